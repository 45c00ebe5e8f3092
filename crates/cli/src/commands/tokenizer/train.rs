//! `hymo tokenizer train`: text to tokenizer.json.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use hymo_data::source::{Inputs, ReadOptions, Records};
use hymo_tokenizer::MIN_VOCAB;
use hymo_tokenizer::train::{Report, TrainOptions, Trainer};
use serde_json::json;

use super::InputArgs;
use crate::exit::data_error;
use crate::progress::{Progress, Unit};

/// Learns a vocabulary from text and writes tokenizer.json
///
/// The same text gives the same file, whatever the number of threads. Memory is bounded: see --max-words.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo tokenizer train data/*.jsonl.zst --vocab 64256 -o tokenizer.json
  hymo tokenizer train src/ docs/ --vocab 4096 -o tokenizer.json
  zcat dump.jsonl.gz | hymo tokenizer train - --stdin-format jsonl -o tokenizer.json")]
pub struct Args {
    #[command(flatten)]
    inputs: InputArgs,

    /// Size of the vocabulary: 256 bytes, merges, 256 special tokens
    #[arg(long, value_name = "N", default_value_t = 64_256)]
    vocab: usize,

    /// Where to write the tokenizer
    #[arg(long, short, value_name = "FILE", default_value = "tokenizer.json")]
    output: PathBuf,

    /// Pairs seen less often are not merged
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().min_count)]
    min_count: u64,

    /// The longest token, in bytes
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().max_token_bytes)]
    max_token_bytes: usize,

    /// The most distinct words to remember, about 250 bytes each; beyond it the rarest are dropped
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().max_words)]
    max_words: usize,

    /// Print one JSON object in place of the summary
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let options = TrainOptions {
        vocab_size: args.vocab,
        min_count: args.min_count,
        max_token_bytes: args.max_token_bytes,
        max_words: args.max_words,
    };
    let inputs = Inputs::find(&args.inputs.input, args.inputs.stdin()).map_err(data_error)?;
    let read_options = ReadOptions { text_field: args.inputs.text_field.clone(), ..ReadOptions::default() };
    let Learned { json, report, reading, merging } = learn(&inputs, &read_options, options)?;
    hymo_data::write_whole(&args.output, &json)?;
    if args.json {
        let object =
            json!({ "file": args.output, "report": report, "seconds": { "reading": reading, "merging": merging } });
        return Ok(writeln!(out, "{object:#}")?);
    }
    Ok(out.write_all(summary(&report, args, reading, merging).as_bytes())?)
}

/// A vocabulary and what it took.
pub struct Learned {
    /// The bytes of tokenizer.json.
    pub json: Vec<u8>,
    /// What was read and learned.
    pub report: Report,
    /// Seconds of reading.
    pub reading: f64,
    /// Seconds of merging.
    pub merging: f64,
}

/// Learns from inputs, with progress on standard error.
pub fn learn(inputs: &Inputs, read_options: &ReadOptions, options: TrainOptions) -> anyhow::Result<Learned> {
    let merges = options.vocab_size.saturating_sub(MIN_VOCAB) as u64;
    let mut trainer = Trainer::new(options).map_err(|e| data_error(e.into()))?;
    let read = AtomicU64::new(0);
    let total = Some(inputs.bytes()).filter(|&bytes| bytes > 0);
    let mut progress = Progress::new("reading", Unit::Bytes, total);
    let documents = Records::counting(inputs, read_options.clone(), &read)
        .map(|record| record.and_then(|record| record.text(inputs, read_options)))
        .filter_map(Result::transpose);
    let mut text = 0;
    trainer
        .feed(documents, &mut |bytes| {
            text += bytes;
            progress.set(read.load(Ordering::Relaxed), || format!("({} MB of text)", text / 1_000_000));
        })
        .map_err(data_error)?;
    let reading = progress.finish();
    let mut progress = Progress::new("merging", Unit::Count, Some(merges));
    let (json, report) =
        trainer.finish(&mut |done, _| progress.set(done as u64, String::new)).map_err(|e| data_error(e.into()))?;
    Ok(Learned { json, report, reading, merging: progress.finish() })
}

fn summary(report: &Report, args: &Args, reading: f64, merging: f64) -> String {
    let Report { documents, bytes, words, distinct_words, dropped_words, long_words, vocab_size, merges, unused } =
        report;
    let mut text = format!(
        "{documents} documents, {:.1} MB of text, {words} words, {distinct_words} distinct\n\
         {vocab_size} ids: 256 bytes, {merges} merges, {unused} unused, 256 special\n",
        *bytes as f64 / 1e6
    );
    if *dropped_words > 0 {
        text += &format!("{dropped_words} occurrences of rare words were dropped to bound memory (--max-words)\n");
    }
    if *long_words > 0 {
        text += &format!("{long_words} words of more than 256 bytes were not learned from\n");
    }
    text + &format!("{} written: {reading:.1} s reading, {merging:.1} s merging\n", args.output.display())
}
