//! `cargo xtask ci`: everything a change must pass, in stages. What `.ci/run` calls, and nothing more is called there.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{kernels, readme, tidy, wasm};

struct Stage {
    name: &'static str,
    /// The command to type for this stage alone.
    what: &'static str,
    run: fn(&Path) -> Result<()>,
}

/// Cheap ones first: a slip is told before anything long has run.
const STAGES: &[Stage] = &[
    Stage { name: "tidy", what: "cargo xtask tidy", run: tidy_stage },
    Stage { name: "test", what: "cargo test --workspace", run: |root| cargo(root, &["test", "--workspace"]) },
    Stage { name: "long", what: "cargo test --workspace --test 'long_*'", run: long_stage },
    Stage { name: "docs", what: "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps", run: docs_stage },
    Stage { name: "wasm", what: "cargo xtask wasm", run: |root| wasm::run(root, false) },
    Stage {
        name: "kernels",
        what: "cargo xtask kernels sm_80 sm_90a",
        run: |root| kernels::run(root, &kernels::Args::every_change()),
    },
    Stage { name: "readme", what: "the commands of README.md", run: readme::run },
];

pub fn list() -> Result<()> {
    for stage in STAGES {
        println!("{:<8} {}", stage.name, stage.what);
    }
    Ok(())
}

/// Runs the named stages (all without names). `Ok(false)` is a failed stage.
pub fn run(root: &Path, only: &[String]) -> Result<bool> {
    let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
    if let Some(unknown) = only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("no stage is named `{unknown}`; there are {}", names.join(", "));
    }
    let mut done: Vec<(&str, Duration)> = Vec::new();
    let mut failed = None;
    for stage in STAGES {
        if !only.is_empty() && !only.iter().any(|wanted| wanted == stage.name) {
            continue;
        }
        println!("\n== {}: {}", stage.name, stage.what);
        let start = Instant::now();
        let outcome = (stage.run)(root);
        done.push((stage.name, start.elapsed()));
        if let Err(error) = outcome {
            failed = Some((stage.name, error));
            break;
        }
        println!("== {}: ok, {:.1} s", stage.name, start.elapsed().as_secs_f64());
    }
    println!("\n{:<8} {:>8}", "stage", "seconds");
    for (name, time) in &done {
        let verdict = if failed.as_ref().is_some_and(|(stage, _)| stage == name) { "FAILED" } else { "ok" };
        println!("{name:<8} {:>8.1}  {verdict}", time.as_secs_f64());
    }
    println!("{:<8} {:>8.1}", "all", done.iter().map(|(_, time)| time.as_secs_f64()).sum::<f64>());
    match failed {
        Some((name, error)) => {
            println!("\nstage {name} failed: {error:#}");
            Ok(false)
        }
        None => Ok(true),
    }
}

fn tidy_stage(root: &Path) -> Result<()> {
    ensure!(tidy::run(root, &[])?, "see the findings above");
    Ok(())
}

fn long_stage(root: &Path) -> Result<()> {
    if !tidy::has_long_tests(root) {
        println!("no long tests yet");
        return Ok(());
    }
    cargo(root, &["test", "--workspace", "--test", "long_*"])
}

fn docs_stage(root: &Path) -> Result<()> {
    let mut doc = Command::new("cargo");
    doc.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    finish(root, doc)
}

fn cargo(root: &Path, args: &[&str]) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(args);
    finish(root, command)
}

/// Runs with this terminal, so that cargo's own lines are seen as they come.
fn finish(root: &Path, mut command: Command) -> Result<()> {
    let status = command.current_dir(root).status().context("cargo is not on the PATH")?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
