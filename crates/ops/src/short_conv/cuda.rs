//! The GPU's side: launches of `short_conv.cu`.

use super::{OP, Saved};
use crate::gpu::{Run, SHARE, SHORT_CONV, args, c_type, expect_f32, sum_shares};
use hymo_cuda::{Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, DType, Error, GpuMat, Result, Tensor};

/// y, and the next piece's tail.
pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, saved: &Saved, w: &Tensor) -> Result<(Tensor, Tensor)> {
    let (taps, channels) = (w.cols(), w.rows());
    let (batch, len, rows) = (saved.docs.batch(), saved.docs.len(), saved.x.rows());
    let mut y = ctx.empty_real(saved.x.dtype(), saved.x.dims())?;
    let mut next = ctx.empty_real(saved.x.dtype(), &[batch, taps - 1, channels])?;
    let (x, w, docs) = (saved.x.gpu()?, expect_f32(OP, "w", w)?, saved.docs.on_gpu(ctx, gpu)?);
    let (tail, start, flags) = (tail(saved)?, docs.start.gpu()?.at(), docs.flags.gpu()?.at());
    let k = taps.to_string();
    let run = Run { gpu, source: &SHORT_CONV, defines: &[("T", c_type(OP, x.dtype())?), ("KC", &k)] };
    let to = y.gpu_mut()?.at();
    if runs(&[&x]) {
        let list = args![x.at(), x.stride(), w.at(), tail, start, flags, to, rows, len, channels, RUN];
        let grid = [(channels * x.dtype().size()).div_ceil(16 * 128), rows.div_ceil(RUN), 1];
        run.grid("short_conv_fwd_runs", grid, 128, 0, list)?;
    } else {
        let list = args![x.at(), x.stride(), w.at(), tail, start, flags, to, rows, len, channels];
        run.each("short_conv_fwd", rows * channels, list)?;
    }
    if len == 0 {
        next.clear()?;
    } else if taps > 1 {
        let list = args![x.at(), x.stride(), tail, start, flags, next.gpu_mut()?.at(), batch, len, channels];
        run.each("short_conv_tail", batch * (taps - 1) * channels, list)?;
    }
    Ok((y, next))
}

/// Tokens of a run in the forward pass.
const RUN: usize = 32;

/// Whether all rows begin at multiples of 16 bytes, and end at such.
fn runs(all: &[&GpuMat]) -> bool {
    let even = |m: &&GpuMat| {
        let size = m.dtype().size();
        m.at().alignment() >= 16 && m.stride() * size % 16 == 0 && m.cols() * size % 16 == 0
    };
    all.iter().all(even)
}

fn tail(saved: &Saved) -> Result<Ptr> {
    match &saved.tail {
        Some(t) if t.is_contiguous() || t.numel() == 0 => Ok(t.gpu()?.at()),
        Some(t) => Err(Error::NotContiguous { op: OP, shape: t.shape(), row_stride: t.row_stride() }),
        None => Ok(Ptr::NULL),
    }
}

// tidy: long, a kernel's launches in order
pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (taps, channels, rows, len) = (w.cols(), w.rows(), saved.x.rows(), saved.docs.len());
    let (x, w, dy, docs) = (saved.x.gpu()?, expect_f32(OP, "w", w)?, d_y.gpu()?, saved.docs.on_gpu(ctx, gpu)?);
    let (tail, start, flags) = (tail(saved)?, docs.start.gpu()?.at(), docs.flags.gpu()?.at());
    let k = taps.to_string();
    let run = Run { gpu, source: &SHORT_CONV, defines: &[("T", c_type(OP, x.dtype())?), ("KC", &k)] };
    let parts = rows.div_ceil(SHARE);
    let to_x = d_x.gpu(ctx)?;
    let mut shares = ctx.empty::<f32>(&[parts, channels * taps])?;
    if runs(&[&x, &dy]) && to_x.as_ref().is_none_or(|(m, _)| runs(&[m])) {
        let (at, stride, add) = to_x.map_or((Ptr::NULL, 0, false), |(m, add)| (m.at(), m.stride(), add));
        let list = args![
            x.at(),
            x.stride(),
            w.at(),
            tail,
            start,
            flags,
            dy.at(),
            dy.stride(),
            at,
            stride,
            add,
            shares.gpu_mut()?.at(),
            rows,
            len,
            channels,
            SHARE
        ];
        let grid = [(channels * x.dtype().size()).div_ceil(16 * 128), parts, 1];
        run.grid("short_conv_bwd_runs", grid, 128, 0, list)?;
        return sum_shares(ctx, gpu, d_w, &shares);
    }
    let mut dp = ctx.empty_real(DType::F32, &[rows, channels])?;
    let (to, share) = (dp.gpu_mut()?.at(), shares.gpu_mut()?.at());
    let list = args![
        x.at(),
        x.stride(),
        w.at(),
        tail,
        start,
        flags,
        dy.at(),
        dy.stride(),
        to,
        share,
        rows,
        len,
        channels,
        SHARE
    ];
    run.grid("short_conv_bwd_p", [parts, channels.div_ceil(128), 1], 128, 0, list)?;
    if let Some((dx, add)) = to_x {
        let list = args![to, w.at(), start, dx.at(), dx.stride(), add, rows, len, channels];
        run.each("short_conv_bwd_x", rows * channels, list)?;
    }
    sum_shares(ctx, gpu, d_w, &shares)
}
