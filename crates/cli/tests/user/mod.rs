//! The command as a user calls it, for the tests of this folder.
#![allow(dead_code)] // each test binary uses its part

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

pub const CORPUS: &str = include_str!("../../../../fixtures/tokenizer/corpus.txt");

pub fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hymo"));
    command.args(args).current_dir(folder);
    command
}

pub fn hymo(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

/// What a command that must succeed prints.
pub fn stdout(folder: &Path, args: &[&str]) -> String {
    let out = hymo(folder, args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

pub fn json(folder: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&stdout(folder, args)).unwrap()
}

/// What a command that must end with `code` says on standard error.
pub fn said(folder: &Path, code: i32, args: &[&str]) -> String {
    let out = hymo(folder, args);
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {error}");
    error
}
