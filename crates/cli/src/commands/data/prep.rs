//! `hymo data prep`: text to shards.

use std::io::Write;
use std::path::{Path, PathBuf};

use hymo_data::manifest::{Manifest, Shaping};
use hymo_data::prep::{Outcome, PrepOptions, Progress as Done, prepare};
use hymo_data::source::Inputs;
use hymo_tokenizer::Tokenizer;
use serde_json::json;

use crate::commands::tokenizer::{InputArgs, TokenizerFile};
use crate::exit::data_error;
use crate::progress::{Progress, Unit};

/// Encodes documents and writes them as shards with a manifest
///
/// Every document ends with <|endoftext|>. Stopped at any moment, the same command goes on where finished shards end, and
/// comes to the same bytes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo data prep books.jsonl.zst -t tokenizer.json -o data/
  hymo data prep src/ 'docs/**/*.md' -t tokenizer.json -o data/ --val-fraction 0.01 --dedup
  zstdcat dump.jsonl.zst | hymo data prep - --stdin-format jsonl -t tokenizer.json -o data/")]
pub struct Args {
    #[command(flatten)]
    inputs: InputArgs,

    #[command(flatten)]
    tokenizer: TokenizerFile,

    /// The folder for shards and manifest
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,

    /// Share of documents that go into the split `val`, chosen by the hash of their text
    #[arg(long, value_name = "SHARE", default_value_t = 0.)]
    val_fraction: f64,

    /// Keep only the first of equal documents (16 bytes of memory for each document)
    #[arg(long)]
    dedup: bool,

    /// Drop shorter documents
    #[arg(long, value_name = "BYTES", default_value_t = 1)]
    min_bytes: u64,

    /// Drop longer documents [default: 2 GiB]
    #[arg(long, value_name = "BYTES")]
    max_bytes: Option<u64>,

    /// The most tokens of a shard, two bytes each
    #[arg(long, value_name = "N", default_value_t = PrepOptions::default().shaping.shard_tokens)]
    shard_tokens: u64,

    /// Threads that encode [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Print one JSON object in place of the summary
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let defaults = PrepOptions::default();
    let shaping = Shaping {
        text_field: args.inputs.text_field.clone(),
        val_fraction: args.val_fraction,
        dedup: args.dedup,
        min_bytes: args.min_bytes,
        max_bytes: args.max_bytes.unwrap_or(defaults.shaping.max_bytes),
        shard_tokens: args.shard_tokens,
    };
    let options = PrepOptions { shaping, threads: args.threads.unwrap_or(defaults.threads) };
    let inputs = Inputs::find(&args.inputs.input, args.inputs.stdin()).map_err(data_error)?;
    let (tokenizer, json) = args.tokenizer.load()?;
    let Encoded { outcome, last, seconds } = encode(&inputs, (&tokenizer, &json), &args.output, &options)?;
    if args.json {
        let object = json!({
            "output": args.output,
            "seconds": seconds,
            "encoded": { "text_bytes": last.text_bytes, "tokens": last.tokens },
            "resumed_shards": outcome.resumed_shards,
            "already_done": outcome.already_done,
            "skipped_files": inputs.skipped,
            "manifest": outcome.manifest,
        });
        return Ok(writeln!(out, "{object:#}")?);
    }
    Ok(out.write_all(summary(args, &inputs, &outcome, &last, seconds).as_bytes())?)
}

/// What encoding came to.
pub struct Encoded {
    /// What the folder holds.
    pub outcome: Outcome,
    /// What was done this time.
    pub last: Done,
    /// How long that took.
    pub seconds: f64,
}

/// Encodes inputs into a folder, with progress on standard error.
pub fn encode(
    inputs: &Inputs,
    tokenizer: (&Tokenizer, &[u8]),
    output: &Path,
    options: &PrepOptions,
) -> anyhow::Result<Encoded> {
    let mut progress = Progress::new("encoding", Unit::Bytes, Some(inputs.bytes()).filter(|&bytes| bytes > 0));
    let mut last = Done::default();
    let outcome = prepare(inputs, tokenizer, output, options, &mut |done| {
        last = *done;
        progress.set(done.read_bytes, || format!("({:.1} million tokens)", done.tokens as f64 / 1e6));
    })
    .map_err(data_error)?;
    Ok(Encoded { outcome, last, seconds: progress.finish() })
}

fn summary(args: &Args, inputs: &Inputs, outcome: &Outcome, last: &Done, seconds: f64) -> String {
    let folder = args.output.display();
    let mut text = counts(&outcome.manifest);
    if !inputs.skipped.is_empty() {
        text += &format!(
            "left out {} files that are not text, the first {}\n",
            inputs.skipped.len(),
            inputs.skipped[0].display()
        );
    }
    if outcome.already_done {
        return text + &format!("{folder} was finished before: nothing to do\n");
    }
    if outcome.resumed_shards > 0 {
        text += &format!("went on behind {} shards of an earlier run\n", outcome.resumed_shards);
    }
    let rate = last.text_bytes as f64 / 1e6 / seconds.max(1e-9);
    text + &format!("{folder} written in {seconds:.1} s, {rate:.1} MB of text a second\n")
}

/// What a folder holds, a line for each split and for what was dropped.
pub fn counts(manifest: &Manifest) -> String {
    let mut text = String::new();
    for split in &manifest.splits {
        let per_token = split.text_bytes as f64 / (split.tokens as f64).max(1.);
        text += &format!(
            "{:<6} {} documents, {} tokens, {} bytes of text ({per_token:.3} a token), {} shards\n",
            split.name,
            split.documents,
            split.tokens,
            split.text_bytes,
            split.shards.len()
        );
    }
    let d = manifest.dropped;
    text += &format!(
        "dropped {} empty, {} too short, {} too long, {} repeated; {} longer than a shard were cut\n",
        d.empty, d.short, d.long, d.duplicate, manifest.cut
    );
    text
}
