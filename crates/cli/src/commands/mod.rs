//! The commands, one a file. A new one is a file with an `Args` and a `run`, and a line in each list here.

mod inspect;

use std::io::Write;

use clap::Subcommand;

/// What `hymo` can do.
#[derive(Subcommand)]
pub enum Command {
    Inspect(inspect::Args),
}

impl Command {
    /// Runs the command, which prints to `out`.
    pub fn run(self, out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Command::Inspect(args) => inspect::run(&args, out),
        }
    }
}
