//! `hymo tokenizer` and `hymo data` as a user calls them: from text to audited shards, killed and gone on with.

mod user;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use user::{CORPUS, hymo, json, said, stdout};

fn piped(folder: &Path, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hymo"))
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    out.stdout
}

/// A folder with text and a tokenizer learned from it.
fn trained() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("text")).unwrap();
    fs::write(folder.path().join("text/a.txt"), CORPUS).unwrap();
    let lines: String =
        (0..200).map(|i| serde_json::json!({ "text": &CORPUS[i * 20..i * 20 + i] }).to_string() + "\n").collect();
    fs::write(folder.path().join("text/b.jsonl"), lines).unwrap();
    let report =
        json(folder.path(), &["tokenizer", "train", "text", "--vocab", "800", "-o", "tokenizer.json", "--json"]);
    assert_eq!((&report["report"]["merges"], &report["report"]["documents"]), (&288.into(), &201.into()));
    folder
}

#[test]
fn from_text_to_ids_and_back() {
    let folder = trained();
    let folder = folder.path();
    let again = stdout(folder, &["tokenizer", "train", "text", "--vocab", "800", "-o", "again.json"]);
    assert!(again.contains("800 ids: 256 bytes, 288 merges, 0 unused, 256 special"), "{again}");
    assert_eq!(fs::read(folder.join("again.json")).unwrap(), fs::read(folder.join("tokenizer.json")).unwrap());
    let input = b"any bytes \xff\x00\xf0\x9f and <|endoftext|>\n".as_slice();
    let ids = piped(folder, &["tokenizer", "encode", "-t", "tokenizer.json"], input);
    assert_eq!(piped(folder, &["tokenizer", "decode", "-t", "tokenizer.json"], &ids), input);
    let end = json(
        folder,
        &["tokenizer", "encode", "-t", "tokenizer.json", "<|endoftext|>", "--allow", "<|endoftext|>", "--json"],
    );
    assert_eq!(end["ids"], serde_json::json!([544]));
    let back = json(folder, &["tokenizer", "decode", "-t", "tokenizer.json", "544", "--json"]);
    assert_eq!((&back["text"], &back["utf8"]), (&"<|endoftext|>".into(), &true.into()));
    let info = json(folder, &["tokenizer", "info", "-t", "tokenizer.json", "text", "--longest", "3", "--json"]);
    assert_eq!((&info["vocab_size"], &info["unused"]), (&800.into(), &0.into()));
    assert_eq!(info["longest"].as_array().unwrap().len(), 3);
    assert!(info["kinds"][".txt"]["bytes_per_token"].as_f64().unwrap() > 1.5);
    let table = stdout(folder, &["tokenizer", "info", "-t", "tokenizer.json", "text"]);
    assert!(table.contains("longest tokens") && table.contains(".jsonl"), "{table}");
}

#[test]
fn from_text_to_shards_and_what_is_in_them() {
    let folder = trained();
    let folder = folder.path();
    let prep = ["data", "prep", "text", "-t", "tokenizer.json", "-o", "data", "--val-fraction", "0.2"];
    let text = stdout(folder, &prep);
    assert!(text.contains("data written in ") && text.contains("dropped 1 empty"), "{text}");
    assert!(stdout(folder, &prep).contains("was finished before: nothing to do"));
    let info = json(folder, &["data", "info", "data", "--json"]);
    assert_eq!(info["splits"].as_array().unwrap().len(), 2);
    let documents = |split: usize| info["splits"][split]["documents"].as_u64().unwrap();
    assert_eq!(documents(0) + documents(1), 200);
    let lengths = info["splits"][0]["lengths"].as_array().unwrap();
    assert_eq!(lengths.iter().map(|b| b["documents"].as_u64().unwrap()).sum::<u64>(), documents(0));
    let text = stdout(folder, &["data", "info", "data"]);
    assert!(text.contains("tokens a document") && text.contains("Apache License"), "{text}");
    assert!(stdout(folder, &["data", "verify", "data"]).contains("all as written"));
    let audit = json(folder, &["data", "audit", "data", "--ranks", "3", "--rows", "6", "--len", "32", "--json"]);
    assert_eq!(audit["audit"]["documents"].as_u64(), Some(documents(0)));
    assert_eq!(audit["audit"]["ranges"][0][2], serde_json::json!({ "start": 128, "end": 192 }));
    let text = stdout(folder, &["data", "audit", "data=3", "--ranks", "2", "--len", "64", "--steps", "20"]);
    assert!(text.contains("20 steps on 2 ranks read tokens 0 to 10240: no token twice"), "{text}");
    let shard = folder.join("data/train-00000.shard");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[1000] ^= 4;
    fs::write(&shard, bytes).unwrap();
    let out = hymo(folder, &["data", "verify", "data"]);
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        text.contains("train-00000.shard: tokens, bytes 128 to ") && text.contains("differs from its checksum"),
        "{text}"
    );
    let verdict = hymo(folder, &["data", "verify", "data", "--json"]);
    let verdict: Value = serde_json::from_slice(&verdict.stdout).unwrap();
    assert_eq!((&verdict["ok"], verdict["findings"].as_array().unwrap().len()), (&false.into(), 1));
}

#[test]
fn standard_input_is_an_input() {
    let folder = trained();
    let folder = folder.path();
    let lines = b"{\"body\": \"one\"}\n{\"body\": \"two\"}\n";
    let args =
        ["data", "prep", "-", "--stdin-format", "jsonl", "--text-field", "body", "-t", "tokenizer.json", "-o", "data"];
    let text = String::from_utf8(piped(folder, &args, lines)).unwrap();
    assert!(text.contains("train  2 documents"), "{text}");
}

#[test]
fn wrong_usage_and_failures() {
    let folder = trained();
    let folder = folder.path();
    fs::write(folder.join("bad.jsonl"), "{\"text\": 1}\n").unwrap();
    let wrong = |args: &[&str]| said(folder, 2, args);
    assert!(wrong(&["tokenizer", "train", "none/", "-o", "x"]).contains("none/: no such file or folder"));
    assert!(wrong(&["tokenizer", "train", "text", "--vocab", "100", "-o", "x"]).contains("a vocabulary of 100"));
    assert!(wrong(&["tokenizer", "encode", "-t", "none.json", "x"]).contains("none.json: no such file"));
    assert!(wrong(&["tokenizer", "decode", "-t", "tokenizer.json", "800"]).contains("there is no token 800"));
    assert!(
        wrong(&["data", "prep", "text", "-t", "tokenizer.json", "-o", "d", "--val-fraction", "1"])
            .contains("val-fraction is 1")
    );
    assert!(wrong(&["data", "audit", "text=x"]).contains("\"x\" is no weight"));
    let failed = said(folder, 1, &["data", "prep", "bad.jsonl", "-t", "tokenizer.json", "-o", "d"]);
    assert!(failed.contains("bad.jsonl, line 1: column "), "{failed}");
    assert!(said(folder, 1, &["data", "prep", "text", "-t", "text/a.txt", "-o", "e"]).contains("not a tokenizer.json"));
    assert!(said(folder, 1, &["data", "info", "text"]).contains("manifest.json: cannot read"));
    stdout(folder, &["data", "prep", "text/a.txt", "-t", "tokenizer.json", "-o", "one"]);
    assert!(
        wrong(&["data", "prep", "text", "-t", "tokenizer.json", "-o", "one"])
            .contains("another command (other inputs)")
    );
    let uneven = wrong(&["data", "audit", "one", "--ranks", "3", "--rows", "8"]);
    assert!(uneven.contains("rows is 8, want a multiple of 3 ranks"), "{uneven}");
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// SIGKILL at moments that fall anywhere, again and again, until a run comes to its end.
#[test]
fn killed_at_any_moment_the_same_command_finishes() {
    let folder = trained();
    let folder = folder.path();
    fs::create_dir(folder.join("more")).unwrap();
    for i in 0..12 {
        let text = CORPUS.chars().skip(i * 300).chain(CORPUS.chars()).collect::<String>().repeat(12);
        fs::write(folder.join(format!("more/{i}.txt")), text).unwrap();
    }
    let args = |out| {
        [
            "data",
            "prep",
            "text",
            "more",
            "-t",
            "tokenizer.json",
            "--shard-tokens",
            "20000",
            "--val-fraction",
            "0.2",
            "--dedup",
            "-o",
            out,
        ]
    };
    stdout(folder, &args("clean"));
    let mut kills = 0;
    for wait in 0.. {
        let mut child = Command::new(env!("CARGO_BIN_EXE_hymo"))
            .args(args("out"))
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(30 + 17 * wait));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        if status.success() {
            break;
        }
        kills += 1;
    }
    assert!(kills > 0, "the first run was too quick to be killed");
    let left = files(&folder.join("out"));
    assert!(left == files(&folder.join("clean")), "{kills} kills: {:?}", left.keys());
}
