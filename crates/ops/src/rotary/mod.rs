//! Rotary position embedding.  (u, w) -> (u cos φ - w sin φ, w cos φ + u sin φ),  φ = pos f_i,  f_i = θ^(-2i/R).
//!
//! x, y [N, H D]: H heads of D columns, of which the last R = d_rope turn, as interleaved pairs (2i, 2i + 1); the others
//! are copied. f32 or f64. Angles and their sines are taken in f64 and then rounded. Keys of several groups are heads of
//! R = D columns. Saves the angles, which all layers share; d_x is d_y turned by -φ, following its slot. Deterministic.
//! Source: MATH 2.1, YaRN (longer contexts than were trained) MATH 2.6.

mod angles;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

pub use angles::{Angles, Rope, Yarn, yarn_scale};

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};
use std::sync::Arc;

const OP: &str = "rotary";

/// How the heads lie in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Args {
    /// H
    pub n_heads: usize,
    /// Columns of a head, rotary ones last.
    pub head_dim: usize,
}

/// y of x [N, H D], token n turned by the angles of its position.
pub fn forward(ctx: &Ctx, x: &Tensor, angles: &Angles, args: Args) -> Result<Tensor> {
    let [rows, cols] = x.dims2(OP, "x")?;
    if args.n_heads.checked_mul(args.head_dim) != Some(cols) || rows != angles.tokens() {
        let want = format!("[{}, {} x {}]", angles.tokens(), args.n_heads, args.head_dim);
        return Err(Error::Shape { op: OP, arg: "x", got: x.shape(), want });
    }
    if angles.rope().d_rope > args.head_dim {
        let want = format!("at most head_dim, {}", args.head_dim);
        return Err(Error::value(OP, "d_rope", angles.rope().d_rope, want));
    }
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, x.dtype(), "rotary",
            fast: cpu::forward(ctx, x, angles, args), oracle: cpu::oracle, (ctx, x, angles, args)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, x, angles, args),
    }
}

/// d_x from d_y.
pub fn backward(ctx: &Ctx, angles: &Angles, d_y: &Tensor, args: Args, d_x: &mut GradSlot<'_>) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_y.dtype(), "rotary",
            fast: cpu::backward(ctx, angles, d_y, args, d_x),
            oracle: cpu::oracle_backward, (ctx, angles, d_y, args, d_x)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, angles, d_y, args, d_x),
    }
}

/// On the tape. The angles are made once for a batch and shared by queries, keys and layers.
pub fn apply(tape: &mut Tape, x: &Var, angles: &Arc<Angles>, args: Args) -> Result<Var> {
    let y = forward(tape.ctx(), x.value(), angles, args)?;
    let angles = Arc::clone(angles);
    let [y] = tape.record(OP, [x], [y], 0, move |ctx, [d_y], [d_x]| {
        let Some(d_y) = d_y else { return Ok(()) };
        backward(ctx, &angles, &d_y, args, d_x)
    });
    Ok(y)
}

fn case(n: usize, (h, d, r): (usize, usize, usize), positions: Vec<i32>, yarn: Option<Yarn>) -> Case {
    let args = Args { n_heads: h, head_dim: d };
    let angles = Angles::new(&positions, Rope { d_rope: r, theta: 1e4, yarn }).map(Arc::new);
    Case::new(format!("rotary {n} x {h} x {d}, {r} turn, {}", yarn.map_or("plain", |_| "YaRN")), &["y"])
        .leaf("x", &[n, h * d], Noise::new((n + d) as u64).normals(n * h * d))
        .bound("y", 8e-8)
        .bound("d_x", 8e-8)
        .difference(1e-8)
        .apply(move |tape, v| Ok(vec![apply(tape, &v[0], angles.as_ref().map_err(Clone::clone)?, args)?]))
}

/// Part and all of a head, documents, positions far apart, YaRN.
pub fn cases() -> Vec<Case> {
    let documents = |n: i32| (0..n).map(|t| t % 50).collect::<Vec<_>>();
    let yarn = Some(Yarn { factor: 8., original_context: 4096 });
    vec![
        case(1, (2, 6, 4), vec![3], None),
        case(63, (3, 32, 8), documents(63), None),
        case(65, (2, 8, 8), (0..65).map(|t| t * 500).collect(), yarn),
        case(1000, (1, 6, 2), documents(1000), None),
    ]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, (6, 32, 8), (0..2048).map(|t| t % 512).collect(), None))]
}

#[cfg(test)]
mod tests;
