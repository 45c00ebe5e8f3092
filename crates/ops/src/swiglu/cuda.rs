//! The GPU's side: launches of `swiglu.cu`.

use super::OP;
use crate::gpu::{Run, SWIGLU, args, c_type};
use hymo_cuda::Gpu;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, ab: &Tensor) -> Result<Tensor> {
    let (rows, f) = (ab.rows(), ab.cols() / 2);
    let mut h = ctx.empty_real(ab.dtype(), ab.shape().with_cols(f).dims())?;
    let ab = ab.gpu()?;
    let run = Run { gpu, source: &SWIGLU, defines: &[("T", c_type(OP, ab.dtype())?)] };
    run.each("swiglu_fwd", rows * f, args![ab.at(), ab.stride(), h.gpu_mut()?.at(), rows, f])?;
    Ok(h)
}

pub(super) fn backward(ctx: &Ctx, gpu: &Gpu, ab: &Tensor, d_h: &Tensor, d_ab: &mut GradSlot<'_>) -> Result<()> {
    let Some((to, add)) = d_ab.gpu(ctx)? else { return Ok(()) };
    let (ab, dh, rows, f) = (ab.gpu()?, d_h.gpu()?, ab.rows(), ab.cols() / 2);
    let run = Run { gpu, source: &SWIGLU, defines: &[("T", c_type(OP, ab.dtype())?)] };
    let a = args![ab.at(), ab.stride(), dh.at(), dh.stride(), to.at(), to.stride(), add, rows, f];
    run.each("swiglu_bwd", rows * f, a)
}
