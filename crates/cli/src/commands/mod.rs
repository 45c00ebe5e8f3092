//! The commands, one a file. A new one is a file with an `Args` and a `run`, and a line in each list here.

mod bench;
mod chat;
mod completions;
mod data;
mod demo;
mod doctor;
mod eval;
mod export;
mod generate;
mod import;
mod inspect;
mod tokenizer;
mod train;

use std::io::Write;

use clap::Subcommand;

/// What `hymo` can do.
#[derive(Subcommand)]
pub enum Command {
    Demo(demo::Args),
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Tokenizer(tokenizer::Args),
    Data(data::Args),
    Train(train::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Chat(chat::Args),
    Export(export::Args),
    Import(import::Args),
    Completions(completions::Args),
}

impl Command {
    /// Runs the command, which prints to `out`.
    pub fn run(self, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
        match self {
            Command::Demo(args) => demo::run(&args, out),
            Command::Inspect(args) => inspect::run(&args, out),
            Command::Doctor(args) => doctor::run(&args, out),
            Command::Bench(args) => bench::run(&args, out),
            Command::Tokenizer(args) => tokenizer::run(args, out),
            Command::Data(args) => data::run(args, out),
            Command::Train(args) => train::run(&args, out),
            Command::Eval(args) => eval::run(&args, out),
            Command::Generate(args) => generate::run(&args, out),
            Command::Chat(args) => chat::run(&args, out),
            Command::Export(args) => export::run(&args, out),
            Command::Import(args) => import::run(&args, out),
            Command::Completions(args) => completions::run(&args, out),
        }
    }
}
