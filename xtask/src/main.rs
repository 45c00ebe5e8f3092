//! HyMo's own chores. `cargo xtask ci` is everything a change must pass, `cargo xtask tidy` the part that reads text.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A command line prints.

mod bench;
mod ci;
mod device;
mod kernels;
mod readme;
mod tidy;
mod wasm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "HyMo's own chores")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Format, lints, and the rules of STYLE.md and ARCHITECTURE.md that a machine can check
    Tidy {
        /// Only these checks, by name (all of them without)
        checks: Vec<String>,
    },
    /// Everything a change must pass, stage by stage; stops at the first stage that fails
    #[command(after_help = "Example: cargo xtask ci tidy test")]
    Ci {
        /// Only these stages, in the fixed order (all of them without)
        stages: Vec<String>,
        /// Print the stages and what each runs, and run nothing
        #[arg(long)]
        list: bool,
    },
    /// Time HyMo on this machine, PyTorch beside it on request, and keep the raw results in bench/results
    #[command(after_help = "Examples:
  cargo xtask bench
  cargo xtask bench train --peer")]
    Bench(bench::Args),
    /// Compile every CUDA kernel for every architecture, without a GPU, and print what each needs
    Kernels(kernels::Args),
    /// Gather what a GPU machine needs into a folder: programs, kernels, data, the script that runs there
    Device(device::Args),
    /// Build the crates that must run in a browser for wasm32-unknown-unknown
    Wasm {
        /// Use Debian's rustc 1.85 even where rustup has the target: it is also our minimum Rust version
        #[arg(long)]
        debian: bool,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = root().and_then(|root| match cli.command {
        Command::Tidy { checks } => tidy::run(&root, &checks),
        Command::Ci { list: true, .. } => ci::list().map(|()| true),
        Command::Ci { stages, .. } => ci::run(&root, &stages),
        Command::Bench(args) => bench::run(&root, &args).map(|()| true),
        Command::Kernels(args) => kernels::run(&root, &args).map(|()| true),
        Command::Device(args) => device::run(&root, &args).map(|()| true),
        Command::Wasm { debian } => wasm::run(&root, debian).map(|()| true),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root: where this crate's folder lies, so that any folder may be the current one.
fn root() -> Result<PathBuf> {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR is not set: start this as `cargo xtask`")?;
    let root = Path::new(&manifest).parent().context("xtask lies in no folder")?;
    Ok(root.to_owned())
}
