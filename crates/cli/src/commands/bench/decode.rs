//! `hymo bench decode`: tokens a second of a model with random weights, against what this machine's memory can give.

use std::fmt::Write as _;
use std::sync::Arc;

use hymo_infer::{Engine, EngineOptions, Gates, Mtp, Request, SampleOptions, WeightDtype, Weights, What};
use hymo_model::params::Part;
use hymo_model::{Cost, CostOptions, ModelConfig, Params};
use hymo_ops::check::Noise;
use hymo_tensor::Ctx;
use serde_json::{Value, json};

use super::{Common, checked, choose};
use crate::ceilings;
use crate::clock::{self, Times};
use crate::decoding::{Dtype, clock as passes, infer_error};
use crate::source::Source;

/// Decoding and prefill of a model with random weights
#[derive(clap::Args)]
#[command(after_help = "Example: hymo bench decode hymo-434m --dtype bf16,int8 --json")]
pub struct Args {
    /// A preset, or a configuration file
    #[arg(value_name = "PRESET|CONFIG.toml", default_value = "hymo-nano")]
    model: String,

    /// What the weights are kept as
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Dtype::F32, Dtype::Bf16, Dtype::Int8])]
    dtype: Vec<Dtype>,

    /// Sequences side by side
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1], value_parser = clap::value_parser!(u32).range(1..))]
    batch: Vec<u32>,

    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,

    #[command(flatten)]
    pub(super) common: Common,
}

/// Runs the bench and gives its text.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let config = Source::find(&args.model)?.model;
    checked(&choose(&["packed_linear".to_owned()])?)?;
    let mut facts = clock::circumstances();
    facts["config"] = json!(args.model);
    facts["prompt_tokens"] = json!(args.prompt);
    facts["read_bytes_a_second"] = json!(ceilings::reading());
    facts["product_flops_a_second"] = json!(ceilings::products(&hymo_tensor::Ctx::cpu())?);
    let cases = measure(args, &config, &facts)?;
    facts["cases"] = json!(cases);
    facts["load_after"] = json!(clock::load());
    facts["peak_resident_mib"] = json!(clock::resident("VmHWM"));
    if args.common.json {
        return Ok(format!("{facts:#}\n"));
    }
    let number = |v: &Value, name: &str| v[name].as_f64().unwrap_or(f64::NAN);
    let mut text = String::new();
    let reads = number(&facts, "read_bytes_a_second") / 1e9;
    let products = number(&facts, "product_flops_a_second") / 1e9;
    writeln!(
        text,
        "{}, {} threads; memory is read at {reads:.1} GB/s, products run at {products:.0} GFLOP/s",
        args.model, facts["threads"]
    )?;
    for case in &cases {
        writeln!(
            text,
            "{:<5} batch {:<3} {:>8.2} ms a step (best {:.2}), {:>7.1} tokens/s, {:.1} GB/s of weights, {:.0}% of memory; \
             prefill {:.0} tokens/s, {:.0}% of products; two drafts and their verification {:.2} plain steps",
            case["dtype"].as_str().unwrap_or(""),
            case["batch"].to_string(),
            number(case, "step_ms_median"),
            number(case, "step_ms_min"),
            number(case, "tokens_a_second"),
            number(case, "weight_bytes_a_second") / 1e9,
            100. * number(case, "share_of_reading"),
            number(case, "prefill_tokens_a_second"),
            100. * number(case, "prefill_share_of_products"),
            number(case, "cycle_in_plain_steps"),
        )?;
    }
    Ok(text)
}

fn measure(args: &Args, config: &ModelConfig, facts: &Value) -> anyhow::Result<Vec<Value>> {
    let ctx = Ctx::cpu();
    let mut params = Some(Params::init(&ctx, config, 0)?);
    let mut all = Vec::new();
    for (i, &dtype) in args.dtype.iter().enumerate() {
        let of = params.as_ref().map_or_else(|| Params::init(&ctx, config, 0), |p| Ok(p.clone()))?;
        if i + 1 == args.dtype.len() {
            params = None;
        }
        let weights = Arc::new(Weights::new(&ctx, config, &of, dtype.into())?);
        drop(of);
        for &batch in &args.batch {
            all.push(case(args, &weights, batch as usize, facts)?);
        }
    }
    Ok(all)
}

fn case(args: &Args, weights: &Arc<Weights>, batch: usize, facts: &Value) -> anyhow::Result<Value> {
    let plain = steps(args, weights, batch, Mtp::Off)?;
    let modules = weights.config().mtp.n_modules;
    let cycle = if modules > 0 { Some(steps(args, weights, batch, Mtp::On)?) } else { None };
    let step = &plain.decode;
    let bytes = weights.bytes_per_token() as f64;
    let (reads, products) = (facts["read_bytes_a_second"].as_f64(), facts["product_flops_a_second"].as_f64());
    let rate = bytes / (step.median() * 1e-3);
    let tokens = f64::from(args.prompt) * batch as f64;
    let prefill = tokens / (plain.prefill.min() * 1e-3);
    let flops = 2. * trunk(weights.config())? as f64 * prefill;
    Ok(json!({
        "dtype": WeightDtype::to_string(&weights.dtype()), "batch": batch,
        "weight_bytes_a_token": bytes, "weight_bytes": weights.bytes(),
        "step_ms_median": step.median(), "step_ms_min": step.min(),
        "tokens_a_second": batch as f64 / (step.median() * 1e-3),
        "weight_bytes_a_second": rate,
        "share_of_reading": reads.map(|reads| rate / reads),
        "prefill_tokens_a_second": prefill,
        "prefill_share_of_products": products.map(|products| flops / products),
        "cycle_ms_median": cycle.as_ref().map(|c| c.decode.median()),
        "cycle_in_plain_steps": cycle.as_ref().map(|c| c.decode.median() / step.median()),
        "raw": {
            "step_ms": step.0, "prefill_ms": plain.prefill.0, "cycle_ms": cycle.as_ref().map(|c| &c.decode.0),
        },
    }))
}

/// Numbers of the layers that a token is multiplied with: all active ones but the head's and the prediction modules'.
fn trunk(config: &ModelConfig) -> anyhow::Result<u64> {
    let cost = Cost::new(config, CostOptions { context: config.context_length, batch: 1 })?;
    let of = |part: Part| !matches!(part, Part::Embedding | Part::Mtp);
    Ok(cost.params.parts.iter().filter(|p| of(p.part)).map(|p| p.active).sum())
}

/// Times of whole prompts and of single passes.
struct Steps {
    prefill: Times,
    decode: Times,
}

/// Prompts, then passes; with prediction every pass verifies all drafts, right or wrong.
fn steps(args: &Args, weights: &Arc<Weights>, batch: usize, mtp: Mtp) -> anyhow::Result<Steps> {
    let config = weights.config();
    let passes_wanted = (args.common.warmup + args.common.reps) as usize;
    let prompt = (args.prompt as usize).min(config.context_length / 2).max(1);
    let options = EngineOptions {
        mtp,
        gates: Gates::new(&[0.])?,
        max_batch: batch,
        prefill_chunk: 512,
        clock: Some(passes()),
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(&Ctx::cpu(), Arc::clone(weights), options)?;
    // Enough that nobody ends before the last timed pass, whatever is accepted.
    let most = (passes_wanted + 8) * (config.mtp.n_modules + 1);
    let sampling = SampleOptions { max_tokens: most, ignore_end: true, ..SampleOptions::default() };
    let mut noise = Noise::new(1);
    let tokens: Vec<u32> = (0..prompt).map(|_| noise.below(config.vocab_size) as u32).collect();
    // Once untimed: the pool then has every buffer of a prompt's size.
    engine.submit(Request::new(&tokens, &SampleOptions { max_tokens: 1, ..sampling.clone() })).map_err(infer_error)?;
    while !engine.idle() {
        engine.step();
    }
    for _ in 0..batch {
        engine.submit(Request::new(&tokens, &sampling)).map_err(infer_error)?;
    }
    let (mut times, mut begun) = (Steps { prefill: Times::default(), decode: Times::default() }, 0);
    let (mut total, mut passes) = (0., 0);
    while passes < passes_wanted {
        let mut time = Times::default();
        let events = time.add(|| engine.step());
        for event in &events {
            if let What::Failed(error) = &event.what {
                return Err(infer_error(error.clone()));
            }
        }
        let tokens = events.iter().filter(|e| matches!(e.what, What::Token(_))).count();
        if begun < batch {
            total += time.min();
            begun += tokens;
            if begun >= batch {
                times.prefill.0.push(total);
            }
            continue;
        }
        passes += 1;
        if passes > args.common.warmup as usize {
            times.decode.0.push(time.min());
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HAZARD 21, 28: plain steps and cycles are both timed, and every time is in the result.
    #[test]
    fn a_small_model_is_timed() {
        let common = Common { reps: 2, warmup: 1, threads: Some(1), json: true };
        let args = Args { model: "hymo-nano".into(), dtype: vec![Dtype::Int8], batch: vec![1, 2], prompt: 4, common };
        let facts: Value = serde_json::from_str(&run(&args).unwrap()).unwrap();
        for case in facts["cases"].as_array().unwrap() {
            let raw = &case["raw"];
            assert_eq!((raw["step_ms"].as_array().unwrap().len(), raw["cycle_ms"].as_array().unwrap().len()), (2, 2));
            assert!(case["share_of_reading"].as_f64().unwrap() > 0. && raw["prefill_ms"][0].as_f64().unwrap() > 0.);
        }
    }
}
