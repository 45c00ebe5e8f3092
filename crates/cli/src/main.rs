//! The `hymo` command.
//!
//! Each command is a file in `commands/`: its flags with their documentation, what it does, its tests. This file finds the
//! command, and turns what it returns into an exit code: 0 done, 1 failed, 2 asked for wrongly.

mod ceilings;
mod clock;
mod commands;
mod decoding;
mod device;
mod exit;
mod numbers;
mod progress;
mod source;
mod stop;
mod threads;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train hybrid language models from raw text, and look into them.
#[derive(Parser)]
#[command(name = "hymo", version = version(), max_term_width = 120, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.\nExample: hymo demo")]
struct Hymo {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let hymo = Hymo::parse();
    let stdout = exit::Named { name: "standard output", to: io::stdout() };
    let mut out = io::BufWriter::new(stdout);
    let done = hymo.command.run(&mut out).and_then(|()| Ok(out.flush()?));
    exit::code(done, &mut io::stderr())
}

/// Version, commit and features.
pub(crate) fn version() -> &'static str {
    let features =
        [("rayon", cfg!(feature = "rayon")), ("avx512", cfg!(feature = "avx512")), ("cuda", cfg!(feature = "cuda"))];
    let mut built: Vec<&str> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    if built.is_empty() {
        built.push("none");
    }
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    const COMMIT: &str = env!("HYMO_COMMIT");
    // Made once, printed once.
    Box::leak(format!("{VERSION} (commit {COMMIT}, features: {})", built.join(", ")).into_boxed_str())
}
