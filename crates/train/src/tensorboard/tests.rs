use super::*;
use crate::record::{Evaluation, Note, Sample, Start, StepReport};
use std::collections::BTreeMap;
use wire::masked_crc;

/// What TensorBoard's own writer made of the records of `log.jsonl`, and its own reader read (`make_tensorboard.py`).
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tensorboard")
}

/// Writes the fixture's run into `dir`: a file each start.
fn write_fixture(dir: &Path) -> Vec<PathBuf> {
    let log = fs::read_to_string(fixtures().join("log.jsonl")).unwrap();
    let mut writers: Vec<EventWriter> = Vec::new();
    for line in log.lines() {
        let record: Record = serde_json::from_str(line).unwrap();
        if let Record::Start(start) = &record {
            writers.push(EventWriter::create_at(dir, start.time).unwrap());
        }
        writers.last_mut().unwrap().write(&record).unwrap();
    }
    writers.iter().map(|writer| writer.path().to_owned()).collect()
}

#[test]
fn the_bytes_are_those_of_tensorboards_own_writer() {
    let dir = tempfile::tempdir().unwrap();
    let written = write_fixture(dir.path());
    assert_eq!(written.len(), 2);
    for path in written {
        let want = fs::read(fixtures().join(path.file_name().unwrap())).unwrap();
        assert_eq!(fs::read(&path).unwrap(), want, "{}", path.display());
    }
}

/// The messages of whole frames. Panics where a checksum is wrong.
fn frames(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let u32_at = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
    while bytes.len() >= 12 {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(u32_at(&bytes[8..]), masked_crc(&bytes[..8]));
        let message = &bytes[12..12 + len];
        assert_eq!(u32_at(&bytes[12 + len..]), masked_crc(message));
        found.push(message.to_vec());
        bytes = &bytes[16 + len..];
    }
    assert!(bytes.is_empty());
    found
}

/// Fields of a message in order: numbers as their bits, and everything else as bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let (number, len) = match key & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (u64::from_le_bytes(bytes[..8].try_into().unwrap()), 8),
            5 => (u64::from(u32::from_le_bytes(bytes[..4].try_into().unwrap())), 4),
            _ => (0, varint(&mut bytes) as usize),
        };
        found.push((key >> 3, number, &bytes[..len]));
        bytes = &bytes[len..];
    }
    found
}

fn field<'f>(fields: &[(u64, u64, &'f [u8])], number: u64) -> Option<(u64, &'f [u8])> {
    fields.iter().find(|field| field.0 == number).map(|field| (field.1, field.2))
}

/// Step and number of every scalar, by tag, of one file.
fn scalars(path: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut found: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for message in frames(&fs::read(path).unwrap()) {
        let event = fields(&message);
        let step = field(&event, 2).map_or(0, |step| step.0);
        let Some((_, summary)) = field(&event, 5) else { continue };
        for (_, _, value) in fields(summary) {
            let value = fields(value);
            let tag = String::from_utf8(field(&value, 1).unwrap().1.to_vec()).unwrap();
            if let Some((bits, _)) = field(&value, 2) {
                found.entry(tag).or_default().push((step, f32::from_bits(bits as u32)));
            }
        }
    }
    found
}

fn step(step: u64) -> StepReport {
    StepReport {
        step,
        time: 1e9,
        losses: vec![2.5, 3.5, f64::NAN],
        total: 4.5,
        balance: 0.5,
        lr: 0.25,
        grad_norm: f64::INFINITY,
        stepped: true,
        refused: None,
        max_violation: vec![0.125, 0.75],
        expert_load: vec![vec![0.5; 2]; 2],
        max_logits: vec![9.5],
        tokens: 100,
        total_tokens: 100 * step,
        epoch: 0,
        seconds: 0.5,
        data_seconds: 0.,
        mfu: Some(0.375),
    }
}

#[test]
fn every_value_of_a_step_is_under_its_tag() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(dir.path()).unwrap();
    // A step beyond 32 bits: seven varint bytes.
    for number in [1, 300, 1 << 40] {
        writer.write(&Record::Step(step(number))).unwrap();
    }
    let want = [
        ("attention/max_logit/layer_0", 9.5),
        ("loss/balance", 0.5),
        ("loss/main", 2.5),
        ("loss/mtp1", 3.5),
        ("loss/mtp2", f32::NAN),
        ("loss/total", 4.5),
        ("moe/max_violation/layer_0", 0.125),
        ("moe/max_violation/layer_1", 0.75),
        ("optim/grad_norm", f32::INFINITY),
        ("optim/lr", 0.25),
        ("speed/mfu", 0.375),
        ("speed/tokens_per_second", 200.),
    ];
    let got = scalars(writer.path());
    assert_eq!(got.len(), want.len(), "{got:?}");
    for (tag, value) in want {
        let values: Vec<(u64, u32)> = got[tag].iter().map(|(step, got)| (*step, got.to_bits())).collect();
        assert_eq!(values, [1, 300, 1 << 40].map(|step| (step, value.to_bits())), "{tag}");
    }
}

#[test]
fn a_file_is_whole_after_every_record() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(dir.path()).unwrap();
    let eval = Evaluation {
        step: 3,
        time: 0.,
        loss: 1.,
        bits_per_byte: 2.,
        mtp_losses: vec![],
        tokens: 1,
        bytes: 1,
        best: false,
        samples: vec![Sample { prompt: "p".into(), text: String::new() }],
        seconds: 0.,
    };
    let note = Note { step: 3, time: 1., text: "n".repeat(70_000) };
    for (at, record) in [Record::Step(step(1)), Record::Eval(eval), Record::Note(note)].iter().enumerate() {
        writer.write(record).unwrap();
        assert_eq!(frames(&fs::read(writer.path()).unwrap()).len(), at + 2);
    }
}

fn start(step: u64) -> Record {
    Record::Start(Start {
        time: 0.,
        name: "n".into(),
        version: "v".into(),
        step,
        num_steps: 9,
        device: "d".into(),
        params: (1, 2),
        tokens_per_step: 3,
        flops_per_token: 4.,
        peak_flops: None,
    })
}

#[test]
fn a_start_voids_the_steps_after_it_and_a_first_one_everything() {
    let dir = tempfile::tempdir().unwrap();
    for (resumed, first) in [(0, None), (7, Some(8))] {
        let mut writer = EventWriter::create(dir.path()).unwrap();
        writer.write(&start(resumed)).unwrap();
        let messages = frames(&fs::read(writer.path()).unwrap());
        assert_eq!(field(&fields(&messages[0]), 3).unwrap().1, b"brain.Event:2");
        let begin = fields(&messages[1]);
        assert_eq!(fields(field(&begin, 7).unwrap().1), [(1, 1, &[][..])]);
        assert_eq!(field(&begin, 2).map(|step| step.0), first);
    }
}

#[test]
fn a_further_file_comes_after_those_in_the_folder_whatever_the_clock_says() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("events.out.tfevents.2000000000.elsewhere.17.0"), "").unwrap();
    fs::write(dir.path().join("log.jsonl"), "").unwrap();
    let name = |writer: EventWriter| writer.path().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(name(EventWriter::create_at(dir.path(), 5.).unwrap()), "events.out.tfevents.2000000001.hymo");
    assert_eq!(name(EventWriter::create_at(dir.path(), 5.).unwrap()), "events.out.tfevents.2000000002.hymo");
    assert_eq!(name(EventWriter::create_at(dir.path(), 3e9).unwrap()), "events.out.tfevents.3000000000.hymo");
    let file = dir.path().join("log.jsonl");
    let error = EventWriter::create(&file).unwrap_err().to_string();
    assert!(error.contains("log.jsonl"), "{error}");
}
