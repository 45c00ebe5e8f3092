//! Both optimizers on a device: some steps against the plain loops in `f64`, run twice, and a gradient that must not move
//! anything.

use crate::{Error, Groups, Method, Optimizer, Outcome};
use hymo_model::config::{ModelConfig, OptimConfig};
use hymo_model::{Params, presets};
use hymo_ops::check::{Deviation, Noise, Report, rms_error, same_bits, values};
use hymo_tensor::{Ctx, DType, Tensor};

const STEPS: u64 = 4;
/// Far enough from 1 that a wrong or missing factor shows.
const CLIP_NORM: f64 = 0.37;
const LR: f64 = 1e-2;

/// Bounds of what AdamW and what NorMuon moved, by what a matrix is orthogonalised in: five steps of a polynomial in bf16
/// keep about two digits, of which the update is made.
fn bounds(ctx: &Ctx) -> [f64; 2] {
    if ctx.activations() == DType::BF16 { [2e-5, 4e-2] } else { [2e-5, 2e-5] }
}

/// Every kind of member, sizes that are no multiple of a tile: embedding, matrices in both orientations and split by head, convolutions, experts, 1-D.
fn config() -> ModelConfig {
    ModelConfig { vocab_size: 300, n_layers: 4, d_model: 72, ..presets::hymo_nano() }
}

struct Run {
    moved: Vec<Vec<f64>>,
    state: Vec<f64>,
}

/// Gradients of step `number` in the layout of `params`, the same numbers in every dtype.
fn gradients(ctx: &Ctx, params: &Params, number: u64) -> Result<Vec<Tensor>, Error> {
    let one = |(unit, flat): (usize, &Tensor)| -> Result<Tensor, Error> {
        let mut noise = Noise::new(1000 * number + unit as u64);
        let numbers: Vec<f32> = (0..flat.numel()).map(|_| noise.normal() as f32).collect();
        Ok(match flat.dtype() {
            DType::F64 => {
                Tensor::from_slice(ctx, flat.dims(), &numbers.into_iter().map(f64::from).collect::<Vec<_>>())?
            }
            _ => Tensor::from_slice(ctx, flat.dims(), &numbers)?,
        })
    };
    params.flats().iter().enumerate().map(one).collect()
}

fn everything(params: &Params, optim: &Optimizer) -> Result<[Vec<f64>; 2], Error> {
    let all = |tensors: &mut dyn Iterator<Item = &Tensor>| -> Result<Vec<f64>, Error> {
        Ok(tensors.map(values).collect::<hymo_tensor::Result<Vec<_>>>()?.concat())
    };
    let state = optim.tensors()?;
    Ok([all(&mut params.flats().iter())?, all(&mut state.iter().map(|(_, t)| t))?])
}

/// What each optimizer moved in all steps, and the state after them.
fn run(ctx: &Ctx, mut params: Params, config: &OptimConfig) -> Result<(Run, Params, Optimizer), Error> {
    let groups = Groups::declared(params.table().params(), config)?;
    let mut optim = Optimizer::with_groups(ctx, params.flats(), groups, config)?;
    let before = params.flats().iter().map(values).collect::<hymo_tensor::Result<Vec<_>>>()?;
    for number in 1..=STEPS {
        let grads = gradients(ctx, &params, number)?;
        let Outcome::Stepped { .. } = optim.step(ctx, params.flats_mut(), &grads, LR)? else { break };
    }
    let after = params.flats().iter().map(values).collect::<hymo_tensor::Result<Vec<_>>>()?;
    let mut moved = vec![Vec::new(); 2];
    for member in optim.groups().members() {
        let (unit, range) = (member.unit.index(), member.offset..member.offset + member.numel());
        let kind = usize::from(optim.groups().group_of(member).method == Method::NorMuon);
        moved[kind].extend(after[unit][range.clone()].iter().zip(&before[unit][range]).map(|(a, b)| a - b));
    }
    let [_, state] = everything(&params, &optim)?;
    Ok((Run { moved, state }, params, optim))
}

/// Runs the comparisons on a context: its device, matrices orthogonalised in its activations' dtype.
///
/// # Errors
/// What goes wrong on the device.
pub fn check(ctx: &Ctx) -> Result<Vec<Report>, Error> {
    let config = OptimConfig { clip_norm: CLIP_NORM, ..OptimConfig::default() };
    let plain = Ctx::cpu().poisoned().oracle();
    // Drawn anew for each run, which writes to them.
    let start = || Params::init(&Ctx::cpu(), &self::config(), 7)?.on(ctx);
    let (oracle, ..) = run(&plain, start()?.on(&Ctx::cpu())?.to_f64(&plain)?, &config)?;
    let (one, mut params, mut optim) = run(ctx, start()?, &config)?;
    let (again, ..) = run(ctx, start()?, &config)?;

    let mut out = Vec::new();
    for (at, (what, bound)) in ["AdamW", "NorMuon"].into_iter().zip(bounds(ctx)).enumerate() {
        let error = rms_error(&one.moved[at], &oracle.moved[at]);
        out.push(Deviation { what: format!("what {what} moved"), error, bound });
    }
    same_bits(
        "everything",
        &[one.moved.concat(), one.state].concat(),
        &[again.moved.concat(), again.state].concat(),
        &mut out,
    );

    // What is refused leaves the bits of parameters and state: no number in the last place, and a norm above a limit.
    let before = everything(&params, &optim)?.concat();
    let mut grads = gradients(ctx, &params, 9)?;
    let above = optim.step_below(ctx, params.flats_mut(), &grads, LR, 1.)?;
    refused("a norm above the limit", &above, &before, &everything(&params, &optim)?.concat(), &mut out);
    let name = poison(&optim, &mut grads)?;
    let outcome = optim.step(ctx, params.flats_mut(), &grads, LR)?;
    refused("a gradient of NaN", &outcome, &before, &everything(&params, &optim)?.concat(), &mut out);
    let named = matches!(&outcome, Outcome::Refused { params, .. } if *params == [name]);
    out.push(Deviation {
        what: "a gradient of NaN is named".into(),
        error: if named { 0. } else { f64::NAN },
        bound: 0.,
    });
    let case = format!("{STEPS} steps of hymo-nano's kinds of parameters in {}", ctx.activations());
    Ok(vec![Report { case, deviations: out }])
}

fn refused(what: &str, outcome: &Outcome, before: &[f64], after: &[f64], out: &mut Vec<Deviation>) {
    let mut same = Vec::new();
    same_bits(what, before, after, &mut same);
    let moved = !matches!(outcome, Outcome::Refused { .. }) || !same.iter().all(Deviation::ok);
    out.push(Deviation { what: format!("{what} moves nothing"), error: if moved { f64::NAN } else { 0. }, bound: 0. });
}

/// Makes one number of the last member's gradient NaN; the member's name.
fn poison(optim: &Optimizer, grads: &mut [Tensor]) -> Result<String, Error> {
    let Some(member) = optim.groups().members().last() else { return Ok(String::new()) };
    grads[member.unit.index()].write_at(member.offset + member.numel() - 1, &[f32::NAN])?;
    Ok(member.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_agrees_with_the_plain_loops() {
        check(&Ctx::cpu().poisoned()).unwrap().iter().for_each(Report::assert);
    }
}
