//! `hymo export`: a model as others read it.

use std::io::Write;
use std::path::PathBuf;

use hymo_train::exchange::{Precision, export};
use serde_json::json;

use crate::exit::train_error;
use crate::numbers::{bytes, grouped};
use crate::source::trained;

/// Writes a model as one safetensors file with config.json and tokenizer.json
///
/// Every tensor is written, the prediction modules' too, and the file is read back and compared. Gates, norms,
/// convolutions and routers stay in single precision.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo export runs/first exported/
  hymo export runs/first/checkpoints/step-4000 exported/ --dtype bf16")]
pub struct Args {
    /// A run's folder (its newest checkpoint), a checkpoint, or an exported folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// The folder to write, empty or an earlier export
    #[arg(value_name = "DIR")]
    output: PathBuf,

    /// What matrices are stored in
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,

    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Dtype {
    /// Every bit
    F32,
    /// Half the size
    Bf16,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let model = trained(&args.model)?;
    let precision = if args.dtype == Dtype::Bf16 { Precision::Bf16 } else { Precision::F32 };
    let written = export(&model, &args.output, precision).map_err(train_error)?;
    let tensors = model.params.table().params().len() + model.params.table().buffers().len();
    if args.json {
        let object = json!({
            "model": model.path, "step": model.step, "output": args.output, "tensors": tensors, "bytes": written,
            "tokenizer": model.tokenizer.is_some(),
        });
        return Ok(writeln!(out, "{object:#}")?);
    }
    writeln!(
        out,
        "{}, step {}: {tensors} tensors, {}, in {}",
        model.path.display(),
        grouped(model.step),
        bytes(written),
        args.output.display()
    )?;
    if model.tokenizer.is_none() {
        writeln!(out, "there is no tokenizer.json beside the model: none was written")?;
    }
    Ok(())
}
