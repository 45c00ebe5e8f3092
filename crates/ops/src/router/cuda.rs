//! The GPU's side: launches of `router.cu`. Nothing waits for it.

use super::{Args, Balance, OP, Routed, Saved, Tally, Upstream};
use crate::Docs;
use crate::gpu::{ROUTER, Run, args, c_type, expect_f32};
use crate::matmul::{Form, matmul};
use hymo_cuda::{Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};
use std::ops::Range;

/// What only the GPU saves.
#[derive(Debug, Clone)]
pub(super) struct GpuSaved {
    /// 1 / Σ s of each token `[N]`.
    inverse: Tensor,
    /// Each token's row of the balance loss's c, -1 for padding `[N]`; with a balance loss.
    document: Option<Tensor>,
}

impl GpuSaved {
    pub fn bytes(&self) -> usize {
        self.inverse.bytes() + self.document.as_ref().map_or(0, Tensor::bytes)
    }
}

type Out = (Routed<Tensor>, Tensor, Option<Tensor>, GpuSaved);

#[allow(clippy::too_many_arguments)] // one operation's operands
pub(super) fn forward(
    ctx: &Ctx,
    gpu: &Gpu,
    x: &Tensor,
    w: &Tensor,
    bias: &Tensor,
    docs: &Docs,
    documents: &[Range<usize>],
    a: Args,
) -> Result<Out> {
    let (n, experts, k) = (x.rows(), w.rows(), a.top_k);
    let [mut s, mut gates, mut figures] = [[n, experts], [n, k], [n, 2]].map(|d| ctx.empty::<f32>(&d));
    let (mut inverse, mut chosen) = (ctx.empty::<f32>(&[n])?, ctx.empty::<i32>(&[n, k])?);
    let (xs, ws, flags) = (x.gpu()?, expect_f32(OP, "w", w)?, docs.on_gpu(ctx, gpu)?.flags);
    let run = Run { gpu, source: &ROUTER, defines: &[("T", c_type(OP, x.dtype())?)] };
    let at = |t: &mut Result<Tensor>| t.as_mut().map_err(|e| e.clone()).and_then(|t| Ok(t.gpu_mut()?.at()));
    let (to_s, to_gates, to_figures) = (at(&mut s)?, at(&mut gates)?, at(&mut figures)?);
    let (s, gates, figures) = (s?, gates?, figures?);
    let (to_inverse, to_chosen) = (inverse.gpu_mut()?.at(), chosen.gpu_mut()?.at());
    let (e, top) = (experts as i32, k as i32);
    let list = args![
        xs.at(),
        xs.stride(),
        ws.at(),
        ws.stride(),
        bias.gpu()?.at(),
        to_s,
        to_inverse,
        to_gates,
        to_chosen,
        to_figures,
        n,
        x.cols(),
        e,
        top,
        a.routed_scale as f32
    ];
    run.grid("router_fwd", [n.div_ceil(8), 1, 1], 256, 8 * 3 * experts * 4, list)?;
    let tally = tally(ctx, &run, [to_chosen, figures.gpu()?.at(), flags.gpu()?.at()], [n, experts, k])?;
    let (balance, c) = balance(ctx, &run, [to_s, to_inverse, to_chosen], experts, documents, a)?;
    let document = c.is_some().then(|| by_token(ctx, n, documents)).transpose()?;
    Ok((Routed { gates, balance, chosen, tally }, s, c, GpuSaved { inverse, document }))
}

fn tally(ctx: &Ctx, run: &Run<'_>, [chosen, figures, flags]: [Ptr; 3], [n, experts, k]: [usize; 3]) -> Result<Tally> {
    let mut out = ctx.empty::<f64>(&[experts + 3])?;
    let list = args![chosen, figures, flags, out.gpu_mut()?.at(), n, experts as i32, k as i32];
    run.grid("router_stats", [experts + 1, 1, 1], 512, 0, list)?;
    Ok(Tally { figures: out, again: false })
}

fn balance(
    ctx: &Ctx,
    run: &Run<'_>,
    [s, inverse, chosen]: [Ptr; 3],
    experts: usize,
    documents: &[Range<usize>],
    a: Args,
) -> Result<(Tensor, Option<Tensor>)> {
    if a.balance_loss == 0. || documents.is_empty() {
        return Ok((ctx.zeros::<f32>(&[1])?, None));
    }
    let n = documents.len();
    let ends: Vec<i32> = documents.iter().flat_map(|r| [r.start as i32, r.end as i32]).collect();
    let ends = Tensor::from_slice(ctx, &[n, 2], &ends)?;
    let (mut c, mut parts, mut loss) =
        (ctx.empty::<f32>(&[n, experts])?, ctx.empty::<f64>(&[n, experts])?, ctx.empty::<f32>(&[1])?);
    let (to, from, unit) = (c.gpu_mut()?.at(), parts.gpu_mut()?.at(), a.balance_loss / a.tokens);
    let list = args![s, inverse, chosen, ends.gpu()?.at(), to, from, experts as i32, a.top_k as i32, unit];
    run.grid("router_balance", [n, experts, 1], 128, 0, list)?;
    run.grid("router_loss", [1, 1, 1], 512, 0, args![from, loss.gpu_mut()?.at(), n * experts])?;
    Ok((loss, Some(c)))
}

fn by_token(ctx: &Ctx, n: usize, documents: &[Range<usize>]) -> Result<Tensor> {
    let mut of = vec![-1i32; n];
    for (i, range) in documents.iter().enumerate() {
        of[range.clone()].fill(i as i32);
    }
    Tensor::from_slice(ctx, &[n], &of)
}

#[allow(clippy::too_many_arguments)] // one operation's operands
pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    w: &Tensor,
    upstream: &Upstream,
    a: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let own = saved.gpu.as_ref().ok_or_else(|| crate::gpu::missing(OP, "backward of a forward on the processor"))?;
    let (n, experts) = (saved.s.rows(), saved.s.cols());
    let gates = match &upstream.d_gates {
        Some(t) => expect_f32(OP, "d_gates", t).map(|m| (m.at(), m.stride()))?,
        None => (Ptr::NULL, 0),
    };
    let balance = match (&saved.balance, &upstream.d_balance, &own.document) {
        (Some(Balance { c, .. }), Some(d), Some(of)) => [c.gpu()?.at(), of.gpu()?.at(), d.gpu()?.at()],
        _ => [Ptr::NULL; 3],
    };
    let mut d_l = ctx.empty::<f32>(&[n, experts])?;
    let (s, inverse, chosen) = (saved.s.gpu()?.at(), own.inverse.gpu()?.at(), saved.chosen.gpu()?.at());
    let [c, document, d] = balance;
    let to = d_l.gpu_mut()?.at();
    let scale = a.routed_scale as f32;
    let run = Run { gpu, source: &ROUTER, defines: &[("T", c_type(OP, saved.x.dtype())?)] };
    let list =
        args![s, inverse, chosen, gates.0, gates.1, c, document, d, to, n, experts as i32, a.top_k as i32, scale];
    run.each("router_bwd", n, list)?;
    let d_l = d_l.gpu()?;
    if let Some((d_x, add)) = d_x.gpu(ctx)? {
        matmul(ctx, gpu, Form::Nn, &d_x, &d_l, &w.gpu()?, add)?;
    }
    if let Some((d_w, add)) = d_w.gpu(ctx)? {
        matmul(ctx, gpu, Form::Tn, &d_w, &d_l, &saved.x.gpu()?, add)?;
    }
    Ok(())
}
