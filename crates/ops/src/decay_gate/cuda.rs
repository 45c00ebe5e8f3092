//! The GPU's side: launches of `decay_gate.cu`. g and β are f32 whatever the activations are.

use super::{Args, Inputs, OP, Upstream};
use crate::gpu::{DECAY_GATE, Run, SHARE, args, c_type, expect_f32, sum_shares};
use hymo_cuda::{Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};

fn scale(a: Args) -> f32 {
    if a.allow_neg_eigval { 2. } else { 1. }
}

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, inputs: Inputs<'_>, a: Args) -> Result<[Tensor; 2]> {
    let (rows, heads) = (inputs.ab.rows(), inputs.a_log.numel());
    let (mut g, mut beta) = (ctx.empty::<f32>(&[rows, heads])?, ctx.empty::<f32>(&[rows, heads])?);
    let ab = inputs.ab.gpu()?;
    let (a_log, dt) = (expect_f32(OP, "a_log", inputs.a_log)?, expect_f32(OP, "dt_bias", inputs.dt_bias)?);
    let run = Run { gpu, source: &DECAY_GATE, defines: &[("T", c_type(OP, ab.dtype())?)] };
    let (to_g, to_beta) = (g.gpu_mut()?.at(), beta.gpu_mut()?.at());
    let list = args![ab.at(), ab.stride(), a_log.at(), dt.at(), to_g, to_beta, rows, heads, scale(a)];
    run.each("decay_gate_fwd", rows * heads, list)?;
    Ok([g, beta])
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    inputs: Inputs<'_>,
    upstream: Upstream<'_>,
    a: Args,
    [d_ab, d_a_log, d_dt]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (rows, heads) = (inputs.ab.rows(), inputs.a_log.numel());
    let ab = inputs.ab.gpu()?;
    let (a_log, dt) = (expect_f32(OP, "a_log", inputs.a_log)?, expect_f32(OP, "dt_bias", inputs.dt_bias)?);
    let run = Run { gpu, source: &DECAY_GATE, defines: &[("T", c_type(OP, ab.dtype())?)] };
    let place = |arg, t: Option<&Tensor>| match t {
        Some(t) => expect_f32(OP, arg, t).map(|m| (m.at(), m.stride())),
        None => Ok((Ptr::NULL, 0)),
    };
    let (dg, db) = (place("d_g", upstream.d_g)?, place("d_beta", upstream.d_beta)?);
    if let Some((to, add)) = d_ab.gpu(ctx)? {
        let list = args![
            ab.at(),
            ab.stride(),
            a_log.at(),
            dt.at(),
            dg.0,
            dg.1,
            db.0,
            db.1,
            to.at(),
            to.stride(),
            add,
            rows,
            heads,
            scale(a)
        ];
        run.each("decay_gate_bwd", rows * heads, list)?;
    }
    // Without a gradient of g, what the parameters get is zero.
    let parts = if upstream.d_g.is_some() { rows.div_ceil(SHARE) } else { 0 };
    let (mut of_log, mut of_dt) = (ctx.empty::<f32>(&[parts, heads])?, ctx.empty::<f32>(&[parts, heads])?);
    let (to_log, to_dt) = (of_log.gpu_mut()?.at(), of_dt.gpu_mut()?.at());
    let list = args![ab.at(), ab.stride(), a_log.at(), dt.at(), dg.0, dg.1, to_log, to_dt, rows, heads, SHARE];
    run.grid("decay_gate_bwd_w", [parts, heads, 1], 32, 0, list)?;
    sum_shares(ctx, gpu, d_a_log, &of_log)?;
    sum_shares(ctx, gpu, d_dt, &of_dt)
}
