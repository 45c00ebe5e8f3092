//! Routed SwiGLU experts.
//!
//! y`[n]` = Σ_j gate[n, j] f_e(x`[n]`), e = chosen(n, j),  f_e(x) = W2_e (silu(W1_e x) ⊙ W3_e x).
//!
//! x, y [.., D] (N rows), chosen [N, K] i32, gates [N, K], w13 [E, 2F, D] (of each expert the rows of W1, then those of
//! W3), w2 [E, D, F]. Sums in the operands' dtype (f32 on the processor). No capacity, no token dropped; padding is
//! computed like any token. The fast path sorts the pairs (n, j) by expert ([`Layout`]), gathers the tokens' rows and
//! multiplies each expert's rows with its matrices ([`grouped`]); the gate is folded in before the down-projection, and
//! y gathers its K rows in the order of j. No atomics, no dependence on the number of threads: deterministic.
//!
//! Saves x, gates, the sorted order and ab = [a | b] [N K, 2F]; h is computed again. With d_z the gathered rows of d_y
//! and h = silu(a) ⊙ b: d_h = d_z W2_e, d_gate = <d_h, h>, d_a = gate d_h ⊙ b ⊙ silu'(a), d_b = gate d_h ⊙ silu(a),
//! d_W13_e += [d_a | d_b]ᵀ x, d_W2_e += d_zᵀ (gate h), d_x gathers the K rows of [d_a | d_b] W13_e; all follow their
//! slots (write or add). An expert without tokens gets exactly zero.
//! Source: MATH 3.2, 3.3.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod grouped;
mod layout;
#[cfg(test)]
mod tests;

pub use layout::Layout;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Result, Tensor};

const OP: &str = "experts";

/// What the backward needs beside the weights.
#[derive(Debug, Clone)]
pub struct Saved {
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    /// The layout and ab; the oracle's dense loop has neither.
    grouped: Option<(Layout, Tensor)>,
    #[cfg(feature = "cuda")]
    gpu: Option<(cuda::GpuLayout, Tensor)>,
}

impl Saved {
    fn bytes(&self) -> usize {
        let grouped = self.grouped.as_ref().map_or(0, |(layout, ab)| layout.bytes() + ab.bytes());
        #[cfg(feature = "cuda")]
        let grouped = grouped + self.gpu.as_ref().map_or(0, |(layout, ab)| layout.bytes() + ab.bytes());
        self.x.bytes() + self.chosen.bytes() + self.gates.bytes() + grouped
    }
}

/// y of x [.., D], the chosen experts and their gates [N, K], w13 [E, 2F, D] and w2 [E, D, F].
pub fn forward(
    ctx: &Ctx,
    x: &Tensor,
    chosen: &Tensor,
    gates: &Tensor,
    w13: &Tensor,
    w2: &Tensor,
) -> Result<(Tensor, Saved)> {
    check(x, chosen, gates, w13, w2)?;
    #[cfg(feature = "cuda")]
    let mut gpu_saved = None;
    let (y, grouped) = match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, x.dtype(), "experts",
            fast: cpu::forward(ctx, x, chosen, gates, w13, w2),
            oracle: cpu::oracle, (ctx, x, chosen, gates, w13, w2)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let (y, own) = cuda::forward(ctx, gpu, x, chosen, gates, w13, w2)?;
            gpu_saved = Some(own);
            Ok((y, None))
        }
    }?;
    let saved = Saved {
        x: x.clone(),
        chosen: chosen.clone(),
        gates: gates.clone(),
        grouped,
        #[cfg(feature = "cuda")]
        gpu: gpu_saved,
    };
    Ok((y, saved))
}

fn check(x: &Tensor, chosen: &Tensor, gates: &Tensor, w13: &Tensor, w2: &Tensor) -> Result<()> {
    let d = x.cols();
    let &[experts, rows, cols] = w13.dims() else {
        return Err(Error::Shape { op: OP, arg: "w13", got: w13.shape(), want: "[E, 2F, D]".into() });
    };
    if rows % 2 != 0 || rows == 0 || cols != d || d == 0 {
        return Err(Error::Shape { op: OP, arg: "w13", got: w13.shape(), want: format!("[E, 2F, {d}], none 0") });
    }
    w2.expect(OP, "w2", &[experts, d, rows / 2])?;
    let [n, k] = chosen.dims2(OP, "chosen")?;
    if n != x.rows() || k == 0 {
        return Err(Error::Shape { op: OP, arg: "chosen", got: chosen.shape(), want: format!("[{}, K]", x.rows()) });
    }
    if chosen.dtype() != DType::I32 {
        return Err(Error::DType { op: OP, arg: "chosen", got: chosen.dtype(), want: "i32" });
    }
    gates.expect(OP, "gates", &[n, k])?;
    for (arg, t) in [("gates", gates), ("w13", w13), ("w2", w2)] {
        if !crate::goes_with(t, x) {
            return Err(Error::DType { op: OP, arg, got: t.dtype(), want: "the dtype of x" });
        }
    }
    Ok(())
}

/// Where the gradients go.
#[derive(Debug)]
pub struct Slots<'a, 'b> {
    /// [.., D]
    pub d_x: &'a mut GradSlot<'b>,
    /// [N, K]
    pub d_gates: &'a mut GradSlot<'b>,
    /// [E, 2F, D]
    pub d_w13: &'a mut GradSlot<'b>,
    /// [E, D, F]
    pub d_w2: &'a mut GradSlot<'b>,
}

/// All gradients from d_y.
pub fn backward(ctx: &Ctx, saved: &Saved, w13: &Tensor, w2: &Tensor, d_y: &Tensor, slots: Slots<'_, '_>) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_y.dtype(), "experts",
            fast: cpu::backward(ctx, saved, w13, w2, d_y, slots),
            oracle: cpu::oracle_backward, (ctx, saved, w13, w2, d_y, slots)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, w13, w2, d_y, slots),
    }
}

/// On the tape. `chosen` comes from the router and has no gradient.
pub fn apply(tape: &mut Tape, x: &Var, chosen: &Tensor, gates: &Var, w13: &Var, w2: &Var) -> Result<Var> {
    let (y, saved) = forward(tape.ctx(), x.value(), chosen, gates.value(), w13.value(), w2.value())?;
    let (w13_value, w2_value, bytes) = (w13.value().clone(), w2.value().clone(), saved.bytes());
    let [y] = tape.record(OP, [x, gates, w13, w2], [y], bytes, move |ctx, [d_y], [d_x, d_gates, d_w13, d_w2]| {
        let Some(d_y) = d_y else { return Ok(()) };
        backward(ctx, &saved, &w13_value, &w2_value, &d_y, Slots { d_x, d_gates, d_w13, d_w2 })
    });
    Ok(y)
}

/// How a case spreads its tokens.
#[derive(Debug, Clone, Copy)]
enum Spread {
    /// Every choice is a different expert, drawn evenly.
    Even,
    /// Most go to the first expert, none to the last.
    Skewed,
    /// All to one expert, the others empty.
    One(usize),
}

impl Spread {
    /// Each token's experts, all different unless there is only one.
    fn chosen(self, noise: &mut Noise, n: usize, experts: usize, top_k: usize) -> Vec<i32> {
        let mut out = Vec::with_capacity(n * top_k);
        for _ in 0..n {
            let mut left: Vec<i32> = (0..experts as i32).collect();
            for _ in 0..top_k {
                let at = match self {
                    Spread::Even => noise.below(left.len()),
                    Spread::Skewed if noise.below(10) > 0 => 0,
                    Spread::Skewed => noise.below(left.len() - 1),
                    Spread::One(e) => e,
                };
                out.push(left.remove(at));
            }
        }
        out
    }
}

/// Sizes of a case: N, D, F, E, K.
type Sizes = [usize; 5];

fn case([n, d, f, experts, top_k]: Sizes, spread: Spread) -> Case {
    let mut noise = Noise::new((n * 97 + d * 13 + f * 5 + experts + top_k) as u64);
    let chosen = spread.chosen(&mut noise, n, experts, top_k);
    let scaled = |noise: &mut Noise, len, by: f64| noise.normals(len).into_iter().map(|x| by * x).collect::<Vec<_>>();
    Case::new(format!("experts {n} x {d}, {top_k} of {experts} x {f}, {spread:?}"), &["y"])
        .leaf("x", &[n, d], noise.normals(n * d))
        .leaf("gates", &[n, top_k], noise.normals(n * top_k))
        .param("w13", &[experts, 2 * f, d], scaled(&mut noise, experts * 2 * f * d, 0.7))
        .param("w2", &[experts, d, f], scaled(&mut noise, experts * d * f, 0.7))
        .bound("y", 2.5e-7)
        .bound("d_x", 3.5e-7)
        .bound("d_gates", 3.5e-7)
        .bound("d_w13", if n < 100 { 5e-7 } else { 7e-7 }) // sums over the tokens, as is d_w2
        .bound("d_w2", if n < 100 { 5e-7 } else { 7e-7 })
        .apply(move |tape, v| {
            let chosen = Tensor::from_slice(tape.ctx(), &[n, top_k], &chosen)?;
            Ok(vec![apply(tape, &v[0], &chosen, &v[1], &v[2], &v[3])?])
        })
}

/// One token, one expert of many, all of several, skewed loads, empty experts, rows across the blocks.
pub fn cases() -> Vec<Case> {
    vec![
        case([1, 5, 3, 4, 2], Spread::Even),
        case([63, 4, 5, 3, 3], Spread::Even),
        case([64, 3, 9, 5, 1], Spread::One(2)),
        case([65, 9, 4, 4, 2], Spread::Skewed),
        case([1000, 3, 2, 6, 2], Spread::Even),
    ]
}

/// At hymo-nano's sizes, 4 x 512 tokens, and at hymo-30m's, 1 x 1,024.
pub fn benches() -> Vec<Bench> {
    [[2048, 192, 128, 8, 2], [1024, 384, 864, 16, 2]]
        .map(|sizes @ [n, d, f, experts, top_k]| {
            let rows = n * top_k / experts;
            let bench = Bench::new(case(sizes, Spread::Even));
            bench.projection([rows, d, 2 * f], experts).projection([rows, f, d], experts)
        })
        .into()
}
