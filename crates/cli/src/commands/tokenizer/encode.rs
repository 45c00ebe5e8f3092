//! `hymo tokenizer encode`: text to ids.

use std::io::Write;

use serde_json::json;

use super::{TokenizerFile, text_or_stdin};
use crate::exit::data_error;

/// Prints the ids of a text
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo tokenizer encode -t tokenizer.json \"Some text\"
  hymo tokenizer encode -t tokenizer.json --json < file.txt
  hymo tokenizer encode -t tokenizer.json --allow '<|user|>' '<|user|>Hello'")]
pub struct Args {
    #[command(flatten)]
    tokenizer: TokenizerFile,

    /// The text [default: standard input, any bytes]
    #[arg(value_name = "TEXT")]
    text: Option<String>,

    /// Recognise this special token in the text (may be given several times); without it, its name is text
    #[arg(long, value_name = "NAME")]
    allow: Vec<String>,

    /// Print one JSON object: ids, and the text of each
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (tokenizer, _) = args.tokenizer.load()?;
    let text = text_or_stdin(args.text.as_ref())?;
    let allowed: Vec<&str> = args.allow.iter().map(String::as_str).collect();
    let ids = tokenizer.encode_with(&text, &allowed).map_err(|e| data_error(e.into()))?;
    if args.json {
        let pieces: Vec<_> =
            ids.iter().map(|&id| String::from_utf8_lossy(tokenizer.bytes(id).unwrap_or_default())).collect();
        return Ok(writeln!(out, "{}", json!({ "bytes": text.len(), "ids": ids, "tokens": pieces }))?);
    }
    for (index, id) in ids.iter().enumerate() {
        write!(out, "{}{id}", if index == 0 { "" } else { " " })?;
    }
    Ok(writeln!(out)?)
}
