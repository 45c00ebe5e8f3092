//! The oracle, a dense loop over tokens and choices; then the fast path.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::grouped::{self, Tn};
use super::{Layout, Saved, Slots};
use crate::act::{silu, silu_grad};
use crate::gemm::local;
use crate::swiglu::{gated, gated_gradient};
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

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

/// Most rows of a task: enough to outweigh packing an expert's matrices for it, few enough that what passes from product to
/// product stays in a core's cache.
const ROWS: usize = 256;

/// The rows of expert `e` from `first` on, and a task's own blocks of tensors whose rows lie in that order.
struct Task<B> {
    e: usize,
    first: usize,
    blocks: B,
}

/// At most [`ROWS`] rows of one expert each; what a block is of follows from `split`.
fn tasks<B>(layout: &Layout, mut split: impl FnMut(usize) -> B) -> Vec<Task<B>> {
    let mut out = Vec::new();
    for (e, pair) in layout.offsets().windows(2).enumerate() {
        for first in (pair[0]..pair[1]).step_by(ROWS) {
            out.push(Task { e, first, blocks: split(ROWS.min(pair[1] - first)) });
        }
    }
    out
}

/// The next `n` rows of `rest`.
fn next<'a>(rest: &mut MatMut<'a, f32>, n: usize) -> MatMut<'a, f32> {
    let whole = std::mem::replace(rest, MatMut::new(&mut [], 0, 0, 0));
    let mine;
    (mine, *rest) = whole.split_rows(n);
    mine
}

/// The tokens' rows of x that belong to the rows from `first` on.
#[inline(always)]
fn gather(to: &mut MatMut<'_, f32>, x: Mat<'_, f32>, first: usize, pair: &impl Fn(usize) -> (usize, usize)) {
    for i in 0..to.rows() {
        to.row_mut(i).copy_from_slice(x.row(pair(first + i).0));
    }
}

/// One task is all of an expert's work on a block of rows: its gathered rows, what the first product makes of them and what
/// the second reads are still in the core's cache when they are used.
pub(super) fn forward(
    ctx: &Ctx,
    x: &Tensor,
    chosen: &Tensor,
    gates: &Tensor,
    w13: &Tensor,
    w2: &Tensor,
) -> Result<Out> {
    let layout = Layout::new(ctx, chosen, w13.dims()[0])?;
    let (d, f) = (x.cols(), w2.cols());
    let mut ab = ctx.empty::<f32>(&[layout.rows(), 2 * f])?;
    let mut z = ctx.empty::<f32>(&[layout.rows(), d])?;
    {
        let (mut abs, mut zs) = (ab.view_mut::<f32>()?, z.view_mut::<f32>()?);
        let tasks = tasks(&layout, |n| (next(&mut abs, n), next(&mut zs, n)));
        let (x, gates, pair) = (x.view::<f32>()?, gates.view::<f32>()?, layout.pairs()?);
        let (w13, w2) = (w13.view::<f32>()?, w2.view::<f32>()?);
        each!(tasks, |_, Task { e, first, blocks: (mut ab, mut z) }| {
            gather(&mut z, x, first, &pair); // where z will be
            local::nt(ab.reborrow(), z.as_mat(), w13.rows_at(e * 2 * f, 2 * f), 1., false);
            let mut h = scratch(ctx, z.rows() * f);
            let mut h = MatMut::new(h.flat_mut::<f32>().expect(NEW), z.rows(), f, f);
            for i in 0..h.rows() {
                let (n, j) = pair(first + i);
                gated(h.row_mut(i), ab.row(i), gates.row(n)[j]);
            }
            local::nt(z, h.as_mat(), w2.rows_at(e * d, d), 1., false);
        });
    }
    let mut y = ctx.empty::<f32>(x.dims())?;
    layout.combine(y.view_mut::<f32>()?, &z, false)?;
    Ok((y, Some((layout, ab))))
}

const NEW: &str = "invariant: a new tensor is the only reference to its memory";

/// Memory from the pool; its contents are arbitrary.
fn scratch(ctx: &Ctx, len: usize) -> Tensor {
    ctx.empty::<f32>(&[len]).expect("invariant: one dimension cannot overflow")
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
    let rows = |cols| ctx.empty::<f32>(&[layout.rows(), cols]);
    let (mut x_rows, mut d_z, mut h, mut d_ab) =
        (rows(w13.cols())?, rows(d_y.cols())?, rows(w2.cols())?, rows(ab.cols())?);
    let mut d_gate = ctx.empty::<f32>(&[layout.rows()])?;
    {
        let (mut xs, mut d_zs) = (x_rows.view_mut::<f32>()?, d_z.view_mut::<f32>()?);
        let (mut hs, mut d_abs, mut d_gates) =
            (h.view_mut::<f32>()?, d_ab.view_mut::<f32>()?, d_gate.flat_mut::<f32>()?);
        let tasks = tasks(&layout, |n| {
            let (mine, rest) = std::mem::take(&mut d_gates).split_at_mut(n);
            d_gates = rest;
            ([&mut xs, &mut d_zs, &mut hs, &mut d_abs].map(|m| next(m, n)), mine)
        });
        let (x, d_y, gates, pair) =
            (saved.x.view::<f32>()?, d_y.view::<f32>()?, saved.gates.view::<f32>()?, layout.pairs()?);
        let (ab, w2) = (ab.view::<f32>()?, w2.view::<f32>()?);
        let d = d_y.cols();
        each!(tasks, |_, Task { e, first, blocks: ([mut x_rows, mut d_z, mut h, mut d_ab], d_gate) }| {
            gather(&mut x_rows, x, first, &pair);
            gather(&mut d_z, d_y, first, &pair);
            local::nn(h.reborrow(), d_z.as_mat(), w2.rows_at(e * d, d), 1., false); // d_h, which h replaces
            for (i, d_gate) in d_gate.iter_mut().enumerate() {
                let (n, j) = pair(first + i);
                *d_gate = gated_gradient(d_ab.row_mut(i), h.row_mut(i), ab.row(first + i), gates.row(n)[j]);
            }
        });
    }
    {
        let (x_rows, d_z, h, d_ab) = (x_rows.view()?, d_z.view()?, h.view()?, d_ab.view()?);
        let w2 = slots.d_w2.target(ctx)?.map(|(c, add)| Tn { c, a: d_z, b: h, add });
        let w13 = slots.d_w13.target(ctx)?.map(|(c, add)| Tn { c, a: d_ab, b: x_rows, add });
        grouped::tn(w13.into_iter().chain(w2), offsets);
    }
    if let Some((d_gates, add)) = slots.d_gates.target::<f32>(ctx)? {
        unsort(d_gates, d_gate.flat::<f32>()?, layout.slot().flat::<i32>()?, add);
    }
    if let Some((d_x, add)) = slots.d_x.target::<f32>(ctx)? {
        grouped::nn(d_z.view_mut::<f32>()?, d_ab.view::<f32>()?, w13.view::<f32>()?, offsets); // d_z is not needed any more
        layout.combine(d_x, &d_z, add)?;
    }
    Ok(())
}

/// A number of each pair in the sorted order, back to its token's row and place.
fn unsort(mut to: MatMut<'_, f32>, sorted: &[f32], slot: &[i32], add: bool) {
    for n in 0..to.rows() {
        let slots = &slot[n * to.cols()..];
        for (to, &row) in to.row_mut(n).iter_mut().zip(slots) {
            *to = sorted[row as usize] + if add { *to } else { 0. };
        }
    }
}

/// The sorted order and ab [N K, 2F], where the forward pass kept neither.
fn up(ctx: &Ctx, x: &Tensor, chosen: &Tensor, w13: &Tensor) -> Result<(Layout, Tensor)> {
    let layout = Layout::new(ctx, chosen, w13.dims()[0])?;
    let rows = layout.gather(ctx, x)?;
    let mut ab = ctx.empty::<f32>(&[layout.rows(), w13.dims()[1]])?;
    grouped::nt(ab.view_mut::<f32>()?, rows.view::<f32>()?, w13.view::<f32>()?, layout.offsets());
    Ok((layout, ab))
}
