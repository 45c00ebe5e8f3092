//! The GPU's side: the sorted order is made on the device, and grouped products read it there. `chosen` must come from a
//! router: an expert out of range would be no row's. Beside bf16 activations the experts' matrices are rounded to bf16 here.

use super::{OP, Saved, Slots};
use crate::gpu::{EXPERTS, Run, args, c_type, expect_f32};
use crate::matmul::{Form, Groups};
use hymo_cuda::Gpu;
use hymo_tensor::{Ctx, GpuMat, Result, Tensor};

/// [`super::Layout`] on the device.
#[derive(Debug, Clone)]
pub(super) struct GpuLayout {
    /// `[N K]` i32.
    order: Tensor,
    /// `[N K]` i32.
    slot: Tensor,
    /// `[E + 1]` i32.
    offsets: Tensor,
    top_k: usize,
}

impl GpuLayout {
    pub fn bytes(&self) -> usize {
        self.order.bytes() + self.slot.bytes() + self.offsets.bytes()
    }

    fn new(ctx: &Ctx, run: &Run<'_>, chosen: &Tensor, experts: usize) -> Result<Self> {
        let pairs = chosen.numel();
        let mut own = [experts, experts + 1, pairs, pairs].map(|n| ctx.empty::<i32>(&[n]));
        let at = own.each_mut().map(|t| match t {
            Ok(t) => t.gpu_mut(),
            Err(e) => Err(e.clone()),
        });
        let [counts, offsets, order, slot] = at;
        let (counts, offsets, order, slot) = (counts?.at(), offsets?.at(), order?.at(), slot?.at());
        let ids = chosen.gpu()?.at();
        run.grid("experts_count", [experts, 1, 1], 512, 0, args![ids, counts, pairs])?;
        let list = args![ids, counts, offsets, order, slot, pairs, experts as i32];
        run.grid("experts_place", [experts, 1, 1], 512, 0, list)?;
        let [_, offsets, order, slot] = own;
        Ok(GpuLayout { order: order?, slot: slot?, offsets: offsets?, top_k: chosen.cols() })
    }

    fn groups(&self) -> Groups<'_> {
        Groups { offsets: &self.offsets, count: self.offsets.numel() - 1 }
    }

    fn rows(&self) -> usize {
        self.order.numel()
    }

    /// The tokens' rows of x in this order.
    fn gather(&self, ctx: &Ctx, run: &Run<'_>, x: &Tensor) -> Result<Tensor> {
        let mut out = ctx.empty_real(x.dtype(), &[self.rows(), x.cols()])?;
        let (from, n) = (x.gpu()?, self.rows() * x.cols());
        let (order, to) = (self.order.gpu()?.at(), out.gpu_mut()?.at());
        let list = args![from.at(), from.stride(), order, to, self.rows(), x.cols(), self.top_k as i32];
        run.each("experts_gather", n, list)?;
        Ok(out)
    }

    /// y_n (+)= Σ_j z_(row of (n, j)).
    fn combine(&self, run: &Run<'_>, y: &GpuMat, z: &GpuMat, add: bool) -> Result<()> {
        let (slot, rows, cols) = (self.slot.gpu()?.at(), y.rows(), y.cols());
        let list = args![z.at(), slot, y.at(), y.stride(), add, rows, cols, self.top_k as i32];
        run.each("experts_combine", rows * cols, list)
    }
}

/// A stack of matrices `[E, O, I]` as E O rows, of the activations' dtype.
fn stacked(ctx: &Ctx, w: &Tensor, x: &Tensor) -> Result<Tensor> {
    w.cast_on_gpu(ctx, x.dtype())
}

pub(super) fn forward(
    ctx: &Ctx,
    gpu: &Gpu,
    x: &Tensor,
    chosen: &Tensor,
    gates: &Tensor,
    w13: &Tensor,
    w2: &Tensor,
) -> Result<(Tensor, (GpuLayout, Tensor))> {
    // What the choices of a token are added up from is f32: one rounding less.
    let run = Run { gpu, source: &EXPERTS, defines: &[("T", c_type(OP, x.dtype())?), ("Z", "float")] };
    let gates = expect_f32(OP, "gates", gates)?;
    let layout = GpuLayout::new(ctx, &run, chosen, w13.dims()[0])?;
    let (rows, f) = (layout.rows(), w2.cols());
    let (w13, w2) = (stacked(ctx, w13, x)?, stacked(ctx, w2, x)?);
    let gathered = layout.gather(ctx, &run, x)?;
    let mut ab = ctx.empty_real(x.dtype(), &[rows, 2 * f])?;
    layout.groups().rows(gpu, Form::Nt, &ab.gpu_mut()?, &gathered.gpu()?, &w13.gpu()?)?;
    let mut h = ctx.empty_real(x.dtype(), &[rows, f])?;
    let order = layout.order.gpu()?.at();
    let list = args![ab.gpu()?.at(), gates.at(), order, h.gpu_mut()?.at(), rows, f];
    run.each("experts_gated", rows * f, list)?;
    let mut z = ctx.empty::<f32>(&[rows, x.cols()])?;
    layout.groups().rows(gpu, Form::Nt, &z.gpu_mut()?, &h.gpu()?, &w2.gpu()?)?;
    let mut y = ctx.empty_real(x.dtype(), x.dims())?;
    layout.combine(&run, &y.gpu_mut()?, &z.gpu()?, false)?;
    Ok((y, (layout, ab)))
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    w13: &Tensor,
    w2: &Tensor,
    d_y: &Tensor,
    slots: Slots<'_, '_>,
) -> Result<()> {
    let (layout, ab) =
        saved.gpu.as_ref().ok_or_else(|| crate::gpu::missing(OP, "backward of a forward on the processor"))?;
    let x = &saved.x;
    let own = c_type(OP, x.dtype())?;
    let run = Run { gpu, source: &EXPERTS, defines: &[("T", own), ("Z", own)] };
    let (rows, f, groups) = (layout.rows(), w2.cols(), layout.groups());
    let (w13, w2) = (stacked(ctx, w13, x)?, stacked(ctx, w2, x)?);
    let mut d_rows = layout.gather(ctx, &run, d_y)?; // d_z
    let mut d_h = ctx.empty_real(x.dtype(), &[rows, f])?;
    groups.rows(gpu, Form::Nn, &d_h.gpu_mut()?, &d_rows.gpu()?, &w2.gpu()?)?;
    let mut d_ab = ctx.empty_real(x.dtype(), &[rows, 2 * f])?;
    let mut d_gate = ctx.empty::<f32>(&[rows])?;
    let (order, gates) = (layout.order.gpu()?.at(), saved.gates.gpu()?.at());
    let (to_ab, to_gate) = (d_ab.gpu_mut()?.at(), d_gate.gpu_mut()?.at());
    let list = args![ab.gpu()?.at(), gates, order, d_h.gpu_mut()?.at(), to_ab, to_gate, rows, f];
    run.warps("experts_bwd", rows, list)?;
    if let Some((d_w2, add)) = slots.d_w2.gpu(ctx)? {
        groups.outer(gpu, &d_w2, &d_rows.gpu()?, &d_h.gpu()?, add)?; // d_h holds gate h by now
    }
    if let Some((to, add)) = slots.d_gates.gpu(ctx)? {
        let list = args![to_gate, layout.slot.gpu()?.at(), to.at(), to.stride(), add, rows, layout.top_k];
        run.each("experts_bwd_gates", rows, list)?;
    }
    if let Some((d_w13, add)) = slots.d_w13.gpu(ctx)? {
        let gathered = layout.gather(ctx, &run, x)?;
        groups.outer(gpu, &d_w13, &d_ab.gpu()?, &gathered.gpu()?, add)?;
    }
    if let Some((d_x, add)) = slots.d_x.gpu(ctx)? {
        groups.rows(gpu, Form::Nn, &d_rows.gpu_mut()?, &d_ab.gpu()?, &w13.gpu()?)?; // d_z is not needed any more
        layout.combine(&run, &d_x, &d_rows.gpu()?, add)?;
    }
    Ok(())
}
