//! `hymo data`: text to shards, and what is in them.

mod audit;
mod info;
pub mod prep;
mod verify;

use std::io::Write;

use clap::Subcommand;

/// Turn text into token shards, look into them, check them
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo data prep books.jsonl.zst -t tokenizer.json -o data/
  hymo data info data/
  hymo data verify data/
  hymo data audit data/ --ranks 8 --rows 64")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Prep(prep::Args),
    Info(info::Args),
    Verify(verify::Args),
    Audit(audit::Args),
}

/// Runs the command.
pub fn run(args: Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match args.command {
        Command::Prep(args) => prep::run(&args, out),
        Command::Info(args) => info::run(&args, out),
        Command::Verify(args) => verify::run(&args, out),
        Command::Audit(args) => audit::run(&args, out),
    }
}
