//! `hymo bench train`: forward and backward of a whole model.

use std::fmt::Write as _;

use anyhow::Context;
use hymo_model::{Batch, HyMo, Options, Params};
use hymo_ops::check::Noise;
use hymo_tape::Tape;
use hymo_tensor::Ctx;
use serde_json::{Value, json};

use super::clock::{self, Times};
use super::{Common, checked, choose};
use crate::source::Source;

/// Forward and backward of a model on random tokens, no optimizer
#[derive(clap::Args)]
#[command(after_help = "Example: hymo bench train hymo-30m --batch 1 --len 1024 --json")]
pub struct Args {
    /// A preset, or a configuration file
    #[arg(value_name = "PRESET|CONFIG.toml", default_value = "hymo-nano")]
    model: String,

    /// Rows
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,

    /// Tokens of a row
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    len: u32,

    /// Documents of a row
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    documents: u32,

    #[command(flatten)]
    pub(super) common: Common,
}

/// Runs the bench and gives its text.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let config = Source::find(&args.model)?.model;
    checked(&choose(&[])?)?;
    let mut facts = clock::circumstances();
    let result = measure(args, &config)?;
    if let (Some(facts), Value::Object(result)) = (facts.as_object_mut(), result) {
        facts.extend(result);
    }
    if args.common.json {
        return Ok(format!("{facts:#}\n"));
    }
    let mut text = String::new();
    let number = |name: &str| facts[name].as_f64().unwrap_or(f64::NAN);
    let (batch, len) = (args.batch, args.len);
    writeln!(text, "{}, {batch} x {len} tokens, {} threads", args.model, facts["threads"])?;
    for what in ["forward", "backward", "step", "processor"] {
        let (median, min) = (number(&format!("{what}_ms_median")), number(&format!("{what}_ms_min")));
        writeln!(text, "{what:<10} {median:>9.2} ms   (best {min:.2})")?;
    }
    writeln!(text, "{:<10} {:>9.0} tokens/s", "rate", number("tokens_a_second"))?;
    writeln!(text, "{:<10} {:>9.0} MiB at the peak", "memory", number("peak_resident_mib"))?;
    Ok(text)
}

fn measure(args: &Args, config: &hymo_model::ModelConfig) -> anyhow::Result<Value> {
    let before = clock::resident("VmRSS");
    let ctx = Ctx::cpu();
    let (model, params) = (HyMo::new(config)?, Params::init(&ctx, config, 0)?);
    let batch = random_batch(args, config)?;
    let mut grads = params.zero_grads(&ctx)?;
    let [mut forward, mut backward, mut step, mut busy] = [const { Times(Vec::new()) }; 4];
    let mut loss = f64::NAN;
    for round in 0..args.common.warmup + args.common.reps {
        if round == args.common.warmup {
            (forward, backward, step, busy) = Default::default();
            clock::reset_peak();
        }
        for flat in grads.flats_mut() {
            flat.flat_mut::<f32>()?.fill(0.);
        }
        let mut tape = Tape::training(&ctx, grads);
        let start = clock::processor_ms();
        grads = step.add(|| -> anyhow::Result<_> {
            let losses = forward.add(|| model.loss(&mut tape, &params, &batch, &Options::default()))?;
            loss = losses.total()?;
            let grads = backward.add(|| tape.backward(&losses.seeds()))?;
            grads.into_params().context("a training tape returns its gradients")
        })?;
        busy.0.extend(clock::processor_ms().zip(start).map(|(end, start)| end - start));
    }
    let mut result = json!({
        "config": args.model, "batch": args.batch, "length": args.len, "documents_a_row": args.documents,
        "dtype": "float32", "loss": loss, "resident_before_mib": before,
        "peak_resident_mib": clock::resident("VmHWM"), "load_after": clock::load(),
        "tokens_a_second": f64::from(args.batch) * f64::from(args.len) / step.median() * 1e3,
    });
    let all = [("forward_ms", &forward), ("backward_ms", &backward), ("step_ms", &step), ("processor_ms", &busy)];
    for (name, times) in all {
        result[format!("{name}_median")] = json!(times.median());
        result[format!("{name}_min")] = json!(times.min());
        result["raw"][name] = json!(times.0);
    }
    Ok(result)
}

/// Random tokens; `documents` documents of about equal length in a row.
fn random_batch(args: &Args, config: &hymo_model::ModelConfig) -> anyhow::Result<Batch> {
    let (batch, len) = (args.batch as usize, args.len as usize);
    let width = len + config.mtp.n_modules + 1;
    let mut noise = Noise::new(1);
    let tokens: Vec<i32> = (0..batch * width).map(|_| noise.below(config.vocab_size) as i32).collect();
    let of = |column: usize| (column * args.documents as usize / width) as i32;
    let seg: Vec<i32> = (0..batch * width).map(|i| of(i % width)).collect();
    Ok(Batch::new(batch, len, config.mtp.n_modules, &tokens, &seg)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_step_is_timed() {
        let common = Common { reps: 2, warmup: 0, threads: Some(1), json: true };
        let args = Args { model: "hymo-nano".into(), batch: 1, len: 8, documents: 2, common };
        let config = Source::find("hymo-nano").unwrap().model;
        let result = measure(&args, &config).unwrap();
        assert_eq!(result["raw"]["step_ms"].as_array().unwrap().len(), 2);
        assert!((result["loss"].as_f64().unwrap() / 4096f64.ln() - 1.4).abs() < 0.2, "{}", result["loss"]);
    }
}
