//! `hymo bench train`: forward and backward of a whole model.

use std::fmt::Write as _;

use anyhow::Context;
use hymo_model::config::OptimConfig;
use hymo_model::{Batch, HyMo, Options, Params};
use hymo_ops::check::Noise;
use hymo_optim::Optimizer;
use hymo_tape::Tape;
use hymo_tensor::{Ctx, Device};
use serde_json::{Value, json};

use super::{Common, checked, choose};
use crate::clock::{self, Times};
use crate::device::Compute;
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

    /// Recompute every n-th layer's activations in the backward pass, 0 for none
    #[arg(long, value_name = "N", default_value_t = 0)]
    recompute: usize,

    /// With the optimizer's step, spread over this many micro-batches
    #[arg(long, value_name = "N", default_value_t = 0)]
    accumulate: u32,

    /// On a GPU: what every kernel and product of one more step takes
    #[arg(long)]
    profile: bool,

    #[command(flatten)]
    compute: Compute,

    #[command(flatten)]
    pub(super) common: Common,
}

/// Runs the bench and gives its text.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let config = Source::find(&args.model)?.model;
    if args.compute.ctx()?.device() == &hymo_tensor::Device::Cpu {
        checked(&choose(&[])?)?;
    }
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
    if facts["optimizer_ms_median"].is_number() {
        let (ms, all) = (number("optimizer_ms_median"), number("tokens_a_second_with_optimizer"));
        writeln!(
            text,
            "{:<10} {ms:>9.2} ms, {all:.0} tokens/s spread over {} micro-batches",
            "optimizer", args.accumulate
        )?;
    }
    if let Some(peak) = facts["device_memory_mib"]["peak"].as_f64() {
        writeln!(text, "{:<10} {peak:>9.0} MiB of the GPU at the peak", "")?;
    }
    for (part, kernels) in facts["kernels"].as_object().into_iter().flatten() {
        writeln!(text, "\n{part}")?;
        for k in kernels.as_array().into_iter().flatten() {
            let (ms, flops) = (k["ms"].as_f64().unwrap_or(f64::NAN), k["flops"].as_f64().unwrap_or(0.));
            let rate = if flops > 0. { format!("{:>7.1} TFLOP/s", flops / ms * 1e-9) } else { String::new() };
            writeln!(text, "{ms:>9.3} ms {:>5} x {} {rate}", k["count"], k["name"].as_str().unwrap_or_default())?;
        }
    }
    Ok(text)
}

fn measure(args: &Args, config: &hymo_model::ModelConfig) -> anyhow::Result<Value> {
    let before = clock::resident("VmRSS");
    let ctx = args.compute.ctx()?;
    let (model, params) = (HyMo::new(config)?, Params::init(&ctx, config, 0)?);
    let batch = random_batch(args, config)?;
    let again = (0..config.n_layers).filter(|i| args.recompute > 0 && i % args.recompute == 0).collect();
    let options = Options { checkpoint: again, counts: None };
    let mut grads = params.zero_grads(&ctx)?;
    let [mut forward, mut backward, mut step, mut busy] = [const { Times(Vec::new()) }; 4];
    let mut loss = f64::NAN;
    for round in 0..args.common.warmup + args.common.reps {
        if round == args.common.warmup {
            (forward, backward, step, busy) = Default::default();
            clock::reset_peak();
        }
        for flat in grads.flats_mut() {
            flat.clear()?;
        }
        let mut tape = Tape::training(&ctx, grads);
        let start = clock::processor_ms();
        grads = step.add(|| -> anyhow::Result<_> {
            let losses = forward.add(|| {
                let losses = model.loss(&mut tape, &params, &batch, &options)?;
                loss = losses.read()?.total;
                ctx.synchronize().map(|()| losses)
            })?;
            let grads = backward.add(|| {
                let grads = tape.backward(&losses.seeds())?;
                ctx.synchronize().map(|()| grads)
            })?;
            grads.into_params().context("a training tape returns its gradients")
        })?;
        busy.0.extend(clock::processor_ms().zip(start).map(|(end, start)| end - start));
    }
    let after = optimise(args, config, &ctx, params, &grads)?;
    let mut result = json!({
        "config": args.model, "batch": args.batch, "length": args.len, "documents_a_row": args.documents,
        "device": ctx.describe(), "dtype": ctx.activations().to_string(), "loss": loss, "resident_before_mib": before,
        "peak_resident_mib": clock::resident("VmHWM"), "load_after": clock::load(),
        "tokens_a_second": f64::from(args.batch) * f64::from(args.len) / step.median() * 1e3,
    });
    let all = [("forward_ms", &forward), ("backward_ms", &backward), ("step_ms", &step), ("processor_ms", &busy)];
    for (name, times) in all {
        result[format!("{name}_median")] = json!(times.median());
        result[format!("{name}_min")] = json!(times.min());
        result["raw"][name] = json!(times.0);
    }
    if let Some((optimizer, kernels)) = after {
        add_optimizer(&mut result, args, step.median(), &optimizer);
        result["kernels"] = kernels;
    }
    result["device_memory_mib"] = memory(&ctx);
    Ok(result)
}

/// The optimizer's times, and tokens a second of whole steps.
fn add_optimizer(result: &mut Value, args: &Args, step: f64, optimizer: &Times) {
    let (micro, ms) = (f64::from(args.accumulate), optimizer.median());
    result["optimizer_ms_median"] = json!(ms);
    result["raw"]["optimizer_ms"] = json!(optimizer.0);
    if micro > 0. {
        let (tokens, whole) = (micro * f64::from(args.batch) * f64::from(args.len), micro * step + ms);
        result["whole_step_ms"] = json!(whole);
        result["tokens_a_second_with_optimizer"] = json!(tokens / whole * 1e3);
    }
}

/// Device memory: live, the most at once, taken from the driver.
fn memory(ctx: &Ctx) -> Value {
    match ctx.device() {
        Device::Cpu => Value::Null,
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            let stats = gpu.stats();
            json!({ "live": mib(stats.live), "peak": mib(stats.peak), "taken": mib(stats.fresh) })
        }
    }
}

/// The optimizer's step on its own, and, where asked for, what each kernel of a whole step takes.
fn optimise(
    args: &Args,
    config: &hymo_model::ModelConfig,
    ctx: &Ctx,
    mut params: Params,
    grads: &hymo_tape::ParamGrads,
) -> anyhow::Result<Option<(Times, Value)>> {
    if args.accumulate == 0 {
        return Ok(None);
    }
    let mut optimizer = Optimizer::new(ctx, &params, &OptimConfig::default())?;
    let mut times = Times::default();
    for round in 0..args.common.warmup + args.common.reps {
        if round == args.common.warmup {
            times = Times::default();
        }
        times.add(|| -> anyhow::Result<()> {
            let _ = optimizer.step(ctx, params.flats_mut(), grads.flats(), 1e-6)?;
            Ok(ctx.synchronize()?)
        })?;
    }
    Ok(Some((times, kernels(args, config, ctx, params, &mut optimizer)?)))
}

/// One more step with events around everything.
fn kernels(
    args: &Args,
    config: &hymo_model::ModelConfig,
    ctx: &Ctx,
    mut params: Params,
    optimizer: &mut Optimizer,
) -> anyhow::Result<Value> {
    let mut out = serde_json::Map::new();
    #[cfg(feature = "cuda")]
    if let (Device::Cuda(gpu), true) = (ctx.device(), args.profile) {
        let (model, batch) = (HyMo::new(config)?, random_batch(args, config)?);
        let mut spent = |what: &str, work: &mut dyn FnMut() -> anyhow::Result<()>| -> anyhow::Result<()> {
            gpu.profile();
            work()?;
            let all = gpu.spent()?;
            let one = |s: &hymo_cuda::Spent| json!({ "name": s.name, "count": s.count, "ms": s.ms, "flops": s.flops });
            out.insert(what.to_owned(), all.iter().map(one).collect());
            Ok(())
        };
        let mut tape = Some(Tape::training(ctx, params.zero_grads(ctx)?));
        let (mut losses, mut grads) = (None, None);
        spent("forward", &mut || {
            let tape = tape.as_mut().context("a tape")?;
            losses = Some(model.loss(tape, &params, &batch, &Options::default())?);
            Ok(())
        })?;
        spent("backward", &mut || {
            let (tape, losses) = (tape.take().context("a tape")?, losses.take().context("losses")?);
            grads = tape.backward(&losses.seeds())?.into_params();
            Ok(())
        })?;
        let grads = grads.context("a training tape returns its gradients")?;
        spent("optimizer", &mut || {
            let _ = optimizer.step(ctx, params.flats_mut(), grads.flats(), 1e-6)?;
            Ok(())
        })?;
    }
    let _ = (args, config, ctx, &mut params, optimizer);
    Ok(Value::Object(out))
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
        let compute = Compute::CPU;
        let model = "hymo-nano".to_owned();
        let args = Args {
            model,
            batch: 1,
            len: 8,
            documents: 2,
            recompute: 0,
            accumulate: 1,
            profile: false,
            compute,
            common,
        };
        let config = Source::find("hymo-nano").unwrap().model;
        let result = measure(&args, &config).unwrap();
        assert_eq!(result["raw"]["step_ms"].as_array().unwrap().len(), 2);
        assert!((result["loss"].as_f64().unwrap() / 4096f64.ln() - 1.4).abs() < 0.2, "{}", result["loss"]);
    }
}
