//! The whole model on a device: losses and all gradients against the oracle in `f64`, run twice, packed and apart.

use crate::config::ModelConfig;
use crate::{Batch, Counts, Error, HyMo, Options, ParamTable, Params, presets};
use hymo_ops::check::{Deviation, Noise, Report, rms_error, same_bits, values};
use hymo_tape::Tape;
use hymo_tensor::{Ctx, DType};
use std::ops::Range;

/// Documents of the row: single tokens, an end at a chunk's, one past it.
const DOCUMENTS: [usize; 5] = [1, 64, 2, 40, 23];

/// Bounds of losses, of all gradients as one and of every parameter's own, by what activations are. In bf16 rounding adds
/// up over all layers, and a token between two experts may take the other one: a single expert's gradient says nothing.
fn bounds(ctx: &Ctx) -> [f64; 3] {
    if ctx.activations() == DType::BF16 { [1e-3, 5e-2, f64::INFINITY] } else { [1e-6, 1e-5, 1e-4] }
}

/// hymo-nano with a short pattern and vocabulary: every operation of a layer, experts, prediction modules.
fn config() -> ModelConfig {
    ModelConfig { vocab_size: 300, n_layers: 4, ..presets::hymo_nano() }
}

/// What a pass gave: the losses with the balance loss last, and the flat gradients.
struct Pass {
    losses: Vec<f64>,
    grads: Vec<f64>,
}

fn pass(ctx: &Ctx, model: &HyMo, params: &Params, batches: &[Batch]) -> Result<Pass, Error> {
    let counts = batches.iter().map(Batch::counts).reduce(|sum, more| sum.plus(&more));
    let mut grads = params.zero_grads(ctx)?;
    let mut losses = Vec::new();
    for batch in batches {
        let options = Options { counts: counts.clone(), ..Options::default() };
        let mut tape = Tape::training(ctx, grads);
        let found = model.loss(&mut tape, params, batch, &options)?;
        let after = tape.backward(&found.seeds())?.into_params();
        grads = match after {
            Some(grads) => grads,
            None => params.zero_grads(ctx)?,
        };
        let found = found.read()?;
        losses.resize(found.depths.len() + 1, 0.);
        losses.iter_mut().zip(found.depths.iter().chain([&found.balance])).for_each(|(sum, x)| *sum += x);
    }
    let flat = grads.flats().iter().map(values).collect::<hymo_tensor::Result<Vec<_>>>()?.concat();
    Ok(Pass { losses, grads: flat })
}

/// Every parameter's name and where it lies in the units' buffers, one after another.
fn places(config: &ModelConfig) -> Result<Vec<(String, Range<usize>)>, Error> {
    let table = ParamTable::new(config)?;
    let mut before = 0;
    let mut out = Vec::new();
    for unit in table.units() {
        out.extend(table.unit_params(unit).iter().map(|p| {
            let at = p.range();
            (p.name.clone(), before + at.start..before + at.end)
        }));
        before += table.unit_len(unit);
    }
    Ok(out)
}

/// One row of documents, and each document in a row of its own.
fn batches(config: &ModelConfig) -> Result<(Vec<Batch>, Vec<Batch>), Error> {
    let (mut noise, modules) = (Noise::new(3), config.mtp.n_modules);
    let beyond = modules + 1;
    let row = |tokens: &[i32], seg: &[i32]| -> Result<Batch, Error> {
        let pad = |x: &[i32], with: i32| [x, &vec![with; beyond][..]].concat();
        Ok(Batch::new(1, tokens.len(), modules, &pad(tokens, 0), &pad(seg, -1))?)
    };
    let (mut tokens, mut seg, mut apart) = (Vec::new(), Vec::new(), Vec::new());
    for (id, &len) in DOCUMENTS.iter().enumerate() {
        let own: Vec<i32> = (0..len).map(|_| noise.below(config.vocab_size) as i32).collect();
        apart.push(row(&own, &vec![0; len])?);
        seg.extend(vec![id as i32; len]);
        tokens.extend(own);
    }
    Ok((vec![row(&tokens, &seg)?], apart))
}

/// Runs the comparisons on a context: its device, in its activations' dtype.
///
/// # Errors
/// What goes wrong on the device.
pub fn check(ctx: &Ctx) -> Result<Vec<Report>, Error> {
    let config = config();
    let model = HyMo::new(&config)?;
    let (packed, apart) = batches(&config)?;
    let plain = Ctx::cpu().poisoned().oracle();
    let start = Params::init(&Ctx::cpu(), &config, 5)?;
    let oracle = pass(&plain, &model, &start.to_f64(&plain)?, &packed)?;
    let params = start.on(ctx)?;
    let [one, again] = [pass(ctx, &model, &params, &packed)?, pass(ctx, &model, &params, &packed)?];
    let separate = pass(ctx, &model, &params, &apart)?;

    let [of_losses, of_gradients, of_one] = bounds(ctx);
    let parameters = places(&config)?;
    let mut out = Vec::new();
    let mut compare = |what: &str, got: &Pass, want: &Pass| {
        let mut push = |name: &str, error: f64, bound: f64| {
            out.push(Deviation { what: format!("{name}{what}"), error, bound });
        };
        push("losses", rms_error(&got.losses, &want.losses), of_losses);
        push("gradients", rms_error(&got.grads, &want.grads), of_gradients);
        for (name, at) in parameters.iter().filter(|_| of_one.is_finite()) {
            push(&format!("d_{name}"), rms_error(&got.grads[at.clone()], &want.grads[at.clone()]), of_one);
        }
    };
    compare("", &one, &oracle);
    compare(", documents apart", &separate, &oracle);
    same_bits("everything", &[one.losses, one.grads].concat(), &[again.losses, again.grads].concat(), &mut out);
    let case = format!("hymo-nano of {} layers, {} tokens in {}", config.n_layers, tokens(&packed), ctx.activations());
    Ok(vec![Report { case, deviations: out }])
}

fn tokens(batches: &[Batch]) -> f64 {
    batches.iter().map(|b| b.counts()).map(|Counts { tokens, .. }| tokens).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_agrees_with_the_oracle() {
        check(&Ctx::cpu().poisoned()).unwrap().iter().for_each(Report::assert);
    }
}
