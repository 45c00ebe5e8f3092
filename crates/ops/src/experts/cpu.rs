//! The oracle, a dense loop over tokens and choices; then the fast path.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Layout, Saved, Slots, grouped};
use crate::act::{silu, silu_grad};
use crate::swiglu::{gated, gated_gradient};
use hymo_tensor::{Ctx, Mat, Real, Result, Tensor, each};

/// y, and what only the fast path saves.
type Out = (Tensor, Option<(Layout, Tensor)>);

/// a or b: row `at` of w13 times x.
fn project<T: Real>(w13: &Mat<'_, T>, at: usize, x: &[T]) -> T {
    w13.row(at).iter().zip(x).map(|(&w, &x)| w * x).sum()
}

pub(super) fn oracle<T: Real>(
    ctx: &Ctx,
    x: &Tensor,
    chosen: &Tensor,
    gates: &Tensor,
    w13: &Tensor,
    w2: &Tensor,
) -> Result<Out> {
    let experts = w13.dims()[0];
    Layout::new(ctx, chosen, experts)?; // refuses what is out of range, as the fast path does
    let (d, f) = (x.cols(), w2.cols());
    let mut y = ctx.zeros::<T>(x.dims())?;
    let mut ys = y.view_mut::<T>()?;
    let (x, gates, w13, w2) = (x.view::<T>()?, gates.view::<T>()?, w13.view::<T>()?, w2.view::<T>()?);
    let chosen = chosen.view::<i32>()?;
    for n in 0..x.rows() {
        for (j, &e) in chosen.row(n).iter().enumerate() {
            let e = e as usize;
            for l in 0..f {
                let (a, b) = (project(&w13, e * 2 * f + l, x.row(n)), project(&w13, e * 2 * f + f + l, x.row(n)));
                let h = gates.row(n)[j] * silu(a) * b;
                for i in 0..d {
                    ys.row_mut(n)[i] += w2.row(e * d + i)[l] * h;
                }
            }
        }
    }
    Ok((y, None))
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w13: &Tensor,
    w2: &Tensor,
    d_y: &Tensor,
    slots: Slots<'_, '_>,
) -> Result<()> {
    let (d, f, k) = (saved.x.cols(), w2.cols(), saved.gates.cols());
    let mut d_x = ctx.zeros::<T>(saved.x.dims())?;
    let mut d_gates = ctx.zeros::<T>(saved.gates.dims())?;
    let (mut d_w13, mut d_w2) = (ctx.zeros::<T>(w13.dims())?, ctx.zeros::<T>(w2.dims())?);
    {
        let (x, gates, chosen) = (saved.x.view::<T>()?, saved.gates.view::<T>()?, saved.chosen.view::<i32>()?);
        let (w13, w2, dy) = (w13.view::<T>()?, w2.view::<T>()?, d_y.view::<T>()?);
        let (mut dx, mut dg) = (d_x.view_mut::<T>()?, d_gates.view_mut::<T>()?);
        let (mut dw13, mut dw2) = (d_w13.view_mut::<T>()?, d_w2.view_mut::<T>()?);
        for n in 0..x.rows() {
            for j in 0..k {
                let (e, gate) = (chosen.row(n)[j] as usize, gates.row(n)[j]);
                for l in 0..f {
                    let (at_a, at_b) = (e * 2 * f + l, e * 2 * f + f + l);
                    let (a, b) = (project(&w13, at_a, x.row(n)), project(&w13, at_b, x.row(n)));
                    let dh = (0..d).map(|i| dy.row(n)[i] * w2.row(e * d + i)[l]).sum::<T>();
                    dg.row_mut(n)[j] += dh * silu(a) * b;
                    let (da, db) = (gate * dh * b * silu_grad(a), gate * dh * silu(a));
                    for i in 0..d {
                        dw2.row_mut(e * d + i)[l] += dy.row(n)[i] * gate * silu(a) * b;
                        dw13.row_mut(at_a)[i] += da * x.row(n)[i];
                        dw13.row_mut(at_b)[i] += db * x.row(n)[i];
                        dx.row_mut(n)[i] += da * w13.row(at_a)[i] + db * w13.row(at_b)[i];
                    }
                }
            }
        }
    }
    slots.d_x.give(ctx, d_x)?;
    slots.d_gates.give(ctx, d_gates)?;
    slots.d_w13.give(ctx, d_w13)?;
    slots.d_w2.give(ctx, d_w2)
}

/// Rows in a block of elementwise work.
const ROWS: usize = 32;

/// The sorted order and ab [N K, 2F].
fn up(ctx: &Ctx, x: &Tensor, chosen: &Tensor, w13: &Tensor) -> Result<(Layout, Tensor)> {
    let layout = Layout::new(ctx, chosen, w13.dims()[0])?;
    let rows = layout.gather(ctx, x)?;
    let mut ab = ctx.empty::<f32>(&[layout.rows(), w13.dims()[1]])?;
    grouped::nt(ab.view_mut::<f32>()?, rows.view::<f32>()?, w13.view::<f32>()?, layout.offsets());
    Ok((layout, ab))
}

pub(super) fn forward(
    ctx: &Ctx,
    x: &Tensor,
    chosen: &Tensor,
    gates: &Tensor,
    w13: &Tensor,
    w2: &Tensor,
) -> Result<Out> {
    let (layout, ab) = up(ctx, x, chosen, w13)?;
    let mut h = ctx.empty::<f32>(&[layout.rows(), w2.cols()])?;
    {
        let (ab, gates, pair) = (ab.view::<f32>()?, gates.view::<f32>()?, layout.pairs()?);
        each!(h.view_mut::<f32>()?.row_blocks(ROWS), |block, mut h| {
            for i in 0..h.rows() {
                let row = block * ROWS + i;
                let (n, j) = pair(row);
                gated(h.row_mut(i), ab.row(row), gates.row(n)[j]);
            }
        });
    }
    let mut z = ctx.empty::<f32>(&[layout.rows(), x.cols()])?;
    grouped::nt(z.view_mut::<f32>()?, h.view::<f32>()?, w2.view::<f32>()?, layout.offsets());
    let mut y = ctx.empty::<f32>(x.dims())?;
    layout.combine(y.view_mut::<f32>()?, &z, false)?;
    Ok((y, Some((layout, ab))))
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w13: &Tensor,
    w2: &Tensor,
    d_y: &Tensor,
    slots: Slots<'_, '_>,
) -> Result<()> {
    let (layout, ab) = match &saved.grouped {
        Some(grouped) => grouped.clone(),
        None => up(ctx, &saved.x, &saved.chosen, w13)?,
    };
    let offsets = layout.offsets();
    let mut d_rows = layout.gather(ctx, d_y)?; // d_z
    let mut d_h = ctx.empty::<f32>(&[layout.rows(), w2.cols()])?;
    grouped::nn(d_h.view_mut::<f32>()?, d_rows.view::<f32>()?, w2.view::<f32>()?, offsets);
    let (d_ab, d_gate) = activation(ctx, &layout, &ab, &saved.gates, &mut d_h)?;
    let h = d_h; // what `activation` has left there
    if let Some((d_w2, add)) = slots.d_w2.target::<f32>(ctx)? {
        grouped::tn(d_w2, d_rows.view::<f32>()?, h.view::<f32>()?, offsets, add);
    }
    if let Some((mut d_gates, add)) = slots.d_gates.target::<f32>(ctx)? {
        let (d_gate, slot) = (d_gate.flat::<f32>()?, layout.slot().flat::<i32>()?);
        for n in 0..d_gates.rows() {
            let slots = &slot[n * d_gates.cols()..];
            for (d, &row) in d_gates.row_mut(n).iter_mut().zip(slots) {
                *d = d_gate[row as usize] + if add { *d } else { 0. };
            }
        }
    }
    let d_ab = d_ab.view::<f32>()?;
    if let Some((d_w13, add)) = slots.d_w13.target::<f32>(ctx)? {
        let rows = layout.gather(ctx, &saved.x)?;
        grouped::tn(d_w13, d_ab, rows.view::<f32>()?, offsets, add);
    }
    if let Some((d_x, add)) = slots.d_x.target::<f32>(ctx)? {
        grouped::nn(d_rows.view_mut::<f32>()?, d_ab, w13.view::<f32>()?, offsets); // d_z is not needed any more
        layout.combine(d_x, &d_rows, add)?;
    }
    Ok(())
}

/// d_ab [N K, 2F] and the gradient of each row's gate; d_h is replaced by gate h.
fn activation(ctx: &Ctx, layout: &Layout, ab: &Tensor, gates: &Tensor, d_h: &mut Tensor) -> Result<(Tensor, Tensor)> {
    let mut d_ab = ctx.empty::<f32>(ab.dims())?;
    let mut d_gate = ctx.empty::<f32>(&[layout.rows()])?;
    let (ab, gates, pair) = (ab.view::<f32>()?, gates.view::<f32>()?, layout.pairs()?);
    let d_hs = d_h.view_mut::<f32>()?.row_blocks(ROWS).into_iter();
    let d_abs = d_ab.view_mut::<f32>()?.row_blocks(ROWS).into_iter();
    let tasks: Vec<_> = d_hs.zip(d_abs).zip(d_gate.flat_mut::<f32>()?.chunks_mut(ROWS)).collect();
    each!(tasks, |block, ((mut d_h, mut d_ab), d_gate)| {
        for (i, d_gate) in d_gate.iter_mut().enumerate() {
            let row = block * ROWS + i;
            let (n, j) = pair(row);
            *d_gate = gated_gradient(d_ab.row_mut(i), d_h.row_mut(i), ab.row(row), gates.row(n)[j]);
        }
    });
    Ok((d_ab, d_gate))
}
