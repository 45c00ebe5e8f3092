//! SwiGLU.  h = silu(a) ⊙ b, of ab = [a | b], the two halves of one projection.
//!
//! ab [.., 2F] (columns a = x W1ᵀ, then b = x W3ᵀ; rows may lie apart), h [.., F]. Elementwise in the operands' dtype.
//! Saves ab; the sigmoid is computed again in the backward: d_a = d_h ⊙ b ⊙ silu'(a), d_b = d_h ⊙ silu(a), following
//! the slot (write or add). Deterministic.
//! Source: MATH 4 (and 3.2, of which this is the case gate = 1).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

pub(crate) use cpu::{gated, gated_gradient};

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};

const OP: &str = "swiglu";

/// What the backward needs.
#[derive(Debug, Clone)]
pub struct Saved {
    ab: Tensor,
}

/// h [.., F] of ab [.., 2F], and what the backward needs.
pub fn forward(ctx: &Ctx, ab: &Tensor) -> Result<(Tensor, Saved)> {
    if ab.cols() % 2 != 0 {
        return Err(Error::Shape { op: OP, arg: "ab", got: ab.shape(), want: "an even last dimension".into() });
    }
    let h = match ctx.device() {
        Device::Cpu => on_cpu!(ctx, ab.dtype(), "swiglu", fast: cpu::forward(ctx, ab), oracle: cpu::oracle, (ctx, ab)),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, ab),
    }?;
    Ok((h, Saved { ab: ab.clone() }))
}

/// d_ab from d_h.
pub fn backward(ctx: &Ctx, saved: &Saved, d_h: &Tensor, d_ab: &mut GradSlot<'_>) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_h.dtype(), "swiglu",
            fast: cpu::backward(ctx, &saved.ab, d_h, d_ab),
            oracle: cpu::oracle_backward, (ctx, &saved.ab, d_h, d_ab)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, &saved.ab, d_h, d_ab),
    }
}

/// On the tape.
pub fn apply(tape: &mut Tape, ab: &Var) -> Result<Var> {
    let (h, saved) = forward(tape.ctx(), ab.value())?;
    let bytes = saved.ab.bytes();
    let [h] = tape.record(OP, [ab], [h], bytes, move |ctx, [d_h], [d_ab]| {
        let Some(d_h) = d_h else { return Ok(()) };
        backward(ctx, &saved, &d_h, d_ab)
    });
    Ok(h)
}

fn case(n: usize, f: usize) -> Case {
    let mut noise = Noise::new((n + f) as u64);
    Case::new(format!("swiglu {n} x {f}"), &["h"])
        .leaf("ab", &[n, 2 * f], noise.normals(n * 2 * f).into_iter().map(|x| 3. * x).collect())
        .bound("h", 1.2e-7)
        .bound("d_ab", 1.6e-7)
        .apply(|tape, v| Ok(vec![apply(tape, &v[0])?]))
}

/// Odd widths, and rows across the blocks.
pub fn cases() -> Vec<Case> {
    vec![case(1, 1), case(63, 65), case(65, 64), case(1000, 7)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 512))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear;

    #[test]
    fn an_odd_width_is_refused() {
        let ctx = Ctx::cpu();
        let err = forward(&ctx, &ctx.zeros::<f32>(&[2, 3]).unwrap()).unwrap_err().to_string();
        assert_eq!(err, "swiglu: ab has shape [2, 3], want an even last dimension");
        let err = forward(&ctx, &ctx.zeros::<i32>(&[2, 4]).unwrap()).unwrap_err().to_string();
        assert_eq!(err, "swiglu: input is i32, want f32 or f64");
    }

    /// Columns of a wider projection, so that rows lie apart both on the way in and among the gradients.
    #[test]
    fn columns_of_a_wider_projection() {
        let mut noise = Noise::new(3);
        Case::new("swiglu of a view", &["rest", "y"])
            .leaf("x", &[70, 5], noise.normals(350))
            .param("w", &[9, 5], noise.normals(45))
            .param("w2", &[4, 3], noise.normals(12))
            .apply(|tape, v| {
                let [rest, ab] = linear::apply_split(tape, &v[0], &v[1], [3, 6])?;
                let h = apply(tape, &ab)?;
                Ok(vec![rest, linear::apply(tape, &h, &v[2])?])
            })
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }

    /// Gates far out on either side: no overflow, no NaN.
    #[test]
    fn extreme_gates_are_finite() {
        let a = vec![-1e4, -90., -0., 0., 90., 1e4, 1., 1., 2., 3., 4., 5.];
        Case::new("swiglu at the extremes", &["h"])
            .leaf("ab", &[1, 12], a)
            .bound("h", 1.2e-7)
            .bound("d_ab", 1.6e-7)
            .apply(|tape, v| Ok(vec![apply(tape, &v[0])?]))
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }

    #[test]
    fn no_rows_give_no_rows() {
        let ctx = Ctx::cpu();
        let (h, _) = forward(&ctx, &ctx.zeros::<f32>(&[0, 4]).unwrap()).unwrap();
        assert_eq!(h.dims(), [0, 2]);
    }
}
