//! Router of a mixture of experts.
//!
//! l = x W_rᵀ,  s = σ(l),  E(n) = the top_k experts of s + bias,  p_e = s_e / (Σ_E(n) s + 1e-20),  gate_e = ρ p_e.
//! Balance loss of a document of T tokens: α Σ_e f_e P_e with f_e = E / (top_k T) · #{t : e ∈ E(t)} (a constant) and
//! P_e = mean_t s_e / Σ_j s_j; documents are weighted by their share T / `tokens` of the global batch, so that packed
//! documents give what they give apart.
//!
//! x [N, D], W_r [E, D], bias `[E]` (f32, a buffer without gradient), gates [N, top_k], chosen [N, top_k] i32, balance
//! `[1]`. `chosen` and `gates` are in order of s + bias, best first; ties go to the lower index, and NaN counts as the
//! lowest score, so an index is always in range. Everything in the operands' dtype, at least f32; the sums over a
//! document in f64. Padding gets gates like any token, but is in no count, no statistic and no balance loss.
//!
//! Saves x, s, chosen and, with a balance loss, c_e = α f_e / tokens of each document; gates and shares are computed
//! again. With Z = Σ_E(n) s, S = Σ_j s_j and the upstream gradients of gates and balance (either may be missing):
//! d_s_e = [e ∈ E(n)] (ρ / Z) (d_gate_e - Σ_j d_gate_j p_j) + d_balance (c_e - Σ_j c_j s_j / S) / S,
//! d_l = d_s s (1 - s), d_x = d_l W_r following its slot, d_W_r += d_lᵀ x. Deterministic.
//! Source: MATH 3.1, 3.2, 3.5; DeepSeek-V3 with one group.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod load;
mod select;
#[cfg(test)]
mod tests;

pub use load::{Load, bias_update};

use crate::Docs;
use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Result, Tensor};
use std::ops::Range;

const OP: &str = "router";
/// Keeps a token whose scores all vanish from dividing by zero, as the public references do.
const TINY: f64 = 1e-20;

/// How tokens are routed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// Experts of a token.
    pub top_k: usize,
    /// ρ: what the gates of a token sum to.
    pub routed_scale: f64,
    /// α, the weight of the balance loss; 0 leaves it out.
    pub balance_loss: f64,
    /// Tokens, padding left out, of the whole global batch that the balance loss is a mean over.
    pub tokens: f64,
}

/// Where the tokens go; `T` is [`Tensor`], or [`Var`] on a tape.
#[derive(Debug, Clone)]
pub struct Routed<T> {
    /// [N, top_k]: the weight of each chosen expert.
    pub gates: T,
    /// `[1]`: the balance loss.
    pub balance: T,
    /// [N, top_k] i32: the chosen experts, by descending s + bias.
    pub chosen: Tensor,
    /// How many tokens went where, and what to watch.
    pub tally: Tally,
}

/// Tokens of each expert and [`Stats`] as the pass leaves them: on a GPU they stay there, and reading waits for it.
#[derive(Debug, Clone)]
pub struct Tally {
    /// The counts, then the largest logit, the sum of the largest p, and the tokens [E + 3], f64.
    figures: Tensor,
    /// Whether a checkpointed block ran for the second time.
    again: bool,
}

impl Tally {
    fn new(ctx: &Ctx, counts: &[u64], [max_logit, top, tokens]: [f64; 3]) -> Result<Self> {
        let figures: Vec<f64> = counts.iter().map(|&c| c as f64).chain([max_logit, top, tokens]).collect();
        Ok(Tally { figures: Tensor::from_slice(ctx, &[figures.len()], &figures)?, again: false })
    }

    /// Tokens of each expert, padding left out. Zeros when a checkpointed block ran for the second time, so that adding
    /// them up counts every token once.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn counts(&self) -> Result<Vec<u64>> {
        let figures = self.figures.to_vec::<f64>()?;
        let counts = &figures[..figures.len().saturating_sub(3)];
        Ok(counts.iter().map(|&c| if self.again { 0 } else { c as u64 }).collect())
    }

    /// What to watch.
    ///
    /// # Errors
    /// As [`Tally::counts`].
    pub fn stats(&self) -> Result<Stats> {
        match self.figures.to_vec::<f64>()?[..] {
            [.., max_logit, top, tokens] => Ok(Stats { max_logit, top_weight: top / tokens.max(1.) }),
            _ => Ok(Stats { max_logit: f64::NEG_INFINITY, top_weight: 0. }),
        }
    }
}

/// Figures over the tokens that are not padding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    /// The largest logit; -inf without tokens.
    pub max_logit: f64,
    /// Mean over the tokens of the largest p; 0 without tokens.
    pub top_weight: f64,
}

/// What the backward needs beside the weight.
#[derive(Debug, Clone)]
pub struct Saved {
    x: Tensor,
    /// [N, E]
    s: Tensor,
    /// [N, top_k]
    chosen: Tensor,
    balance: Option<Balance>,
    #[cfg(feature = "cuda")]
    gpu: Option<cuda::GpuSaved>,
}

/// The documents that are not padding, and the gradient of the balance loss by each expert's share in them.
#[derive(Debug, Clone)]
struct Balance {
    documents: Vec<Range<usize>>,
    /// [documents, E]
    c: Tensor,
}

impl Saved {
    fn bytes(&self) -> usize {
        let documents =
            self.balance.as_ref().map_or(0, |b| b.c.bytes() + b.documents.len() * size_of::<Range<usize>>());
        #[cfg(feature = "cuda")]
        let documents = documents + self.gpu.as_ref().map_or(0, cuda::GpuSaved::bytes);
        self.x.bytes() + self.s.bytes() + self.chosen.bytes() + documents
    }
}

/// The routing of x [N, D] by W_r [E, D] and bias `[E]`, and what the backward needs.
pub fn forward(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    bias: &Tensor,
    docs: &Docs,
    args: Args,
) -> Result<(Routed<Tensor>, Saved)> {
    let documents = check(x, w, bias, docs, args)?;
    #[cfg(feature = "cuda")]
    let mut gpu_saved = None;
    let (routed, s, c) = match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, x.dtype(), "router",
            fast: cpu::forward(ctx, x, w, bias, docs, &documents, args),
            oracle: cpu::oracle, (ctx, x, w, bias, docs, &documents, args)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let (routed, s, c, own) = cuda::forward(ctx, gpu, x, w, bias, docs, &documents, args)?;
            gpu_saved = Some(own);
            Ok((routed, s, c))
        }
    }?;
    let chosen = routed.chosen.clone();
    let saved = Saved {
        x: x.clone(),
        s,
        chosen,
        balance: c.map(|c| Balance { documents, c }),
        #[cfg(feature = "cuda")]
        gpu: gpu_saved,
    };
    Ok((routed, saved))
}

/// Checks the arguments; the documents that are not padding, as ranges of the batch's tokens.
fn check(x: &Tensor, w: &Tensor, bias: &Tensor, docs: &Docs, args: Args) -> Result<Vec<Range<usize>>> {
    let [experts, d] = w.dims2(OP, "w")?;
    if x.cols() != d || d == 0 {
        return Err(Error::Shape { op: OP, arg: "x", got: x.shape(), want: format!("[.., {d}]") });
    }
    if !crate::goes_with(w, x) {
        return Err(Error::DType { op: OP, arg: "w", got: w.dtype(), want: "the dtype of x" });
    }
    bias.expect(OP, "bias", &[experts])?;
    if bias.dtype() != DType::F32 {
        return Err(Error::DType { op: OP, arg: "bias", got: bias.dtype(), want: "f32" });
    }
    docs.expect(OP, "x", x.rows())?;
    if args.top_k == 0 || args.top_k > experts || experts > i32::MAX as usize {
        return Err(Error::value(OP, "top_k", args.top_k, format!("1 to the {experts} experts")));
    }
    for (arg, value) in [("routed_scale", args.routed_scale), ("balance_loss", args.balance_loss)] {
        if !value.is_finite() {
            return Err(Error::value(OP, arg, value, "a finite number"));
        }
    }
    let rows = (0..docs.batch()).flat_map(|b| docs.ranges(b).map(move |r| (b, r)));
    let real = rows.filter(|(b, r)| !docs.padding(*b, r.start));
    let documents: Vec<_> = real.map(|(b, r)| b * docs.len() + r.start..b * docs.len() + r.end).collect();
    let mean = args.tokens.is_finite() && args.tokens > 0.;
    if args.balance_loss != 0. && !documents.is_empty() && !mean {
        return Err(Error::value(OP, "tokens", args.tokens, "the number of tokens of the global batch"));
    }
    Ok(documents)
}

/// The choice from logits [N, E] (f32) and bias `[E]`, for decoding: chosen and gates [N, top_k], row by row as
/// [`forward`] does.
///
/// # Errors
/// As [`forward`].
pub fn choose(ctx: &Ctx, logits: &Tensor, bias: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let [_, experts] = logits.dims2(OP, "logits")?;
    bias.expect(OP, "bias", &[experts])?;
    if args.top_k == 0 || args.top_k > experts {
        return Err(Error::value(OP, "top_k", args.top_k, format!("1 to the {experts} experts")));
    }
    cpu::choose(ctx, logits, bias, args)
}

/// The gradients that reach the router from what it gave out; `None`: not used.
#[derive(Debug, Clone)]
pub struct Upstream {
    /// [N, top_k]
    pub d_gates: Option<Tensor>,
    /// `[1]`
    pub d_balance: Option<Tensor>,
}

/// d_x and d_W_r from the upstream gradients.
pub fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    upstream: &Upstream,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, saved.x.dtype(), "router",
            fast: cpu::backward(ctx, saved, w, upstream, args, d_x, d_w),
            oracle: cpu::oracle_backward, (ctx, saved, w, upstream, args, d_x, d_w)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, w, upstream, args, d_x, d_w),
    }
}

/// On the tape.
pub fn apply(tape: &mut Tape, x: &Var, w: &Var, bias: &Tensor, docs: &Docs, args: Args) -> Result<Routed<Var>> {
    let (mut out, saved) = forward(tape.ctx(), x.value(), w.value(), bias, docs, args)?;
    out.tally.again = tape.recomputing();
    let (w_value, bytes) = (w.value().clone(), saved.bytes());
    let outputs = [out.gates, out.balance];
    let [gates, balance] = tape.record(OP, [x, w], outputs, bytes, move |ctx, [d_gates, d_balance], [d_x, d_w]| {
        backward(ctx, &saved, &w_value, &Upstream { d_gates, d_balance }, args, d_x, d_w)
    });
    Ok(Routed { gates, balance, chosen: out.chosen, tally: out.tally })
}

/// Inputs whose choice no rounding and no step of central differences can flip: every token is drawn anew until the
/// scores that matter lie at least `MARGIN` apart.
pub(crate) struct Clear {
    pub(crate) x: Vec<f64>,
    pub(crate) w: Vec<f64>,
    pub(crate) bias: Vec<f32>,
}

/// A step of 1e-5 moves a score by at most about 1e-5 of the size of a weight.
const MARGIN: f64 = 2e-4;

impl Clear {
    pub(crate) fn new(n: usize, d: usize, experts: usize, top_k: usize) -> Self {
        let mut noise = Noise::new((n * 31 + d * 7 + experts * 3 + top_k) as u64);
        let w: Vec<f64> = noise.normals(experts * d).into_iter().map(|x| f64::from((0.7 * x) as f32)).collect();
        let bias: Vec<f32> = noise.normals(experts).into_iter().map(|x| (0.2 * x) as f32).collect();
        let mut x = Vec::new();
        while x.len() < n * d {
            let token: Vec<f64> = noise.normals(d).into_iter().map(|x| f64::from(x as f32)).collect();
            let score = |w: &[f64]| crate::act::sigmoid(w.iter().zip(&token).map(|(w, x)| w * x).sum::<f64>());
            let mut s: Vec<f64> = w.chunks(d).zip(&bias).map(|(w, &b)| score(w) + f64::from(b)).collect();
            s.sort_by(|a, b| b.total_cmp(a));
            if s.windows(2).take(top_k).all(|pair| pair[0] - pair[1] > MARGIN) {
                x.extend(token);
            }
        }
        Clear { x, w, bias }
    }
}

/// Documents of a batch of one row with padding in the middle and at the end (from five tokens on).
fn packed(n: usize) -> Docs {
    let seg: Vec<i32> = (0..n as i32)
        .map(|t| match t * 5 / n as i32 {
            0 => 0,
            1 => 1 + t,
            3 if n > 4 => -1,
            k if k == 4 && t as usize == n - 1 && n > 4 => -2,
            k => 5000 + k,
        })
        .collect();
    Docs::new(1, n, &seg).expect("invariant: one id a token")
}

fn case(n: usize, d: usize, experts: usize, top_k: usize) -> Case {
    let Clear { x, w, bias } = Clear::new(n, d, experts, top_k);
    let docs = packed(n);
    let args = Args { top_k, routed_scale: 1.412, balance_loss: 3., tokens: 1.5 * n as f64 };
    Case::new(format!("router {n} x {d}, {top_k} of {experts}"), &["gates", "balance"])
        .leaf("x", &[n, d], x)
        .param("w", &[experts, d], w)
        .bound("gates", 1.5e-7)
        .bound("balance", 3e-7)
        .bound("d_x", 5e-7)
        .bound("d_w", if n < 100 { 5e-7 } else { 2e-6 }) // a sum over the tokens, many of which cancel
        .apply(move |tape, v| {
            let bias = Tensor::from_slice(tape.ctx(), &[bias.len()], &bias)?;
            let out = apply(tape, &v[0], &v[1], &bias, &docs, args)?;
            Ok(vec![out.gates, out.balance])
        })
}

/// One expert of one, all of several, few of many; single tokens and rows across the blocks; packed documents.
pub fn cases() -> Vec<Case> {
    vec![case(1, 4, 6, 2), case(63, 5, 4, 4), case(64, 9, 3, 1), case(65, 7, 16, 2), case(1000, 4, 8, 2)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 192, 8, 2)).projection([2048, 192, 8], 1)]
}
