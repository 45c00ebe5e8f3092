//! The GPU's side: one kernel, which turns forwards and backwards.

use super::{Angles, Args, OP};
use crate::gpu::{ROTARY, Run, args, c_type};
use hymo_cuda::Gpu;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, GpuMat, Result, Tensor};

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, x: &Tensor, angles: &Angles, a: Args) -> Result<Tensor> {
    let mut y = ctx.empty_real(x.dtype(), x.dims())?;
    turn(ctx, gpu, &y.gpu_mut()?, false, &x.gpu()?, angles, a, 1.)?;
    Ok(y)
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    angles: &Angles,
    d_y: &Tensor,
    a: Args,
    d_x: &mut GradSlot<'_>,
) -> Result<()> {
    match d_x.gpu(ctx)? {
        Some((d_x, add)) => turn(ctx, gpu, &d_x, add, &d_y.gpu()?, angles, a, -1.),
        None => Ok(()),
    }
}

#[allow(clippy::too_many_arguments)] // one kernel's operands; a struct would only name them twice
fn turn(ctx: &Ctx, gpu: &Gpu, y: &GpuMat, add: bool, x: &GpuMat, angles: &Angles, a: Args, sign: f32) -> Result<()> {
    let (table, d_rope) = (angles.on_gpu(ctx, gpu)?, angles.rope().d_rope);
    let run = Run { gpu, source: &ROTARY, defines: &[("T", c_type(OP, x.dtype())?)] };
    let (rows, cols, at) = (x.rows(), x.cols(), table.gpu()?.at());
    let list = args![x.at(), x.stride(), at, y.at(), y.stride(), add, rows, cols, a.head_dim, d_rope, sign];
    run.each("rotary", rows * cols, list)
}
