//! `hymo inspect`: what a model is made of and what it costs, before anything is run.

mod report;

use std::io::Write;
use std::path::PathBuf;

use hymo_model::{Cost, CostOptions};

use crate::exit::Usage;
use crate::source::{Source, shown};

/// Parameters by part, operations a token, memory in training, caches
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo inspect hymo-434m --context 32768
  hymo inspect configs/hymo-nano.toml --json
  hymo inspect hymo-30m --print-config > my.toml")]
pub struct Args {
    /// A preset, or a configuration file (a path, or a name ending in .toml)
    #[arg(value_name = "PRESET|CONFIG.toml")]
    model: PathBuf,

    /// Print one JSON object in place of the tables
    #[arg(long, conflicts_with = "print_config")]
    json: bool,

    /// Print the configuration with all defaults, as TOML
    #[arg(long)]
    print_config: bool,

    /// Tokens of a sequence [default: the model's context_length]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,

    /// Sequences held at once: the micro-batch in training, requests in decoding
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let source = Source::find(&args.model)?;
    if args.print_config {
        return Ok(out.write_all(source.printed.as_bytes())?);
    }
    let model = source.model;
    let context = args.context.map_or(model.context_length, |n| n as usize);
    let options = CostOptions { context, batch: args.batch as usize };
    // The configuration has been checked and so have the numbers: no problem is left.
    let cost = Cost::new(&model, options).map_err(|e| Usage(e.to_string()))?;
    if args.json {
        let mut object = serde_json::json!({ "model": args.model.to_string_lossy() });
        if let (Some(object), serde_json::Value::Object(cost)) = (object.as_object_mut(), serde_json::to_value(&cost)?)
        {
            object.extend(cost);
        }
        return Ok(writeln!(out, "{object:#}")?);
    }
    Ok(out.write_all(report::text(&shown(&args.model), &model, &cost).as_bytes())?)
}
