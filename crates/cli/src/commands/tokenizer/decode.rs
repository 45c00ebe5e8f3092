//! `hymo tokenizer decode`: ids to text.

use std::io::Write;

use serde_json::json;

use super::{TokenizerFile, text_or_stdin};
use crate::exit::{Usage, data_error};

/// Prints the text of ids, byte for byte
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo tokenizer decode -t tokenizer.json 52 391 84
  hymo tokenizer encode -t tokenizer.json < file | hymo tokenizer decode -t tokenizer.json | cmp - file")]
pub struct Args {
    #[command(flatten)]
    tokenizer: TokenizerFile,

    /// The ids [default: standard input; numbers with anything but digits between them]
    #[arg(value_name = "ID")]
    ids: Vec<u32>,

    /// Print one JSON object: bytes, whether they are UTF-8, and the text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (tokenizer, _) = args.tokenizer.load()?;
    let ids = if args.ids.is_empty() { parse(&text_or_stdin(None)?)? } else { args.ids.clone() };
    let bytes = tokenizer.decode(&ids).map_err(|e| data_error(e.into()))?;
    if args.json {
        let utf8 = std::str::from_utf8(&bytes).is_ok();
        let text = String::from_utf8_lossy(&bytes);
        return Ok(writeln!(out, "{}", json!({ "bytes": bytes.len(), "utf8": utf8, "text": text }))?);
    }
    Ok(out.write_all(&bytes)?)
}

fn parse(text: &[u8]) -> Result<Vec<u32>, Usage> {
    let digits = text.split(|byte| !byte.is_ascii_digit()).filter(|word| !word.is_empty());
    digits
        .map(|word| {
            let word = String::from_utf8_lossy(word);
            word.parse().map_err(|_| Usage(format!("{word} is no id: ids are below 65536")))
        })
        .collect()
}
