//! The GPU's side: launches of `rms_norm.cu`.

use super::{Args, OP, Saved};
use crate::gpu::{RMS_NORM, Run, SHARE, args, c_type, expect_f32, sum_shares};
use hymo_cuda::Gpu;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};

fn shift(args: Args) -> f32 {
    if args.zero_centred { 1. } else { 0. }
}

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, x: &Tensor, w: &Tensor, a: Args) -> Result<(Tensor, Tensor)> {
    let mut y = ctx.empty_real(x.dtype(), x.dims())?;
    let mut r = ctx.empty::<f32>(&[x.rows()])?;
    let (xs, w) = (x.gpu()?, expect_f32(OP, "w", w)?);
    let (rows, cols) = (x.rows(), x.cols());
    let run = Run { gpu, source: &RMS_NORM, defines: &[("T", c_type(OP, x.dtype())?)] };
    run.warps(
        "rms_norm_fwd",
        rows,
        args![xs.at(), xs.stride(), w.at(), y.gpu_mut()?.at(), r.gpu_mut()?.at(), rows, cols, a.eps as f32, shift(a)],
    )?;
    Ok((y, r))
}

#[allow(clippy::too_many_arguments)] // one operation's operands
pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    a: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (x, r, dy, w) = (saved.x.gpu()?, saved.r.gpu()?, d_y.gpu()?, expect_f32(OP, "w", w)?);
    let (rows, cols) = (x.rows(), x.cols());
    let run = Run { gpu, source: &RMS_NORM, defines: &[("T", c_type(OP, x.dtype())?)] };
    if let Some((dx, add)) = d_x.gpu(ctx)? {
        run.warps(
            "rms_norm_bwd_x",
            rows,
            args![
                x.at(),
                x.stride(),
                w.at(),
                r.at(),
                dy.at(),
                dy.stride(),
                dx.at(),
                dx.stride(),
                add,
                rows,
                cols,
                shift(a)
            ],
        )?;
    }
    if d_w.wanted() {
        let parts = rows.div_ceil(SHARE);
        let mut shares = ctx.empty::<f32>(&[parts, cols])?;
        let to = shares.gpu_mut()?.at();
        run.grid(
            "rms_norm_bwd_w",
            [parts, cols.div_ceil(128), 1],
            128,
            0,
            args![x.at(), x.stride(), r.at(), dy.at(), dy.stride(), to, rows, cols, SHARE],
        )?;
        sum_shares(ctx, gpu, d_w, &shares)?;
    }
    Ok(())
}
