//! Gated delta rule, per head:  H̄ = e^g H,  u = β (v - k H̄),  H ← H̄ + kᵀ u,  o = s q H,  q and k normalised.
//!
//! qkv [N, 2 H K + H V] (after the convolution; q | k | v, heads side by side in each), g and β [N, H], h0 and h_t
//! [B, H, K, V], o [N, H V]. Decay first, then read the error. The state is zero where a document begins; row b starts
//! from h0 when its first document is continued; h_t is the state after the row's last token. All f32 (the state too:
//! HAZARD 6), sums of decays in f64.
//! The fast path is the chunk form (WY): a fixed grid of chunks with document masks, so thousands of tiny documents cost
//! what one does; a GPU's chunks are of 64 tokens. The oracle is the recurrence above; [`step`] and [`decode`] are that recurrence for decoding.
//! Saves qkv, g and β as they are, and the state before each chunk ([B H T/C, K V], V K / C numbers a token: without it
//! the backward would walk the sequence forwards again, the only part that chunks cannot share). Norms, decays, products
//! of keys and the triangular solve are computed again. Gradients follow their slots (write or add). Deterministic.
//! Source: MATH 1.1, 1.3 to 1.6, 1.9.

mod backward;
mod chunk;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod decode;
mod forward;
mod solve;
#[cfg(test)]
mod tests;

use crate::Docs;
use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Mat, Path, Real, Result, Tensor};

const OP: &str = "delta_rule";

/// How many heads of which size, and how the sequence is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// H
    pub n_heads: usize,
    /// K
    pub d_k: usize,
    /// V
    pub d_v: usize,
    /// Tokens in a chunk; any number gives the same result up to rounding.
    pub chunk: usize,
    /// Whether q and k are divided by their lengths.
    pub qk_l2norm: bool,
}

/// What the operation is given.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// [N, 2 H K + H V]
    pub qkv: &'a Tensor,
    /// [N, H], the log decay.
    pub g: &'a Tensor,
    /// [N, H]
    pub beta: &'a Tensor,
    /// [B, H, K, V]; needed when any row is continued.
    pub h0: Option<&'a Tensor>,
    /// Whose tokens they are.
    pub docs: &'a Docs,
}

/// What the backward needs.
#[derive(Debug, Clone)]
pub struct Saved {
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    h0: Option<Tensor>,
    docs: Docs,
    states: Option<Tensor>,
}

impl Saved {
    fn inputs(&self) -> Inputs<'_> {
        Inputs { qkv: &self.qkv, g: &self.g, beta: &self.beta, h0: self.h0.as_ref(), docs: &self.docs }
    }

    fn bytes(&self) -> usize {
        let states = self.states.as_ref().map_or(0, Tensor::bytes);
        self.qkv.bytes() + self.g.bytes() + self.beta.bytes() + states
    }
}

/// Gradients of the outputs; `None` counts as zero.
#[derive(Debug, Clone, Copy)]
pub struct Upstream<'a> {
    /// [N, H V]
    pub d_o: Option<&'a Tensor>,
    /// [B, H, K, V]
    pub d_h_t: Option<&'a Tensor>,
}

impl Upstream<'_> {
    /// A buffer of its own that starts as d_h_t.
    fn d_state<T: Real>(self, ctx: &Ctx, d: Dims) -> Result<Tensor> {
        match self.d_h_t {
            Some(t) => t.copy(ctx),
            None => ctx.zeros::<T>(&[d.batch, d.heads, d.d_k, d.d_v]),
        }
    }
}

/// [`Args`] with the batch's sizes.
#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    len: usize,
    heads: usize,
    d_k: usize,
    d_v: usize,
    chunk: usize,
    l2norm: bool,
    scale: f64,
}

impl Dims {
    fn new(docs: &Docs, args: Args) -> Self {
        let Args { n_heads: heads, d_k, d_v, chunk, qk_l2norm: l2norm } = args;
        let scale = (d_k as f64).sqrt().recip();
        Dims {
            batch: docs.batch(),
            len: docs.len(),
            heads,
            d_k,
            d_v,
            chunk: chunk.min(docs.len()).max(1),
            l2norm,
            scale,
        }
    }

    /// First column of head `h`'s q, k, v.
    fn q_at(self, h: usize) -> usize {
        h * self.d_k
    }
    fn k_at(self, h: usize) -> usize {
        (self.heads + h) * self.d_k
    }
    fn v_at(self, h: usize) -> usize {
        2 * self.heads * self.d_k + h * self.d_v
    }

    /// Chunks of a row.
    fn chunks(self) -> usize {
        self.len.div_ceil(self.chunk)
    }
}

/// The inputs as matrices.
struct Views<'a, T> {
    qkv: Mat<'a, T>,
    g: Mat<'a, T>,
    beta: Mat<'a, T>,
    docs: &'a Docs,
    d: Dims,
}

impl<'a, T: Real> Views<'a, T> {
    fn new(inputs: Inputs<'a>, d: Dims) -> Result<Self> {
        let (qkv, g, beta) = (inputs.qkv.view()?, inputs.g.view()?, inputs.beta.view()?);
        Ok(Views { qkv, g, beta, docs: inputs.docs, d })
    }

    /// Row `i`'s q, k, v of head `h`.
    fn q(&self, i: usize, h: usize) -> &'a [T] {
        &self.qkv.row(i)[self.d.q_at(h)..][..self.d.d_k]
    }
    fn k(&self, i: usize, h: usize) -> &'a [T] {
        &self.qkv.row(i)[self.d.k_at(h)..][..self.d.d_k]
    }
    fn v(&self, i: usize, h: usize) -> &'a [T] {
        &self.qkv.row(i)[self.d.v_at(h)..][..self.d.d_v]
    }

    /// Whether the state is cleared before token `t` of row `b`.
    fn resets(&self, b: usize, t: usize) -> bool {
        self.docs.start(b, t) == t && !self.docs.carried(b, t)
    }
}

fn check(inputs: Inputs<'_>, args: Args) -> Result<Dims> {
    let Inputs { qkv, g, beta, h0, docs } = inputs;
    for (arg, n) in [("n_heads", args.n_heads), ("d_k", args.d_k), ("d_v", args.d_v), ("chunk", args.chunk)] {
        if n == 0 {
            return Err(Error::value(OP, arg, 0, "at least 1"));
        }
    }
    let (n, h) = (docs.tokens(), args.n_heads);
    qkv.expect(OP, "qkv", &[n, 2 * h * args.d_k + h * args.d_v])?;
    g.expect(OP, "g", &[n, h])?;
    beta.expect(OP, "beta", &[n, h])?;
    for (arg, t) in [("g", Some(g)), ("beta", Some(beta)), ("h0", h0)] {
        if let Some(t) = t.filter(|t| !crate::goes_with(t, qkv)) {
            return Err(Error::DType { op: OP, arg, got: t.dtype(), want: "the dtype of qkv, f32 beside bf16" });
        }
    }
    match h0 {
        Some(h0) => h0.expect(OP, "h0", &[docs.batch(), h, args.d_k, args.d_v])?,
        None => {
            if let Some(b) = (0..docs.batch()).find(|&b| docs.continued(b)) {
                return Err(Error::value(OP, "h0", "none", format!("the state that row {b} continues from")));
            }
        }
    }
    Ok(Dims::new(docs, args))
}

/// o, h_t and, with `keep`, what the backward needs beside the inputs.
pub fn forward(ctx: &Ctx, inputs: Inputs<'_>, args: Args, keep: bool) -> Result<(Tensor, Tensor, Saved)> {
    let d = check(inputs, args)?;
    let (o, h_t, states) = match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, inputs.qkv.dtype(), "delta_rule",
            fast: forward::forward::<f32>(ctx, inputs, d, keep), oracle: cpu::oracle, (ctx, inputs, d)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, inputs, d, keep),
    }?;
    let Inputs { qkv, g, beta, h0, docs } = inputs;
    let [qkv, g, beta] = [qkv, g, beta].map(Clone::clone);
    Ok((o, h_t, Saved { qkv, g, beta, h0: h0.cloned(), docs: docs.clone(), states }))
}

/// d_qkv, d_g, d_beta and d_h0.
pub fn backward(
    ctx: &Ctx,
    saved: &Saved,
    upstream: Upstream<'_>,
    args: Args,
    slots: &mut [GradSlot<'_>; 4],
) -> Result<()> {
    let d = Dims::new(&saved.docs, args);
    if ctx.path() == Path::Fast && saved.qkv.dtype() == DType::F32 && saved.states.is_none() {
        return Err(Error::value(OP, "saved", "no chunk states", "what a forward on the fast path with `keep` saves"));
    }
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, saved.qkv.dtype(), "delta_rule",
            fast: backward::backward::<f32>(ctx, saved, upstream, d, slots),
            oracle: cpu::oracle_backward, (ctx, saved, upstream, d, slots)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, upstream, d, slots),
    }
}

/// On the tape: o and h_t. `h0` may be left out when no row of `docs` is continued.
pub fn apply(
    tape: &mut Tape,
    qkv: &Var,
    g: &Var,
    beta: &Var,
    h0: Option<&Var>,
    docs: &Docs,
    args: Args,
) -> Result<[Var; 2]> {
    let inputs = Inputs { qkv: qkv.value(), g: g.value(), beta: beta.value(), h0: h0.map(Var::value), docs };
    let (o, h_t, saved) = forward(tape.ctx(), inputs, args, tape.recording())?;
    let none = Var::constant(h_t.clone());
    let bytes = saved.bytes();
    Ok(tape.record(OP, [qkv, g, beta, h0.unwrap_or(&none)], [o, h_t], bytes, move |ctx, [d_o, d_h_t], slots| {
        backward(ctx, &saved, Upstream { d_o: d_o.as_ref(), d_h_t: d_h_t.as_ref() }, args, slots)
    }))
}

/// One token of every row, for decoding: o [B, H V]; `state` [B, H, K, V] moves on in place. qkv, g and beta have one
/// row a sequence, of the same making as in [`forward`]; a new sequence starts from a state of zeros.
pub fn step(ctx: &Ctx, qkv: &Tensor, g: &Tensor, beta: &Tensor, state: &mut Tensor, args: Args) -> Result<Tensor> {
    let docs = Docs::whole(qkv.rows(), 1);
    let inputs = Inputs { qkv, g, beta, h0: None, docs: &docs };
    let d = check(Inputs { h0: Some(state), ..inputs }, args)?;
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, qkv.dtype(), "delta_rule",
            fast: cpu::step::<f32>(ctx, inputs, d, state), oracle: cpu::step, (ctx, inputs, d, state)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Err(crate::gpu::missing(OP, "step of decoding")),
    }
}

/// Noise of a case: log decays from none to nearly a reset, most of them slow; β over (0, 1).
fn gates(noise: &mut Noise, n: usize) -> [Vec<f64>; 2] {
    let g = (0..n).map(|_| -6. * noise.uniform().powi(4)).collect();
    let beta = (0..n).map(|_| crate::act::sigmoid(1.5 * noise.normal())).collect();
    [g, beta]
}

/// Documents of a case: `cuts` are their first tokens after the row's first; row 0 is continued when `carried`.
fn packed(batch: usize, len: usize, cuts: &[usize], carried: bool) -> Docs {
    let row = (0..len).map(|t| cuts.iter().filter(|&&c| c <= t).count() as i32);
    let seg: Vec<i32> = row.cycle().take(batch * len).collect();
    let continued: Vec<bool> = (0..batch).map(|b| carried && b == 0).collect();
    Docs::continuing(batch, len, &seg, &continued).expect("invariant: one id a token")
}

fn case(name: &str, [batch, len]: [usize; 2], args: Args, cuts: &[usize], carried: bool) -> Case {
    let (n, h) = (batch * len, args.n_heads);
    let mut noise = Noise::new((n + 31 * h + args.chunk) as u64);
    let [g, beta] = gates(&mut noise, n * h);
    let docs = packed(batch, len, cuts, carried);
    let width = 2 * h * args.d_k + h * args.d_v;
    let case = Case::new(format!("delta_rule {name}, {batch} x {len}, {args:?}"), &["o", "h_t"])
        .leaf("qkv", &[n, width], noise.normals(n * width))
        .leaf("g", &[n, h], g)
        .leaf("beta", &[n, h], beta);
    let state = [batch, h, args.d_k, args.d_v];
    let case = if carried { case.leaf("h0", &state, noise.normals(state.iter().product())) } else { case };
    let bounds = [("o", 3e-7), ("h_t", 3e-7), ("d_qkv", 3e-7), ("d_g", 5e-7), ("d_beta", 4e-7), ("d_h0", 3e-7)];
    let case = bounds.into_iter().fold(case, |case, (what, bound)| case.bound(what, bound)).difference(1e-7);
    case.apply(move |tape, v| Ok(apply(tape, &v[0], &v[1], &v[2], v.get(3), &docs, args)?.into()))
}

/// A single token, chunk tails, documents across and inside chunks, carried states, many chunks.
pub fn cases() -> Vec<Case> {
    let args = |n_heads, d_k, d_v, chunk| Args { n_heads, d_k, d_v, chunk, qk_l2norm: true };
    vec![
        case("one token", [2, 1], args(2, 4, 6, 64), &[], true),
        case("short of a chunk", [1, 63], args(2, 8, 12, 64), &[], false),
        case("one chunk", [2, 64], args(1, 8, 8, 64), &[], true),
        case("one more", [1, 65], args(2, 8, 12, 64), &[20, 21, 64], true),
        case("documents", [2, 130], args(2, 6, 10, 32), &[1, 31, 32, 40, 97, 129], true),
        case("many chunks", [1, 1200], args(2, 5, 7, 64), &[700], false),
    ]
}

/// Every length around one and two chunks, the presets' heads, gates at their extremes with keys that repeat, and thousands
/// of documents.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_cases() -> Vec<Case> {
    let args = |n_heads, d_k, d_v| Args { n_heads, d_k, d_v, chunk: 64, qk_l2norm: true };
    let mut out: Vec<Case> = (1..=130).map(|t| case("tail", [2, t], args(6, 8, 16), &[t / 2], true)).collect();
    out.push(case("long", [2, 1000], args(2, 64, 128), &[1, 300, 301, 640], true));
    out.push(case("nano", [2, 200], args(4, 32, 64), &[63], false));
    out.push(case("wide", [1, 130], args(1, 128, 64), &[64], true));
    // Hazard 8 of the list: documents of 1 to 3 tokens.
    let cuts: Vec<usize> = (0..5000).map(|i| 2 * i + usize::from(i % 3 == 0)).collect();
    out.push(case("5,000 documents", [1, 10_000], args(1, 16, 16), &cuts, false));
    for (name, g, beta) in [
        ("nothing forgotten", 0., 1.),
        ("all forgotten", -60., 1.),
        ("nothing written", -0.1, 0.),
        ("at once", -2000., 0.5),
    ] {
        out.push(extreme(name, args(2, 64, 128), g, beta));
    }
    out
}

/// Gates all alike, keys of which every third is the one before it.
#[cfg(feature = "cuda")]
fn extreme(name: &str, args: Args, g: f64, beta: f64) -> Case {
    let (len, h) = (200, args.n_heads);
    let docs = packed(1, len, &[150], false);
    let width = 2 * h * args.d_k + h * args.d_v;
    let mut qkv = Noise::new(9).normals(len * width);
    for i in (1..len).filter(|i| i % 3 == 0) {
        let keys = i * width + h * args.d_k..i * width + 2 * h * args.d_k;
        qkv.copy_within(keys.start - width..keys.end - width, keys.start);
    }
    Case::new(format!("delta_rule {name}"), &["o", "h_t"])
        .leaf("qkv", &[len, width], qkv)
        .leaf("g", &[len, h], vec![g; len * h])
        .leaf("beta", &[len, h], vec![beta; len * h])
        .half(1e-2, 2e-2)
        .apply(move |tape, v| Ok(apply(tape, &v[0], &v[1], &v[2], None, &docs, args)?.into()))
}

/// At hymo-nano's sizes, 4 x 512 tokens, and at hymo-30m's, 1 x 1024.
pub fn benches() -> Vec<Bench> {
    let bench = |batch, len, n_heads, [d_k, d_v]: [usize; 2]| {
        let (c, args) = (64, Args { n_heads, d_k, d_v, chunk: 64, qk_l2norm: true });
        // The products of one chunk (MATH 1.3): K Kᵀ and Q Kᵀ, the triangular solve, those with the state, the rest.
        let chunk = 2 * c * (2 * c * d_k + c * (d_k + d_v) + 3 * d_k * d_v + c * d_v);
        let flops = (batch * len / c * n_heads * chunk) as u64;
        Bench::new(case("training", [batch, len], args, &[], false)).flops(flops, 5 * flops / 2)
    };
    vec![bench(4, 512, 4, [32, 64]), bench(1, 1024, 6, [64, 128])]
}
