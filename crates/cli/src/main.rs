//! The `hymo` command.
//!
//! Each command is a file in `commands/`: its flags with their documentation, what it does, its tests. This file finds the
//! command, and turns what it returns into an exit code: 0 done, 1 failed, 2 asked for wrongly.

mod commands;
mod exit;
mod progress;
mod source;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

/// Inspect hybrid language models, check this machine's arithmetic, and time it.
#[derive(Parser)]
#[command(name = "hymo", version = version(), max_term_width = 120, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.\nExample: hymo inspect hymo-434m"
)]
struct Hymo {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let hymo = Hymo::parse();
    let stdout = exit::Named { name: "standard output", to: io::stdout().lock() };
    let mut out = io::BufWriter::new(stdout);
    let done = hymo.command.run(&mut out).and_then(|()| Ok(out.flush()?));
    exit::code(done, &mut io::stderr())
}

/// Version, commit and features.
fn version() -> &'static str {
    const FEATURES: &str = match (cfg!(feature = "rayon"), cfg!(feature = "avx512")) {
        (true, true) => "rayon, avx512",
        (true, false) => "rayon",
        (false, true) => "avx512",
        (false, false) => "none",
    };
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    const COMMIT: &str = env!("HYMO_COMMIT");
    // Made once, printed once.
    Box::leak(format!("{VERSION} (commit {COMMIT}, features: {FEATURES})").into_boxed_str())
}
