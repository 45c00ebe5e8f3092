//! `hymo train`, `eval`, `export`, `import` and `demo` as a user calls them: stopped by a signal, gone on with, handed over.

mod user;

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;
use user::{CORPUS, command, said, stdout};

fn records(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Shards, a tokenizer and `small.toml`: a model that takes a step in some milliseconds.
fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| serde_json::json!({ "text": &CORPUS[i * 30..i * 30 + 200] }).to_string() + "\n";
    fs::write(folder.path().join("text.jsonl"), (0..120).map(line).collect::<String>()).unwrap();
    stdout(folder.path(), &["tokenizer", "train", "text.jsonl", "--vocab", "600", "-o", "tokenizer.json"]);
    let prep = ["data", "prep", "text.jsonl", "-t", "tokenizer.json", "-o", "data", "--val-fraction", "0.2"];
    stdout(folder.path(), &prep);
    let config = stdout(folder.path(), &["inspect", "hymo-nano", "--print-config"]);
    let sizes = [("vocab_size = 4096", "vocab_size = 600"), ("context_length = 512", "context_length = 32")];
    let more =
        [("n_layers = 8", "n_layers = 4"), ("d_model = 192", "d_model = 32"), ("shards = []", "shards = [\"data\"]")];
    let steps = [("num_steps = 1000", "num_steps = 12"), ("every = 250 ", "every = 6 "), ("rows = 16 ", "rows = 4 ")];
    let small = sizes.iter().chain(&more).chain(&steps).fold(config, |config, (from, to)| {
        assert!(config.contains(from), "{from}");
        config.replace(from, to)
    });
    fs::write(folder.path().join("small.toml"), small).unwrap();
    folder
}

/// A signal in the middle: it saves, says so, exits with 0, and the same command comes to the losses of a run without one.
#[cfg(unix)]
#[test]
fn a_signal_saves_and_the_same_command_goes_on() {
    use std::io::{BufRead, BufReader};
    let folder = prepared();
    let folder = folder.path();
    let losses = |records: &[Value]| {
        let steps = records.iter().filter(|r| r["kind"] == "step").map(|r| r["losses"].clone());
        steps.collect::<Vec<_>>()
    };
    let whole = losses(&records(&stdout(folder, &["train", "small.toml", "--out", "whole", "--json"])));
    assert_eq!(whole.len(), 12);

    let args = ["train", "small.toml", "--out", "cut", "--json"];
    let mut child = command(folder, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = Vec::new();
    while seen.iter().filter(|r: &&Value| r["kind"] == "step").count() < 3 {
        seen.push(serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap());
    }
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    seen.extend(lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap()));
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&out.stderr).contains("saving, then leaving"));
    let before = losses(&seen).len();
    assert!(before < 12, "the run was over before the signal came");

    seen.extend(records(&stdout(folder, &args)));
    assert_eq!(losses(&seen), whole);
    assert!(stdout(folder, &["train", "small.toml", "--out", "cut"]).contains("has its 12 steps already"));
    let log = records(&fs::read_to_string(folder.join("cut/log.jsonl")).unwrap());
    assert_eq!(losses(&log), whole);
}

#[test]
fn what_a_run_prints_and_leaves() {
    let folder = prepared();
    let folder = folder.path();
    let planned = stdout(folder, &["train", "small.toml", "--dry-run", "--out", "run"]);
    for line in ["device", "cpu: ", "memory", "held out", "12 steps, 12 to go", "each in one group"] {
        assert!(planned.contains(line), "{line}\n{planned}");
    }
    assert!(!folder.join("run").exists());
    let args = ["train", "small.toml", "--out", "run", "--profile", "trace.json", "--set", "optim.lr=0.004"];
    let text = stdout(folder, &args);
    for line in ["step 12/12", "== step 6: held out", "checkpoint of step 12", "finished 12 steps", "trace of 3 steps"]
    {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let trace: Value = serde_json::from_slice(&fs::read(folder.join("trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 100);
    for file in ["run.toml", "log.jsonl", "report.html", "tokenizer.json", "checkpoints/step-12/manifest.json"] {
        assert!(folder.join("run").join(file).is_file(), "{file}");
    }
    assert!(fs::read_to_string(folder.join("run/run.toml")).unwrap().contains("lr = 0.004"));

    let fault = said(folder, 2, &["train", "small.toml", "--out", "run", "--resume", "never"]);
    assert!(fault.contains("checkpoints of an earlier run"), "{fault}");
    let fault =
        said(folder, 2, &["train", "small.toml", "--out", "new", "--set", "optim.lr=fast", "--set", "train.rowz=1"]);
    assert!(fault.contains("optim.lr") && fault.contains("train.rowz"), "{fault}");
    let fault = said(folder, 2, &["train", "hymo-nano", "--out", "new"]);
    assert!(fault.contains("data.shards: found [], expected one or more folders"), "{fault}");
    let fault = said(folder, 2, &["train", "small.toml", "--out", "new", "--set", "data.shards=elsewhere"]);
    assert!(fault.contains("data.shards: found \"elsewhere\", not there, expected folders that"), "{fault}");
    let fault = said(folder, 2, &["train", "small.toml", "--out", "run", "--set", "model.d_model=64"]);
    assert!(fault.contains("model.d_model 32 -> 64"), "{fault}");
}

#[test]
fn a_model_is_evaluated_handed_over_and_taken_back() {
    let folder = prepared();
    let folder = folder.path();
    stdout(folder, &["train", "small.toml", "--out", "run"]);
    let json = |args: &[&str]| -> Value { serde_json::from_str(&stdout(folder, args)).unwrap() };
    let scores = json(&["eval", "run", "--data", "data", "--json"]);
    let log = records(&fs::read_to_string(folder.join("run/log.jsonl")).unwrap());
    let last = log.iter().rfind(|r| r["kind"] == "eval").unwrap();
    let (got, want) = (scores["data"][0]["bits_per_byte"].as_f64().unwrap(), last["bits_per_byte"].as_f64().unwrap());
    assert!((got - want).abs() < 1e-6 * want, "{got}, the run's own evaluation {want}");

    let questions = "{\"context\":\"a\",\"choices\":[\" b\",\" c\"],\"answer\":0,\"task\":\"letters\"}\n".repeat(3);
    fs::write(folder.join("q.jsonl"), questions).unwrap();
    let tasks = json(&["eval", "run", "--tasks", "q.jsonl", "--limit", "2", "--json"]);
    assert_eq!((&tasks["tasks"][0]["task"], &tasks["tasks"][0]["questions"]), (&"letters".into(), &2.into()));
    fs::write(folder.join("bad.jsonl"), "{\"context\":\"a\"}\n").unwrap();
    assert!(said(folder, 1, &["eval", "run", "--tasks", "bad.jsonl"]).contains("bad.jsonl: line 1: missing field"));
    assert!(said(folder, 2, &["eval", "run"]).contains("--data"));
    let fault = said(folder, 1, &["eval", "run", "--data", "data", "--split", "test"]);
    assert!(fault.contains("no tokens in the split \"test\"; there are train, val"), "{fault}");
    fs::create_dir(folder.join("begun")).unwrap();
    fs::copy(folder.join("run/run.toml"), folder.join("begun/run.toml")).unwrap();
    assert!(said(folder, 1, &["eval", "begun", "--data", "data"]).contains("a run without a checkpoint yet"));
    assert!(said(folder, 2, &["eval", "nowhere", "--data", "data"]).contains("nowhere: no such folder"));
    assert!(said(folder, 1, &["eval", "data", "--data", "data"]).contains("data"));

    assert!(stdout(folder, &["export", "run", "out"]).contains("tensors"));
    assert!(stdout(folder, &["import", "out", "-o", "back"]).contains("step 12"));
    assert_eq!(json(&["eval", "back", "--data", "data", "--json"])["data"][0]["loss"], scores["data"][0]["loss"]);
    fs::remove_file(folder.join("out/config.json")).unwrap();
    let fault = said(folder, 2, &["import", "out", "-o", "other"]);
    assert!(fault.contains("no config.json in out") && fault.contains("--config"), "{fault}");
    assert!(stdout(folder, &["export", "run", "out"]).contains("tensors"));
    assert!(said(folder, 1, &["export", "run", "data"]).contains("choose an empty folder"));
    assert!(said(folder, 2, &["import", "out", "-o", "back"]).contains("checkpoints of an earlier run"));
    // From weights alone a new run begins, in a folder of its own; stopped or done, the same command goes on there.
    let fault = said(folder, 2, &["train", "small.toml", "--out", "back"]);
    assert!(fault.contains("holds imported weights") && fault.contains("--resume back"), "{fault}");
    let text = stdout(folder, &["train", "small.toml", "--resume", "back", "--out", "tuned"]);
    assert!(text.contains("begins with the weights of") && text.contains("finished 12 steps"), "{text}");
    let text = stdout(folder, &["train", "small.toml", "--resume", "back", "--out", "tuned"]);
    assert!(text.contains("has its 12 steps already"), "{text}");
}

/// The whole pipeline at once, on a text of the caller's, and again: the second time only writes.
#[test]
fn the_demo_learns_and_writes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("book.txt"), CORPUS.repeat(3)).unwrap();
    let args = ["demo", "--text", "book.txt", "--steps", "2", "--out", "demo"];
    let text = stdout(folder, &args);
    for line in ["[1/5] text: a file of yours, cut into", "[3/5] shards", "step 2/2", "---- 1 ----", "demo/report.html"]
    {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(folder.join("demo/report.html").is_file());
    let again = stdout(folder, &args);
    assert!(again.contains("done before") && again.contains("---- 1 ----"), "{again}");
    assert!(said(folder, 2, &["demo", "--text", "nothing.txt"]).contains("nothing.txt"));
    fs::write(folder.join("empty.txt"), "").unwrap();
    let fault = said(folder, 2, &["demo", "--text", "empty.txt", "--out", "none"]);
    assert!(fault.contains("empty.txt: no text in it"), "{fault}");
}

#[test]
fn shells_can_complete() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let text = stdout(folder.path(), &["completions", shell]);
        assert!(text.contains("tokenizer") && text.contains("demo"), "{shell}");
    }
}
