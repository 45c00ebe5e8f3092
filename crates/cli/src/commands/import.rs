//! `hymo import`: a model that others wrote, as a run's folder.

use std::io::Write;
use std::path::PathBuf;

use hymo_tensor::Ctx;
use hymo_train::exchange::{Source, import};
use serde_json::json;

use crate::exit::train_error;
use crate::numbers::{grouped, short};
use crate::source;

/// Reads safetensors or .npy files as a checkpoint to train, evaluate or generate with
///
/// DIR is an export, or any folder of tensors by name: safetensors files, .npy files (the file's name is the tensor's), or
/// both. Every tensor of the model must be there, and no other.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo import exported/ -o runs/from-export
  hymo import weights/ --config my.toml --tokenizer tokenizer.json -o runs/from-weights
  hymo train my.toml --resume runs/from-weights --out runs/tuned")]
pub struct Args {
    /// The folder of tensors
    #[arg(value_name = "DIR")]
    input: PathBuf,

    /// The folder to write: checkpoints/step-N and tokenizer.json
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,

    /// The model, where DIR has no config.json: a configuration file or a preset
    #[arg(long, value_name = "CONFIG.toml|PRESET")]
    config: Option<PathBuf>,

    /// The tokenizer, where DIR has no tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,

    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let config = args.config.as_ref().map(source::Source::find).transpose()?.map(|source| source.model);
    let source = Source { dir: &args.input, config, tokenizer: args.tokenizer.as_deref() };
    let model = import(&Ctx::cpu(), &source, &args.output).map_err(train_error)?;
    let table = model.params.table();
    let tensors = table.params().len() + table.buffers().len();
    let numbers: u64 = table.params().iter().map(|spec| spec.numel() as u64).sum();
    if args.json {
        let object = json!({
            "input": args.input, "checkpoint": model.path, "step": model.step, "tensors": tensors, "parameters": numbers,
            "tokenizer": model.tokenizer.is_some(),
        });
        return Ok(writeln!(out, "{object:#}")?);
    }
    let place = model.path.display();
    writeln!(out, "{place}: {tensors} tensors, {} parameters, step {}", short(numbers), grouped(model.step))?;
    if model.tokenizer.is_none() {
        writeln!(
            out,
            "without a tokenizer: text goes neither in nor out until {}/tokenizer.json is there",
            args.output.display()
        )?;
    }
    Ok(())
}
