//! RMSNorm.  n = x r,  r = (mean(x²) + ε)^(-1/2),  y = (1 + w) ⊙ n when zero-centred, else w ⊙ n.
//!
//! x, y `[.., D]`, w `[D]`, r `[N]`. Sums in the operands' dtype, at least f32. Saves x and r. With dn = d_y ⊙ (1 + w):
//! d_x = r (dn - n mean(dn ⊙ n)), following its slot (write or add); d_w += Σ d_y ⊙ n, rows in fixed blocks. Deterministic.
//! Source: MATH 4; zero-centred as in Qwen3-Next, so that weight decay pulls towards the identity.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};

const OP: &str = "rms_norm";

/// How the norm is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// Added to the mean square.
    pub eps: f64,
    /// Whether the gain is 1 + w.
    pub zero_centred: bool,
}

/// What the backward needs beside the weight.
#[derive(Debug, Clone)]
pub struct Saved {
    x: Tensor,
    /// `[N]`
    r: Tensor,
}

impl Saved {
    fn bytes(&self) -> usize {
        self.x.bytes() + self.r.bytes()
    }
}

/// y and what the backward needs, of x [.., D] and w `[D]`.
pub fn forward(ctx: &Ctx, x: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Saved)> {
    w.expect(OP, "w", &[x.cols()])?;
    if !crate::goes_with(w, x) {
        return Err(Error::DType { op: OP, arg: "w", got: w.dtype(), want: "the dtype of x" });
    }
    let (y, r) = match ctx.device() {
        Device::Cpu => {
            on_cpu!(ctx, x.dtype(), "rms_norm", fast: cpu::forward(ctx, x, w, args), oracle: cpu::oracle, (ctx, x, w, args))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, x, w, args),
    }?;
    Ok((y, Saved { x: x.clone(), r }))
}

/// d_x and d_w from d_y.
pub fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_y.dtype(), "rms_norm",
            fast: cpu::backward(ctx, saved, w, d_y, args, d_x, d_w),
            oracle: cpu::oracle_backward, (ctx, saved, w, d_y, args, d_x, d_w)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, w, d_y, args, d_x, d_w),
    }
}

/// On the tape.
pub fn apply(tape: &mut Tape, x: &Var, w: &Var, args: Args) -> Result<Var> {
    let (y, saved) = forward(tape.ctx(), x.value(), w.value(), args)?;
    let (w_value, bytes) = (w.value().clone(), saved.bytes());
    let [y] = tape.record(OP, [x, w], [y], bytes, move |ctx, [d_y], [d_x, d_w]| {
        let Some(d_y) = d_y else { return Ok(()) };
        backward(ctx, &saved, &w_value, &d_y, args, d_x, d_w)
    });
    Ok(y)
}

fn case(n: usize, d: usize, zero_centred: bool) -> Case {
    let mut noise = Noise::new((n + d) as u64);
    Case::new(format!("rms_norm {n} x {d}, zero-centred {zero_centred}"), &["y"])
        .leaf("x", &[n, d], noise.normals(n * d))
        .param("w", &[d], noise.normals(d))
        .apply(move |tape, v| Ok(vec![apply(tape, &v[0], &v[1], Args { eps: 1e-6, zero_centred })?]))
}

/// Odd widths, single rows and rows across the blocks, both gains.
pub fn cases() -> Vec<Case> {
    vec![case(2, 3, false), case(1, 64, true), case(63, 65, false), case(65, 100, true), case(1000, 24, true)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 192, true))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_of_another_width_is_refused() {
        let ctx = Ctx::cpu();
        let (x, w) = (ctx.zeros::<f32>(&[2, 3]).unwrap(), ctx.zeros::<f32>(&[4]).unwrap());
        let err = forward(&ctx, &x, &w, Args { eps: 1e-6, zero_centred: true }).unwrap_err();
        assert_eq!(err.to_string(), "rms_norm: w has shape [4], want [3]");
    }

    /// A row of zeros stays zero and its gradient is finite: epsilon is inside the root.
    #[test]
    fn a_zero_row_is_finite() {
        Case::new("rms_norm of zeros", &["y"])
            .leaf("x", &[2, 4], vec![0., 0., 0., 0., 1., 2., 3., 4.])
            .param("w", &[4], vec![0.5; 4])
            .difference(1e-3) // the differences' step is not small beside sqrt(eps)
            .apply(|tape, v| Ok(vec![apply(tape, &v[0], &v[1], Args { eps: 1e-6, zero_centred: true })?]))
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }
}
