//! Linear cross-entropy: the tied head, softmax, z-loss and their gradients without the matrix of logits.
//! l = h Eᵀ,  l̃ = κ tanh(l / κ) (or l),  lse = ln Σ_v exp l̃_v,  nll = lse - l̃_y,
//! loss = (weight / count) Σ_valid (nll + ζ lse²).
//!
//! h [N, D], E [V, D], targets i32 `[N]` (-1: ignored), loss `[1]`. Sums of products in the operands' dtype, at least f32;
//! softmax in f32 after subtracting the row's maximum; lse, nll and the loss in f64. Reserved logits are not masked:
//! training teaches the model that they never occur.
//! While a tape records, forward computes the gradients too, chunk by chunk of tokens while the chunk's logits are at
//! hand (three products instead of four): d_l̃ = (weight / count) (p (1 + 2ζ lse) - 1[v = y]), d_l = d_l̃ (1 - (l̃/κ)²),
//! d_h = d_l E,  d_E += d_lᵀ h. d_E adds into the parameter's flat gradient at once; d_h [N, D] is all that is saved.
//! So the upstream gradient must be 1 (another one is an error): weights go into `Args`, and a loss that is recorded
//! but never run backwards has added its d_E all the same. Deterministic: chunks in order.
//! Source: MATH 4.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod fast;

use crate::bench::{Bench, Form};
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, MatMut, Real, Result, Tensor};

const OP: &str = "cross_entropy";

/// What the loss is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// The loss's weight in the total (of an MTP depth, for example).
    pub weight: f64,
    /// Valid targets of the global batch: the mean's denominator. At least 1 when any target is valid.
    pub count: f64,
    /// ζ, 0 for none.
    pub z_loss: f64,
    /// κ, if the logits are capped.
    pub soft_cap: Option<f64>,
}

/// Bytes of the logits that stand at once on the processor's fast path, of so many tokens by a vocabulary of `v`.
#[must_use]
pub fn logits_bytes(tokens: usize, v: usize) -> u64 {
    (tokens.min(fast::chunk_rows(v)) as u64).saturating_mul(4 * v as u64)
}

/// Sums over the valid targets, unweighted: for reports.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    /// Σ nll.
    pub nll: f64,
    /// Σ lse²: the z-loss before ζ.
    pub lse_squared: f64,
    /// Valid targets.
    pub valid: usize,
    /// Of them, those whose logit was the largest.
    pub correct: usize,
}

/// [`Stats`] as the pass leaves them: on a GPU they stay there, and reading waits for it.
#[derive(Debug, Clone)]
pub struct Sums(Tensor);

impl Sums {
    fn new(ctx: &Ctx, s: Stats) -> Result<Self> {
        Tensor::from_slice(ctx, &[4], &[s.nll, s.lse_squared, s.valid as f64, s.correct as f64]).map(Sums)
    }

    /// The sums.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn read(&self) -> Result<Stats> {
        match self.0.to_vec::<f64>()?[..] {
            [nll, lse_squared, valid, correct] => {
                Ok(Stats { nll, lse_squared, valid: valid as usize, correct: correct as usize })
            }
            _ => Ok(Stats::default()),
        }
    }
}

/// What a pass found of every token.
enum Found {
    Here(Vec<Token>),
    #[cfg(feature = "cuda")]
    There(cuda::Found),
}

impl Found {
    fn tokens(self) -> Result<Vec<Token>> {
        match self {
            Found::Here(tokens) => Ok(tokens),
            #[cfg(feature = "cuda")]
            Found::There(found) => found.tokens(),
        }
    }
}

/// One token's result.
#[derive(Debug, Clone, Copy, Default)]
struct Token {
    nll: f64,
    lse: f64,
    correct: bool,
}

/// The operands, checked.
#[derive(Clone, Copy)]
struct Head<'a> {
    h: &'a Tensor,
    e: &'a Tensor,
    targets: &'a [i32],
    soft_cap: Option<f64>,
    z_loss: f64,
    /// weight / count: what every token's gradient is scaled by.
    scale: f64,
}

/// Where d_h [N, D] (written) and d_E [V, D] (added) go, if wanted.
#[derive(Default)]
struct Sinks<'a, 'g> {
    d_h: Option<&'a mut Tensor>,
    d_e: Option<Sink<'a, 'g>>,
}

/// A parameter's range of the flat gradient, or a tensor of zeros.
enum Sink<'a, 'g> {
    Param(&'a mut GradSlot<'g>),
    Zeros(&'a mut Tensor),
}

/// Both as matrices.
type Grads<'a, T> = (Option<MatMut<'a, T>>, Option<MatMut<'a, T>>);

impl Sinks<'_, '_> {
    fn open<T: Real>(&mut self, ctx: &Ctx) -> Result<Grads<'_, T>> {
        let d_h = self.d_h.as_mut().map(|t| t.view_mut::<T>()).transpose()?;
        let d_e = match &mut self.d_e {
            None => None,
            Some(Sink::Zeros(t)) => Some(t.view_mut::<T>()?),
            Some(Sink::Param(slot)) => slot.target::<T>(ctx)?.map(|(mut d_e, add)| {
                if !add {
                    d_e.fill(T::zero());
                }
                d_e
            }),
        };
        Ok((d_h, d_e))
    }
}

impl<'a> Head<'a> {
    fn new(h: &'a Tensor, e: &'a Tensor, targets: &'a [i32], args: Args) -> Result<Self> {
        let [n, d] = h.dims2(OP, "h")?;
        let [v, width] = e.dims2(OP, "E")?;
        if width != d {
            return Err(Error::Shape { op: OP, arg: "E", got: e.shape(), want: format!("[V, {d}]") });
        }
        if !crate::goes_with(e, h) {
            return Err(Error::DType { op: OP, arg: "E", got: e.dtype(), want: "the dtype of h" });
        }
        if targets.len() != n {
            return Err(Error::value(
                OP,
                "targets",
                format!("{} targets", targets.len()),
                format!("{n}, one a row of h"),
            ));
        }
        let fits = |y: i32| y == -1 || usize::try_from(y).is_ok_and(|y| y < v);
        if let Some((at, y)) = targets.iter().enumerate().find(|(_, y)| !fits(**y)) {
            return Err(Error::value(OP, "targets", format!("{y} at position {at}"), format!("-1 or in 0..{v}")));
        }
        if args.soft_cap.is_some_and(|cap| !(cap > 0. && cap.is_finite())) {
            return Err(Error::value(OP, "soft_cap", format!("{:?}", args.soft_cap), "a positive number or none"));
        }
        // Without a valid target the loss is 0 whatever the count; 0 / 0 must not make it NaN.
        let any = targets.iter().any(|&y| y >= 0);
        if any && !(args.count > 0. && args.count.is_finite()) {
            return Err(Error::value(OP, "count", args.count, "the number of valid targets, at least 1"));
        }
        let scale = if any { args.weight / args.count } else { 0. };
        Ok(Head { h, e, targets, soft_cap: args.soft_cap, z_loss: args.z_loss, scale })
    }

    fn run(&self, ctx: &Ctx, sinks: Sinks<'_, '_>) -> Result<Found> {
        match ctx.device() {
            Device::Cpu => on_cpu!(
                ctx, self.h.dtype(), "cross_entropy",
                fast: fast::run(ctx, self, sinks, fast::chunk_rows(self.e.rows())),
                oracle: cpu::oracle, (ctx, self, sinks)
            )
            .map(Found::Here),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => cuda::run(ctx, gpu, self, sinks).map(Found::There),
        }
    }

    /// The loss and the sums, tokens in order.
    fn loss(&self, ctx: &Ctx, found: &Found) -> Result<(Tensor, Sums)> {
        let tokens = match found {
            Found::Here(tokens) => tokens,
            #[cfg(feature = "cuda")]
            Found::There(found) => return found.loss(ctx, self),
        };
        let mut stats = Stats::default();
        for (token, _) in tokens.iter().zip(self.targets).filter(|(_, y)| **y >= 0) {
            stats.nll += token.nll;
            stats.lse_squared += token.lse * token.lse;
            stats.valid += 1;
            stats.correct += usize::from(token.correct);
        }
        let value = self.scale * (stats.nll + self.z_loss * stats.lse_squared);
        let loss = match self.h.dtype() {
            hymo_tensor::DType::F64 => Tensor::scalar(ctx, value)?,
            _ => Tensor::scalar(ctx, value as f32)?,
        };
        Ok((loss, Sums::new(ctx, stats)?))
    }
}

/// The loss `[1]` and its parts, of h [N, D], E [V, D] and N targets, without gradients: one product.
pub fn forward(ctx: &Ctx, h: &Tensor, e: &Tensor, targets: &[i32], args: Args) -> Result<(Tensor, Sums)> {
    let head = Head::new(h, e, targets, args)?;
    head.loss(ctx, &head.run(ctx, Sinks::default())?)
}

/// nll of every target (0 where it is -1), for evaluation.
pub fn token_nll(ctx: &Ctx, h: &Tensor, e: &Tensor, targets: &[i32], soft_cap: Option<f64>) -> Result<Vec<f32>> {
    let head = Head::new(h, e, targets, Args { weight: 1., count: 1., z_loss: 0., soft_cap })?;
    Ok(head.run(ctx, Sinks::default())?.tokens()?.into_iter().map(|t| t.nll as f32).collect())
}

/// Gradients that forward has computed, for an upstream gradient of 1.
#[derive(Debug, Default)]
pub struct Saved {
    d_h: Option<Tensor>,
    /// Only when E is not a parameter: a parameter's gradient is already where it belongs.
    d_e: Option<Tensor>,
}

impl Saved {
    fn bytes(&self) -> usize {
        [&self.d_h, &self.d_e].into_iter().flatten().map(Tensor::bytes).sum()
    }

    fn give(self, ctx: &Ctx, d_h: &mut GradSlot<'_>, d_e: &mut GradSlot<'_>) -> Result<()> {
        if let Some(d) = self.d_h {
            d_h.give(ctx, d)?;
        }
        if let Some(d) = self.d_e {
            d_e.give(ctx, d)?;
        }
        Ok(())
    }
}

/// Hands over d_h (and d_E, where E is not a parameter); fails unless `d_loss` is 1. On a GPU, where looking would wait for
/// it, another `d_loss` makes d_h NaN.
pub fn backward(
    ctx: &Ctx,
    saved: Saved,
    d_loss: &Tensor,
    d_h: &mut GradSlot<'_>,
    d_e: &mut GradSlot<'_>,
) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = ctx.device() {
        cuda::insist(gpu, d_loss, [saved.d_h.as_ref(), saved.d_e.as_ref()])?;
        return saved.give(ctx, d_h, d_e);
    }
    let d_loss = d_loss.item()?;
    if d_loss != 1. {
        let want = "1, as the gradients were computed in forward: weigh the loss by Args::weight, seed it once with 1";
        return Err(Error::value(OP, "d_loss", d_loss, want));
    }
    saved.give(ctx, d_h, d_e)
}

/// On the tape: the loss, to be seeded with 1, and its parts.
pub fn apply(tape: &mut Tape, h: &Var, e: &Var, targets: &[i32], args: Args) -> Result<(Var, Sums)> {
    let ctx = tape.ctx().clone();
    let head = Head::new(h.value(), e.value(), targets, args)?;
    let wanted = |v: &Var| tape.recording() && v.tracked();
    let (want_h, want_e) = (wanted(h), wanted(e));
    let mut saved = Saved::default();
    if want_h {
        saved.d_h = Some(ctx.empty_real(h.value().dtype(), h.dims())?);
    }
    let found = if want_e && e.is_param() {
        let (mut found, d_h) = (Found::Here(Vec::new()), saved.d_h.as_mut());
        tape.with_param_grads([e], |ctx, [slot]| {
            found = head.run(ctx, Sinks { d_h, d_e: Some(Sink::Param(slot)) })?;
            Ok(())
        })?;
        found
    } else {
        // An activation as E (as in tests): its slot opens only in backward, so its gradient waits in a tensor.
        if want_e {
            saved.d_e = Some(ctx.zeros_real(e.value().dtype(), e.dims())?);
        }
        head.run(&ctx, Sinks { d_h: saved.d_h.as_mut(), d_e: saved.d_e.as_mut().map(Sink::Zeros) })?
    };
    let (loss, sums) = head.loss(&ctx, &found)?;
    let bytes = saved.bytes();
    let [loss] = tape.record(OP, [h, e], [loss], bytes, move |ctx, [d_loss], [d_h, d_e]| {
        let Some(d_loss) = d_loss else { return Ok(()) };
        backward(ctx, saved, &d_loss, d_h, d_e)
    });
    Ok((loss, sums))
}

/// `n` targets below `v`, about one in five ignored.
fn some_targets(n: usize, v: usize) -> Vec<i32> {
    let mut noise = Noise::new((3 * n + v) as u64);
    (0..n).map(|_| if noise.below(5) == 0 { -1 } else { noise.below(v) as i32 }).collect()
}

fn case(n: usize, v: usize, d: usize, soft_cap: Option<f64>, param: bool) -> Case {
    let targets = some_targets(n, v);
    let mut noise = Noise::new((n + d) as u64);
    let case =
        Case::new(format!("cross_entropy {n} x {d}, vocabulary {v}, cap {soft_cap:?}, param {param}"), &["loss"])
            .losses()
            .leaf("h", &[n, d], noise.normals(n * d));
    let e = noise.normals(v * d);
    let case = if param { case.param("E", &[v, d], e) } else { case.leaf("E", &[v, d], e) };
    let count = targets.iter().filter(|&&y| y >= 0).count() as f64 + 3.;
    let args = Args { weight: 0.3, count, z_loss: 1e-2, soft_cap };
    case.bound("loss", 2e-7)
        .bound("d_h", 5e-7)
        .bound("d_E", 8e-7)
        .apply(move |tape, vars| Ok(vec![apply(tape, &vars[0], &vars[1], &targets, args)?.0]))
}

/// Single tokens, odd vocabularies, capped logits, E as a parameter and as an activation.
pub fn cases() -> Vec<Case> {
    vec![
        case(1, 2, 1, None, true),
        case(63, 65, 5, None, true),
        case(64, 50, 8, Some(5.), true),
        case(65, 33, 7, Some(2.), false),
        case(1000, 19, 3, None, false),
    ]
}

/// At hymo-nano's sizes, 4 x 512 tokens. All three products, the gradients' too, are made in the forward pass.
pub fn benches() -> Vec<Bench> {
    let [n, d, v] = [2048, 192, 4096];
    let bench = Bench::new(case(n, v, d, None, true)).forward_product(Form::Nt, [n, v, d]);
    vec![bench.forward_product(Form::Nn, [n, d, v]).forward_product(Form::Tn, [v, d, n])]
}

#[cfg(test)]
mod tests;
