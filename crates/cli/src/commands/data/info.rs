//! `hymo data info`: what a data folder holds.

use std::io::Write;
use std::path::{Path, PathBuf};

use hymo_data::corpus::Dataset;
use hymo_data::manifest::Manifest;
use hymo_data::prep::TOKENIZER;
use serde::Serialize;
use serde_json::json;

use super::prep::counts;
use crate::commands::tokenizer::load;
use crate::exit::data_error;

/// Bytes of a sample that are printed.
const SAMPLE_BYTES: usize = 300;

/// Counts, lengths of documents, bytes per token, samples
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo data info data/
  hymo data info data/ --samples 10
  hymo data info data/ --json")]
pub struct Args {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// How many documents of each split to print the beginning of
    #[arg(long, value_name = "N", default_value_t = 3)]
    samples: u64,

    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct SplitInfo {
    name: String,
    tokens: u64,
    documents: u64,
    text_bytes: u64,
    bytes_per_token: f64,
    shards: usize,
    lengths: Vec<Bucket>,
    samples: Vec<Sample>,
}

/// Documents of `from` to `to` tokens, the last included.
#[derive(Serialize)]
struct Bucket {
    from: u64,
    to: u64,
    documents: u64,
    tokens: u64,
}

#[derive(Serialize)]
struct Sample {
    document: u64,
    tokens: usize,
    text: String,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let manifest = Manifest::read(&args.folder).map_err(data_error)?;
    let full = manifest.splits.iter().filter(|split| split.tokens > 0);
    let splits =
        full.map(|split| inspect(&args.folder, &split.name, args.samples)).collect::<anyhow::Result<Vec<_>>>()?;
    if args.json {
        return Ok(writeln!(out, "{:#}", json!({ "manifest": manifest, "splits": splits }))?);
    }
    let tokenizer = &manifest.tokenizer;
    writeln!(out, "tokenizer {} ({} ids), {} sources", tokenizer.sha256, tokenizer.vocab_size, manifest.sources.len())?;
    out.write_all(counts(&manifest).as_bytes())?;
    for split in &splits {
        writeln!(out, "\n{}: tokens a document", split.name)?;
        let most = split.lengths.iter().map(|bucket| bucket.documents).max().unwrap_or(1);
        for b in &split.lengths {
            let bar = "#".repeat((b.documents * 40).div_ceil(most) as usize);
            writeln!(out, "{:>9} to {:<9} {:>10}  {bar}", b.from, b.to, b.documents)?;
        }
        for sample in &split.samples {
            writeln!(
                out,
                "\n{} document {} ({} tokens):\n{}",
                split.name, sample.document, sample.tokens, sample.text
            )?;
        }
    }
    Ok(())
}

fn inspect(folder: &Path, name: &str, samples: u64) -> anyhow::Result<SplitInfo> {
    let dataset = Dataset::open(folder, name).map_err(data_error)?;
    let manifest = dataset.manifest();
    let split = manifest.split(name).cloned().unwrap_or_else(|| unreachable!("invariant: the split has been opened"));
    let mut lengths = [(0, 0); 33];
    for document in 0..dataset.documents() {
        let tokens = dataset.len_of(document).map_err(data_error)?;
        let bucket = &mut lengths[tokens.ilog2() as usize];
        *bucket = (bucket.0 + 1, bucket.1 + tokens);
    }
    let bucket = |(power, (documents, tokens)): (u32, (u64, u64))| {
        (documents > 0).then(|| Bucket { from: 1 << power, to: (2 << power) - 1, documents, tokens })
    };
    let (tokenizer, _) = load(&folder.join(TOKENIZER))?;
    dataset.check_tokenizer(&tokenizer).map_err(data_error)?;
    let n = samples.min(dataset.documents());
    let sample = |index: u64| -> anyhow::Result<Sample> {
        let document = index * dataset.documents() / n.max(1);
        let ids: Vec<u32> = dataset.tokens_of(document).map_err(data_error)?.into_iter().map(u32::from).collect();
        let bytes = tokenizer.decode(&ids[..ids.len().min(SAMPLE_BYTES)])?;
        let cut = &bytes[..bytes.len().min(SAMPLE_BYTES)];
        Ok(Sample { document, tokens: ids.len(), text: String::from_utf8_lossy(cut).into_owned() })
    };
    Ok(SplitInfo {
        name: name.to_owned(),
        tokens: split.tokens,
        documents: split.documents,
        text_bytes: split.text_bytes,
        bytes_per_token: split.text_bytes as f64 / split.tokens as f64,
        shards: split.shards.len(),
        lengths: (0..).zip(lengths).filter_map(bucket).collect(),
        samples: (0..n).map(sample).collect::<anyhow::Result<_>>()?,
    })
}
