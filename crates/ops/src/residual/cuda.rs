//! The GPU's side: a launch of `residual.cu`.

use super::OP;
use crate::gpu::{RESIDUAL, Run, args, c_type};
use hymo_cuda::Gpu;
use hymo_tensor::{Ctx, Error, Result, Tensor};

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, x: &Tensor, branch: &Tensor) -> Result<Tensor> {
    if branch.dtype() != x.dtype() {
        return Err(Error::DType { op: OP, arg: "branch", got: branch.dtype(), want: "the dtype of x" });
    }
    let mut y = ctx.empty_real(x.dtype(), x.dims())?;
    let (a, b, (rows, cols)) = (x.gpu()?, branch.gpu()?, (x.rows(), x.cols()));
    let run = Run { gpu, source: &RESIDUAL, defines: &[("T", c_type(OP, x.dtype())?)] };
    let list = args![a.at(), a.stride(), b.at(), b.stride(), y.gpu_mut()?.at(), rows, cols];
    run.each("residual_fwd", rows * cols, list)?;
    Ok(y)
}
