//! `hymo data verify`: is everything as it was written?

use std::io::Write;
use std::path::PathBuf;

use hymo_data::manifest::Manifest;
use hymo_data::verify::verify;
use serde_json::json;

use crate::exit::data_error;
use crate::progress::{Progress, Unit};

/// Reads every byte of a data folder and names each place that is damaged; exit code 1 if there is one
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo data verify data/
  hymo data verify data/ --json")]
pub struct Args {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// Print one JSON object in place of the lines
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let manifest = Manifest::read(&args.folder).map_err(data_error)?;
    let shards = || manifest.splits.iter().flat_map(|split| &split.shards);
    let total = shards().map(|shard| shard.bytes).sum();
    let mut progress = Progress::new("verifying", Unit::Bytes, Some(total));
    let mut read = 0;
    let findings = verify(&args.folder, &mut |bytes| {
        read += bytes;
        progress.set(read, String::new);
    })
    .map_err(data_error)?;
    let seconds = progress.finish();
    if args.json {
        let object = json!({ "ok": findings.is_empty(), "shards": shards().count(), "bytes": read, "seconds": seconds, "findings": findings });
        writeln!(out, "{object:#}")?;
    } else {
        for finding in &findings {
            writeln!(out, "{}: {}: {}", finding.file.display(), finding.place, finding.why)?;
        }
    }
    // What was found comes before the error.
    out.flush()?;
    anyhow::ensure!(findings.is_empty(), "{}: {} places are damaged", args.folder.display(), findings.len());
    if !args.json {
        writeln!(out, "{}: {} shards, {read} bytes, all as written", args.folder.display(), shards().count())?;
    }
    Ok(())
}
