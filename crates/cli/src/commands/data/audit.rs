//! `hymo data audit`: which tokens would each rank read?

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hymo_data::audit::{Audit, audit};
use hymo_data::corpus::{Corpus, Dataset, Weighted};
use hymo_data::loader::LoaderOptions;
use serde_json::json;

use crate::exit::{Usage, data_error};
use crate::progress::{Progress, Unit};

/// Prints the token ranges that each rank would read, and proves that they are the stream, each token once
///
/// Every rank is walked by itself and compared with one walk over the whole stream. Then an epoch of every data set is walked:
/// each document must come once, and their tokens must be all there are.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo data audit data/ --ranks 8 --rows 64 --len 4096
  hymo data audit books/=3 code/=1 --ranks 3 --rows 24 --steps 100 --json")]
pub struct Args {
    /// Data folders, mixed by weight where a weight stands behind them
    #[arg(value_name = "DIR[=WEIGHT]", required = true)]
    data: Vec<String>,

    /// Which split
    #[arg(long, value_name = "NAME", default_value = "train")]
    split: String,

    /// How many ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,

    /// Rows of a step, all ranks together
    #[arg(long, value_name = "N", default_value_t = 8)]
    rows: usize,

    /// Tokens of a row
    #[arg(long, value_name = "N", default_value_t = 4096)]
    len: usize,

    /// Prediction modules that look further ahead
    #[arg(long, value_name = "N", default_value_t = 2)]
    modules: usize,

    /// Steps to walk [default: one epoch]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,

    /// Seed of the shuffle
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print one JSON object in place of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let sets = args.data.iter().map(|data| open(data, &args.split)).collect::<anyhow::Result<Vec<_>>>()?;
    let corpus = Arc::new(Corpus::new(sets, Some(args.seed)).map_err(data_error)?);
    let all: u64 = corpus.sets().iter().map(|set| set.dataset.tokens()).sum();
    let options = LoaderOptions {
        world: args.ranks,
        micro_rows: (args.rows / args.ranks.max(1)).max(1),
        ..LoaderOptions::new(args.len, args.modules, args.rows)
    };
    let a_step = (args.rows * args.len).max(1) as u64;
    let steps = args.steps.unwrap_or(all.div_ceil(a_step));
    let mut progress = Progress::new("walking", Unit::Count, None);
    let found = audit(&corpus, &options, steps, &mut |tokens| progress.set(tokens, || "tokens".into()));
    let found = found.map_err(data_error)?;
    progress.finish();
    if args.json {
        let object = json!({ "ok": true, "tokens_a_step": a_step, "data_tokens": all, "audit": found });
        return Ok(writeln!(out, "{object:#}")?);
    }
    Ok(out.write_all(text(&found, args.ranks).as_bytes())?)
}

/// `folder` or `folder=weight`.
fn open(data: &str, split: &str) -> anyhow::Result<Weighted> {
    let (folder, weight) = match data.rsplit_once('=') {
        Some((folder, weight)) if !Path::new(data).exists() => {
            let wrong = || Usage(format!("{data}: {weight:?} is no weight"));
            (folder, weight.parse().ok().with_context(|| weight.to_owned()).map_err(|_| wrong())?)
        }
        _ => (data, 1.),
    };
    let dataset = Dataset::open(Path::new(folder), split).map_err(data_error)?;
    Ok(Weighted { dataset, weight })
}

/// Steps that are printed at either end.
const SHOWN: usize = 4;

fn text(found: &Audit, ranks: usize) -> String {
    let mut text = format!("{:>8} {:>6}  tokens\n", "step", "rank");
    let last = found.ranges.len().saturating_sub(SHOWN);
    for (step, ranges) in found.ranges.iter().enumerate() {
        if step == SHOWN && last > SHOWN {
            text += &format!("{:>8}\n", "...");
        }
        if step < SHOWN || step >= last {
            for (rank, range) in ranges.iter().enumerate() {
                text += &format!("{step:>8} {rank:>6}  {} to {}\n", range.start, range.end);
            }
        }
    }
    text + &format!(
        "{} steps on {ranks} ranks read tokens 0 to {}: no token twice, none left out\n\
         one epoch: {} documents, each once, {} tokens, as the manifests say\n",
        found.steps, found.tokens, found.documents, found.epoch_tokens
    )
}
