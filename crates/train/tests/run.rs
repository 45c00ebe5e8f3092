//! A run's folder: what is in it after a start, a stop, a continuation and an end.

#[cfg(target_os = "linux")]
mod small_disk;

use hymo_data::prep::{PrepOptions, prepare};
use hymo_data::source::{Format, Inputs};
use hymo_model::config::OnNonFinite;
use hymo_model::{RunConfig, presets};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::{TrainOptions, Trainer as Learner};
use hymo_train::checkpoint::newest;
use hymo_train::profile::ProfileOptions;
use hymo_train::record::Record;
use hymo_train::run::{Ending, Resume, Run, RunOptions, Watch};
use std::path::Path;

/// Sentences of a small language, so that something can be learned.
fn data(dir: &Path) -> String {
    let words = ["the cat", "a dog", "the moon", "sees", "eats", "follows", "quickly", "again", ". "];
    let sentence =
        |i: usize| (0..40).map(|j| words[(i * i + 3 * j * i + j) % 9]).collect::<Vec<_>>().join(" ") + &format!(" {i}");
    let texts: Vec<String> = (0..80).map(sentence).collect();
    let mut learner = Learner::new(TrainOptions { vocab_size: 560, ..TrainOptions::default() }).unwrap();
    learner.feed(texts.iter().map(|t| Ok::<_, hymo_data::Error>(t.clone().into_bytes())), &mut |_| ()).unwrap();
    let (json, _) = learner.finish(&mut |_, _| ()).unwrap();
    let lines: String = texts.iter().map(|t| serde_json::json!({ "text": t }).to_string() + "\n").collect();
    std::fs::write(dir.join("text.jsonl"), lines).unwrap();
    let inputs = Inputs::find(&[dir.join("text.jsonl").to_str().unwrap().to_owned()], Format::Text).unwrap();
    let mut options = PrepOptions::default();
    options.shaping.val_fraction = 0.2;
    let folder = dir.join("data");
    prepare(&inputs, (&Tokenizer::from_json(&json).unwrap(), &json), &folder, &options, &mut |_| ()).unwrap();
    folder.to_str().unwrap().to_owned()
}

fn config(data: &str) -> RunConfig {
    let mut model = presets::hymo_nano();
    (model.d_model, model.n_layers, model.context_length, model.vocab_size) = (24, 4, 20, 560);
    if let (Some(gdn), Some(mla), Some(moe)) = (&mut model.gdn, &mut model.mla, &mut model.moe) {
        (gdn.n_heads, gdn.d_k, gdn.d_v, gdn.chunk_size) = (2, 8, 8, 16);
        (mla.n_heads, mla.n_kv_groups, mla.d_nope, mla.d_rope, mla.d_v, mla.kv_latent) = (2, 1, 6, 2, 8, 8);
        (moe.n_routed, moe.d_ff) = (4, 16);
    }
    let mut run = RunConfig::new(model);
    (run.train.rows, run.train.micro_rows, run.optim.lr) = (4, 2, 1e-2);
    (run.schedule.num_steps, run.eval.every, run.eval.tokens, run.checkpoint.every) = (30, 10, 0, 8);
    (run.checkpoint.keep_last, run.checkpoint.keep_best) = (2, false);
    run.data.shards = vec![data.to_owned()];
    run
}

fn options(dir: &Path, resume: Resume) -> RunOptions {
    let (name, version) = ("test".to_owned(), "0".to_owned());
    RunOptions { dir: dir.join("run"), resume, name, version, peak_flops: Some(1e11), profile: None, dry: false }
}

/// Keeps the records and leaves before step `until`.
#[derive(Default)]
struct Listener {
    records: Vec<Record>,
    until: Option<u64>,
    steps: u64,
}

impl Watch for Listener {
    fn record(&mut self, record: &Record) {
        self.steps += u64::from(matches!(record, Record::Step(_)));
        self.records.push(record.clone());
    }

    fn stop(&mut self) -> bool {
        self.until == Some(self.steps)
    }
}

fn log(dir: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(dir.join("run/log.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(records: &[Record]) -> Vec<(u64, Vec<f64>)> {
    let of = |r: &Record| match r {
        Record::Step(s) => Some((s.step, s.losses.clone())),
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

fn evaluations(records: &[Record]) -> Vec<(u64, f64, u64)> {
    let of = |r: &Record| match r {
        Record::Eval(e) => Some((e.step, e.bits_per_byte, e.bytes)),
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

fn notes(records: &[Record]) -> String {
    let of = |r: &Record| match r {
        Record::Note(n) => Some(n.text.clone() + "\n"),
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

#[test]
fn stopped_and_gone_on_with_equals_straight_through() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ctx = Ctx::cpu();
    let config = config(&data(dir.path()));
    let mut straight = Run::open(&ctx, &config, options(other.path(), Resume::Auto)).unwrap();
    let mut all = Listener::default();
    assert_eq!(straight.go(&mut all).unwrap(), Ending::Finished);

    let mut run = Run::open(&ctx, &config, options(dir.path(), Resume::Never)).unwrap();
    let taken = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap_err().to_string();
    assert!(taken.contains("in use by another process"), "{taken}");
    let mut first = Listener { until: Some(13), ..Listener::default() };
    assert_eq!(run.go(&mut first).unwrap(), Ending::Stopped);
    drop(run);
    // A kill in the middle of a line.
    let path = dir.path().join("run/log.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.trim_end_matches('\n')).unwrap();

    let refused = Run::open(&ctx, &config, options(dir.path(), Resume::Never)).unwrap_err().to_string();
    assert!(refused.contains("checkpoints of an earlier run, the newest of step 13"), "{refused}");
    let mut run = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap();
    let mut second = Listener::default();
    assert_eq!(run.go(&mut second).unwrap(), Ending::Finished);
    assert_eq!(run.go(&mut second).unwrap(), Ending::WasFinished);

    let records = log(dir.path());
    assert_eq!(losses(&records), losses(&all.records));
    assert_eq!(evaluations(&records), evaluations(&all.records));
    assert_eq!(evaluations(&records).iter().map(|e| e.0).collect::<Vec<_>>(), [10, 20, 30]);
    let bits = evaluations(&records);
    assert!(bits[2].1 < bits[0].1 && bits[0].2 > 0 && bits.iter().all(|e| e.2 == bits[0].2), "{bits:?}");
    assert!(notes(&records).contains("goes on from"), "{}", notes(&records));
    let newest = newest(&dir.path().join("run/checkpoints")).unwrap();
    assert_eq!((newest.checkpoint.unwrap().step(), newest.refused.len()), (30, 0));
    let kept = std::fs::read_dir(dir.path().join("run/checkpoints")).unwrap().count();
    assert_eq!(kept, 2);
    assert_eq!(
        RunConfig::from_toml(&std::fs::read_to_string(dir.path().join("run/run.toml")).unwrap()).unwrap(),
        config
    );
    assert!(dir.path().join("run/tokenizer.json").is_file());
}

/// What is only looked at leaves no trace, and is refused while somebody trains there.
#[test]
fn a_dry_run_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, config) = (Ctx::cpu(), config(&data(dir.path())));
    let dry = || RunOptions { dry: true, ..options(dir.path(), Resume::Auto) };
    let mut looked = Run::open(&ctx, &config, dry()).unwrap();
    assert_eq!(looked.trainer().state().step, 0);
    assert!(looked.go(&mut ()).unwrap_err().to_string().contains("for a run that trains"));
    assert!(!dir.path().join("run").exists());

    let mut run = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap();
    assert!(Run::open(&ctx, &config, dry()).unwrap_err().to_string().contains("in use"));
    run.go(&mut Listener { until: Some(3), ..Listener::default() }).unwrap();
    drop(run);
    let files = || std::fs::read_dir(dir.path().join("run")).unwrap().map(|e| e.unwrap()).collect::<Vec<_>>();
    let times = || files().iter().map(|e| (e.path(), e.metadata().unwrap().modified().unwrap())).collect::<Vec<_>>();
    let before = times();
    assert_eq!(Run::open(&ctx, &config, dry()).unwrap().trainer().state().step, 3);
    assert_eq!(times(), before);
}

/// What a person looks at is there while the run goes on, and neither of it is needed for the run.
#[test]
fn the_page_and_tensorboards_files_follow_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&data(dir.path()));
    (config.schedule.num_steps, config.eval.every, config.eval.samples, config.eval.sample_tokens) = (4, 2, 2, 5);
    let folder = dir.path().join("run");
    let mut run = Run::open(&Ctx::cpu(), &config, options(dir.path(), Resume::Auto)).unwrap();
    assert!(!folder.join("report.html").exists(), "a run that is opened is not begun");
    let mut seen = Listener::default();
    run.go(&mut seen).unwrap();
    drop(run);
    let samples: Vec<_> =
        seen.records.iter().filter_map(|r| if let Record::Eval(e) = r { Some(&e.samples) } else { None }).collect();
    assert_eq!(samples.len(), 2);
    for samples in samples {
        assert!(
            samples.len() == 2 && samples.iter().all(|s| !s.prompt.is_empty() && !s.text.is_empty()),
            "{samples:?}"
        );
    }
    let page = std::fs::read_to_string(folder.join("report.html")).unwrap();
    assert_eq!(page, hymo_train::report::Report::from_log(&folder.join("log.jsonl")).unwrap().render());
    let events = |folder: &Path| {
        let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains("tfevents")).count()
    };
    assert_eq!(events(&folder), 1);

    // A page that cannot be written: a folder stands in its place.
    std::fs::remove_file(folder.join("report.html")).unwrap();
    std::fs::create_dir_all(folder.join("report.html/in the way")).unwrap();
    config.schedule.num_steps = 6;
    let mut run = Run::open(&Ctx::cpu(), &config, options(dir.path(), Resume::Auto)).unwrap();
    let mut seen = Listener::default();
    assert_eq!(run.go(&mut seen).unwrap(), Ending::Finished);
    assert_eq!(notes(&seen.records).matches("the run goes on without its pictures").count(), 1);
    assert_eq!(events(&folder), 2);
}

/// A trace has every operation of the steps asked for, forwards and backwards, nested in its step, and changes no bit.
#[test]
fn a_trace_shows_every_operation_in_its_layer() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut config = config(&data(dir.path()));
    (config.schedule.num_steps, config.eval.every, config.train.recompute) = (4, 0, 3);
    let trace = dir.path().join("trace.json");
    let plain = options(other.path(), Resume::Auto);
    let traced = RunOptions {
        profile: Some(ProfileOptions { path: trace.clone(), skip: 1, steps: 2 }),
        ..options(dir.path(), Resume::Auto)
    };
    let (mut seen, mut all) = (Listener::default(), Listener::default());
    Run::open(&Ctx::cpu(), &config, traced).unwrap().go(&mut seen).unwrap();
    Run::open(&Ctx::cpu(), &config, plain).unwrap().go(&mut all).unwrap();
    assert_eq!(losses(&seen.records), losses(&all.records));
    assert!(notes(&seen.records).contains("trace of 2 steps in"));

    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|e| e["name"] == name).collect::<Vec<_>>();
    let span = |e: &serde_json::Value| {
        let at = e["ts"].as_f64().unwrap();
        (at, at + e["dur"].as_f64().unwrap())
    };
    assert!(named("step 1").is_empty() && named("step 4").is_empty());
    // 2 steps of 2 micro-batches: 3 delta rules in the trunk, 2 modules'; layers 0 and 3 run again, layer 0 has one.
    assert_eq!((named("delta_rule").len(), named("delta_rule backward").len()), (4 * (3 + 2 + 1), 4 * (3 + 2)));
    assert!(named("delta_rule").iter().any(|e| e["args"]["part"] == "prediction module 2"));
    assert!(named("attention").iter().all(|e| e["args"]["part"] == "layer 3"));
    for (name, times) in [("optimizer", 2), ("forward", 4), ("backward", 4), ("wait for data", 2)] {
        assert_eq!(named(name).len(), times, "{name}");
    }
    let (begin, end) = span(named("step 2")[0]);
    let inside = |e: &&serde_json::Value| (begin..=end).contains(&span(e).0) && span(e).1 <= end + 1.;
    assert_eq!(named("attention backward").iter().filter(|e| inside(e)).count(), 2);
}

/// A branch with another schedule starts from a checkpoint of another run's; the model cannot change.
#[test]
fn a_branch_says_what_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = Ctx::cpu();
    let config = config(&data(dir.path()));
    let mut first = Listener { until: Some(9), ..Listener::default() };
    Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap().go(&mut first).unwrap();
    let branch = |config: &RunConfig| {
        let options =
            RunOptions { dir: dir.path().join("branch"), ..options(dir.path(), Resume::From(dir.path().join("run"))) };
        Run::open(&ctx, config, options)
    };
    let mut decayed = config.clone();
    (decayed.schedule.num_steps, decayed.schedule.decay_from) = (12, Some(9));
    let mut end = Listener::default();
    assert_eq!(branch(&decayed).unwrap().go(&mut end).unwrap(), Ending::Finished);
    assert_eq!(losses(&end.records).iter().map(|l| l.0).collect::<Vec<_>>(), [10, 11, 12]);
    let said = notes(&end.records);
    assert!(said.contains("schedule.num_steps 30 -> 12") && said.contains("schedule.decay_from null -> 9"), "{said}");
    let mut wider = config.clone();
    wider.model.d_model = 32;
    let error = branch(&wider).unwrap_err().to_string();
    assert!(error.contains("model.d_model 24 -> 32") && error.starts_with("model: found another model"), "{error}");
}

/// HAZARD 14: a damaged checkpoint is named and the one before is used; if all are damaged, nothing is begun anew.
#[test]
fn damaged_checkpoints_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = Ctx::cpu();
    let config = config(&data(dir.path()));
    let mut first = Listener { until: Some(9), ..Listener::default() };
    Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap().go(&mut first).unwrap();
    let damage = |step: u64| {
        let file = dir.path().join(format!("run/checkpoints/step-{step}/rank00000.safetensors"));
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    };
    damage(9);
    let mut run = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap();
    assert_eq!(run.trainer().state().step, 8);
    let mut second = Listener { until: Some(1), ..Listener::default() };
    run.go(&mut second).unwrap();
    drop(run);
    let said = notes(&second.records);
    assert!(said.contains("passed over") && said.contains("step-9") && said.contains("checksum"), "{said}");
    damage(9);
    damage(8);
    let error = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap_err().to_string();
    assert!(error.contains("none of the checkpoints verifies") && error.contains("step-8"), "{error}");
}

/// HAZARD 13: the third policy, from the step to the folder.
#[test]
fn roll_back_goes_on_from_the_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = Ctx::cpu();
    let mut config = config(&data(dir.path()));
    (config.train.spike, config.train.on_non_finite) = (1.2, OnNonFinite::RollBack);
    (config.schedule.num_steps, config.checkpoint.every) = (60, 4);
    let mut run = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap();
    let mut seen = Listener::default();
    // Whether it comes through or has to give up is the data's to decide; that it went back is what is asked here.
    let _ = run.go(&mut seen);
    let said = notes(&seen.records);
    assert!(said.contains("times the median") && said.contains("went back from step"), "{said}");
    let steps: Vec<u64> = losses(&seen.records).iter().map(|l| l.0).collect();
    assert!(steps.windows(2).any(|w| w[1] < w[0]), "{steps:?}");
}

/// HAZARD 14: on a disk that fills up the run ends with the sizes and the step it can go on from, and does go on from there
/// once there is room.
#[cfg(target_os = "linux")]
#[test]
#[allow(clippy::print_stderr)] // A test that could not be made must not look like one that passed.
fn a_run_on_a_full_disk_goes_on_when_there_is_room() {
    let Some(disk) = small_disk::SmallDisk::mount(8) else {
        eprintln!("not tried: mounting a small file system takes privileges that this user does not have");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let ctx = Ctx::cpu();
    let config = config(&data(dir.path()));
    let mut straight = Run::open(&ctx, &config, options(dir.path(), Resume::Auto)).unwrap();
    let mut all = Listener::default();
    straight.go(&mut all).unwrap();

    let mut run = Run::open(&ctx, &config, options(&disk.0, Resume::Auto)).unwrap();
    let mut first = Listener { until: Some(10), ..Listener::default() };
    assert_eq!(run.go(&mut first).unwrap(), Ending::Stopped);
    drop(run);
    let ballast = disk.0.join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &[7; 4096]).is_ok() {}
    // Room for the log, not for a checkpoint.
    let size = file.metadata().unwrap().len();
    file.set_len(size - (100 << 10)).unwrap();
    drop(file);

    let mut run = Run::open(&ctx, &config, options(&disk.0, Resume::Auto)).unwrap();
    let mut second = Listener::default();
    let error = run.go(&mut second).unwrap_err();
    let text = error.to_string();
    drop(run);
    assert!(text.contains("no space") && text.contains("are free") && text.contains("intact"), "{text}");
    assert!(notes(&second.records).contains(&text), "the log says it too");
    std::fs::remove_file(&ballast).unwrap();

    let mut run = Run::open(&ctx, &config, options(&disk.0, Resume::Auto)).unwrap();
    let mut third = Listener::default();
    assert_eq!(run.go(&mut third).unwrap(), Ending::Finished);
    let (whole, rest) = (losses(&all.records), losses(&third.records));
    assert_eq!(rest[0].0, 11, "{rest:?}");
    assert_eq!(rest, whole[10..]);
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let ctx = Ctx::cpu();
    let mut config = config("nowhere");
    let error =
        |config: &RunConfig| Run::open(&ctx, config, options(dir.path(), Resume::Auto)).unwrap_err().to_string();
    assert!(error(&config).contains("nowhere"));
    config.data.shards.clear();
    let found = error(&config);
    assert!(found.starts_with("data.shards: found [], expected one or more folders"), "{found}");
    assert!(!dir.path().join("run").exists(), "nothing is made for a run that cannot begin");
}
