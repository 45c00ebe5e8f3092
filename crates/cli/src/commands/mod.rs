//! The commands, one a file. A new one is a file with an `Args` and a `run`, and a line in each list here.

mod bench;
mod data;
mod doctor;
mod inspect;
mod tokenizer;

use std::io::Write;

use clap::Subcommand;

/// What `hymo` can do.
#[derive(Subcommand)]
pub enum Command {
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Tokenizer(tokenizer::Args),
    Data(data::Args),
}

impl Command {
    /// Runs the command, which prints to `out`.
    pub fn run(self, out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Command::Inspect(args) => inspect::run(&args, out),
            Command::Doctor(args) => doctor::run(&args, out),
            Command::Bench(args) => bench::run(&args, out),
            Command::Tokenizer(args) => tokenizer::run(args, out),
            Command::Data(args) => data::run(args, out),
        }
    }
}
