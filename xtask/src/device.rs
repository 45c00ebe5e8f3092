//! `cargo xtask device`: what a machine with a GPU, and without Rust, needs to check and to time everything. It is gathered
//! into a folder small enough to carry; `run.sh` in it is what runs there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::kernels;

/// Bytes that are carried at most.
const LIMIT: u64 = 56 << 20;

#[derive(clap::Args)]
pub struct Args {
    /// The folder to gather into
    #[arg(long, value_name = "DIR", default_value = ".cache/device")]
    out: PathBuf,

    /// Take this build of hymo in place of one made with --release
    #[arg(long, value_name = "FILE")]
    hymo: Option<PathBuf>,

    /// Also compile the kernels for this architecture, so that no device time goes into it
    #[arg(long, value_name = "ARCH", default_value = "sm_90a")]
    arch: String,

    /// A folder of shards to train on (hymo data prep)
    #[arg(long, value_name = "DIR")]
    shards: Option<PathBuf>,
}

pub fn run(root: &Path, args: &Args) -> Result<()> {
    let out = root.join(&args.out);
    std::fs::create_dir_all(&out)?;
    let built = match &args.hymo {
        Some(file) => file.clone(),
        None => {
            let mut build = Command::new("cargo");
            build.args(["build", "--release", "--package", "hymo-cli"]).current_dir(root);
            ensure!(build.status().context("cargo does not start")?.success(), "the build failed");
            root.join("target/release/hymo")
        }
    };
    let program = out.join("hymo");
    std::fs::copy(&built, &program).with_context(|| built.display().to_string())?;
    ensure!(Command::new("strip").arg(&program).status().context("strip")?.success(), "strip failed");
    kernels::run(root, &kernels::Args::one(&args.arch, &out.join("kernels")))?;
    std::fs::copy(root.join("xtask/device.sh"), out.join("run.sh"))?;
    for folder in ["configs", "bench/peer"] {
        copy(&root.join(folder), &out.join(folder))?;
    }
    if let Some(shards) = &args.shards {
        copy(shards, &out.join("data"))?;
    }
    let bytes = size(&out)?;
    ensure!(bytes <= LIMIT, "{} holds {bytes} bytes, the limit is {LIMIT}", out.display());
    println!(
        "{}: {:.1} MiB. There: bash run.sh RESULTS_FOLDER [part..]",
        out.display(),
        bytes as f64 / f64::from(1 << 20)
    );
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => std::fs::copy(entry.path(), target).map(|_| ())?,
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        sum += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(sum)
}
