//! `hymo tokenizer`: learn a vocabulary, use it, look at it.

mod decode;
mod encode;
mod info;
pub mod train;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;
use hymo_data::source::Format;
use hymo_tokenizer::Tokenizer;

use crate::exit::Usage;

/// Learn a vocabulary from text, encode, decode, look into it
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo tokenizer train books/ --vocab 16384 -o tokenizer.json
  hymo tokenizer encode -t tokenizer.json \"Some text\"
  hymo tokenizer info -t tokenizer.json books/")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Encode(encode::Args),
    Decode(decode::Args),
    Info(info::Args),
}

/// Runs the command.
pub fn run(args: Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match args.command {
        Command::Train(args) => train::run(&args, out),
        Command::Encode(args) => encode::run(&args, out),
        Command::Decode(args) => decode::run(&args, out),
        Command::Info(args) => info::run(&args, out),
    }
}

/// Which tokenizer: every command that needs one has this flag.
#[derive(clap::Args)]
pub struct TokenizerFile {
    /// The tokenizer's file, tokenizer.json
    #[arg(long, short, value_name = "FILE")]
    pub tokenizer: PathBuf,
}

impl TokenizerFile {
    /// The tokenizer and its file's bytes.
    pub fn load(&self) -> anyhow::Result<(Tokenizer, Vec<u8>)> {
        load(&self.tokenizer)
    }
}

/// Reads a tokenizer.
pub fn load(path: &Path) -> anyhow::Result<(Tokenizer, Vec<u8>)> {
    let json = std::fs::read(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => anyhow::Error::new(Usage(format!("{}: no such file", path.display()))),
        _ => anyhow::Error::new(e).context(path.display().to_string()),
    })?;
    let tokenizer = Tokenizer::from_json(&json).with_context(|| path.display().to_string())?;
    Ok((tokenizer, json))
}

/// How documents are found in inputs: the flags of all commands that read text.
#[derive(clap::Args)]
pub struct InputArgs {
    /// Files, folders, patterns, or - for standard input. By name: .txt and sources (a document each), .jsonl, .parquet;
    /// .gz and .zst of the first two
    #[arg(value_name = "INPUT", required = true)]
    pub input: Vec<String>,

    /// Field of JSON lines, or column of Parquet files, that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_field: String,

    /// What standard input holds
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub stdin_format: StdinFormat,
}

/// What standard input may hold.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum StdinFormat {
    /// One document
    Text,
    /// A JSON object a line
    Jsonl,
}

impl InputArgs {
    /// The format of standard input.
    pub fn stdin(&self) -> Format {
        match self.stdin_format {
            StdinFormat::Text => Format::Text,
            StdinFormat::Jsonl => Format::JsonLines,
        }
    }
}

/// The text of an argument, or of standard input where there is none.
fn text_or_stdin(text: Option<&String>) -> anyhow::Result<Vec<u8>> {
    if let Some(text) = text {
        return Ok(text.clone().into_bytes());
    }
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).context("standard input")?;
    Ok(bytes)
}
