//! Text to shards: every kind of input, stopped and gone on with, and what is wrong with inputs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::{Arc, LazyLock};

use hymo_data::corpus::Dataset;
use hymo_data::manifest::{Manifest, Shaping};
use hymo_data::prep::{Outcome, PrepOptions, prepare};
use hymo_data::source::{Format, Inputs};
use hymo_data::verify::verify;
use hymo_data::{Error, Result};
use hymo_tokenizer::Tokenizer;
use parquet::data_type::ByteArray;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;

const JSON: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");
const CORPUS: &str = include_str!("../../../fixtures/tokenizer/corpus.txt");
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(JSON).unwrap());

fn shaping() -> Shaping {
    PrepOptions::default().shaping
}

fn prep(inputs: &[PathBuf], out: &Path, shaping: Shaping, threads: usize) -> Result<Outcome> {
    let arguments: Vec<String> = inputs.iter().map(|p| p.display().to_string()).collect();
    let inputs = Inputs::find(&arguments, Format::Text)?;
    prepare(&inputs, (&TOKENIZER, JSON), out, &PrepOptions { shaping, threads }, &mut |_| ())
}

/// All files of a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// The documents of a split as text, their last token taken off.
fn texts(folder: &Path, split: &str) -> Vec<Vec<u8>> {
    let dataset = Dataset::open(folder, split).unwrap();
    let text = |document| {
        let mut ids: Vec<u32> = dataset.tokens_of(document).unwrap().into_iter().map(u32::from).collect();
        assert_eq!(ids.pop(), Some(TOKENIZER.end_of_text()), "every document ends");
        TOKENIZER.decode(&ids).unwrap()
    };
    (0..dataset.documents()).map(text).collect()
}

/// Some documents of many lengths, some twice, as a file of JSON lines.
fn jsonl(path: &Path, n: usize) -> Vec<String> {
    let texts: Vec<String> = (0..n)
        .map(|i| {
            let (start, len) = (i * 97 % 9000, i * i % 700);
            let text: String = CORPUS.chars().skip(start).take(len).collect();
            if i % 10 == 9 { "said twice".into() } else { text }
        })
        .collect();
    let lines: Vec<String> = texts.iter().map(|t| serde_json::json!({ "id": 1, "text": t }).to_string()).collect();
    fs::write(path, lines.join("\n")).unwrap();
    texts
}

#[test]
fn every_kind_of_input_gives_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let line = |text: &str| format!("{}\n", serde_json::json!({ "text": text }));
    let lines = format!("{}\n\n{}", line("first"), line("second \u{e9}\u{1F600}"));
    fs::create_dir_all(root.join("tree/src")).unwrap();
    fs::write(root.join("tree/src/main.rs"), "fn main() {}").unwrap();
    fs::write(root.join("tree/raw.txt"), b"bytes \xff\xfe\0 kept".as_slice()).unwrap();
    fs::write(root.join("a.jsonl"), &lines).unwrap();
    let file = File::create(root.join("b.jsonl.gz")).unwrap();
    let mut gz = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    gz.write_all(lines.as_bytes()).unwrap();
    let mut file = gz.finish().unwrap();
    // A second member follows the first, as `cat a.gz b.gz` makes it.
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(line("third").as_bytes()).unwrap();
    file.write_all(&gz.finish().unwrap()).unwrap();
    let frames =
        [zstd::encode_all(lines.as_bytes(), 3).unwrap(), zstd::encode_all(line("third").as_bytes(), 3).unwrap()];
    fs::write(root.join("c.jsonl.zst"), frames.concat()).unwrap();
    fs::write(root.join("d.txt.zst"), zstd::encode_all(&b"plain"[..], 3).unwrap()).unwrap();
    parquet(&root.join("e.parquet"), "message m { optional binary text (UTF8); required int64 id; }");
    let all = ["tree/src/main.rs", "tree/raw.txt", "a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt.zst", "e.parquet"];
    let inputs: Vec<PathBuf> = all.iter().map(|name| root.join(name)).collect();
    let out = root.join("out");
    let outcome = prep(&inputs, &out, shaping(), 2).unwrap();
    let mut want: Vec<Vec<u8>> = vec![b"fn main() {}".to_vec(), b"bytes \xff\xfe\0 kept".to_vec()];
    let two = || [b"first".to_vec(), "second \u{e9}\u{1F600}".as_bytes().to_vec()];
    want.extend(two());
    want.extend(two().into_iter().chain([b"third".to_vec()]));
    want.extend(two().into_iter().chain([b"third".to_vec()]));
    want.push(b"plain".to_vec());
    want.extend((0..600).filter(|i| i % 3 != 1).map(|i| format!("row {i}").into_bytes()));
    assert_eq!(texts(&out, "train"), want);
    let manifest = outcome.manifest;
    assert_eq!(manifest.dropped.empty, 6 + 200, "blank lines and rows without a text");
    assert_eq!(manifest.sources.iter().map(|s| s.kept).collect::<Vec<_>>(), [1, 1, 2, 3, 3, 1, 400]);
    assert_eq!(manifest.splits[0].text_bytes, want.iter().map(|t| t.len() as u64).sum::<u64>());
    assert_eq!(Manifest::read(&out).unwrap(), manifest);
    assert_eq!(files(&out)["tokenizer.json"], JSON);
}

/// Two row groups of 300 rows; every third text is null where the schema lets it.
fn parquet(path: &Path, schema: &str) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), Arc::clone(&schema), properties).unwrap();
    for group in 0..2 {
        let mut columns = writer.next_row_group().unwrap();
        let rows = 300 * group..300 * (group + 1);
        while let Some(mut column) = columns.next_column().unwrap() {
            let levels: Vec<i16> = rows.clone().map(|i| i16::from(i % 3 != 1)).collect();
            let texts: Vec<ByteArray> =
                rows.clone().filter(|i| i % 3 != 1).map(|i| ByteArray::from(format!("row {i}").into_bytes())).collect();
            match column.untyped() {
                parquet::column::writer::ColumnWriter::ByteArrayColumnWriter(w) => {
                    w.write_batch(&texts, Some(&levels), None).unwrap();
                }
                parquet::column::writer::ColumnWriter::Int64ColumnWriter(w) => {
                    w.write_batch(&rows.clone().map(i64::from).collect::<Vec<_>>(), None, None).unwrap();
                }
                _ => panic!("another column"),
            }
            column.close().unwrap();
        }
        columns.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn lengths_repetitions_and_splits() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.jsonl");
    let all = jsonl(&input, 300);
    let options = Shaping { val_fraction: 0.3, dedup: true, min_bytes: 20, max_bytes: 500, ..shaping() };
    let out = folder.path().join("out");
    let outcome = prep(from_ref(&input), &out, options.clone(), 3).unwrap();
    let mut seen = std::collections::HashSet::new();
    let kept: Vec<&[u8]> =
        all.iter().map(String::as_bytes).filter(|t| (20..=500).contains(&t.len()) && seen.insert(*t)).collect();
    let (train, val) = (texts(&out, "train"), texts(&out, "val"));
    assert_eq!(train.len() + val.len(), kept.len());
    assert!((kept.len() / 6..kept.len() / 2).contains(&val.len()), "{} of {}", val.len(), kept.len());
    let order = |split: &[Vec<u8>]| split.iter().map(|t| kept.iter().position(|k| k == t).unwrap()).collect::<Vec<_>>();
    assert!(order(&train).is_sorted() && order(&val).is_sorted());
    let dropped = outcome.manifest.dropped;
    let count = |f: fn(&&String) -> bool| all.iter().filter(f).count() as u64;
    assert_eq!(dropped.empty, count(|t| t.is_empty()));
    assert_eq!(dropped.short, count(|t| !t.is_empty() && t.len() < 20));
    assert_eq!(dropped.long, count(|t| t.len() > 500));
    assert_eq!(dropped.empty + dropped.short + dropped.long + dropped.duplicate + kept.len() as u64, 300);
    // The side of a document is its text's alone.
    let more = Shaping { dedup: false, ..options };
    prep(&[input], &folder.path().join("more"), more, 1).unwrap();
    let again = texts(&folder.path().join("more"), "val");
    assert!(val.iter().all(|t| again.contains(t)) && again.iter().all(|t| val.contains(t)));
}

#[test]
fn any_number_of_threads_writes_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.jsonl");
    jsonl(&input, 500);
    let options = Shaping { val_fraction: 0.1, shard_tokens: 5000, dedup: true, ..shaping() };
    let outs: Vec<_> = [1, 2, 5]
        .map(|threads| {
            let out = folder.path().join(threads.to_string());
            prep(from_ref(&input), &out, options.clone(), threads).unwrap();
            files(&out)
        })
        .into();
    assert!(outs[0].len() > 8, "{:?}", outs[0].keys());
    assert!(outs[0] == outs[1] && outs[0] == outs[2]);
}

/// A document longer than a shard fills several; the rest opens the next one as a new document.
#[test]
fn shards_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let (short, long) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
    fs::write(&short, "short").unwrap();
    fs::write(&long, CORPUS).unwrap();
    let out = folder.path().join("out");
    let options = Shaping { shard_tokens: 700, ..shaping() };
    let outcome = prep(&[short.clone(), long, folder.path().join("a.t*")], &out, options.clone(), 1);
    assert!(outcome.unwrap_err().to_string().contains("named twice"));
    let outcome = prep(&[short, folder.path().join("b.txt")], &out, options, 1).unwrap();
    let split = &outcome.manifest.splits[0];
    assert_eq!(outcome.manifest.cut, 1);
    assert!(split.shards.iter().all(|s| s.tokens <= 700) && split.shards.len() > 5);
    let dataset = Dataset::open(&out, "train").unwrap();
    let ids: Vec<u16> = (0..dataset.documents()).flat_map(|d| dataset.tokens_of(d).unwrap()).collect();
    let end = TOKENIZER.end_of_text();
    let mut want = TOKENIZER.encode(b"short").unwrap();
    want.push(end);
    want.extend(TOKENIZER.encode(CORPUS.as_bytes()).unwrap());
    want.push(end);
    assert_eq!(ids.into_iter().map(u32::from).collect::<Vec<_>>(), want);
    assert_eq!(split.text_bytes, 5 + CORPUS.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Killed wherever it was, with whatever a kill leaves behind, the same command ends with the same bytes.
    #[test]
    fn killed_and_gone_on_with(
        kills in proptest::collection::vec((0..25_usize, any::<prop::sample::Index>(), 0..3_u8), 1..4),
        val in any::<bool>(), dedup in any::<bool>(), shard_tokens in 300..4000_u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("a.jsonl");
        jsonl(&input, 120);
        let long = folder.path().join("long.txt");
        fs::write(&long, CORPUS).unwrap();
        // Many inputs make many batches, and so many moments to be killed at.
        let mut inputs = vec![input, long];
        for i in 0..10 {
            inputs.push(folder.path().join(format!("{i}.txt")));
            fs::write(&inputs[i + 2], CORPUS.chars().skip(i * 400).take(2000).collect::<String>().repeat(300)).unwrap();
        }
        let shaping = Shaping { val_fraction: if val { 0.2 } else { 0. }, dedup, shard_tokens: shard_tokens * 100, ..shaping() };
        let clean = folder.path().join("clean");
        prep(&inputs, &clean, shaping.clone(), 2).unwrap();
        let out = folder.path().join("out");
        for (after, cut, kind) in kills {
            let arguments: Vec<String> = inputs.iter().map(|p| p.display().to_string()).collect();
            let found = Inputs::find(&arguments, Format::Text).unwrap();
            let options = PrepOptions { shaping: shaping.clone(), threads: 2 };
            let mut calls = 0;
            let killed = catch_unwind(AssertUnwindSafe(|| {
                prepare(&found, (&TOKENIZER, JSON), &out, &options, &mut |_| {
                    calls += 1;
                    // Past the hook that would print: this is no fault.
                    if calls > after { std::panic::resume_unwind(Box::new("killed")) }
                })
            }));
            if let Ok(done) = killed {
                done.unwrap();
                break;
            }
            let journal = out.join("prep.journal");
            let mut text = fs::read(&journal).unwrap();
            match kind {
                // In the middle of a line of the journal.
                0 => text.truncate(cut.index(text.len() + 1)),
                // Before the journal knew of its last shard.
                1 => {
                    let end = text[..text.len() - 1].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
                    text.truncate(end);
                }
                _ => (),
            }
            fs::write(&journal, text).unwrap();
        }
        prep(&inputs, &out, shaping, 2).unwrap();
        prop_assert!(files(&out) == files(&clean));
    }
}

#[test]
fn a_finished_folder_is_left_alone_and_another_command_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.jsonl");
    jsonl(&input, 20);
    let out = folder.path().join("out");
    assert!(!prep(from_ref(&input), &out, shaping(), 1).unwrap().already_done);
    let before = files(&out);
    // As a kill behind the manifest leaves it.
    fs::write(out.join("prep.journal"), "anything").unwrap();
    assert!(prep(from_ref(&input), &out, shaping(), 2).unwrap().already_done);
    assert!(files(&out) == before);
    let error = prep(&[input], &out, Shaping { min_bytes: 2, ..shaping() }, 1).unwrap_err().to_string();
    assert!(error.contains("output of another command (other options") && error.contains("min_bytes: 1"), "{error}");
    assert!(files(&out) == before);
}

#[test]
fn inputs_that_changed_are_not_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let (input, broken) = (folder.path().join("a.jsonl"), folder.path().join("b.jsonl"));
    jsonl(&input, 20);
    fs::write(&broken, "{").unwrap();
    let out = folder.path().join("out");
    let both = [input.clone(), broken];
    assert!(matches!(prep(&both, &out, shaping(), 1), Err(Error::Read { .. })));
    jsonl(&input, 21);
    let error = prep(&both, &out, shaping(), 1).unwrap_err().to_string();
    assert!(error.contains("a.jsonl has changed since"), "{error}");
    // Of the same size and time, as standard input would be.
    let (first, out) = (folder.path().join("c.jsonl"), folder.path().join("same"));
    let texts = jsonl(&first, 60);
    let both = [first.clone(), folder.path().join("b.jsonl")];
    let options = Shaping { shard_tokens: 1000, ..shaping() };
    prep(&both, &out, options.clone(), 1).unwrap_err();
    assert!(out.join("train-00000.shard").exists());
    let time = fs::metadata(&first).unwrap().modified().unwrap();
    let other = fs::read_to_string(&first).unwrap().replacen(&texts[1], &"x".repeat(texts[1].len()), 1);
    fs::write(&first, other).unwrap();
    File::options().write(true).open(&first).unwrap().set_modified(time).unwrap();
    let error = prep(&both, &out, options, 1).unwrap_err().to_string();
    assert!(error.contains("c.jsonl has changed since"), "{error}");
    let error = prep(&[input], &folder.path().join("out"), shaping(), 1).unwrap_err().to_string();
    assert!(error.contains("other inputs"), "{error}");
}

/// Broken inputs: the error names file and place, and shards finished before stay.
#[test]
fn broken_inputs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let good = root.join("good.jsonl");
    jsonl(&good, 60);
    let said = |name: &str, content: &[u8]| {
        let path = root.join(name);
        fs::write(&path, content).unwrap();
        let out = root.join(format!("{name}.out"));
        let options = Shaping { shard_tokens: 1000, ..shaping() };
        let error = prep(&[good.clone(), path], &out, options, 2).unwrap_err().to_string();
        let left = files(&out);
        assert!(left.contains_key("train-00000.shard") && !left.contains_key("manifest.json"), "{name}");
        assert!(left.keys().all(|file| !file.ends_with(".tmp")), "{name}: {:?}", left.keys());
        hymo_data::shard::Shard::open(&out.join("train-00000.shard")).unwrap();
        error
    };
    let lines = "{\"text\": \"x\"}\n".repeat(50_000);
    let packed = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    let error = said("short.jsonl.zst", &packed[..packed.len() - 9]);
    assert!(error.contains("short.jsonl.zst, line ") && error.contains("cut short"), "{error}");
    let error = said("no.jsonl.zst", b"plain text");
    assert!(error.contains("no.jsonl.zst, line 1: "), "{error}");
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(lines.as_bytes()).unwrap();
    let gz = gz.finish().unwrap();
    let error = said("short.txt.gz", &gz[..gz.len() / 2]);
    assert!(error.contains("short.txt.gz, after byte ") && error.contains("cut short"), "{error}");
    let error = said("bad.jsonl", b"{\"text\": \"x\"}\n\n{\"text\": \"y\"\n");
    assert!(error.contains("bad.jsonl, line 3: column "), "{error}");
    let error = said("field.jsonl", b"{\"text\": \"x\"}\n{\"body\": 1}\n");
    assert!(error.contains("field.jsonl, line 2: no text field \"text\"; there are body"), "{error}");
    parquet(&root.join("column.parquet"), "message m { optional binary content (UTF8); required int64 id; }");
    let column = fs::read(root.join("column.parquet")).unwrap();
    let error = said("column2.parquet", &column);
    assert!(error.contains("column2.parquet, its schema: no text field \"text\"; there are content, id"), "{error}");
    let error = said("cut.parquet", &column[..column.len() - 100]);
    assert!(error.contains("cut.parquet, its footer: "), "{error}");
    let error = said("int.parquet", &{
        parquet(&root.join("i.parquet"), "message m { optional binary a (UTF8); required int64 text; }");
        fs::read(root.join("i.parquet")).unwrap()
    });
    assert!(error.contains("holds INT64 values"), "{error}");
}

#[test]
fn empty_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let (empty, full) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
    fs::write(&empty, "").unwrap();
    fs::write(&full, "x").unwrap();
    let error = prep(from_ref(&empty), &folder.path().join("one"), shaping(), 1).unwrap_err().to_string();
    assert!(error.contains("no document is left to keep"), "{error}");
    let out = folder.path().join("two");
    let outcome = prep(&[empty, full], &out, shaping(), 1).unwrap();
    assert_eq!((outcome.manifest.dropped.empty, texts(&out, "train")), (1, vec![b"x".to_vec()]));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_finished_shards_and_the_same_command_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.jsonl");
    jsonl(&input, 300);
    let options = Shaping { shard_tokens: 3000, ..shaping() };
    let clean = folder.path().join("clean");
    prep(from_ref(&input), &clean, options.clone(), 2).unwrap();
    let out = folder.path().join("out");
    fs::create_dir(&out).unwrap();
    let full = out.join("train-00002.shard.tmp");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    let error = prep(from_ref(&input), &out, options.clone(), 2).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(files(&out)["train-00001.shard"] == files(&clean)["train-00001.shard"]);
    assert!(!full.exists(), "what was begun is gone: the disk has room again");
    assert_eq!(prep(&[input], &out, options, 2).unwrap().resumed_shards, 2);
    assert!(files(&out) == files(&clean));
}

#[test]
fn another_tokenizer_than_the_shards() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.txt");
    fs::write(&input, "some text").unwrap();
    let out = folder.path().join("out");
    prep(&[input], &out, shaping(), 1).unwrap();
    let dataset = Dataset::open(&out, "train").unwrap();
    dataset.check_tokenizer(&TOKENIZER).unwrap();
    // The same tokenizer in other bytes is another file, and the ids might be others.
    let other = Tokenizer::from_json(&[JSON, b"\n"].concat()).unwrap();
    let error = dataset.check_tokenizer(&other).unwrap_err().to_string();
    assert!(error.contains("made with the tokenizer ") && error.contains("SHA-256"), "{error}");
    // A shard of another tokenizer under the right name.
    let mut writer = hymo_data::shard::ShardWriter::create(&out.join("train-00000.shard"), 1024, [1; 32], 10).unwrap();
    let manifest = Manifest::read(&out).unwrap();
    writer.push(&vec![1; manifest.splits[0].tokens as usize]).unwrap();
    writer.finish().unwrap();
    let error = Dataset::open(&out, "train").unwrap_err().to_string();
    assert!(error.contains("train-00000.shard, header: made with another tokenizer"), "{error}");
}

#[test]
fn options_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.txt");
    fs::write(&input, "x").unwrap();
    let said = |shaping: Shaping, threads| {
        prep(from_ref(&input), &folder.path().join("out"), shaping, threads).unwrap_err().to_string()
    };
    assert!(said(Shaping { val_fraction: 1., ..shaping() }, 1).contains("val-fraction is 1, want 0 to less than 1"));
    assert!(
        said(Shaping { min_bytes: 9, max_bytes: 8, ..shaping() }, 1).contains("max-bytes is 8, want min-bytes 9 to")
    );
    assert!(said(Shaping { shard_tokens: 1, ..shaping() }, 1).contains("shard-tokens is 1"));
    assert!(said(shaping(), 0).contains("threads is 0"));
    assert!(!folder.path().join("out").exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// A flipped bit in any file of a folder is found, and named with the file it is in.
    #[test]
    fn verify_names_the_file_of_any_flipped_bit(file in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("a.jsonl");
        jsonl(&input, 100);
        let out = folder.path().join("out");
        prep(&[input], &out, Shaping { val_fraction: 0.2, shard_tokens: 4000, ..shaping() }, 2).unwrap();
        prop_assert_eq!(verify(&out, &mut |_| ()).unwrap(), []);
        let all: Vec<(String, Vec<u8>)> = files(&out).into_iter().collect();
        let (name, mut bytes) = all[file.index(all.len())].clone();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let path = out.join(&name);
        fs::write(&path, bytes).unwrap();
        match verify(&out, &mut |_| ()) {
            Ok(findings) => {
                prop_assert!(!findings.is_empty(), "byte {at} of {name}");
                prop_assert!(findings.iter().all(|f| f.file == path), "byte {at} of {name}: {findings:?}");
            }
            Err(Error::Manifest { path: named, .. }) => prop_assert_eq!(named, path),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
