//! What a run plans to hold against what it held.

mod user;

use std::fs;

use user::{CORPUS, stdout};

/// A number of MiB or GiB behind a word, in bytes.
fn bytes_behind(text: &str, word: &str) -> f64 {
    let behind = text.split_once(word).unwrap_or_else(|| panic!("no {word:?} in {text}")).1;
    let mut parts = behind.split_whitespace();
    let number: f64 = parts.next().unwrap().parse().unwrap();
    number * if parts.next().unwrap().starts_with("GiB") { f64::from(1 << 30) } else { f64::from(1 << 20) }
}

/// The plan is within 5% of what release builds hold (LOG.md, 2026-12-01); 12 leaves room for other processors, whose
/// products pack in other sizes, and for test builds.
#[cfg(target_os = "linux")]
#[test]
fn a_run_holds_what_it_plans() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("text.txt"), CORPUS.repeat(40)).unwrap();
    stdout(folder, &["tokenizer", "train", "text.txt", "--vocab", "4096", "-o", "t.json"]);
    stdout(folder, &["data", "prep", "text.txt", "-t", "t.json", "-o", "data", "--val-fraction", "0"]);
    for sets in [&["train.micro_rows=4"][..], &["train.micro_rows=2"], &["train.micro_rows=4", "train.recompute=1"]] {
        let mut args = vec!["train", "hymo-nano", "--resume", "never", "--out"];
        let out = format!("run-{}", sets.join("-"));
        args.push(&out);
        let common = ["data.shards=data", "train.rows=4", "model.context_length=256", "schedule.num_steps=3"];
        args.extend(common.iter().chain(sets).flat_map(|set| ["--set", set]));
        let text = stdout(folder, &args);
        let (plan, held) = (bytes_behind(&text, "about"), bytes_behind(&text, "the process held"));
        assert!((plan / held - 1.).abs() < 0.12, "{sets:?}: planned {plan}, held {held}\n{text}");
    }
}
