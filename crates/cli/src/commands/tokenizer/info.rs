//! `hymo tokenizer info`: what a tokenizer holds, and how well it fits texts.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use hymo_data::manifest::hex;
use hymo_data::source::{Format, Inputs, ReadOptions, Records};
use hymo_tokenizer::{Kind, N_SPECIAL, Tokenizer};
use serde::Serialize;

use super::{StdinFormat, TokenizerFile};
use crate::exit::data_error;

/// What a tokenizer holds, and bytes per token of texts, by kind of file
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo tokenizer info -t tokenizer.json
  hymo tokenizer info -t tokenizer.json src/ books.jsonl.zst
  hymo tokenizer info -t tokenizer.json --longest 50 --json")]
pub struct Args {
    #[command(flatten)]
    tokenizer: TokenizerFile,

    /// Texts to measure bytes per token on
    #[arg(value_name = "INPUT")]
    input: Vec<String>,

    /// Field of JSON lines, or column of Parquet files, that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    text_field: String,

    /// What standard input holds
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    stdin_format: StdinFormat,

    /// How many of the longest tokens to print
    #[arg(long, value_name = "N", default_value_t = 20)]
    longest: usize,

    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Info {
    file: String,
    sha256: String,
    vocab_size: usize,
    merges: usize,
    unused: usize,
    special: usize,
    end_of_text: u32,
    pattern: String,
    longest: Vec<Token>,
    kinds: BTreeMap<String, Fit>,
}

#[derive(Serialize)]
struct Token {
    id: u32,
    bytes: usize,
    text: String,
}

/// How a kind of file is encoded.
#[derive(Default, Serialize)]
struct Fit {
    documents: u64,
    bytes: u64,
    tokens: u64,
    bytes_per_token: f64,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (tokenizer, _) = args.tokenizer.load()?;
    let kinds = if args.input.is_empty() { BTreeMap::new() } else { measure(args, &tokenizer)? };
    let info = Info {
        file: args.tokenizer.tokenizer.display().to_string(),
        sha256: hex(&tokenizer.sha256()),
        vocab_size: tokenizer.vocab_size(),
        merges: tokenizer.n_text() - 256,
        unused: tokenizer.vocab_size() - N_SPECIAL - tokenizer.n_text(),
        special: N_SPECIAL,
        end_of_text: tokenizer.end_of_text(),
        pattern: tokenizer.pattern().to_owned(),
        longest: longest(&tokenizer, args.longest),
        kinds,
    };
    if args.json {
        return Ok(writeln!(out, "{:#}", serde_json::to_value(&info)?)?);
    }
    Ok(out.write_all(text(&info).as_bytes())?)
}

fn longest(tokenizer: &Tokenizer, n: usize) -> Vec<Token> {
    let text_ids = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.kind(id) == Some(Kind::Text));
    let mut tokens: Vec<(u32, &[u8])> = text_ids.map(|id| (id, tokenizer.bytes(id).unwrap_or_default())).collect();
    tokens.sort_by_key(|&(id, bytes)| (std::cmp::Reverse(bytes.len()), id));
    tokens.truncate(n);
    let token =
        |(id, bytes): (u32, &[u8])| Token { id, bytes: bytes.len(), text: String::from_utf8_lossy(bytes).into_owned() };
    tokens.into_iter().map(token).collect()
}

fn measure(args: &Args, tokenizer: &Tokenizer) -> anyhow::Result<BTreeMap<String, Fit>> {
    let stdin = match args.stdin_format {
        StdinFormat::Text => Format::Text,
        StdinFormat::Jsonl => Format::JsonLines,
    };
    let inputs = Inputs::find(&args.input, stdin).map_err(data_error)?;
    let options = ReadOptions { text_field: args.text_field.clone(), ..ReadOptions::default() };
    let (mut encoder, mut ids) = (tokenizer.encoder(), Vec::new());
    let mut kinds: BTreeMap<String, Fit> = BTreeMap::new();
    for record in Records::new(&inputs, options.clone()) {
        let record = record.map_err(data_error)?;
        let kind = kind(inputs.name(record.input));
        let Some(text) = record.text(&inputs, &options).map_err(data_error)? else { continue };
        ids.clear();
        encoder.encode(&text, &mut ids)?;
        let fit = kinds.entry(kind).or_default();
        fit.documents += 1;
        fit.bytes += text.len() as u64;
        fit.tokens += ids.len() as u64;
        fit.bytes_per_token = fit.bytes as f64 / (fit.tokens as f64).max(1.);
    }
    Ok(kinds)
}

/// A file's ending, without that of its compression.
fn kind(name: &str) -> String {
    let name = Path::new(name).file_name().map_or(name.into(), |name| name.to_string_lossy());
    let stem = name.trim_end_matches(".gz").trim_end_matches(".zst").trim_end_matches(".zstd");
    stem.rsplit_once('.').map_or_else(|| "(none)".to_owned(), |(_, ending)| format!(".{}", ending.to_lowercase()))
}

fn text(info: &Info) -> String {
    let mut text = format!(
        "{}: {} ids, of these 256 bytes, {} merges, {} unused, {} special (from {} on)\nsha256 {}\npattern {}\n",
        info.file, info.vocab_size, info.merges, info.unused, info.special, info.end_of_text, info.sha256, info.pattern
    );
    if !info.longest.is_empty() {
        text += "\nlongest tokens\n";
    }
    for token in &info.longest {
        text += &format!("{:>7} {:>3} bytes {:?}\n", token.id, token.bytes, token.text);
    }
    if !info.kinds.is_empty() {
        text +=
            &format!("\n{:<12} {:>10} {:>14} {:>14} {:>12}\n", "kind", "documents", "bytes", "tokens", "bytes/token");
    }
    for (kind, fit) in &info.kinds {
        let Fit { documents, bytes, tokens, bytes_per_token } = fit;
        text += &format!("{kind:<12} {documents:>10} {bytes:>14} {tokens:>14} {bytes_per_token:>12.3}\n");
    }
    text
}
