//! The GPU's side: launches of `gated_norm.cu`.

use super::{Args, OP, Saved};
use crate::act::GateAct;
use crate::gpu::{GATED_NORM, Run, SHARE, args, c_type, expect_f32, sum_shares};
use hymo_cuda::{Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};

fn silu(a: Args) -> &'static str {
    if a.act == GateAct::Silu { "1" } else { "0" }
}

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, o: &Tensor, z: &Tensor, w: &Tensor, a: Args) -> Result<(Tensor, Tensor)> {
    let (rows, heads, v) = (o.rows(), o.cols() / a.d_v, a.d_v);
    let mut y = ctx.empty_real(o.dtype(), o.dims())?;
    let mut r = ctx.empty::<f32>(&[rows, heads])?;
    let (o, z, w) = (o.gpu()?, z.gpu()?, expect_f32(OP, "w", w)?);
    let run = Run { gpu, source: &GATED_NORM, defines: &[("T", c_type(OP, o.dtype())?), ("SILU", silu(a))] };
    let (to, scale) = (y.gpu_mut()?.at(), r.gpu_mut()?.at());
    let list = args![o.at(), o.stride(), z.at(), z.stride(), w.at(), to, scale, rows, heads, v, a.eps as f32];
    run.warps("gated_norm_fwd", rows * heads, list)?;
    Ok((y, r))
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    a: Args,
    [d_o, d_z, d_w]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (rows, heads, v) = (saved.o.rows(), saved.o.cols() / a.d_v, a.d_v);
    let (o, z, r, dy) = (saved.o.gpu()?, saved.z.gpu()?, saved.r.gpu()?, d_y.gpu()?);
    let w = expect_f32(OP, "w", w)?;
    let run = Run { gpu, source: &GATED_NORM, defines: &[("T", c_type(OP, o.dtype())?), ("SILU", silu(a))] };
    let place =
        |t: Option<(hymo_tensor::GpuMat, bool)>| t.map_or((Ptr::NULL, 0, false), |(m, add)| (m.at(), m.stride(), add));
    let (to, tz) = (place(d_o.gpu(ctx)?), place(d_z.gpu(ctx)?));
    let list = args![
        o.at(),
        o.stride(),
        z.at(),
        z.stride(),
        w.at(),
        r.at(),
        dy.at(),
        dy.stride(),
        to.0,
        to.1,
        to.2,
        tz.0,
        tz.1,
        tz.2,
        rows,
        heads,
        v
    ];
    run.warps("gated_norm_bwd", rows * heads, list)?;
    if d_w.wanted() {
        let parts = rows.div_ceil(SHARE);
        let mut shares = ctx.empty::<f32>(&[parts, v])?;
        let to = shares.gpu_mut()?.at();
        let list =
            args![o.at(), o.stride(), z.at(), z.stride(), r.at(), dy.at(), dy.stride(), to, rows, heads, v, SHARE];
        run.grid("gated_norm_bwd_w", [parts, v.div_ceil(128), 1], 128, 0, list)?;
        sum_shares(ctx, gpu, d_w, &shares)?;
    }
    Ok(())
}
