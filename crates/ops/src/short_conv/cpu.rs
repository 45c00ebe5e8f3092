//! The oracle, the tail, and the step of decoding: plain loops.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::Saved;
use crate::act::{silu, silu_grad};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor};

/// x at `back` tokens before token `t` of row `b`, channel `c`: from this piece, from the tail, or nothing.
fn input<T: Real>(saved: &Saved, k: usize, (b, t): (usize, usize), back: usize, c: usize) -> Result<Option<T>> {
    let docs = &saved.docs;
    if t - docs.start(b, t) >= back {
        return Ok(Some(saved.x.view::<T>()?.row(b * docs.len() + t - back)[c]));
    }
    match &saved.tail {
        Some(tail) if docs.carried(b, t) => Ok(Some(tail.view::<T>()?.row(b * (k - 1) + (k - 1) + t - back)[c])),
        _ => Ok(None),
    }
}

/// p at token `t` of row `b`, channel `c`.
fn pre<T: Real>(saved: &Saved, w: Mat<'_, T>, (b, t): (usize, usize), c: usize) -> Result<T> {
    let k = w.cols();
    let mut sum = T::zero();
    for j in 0..k {
        if let Some(x) = input::<T>(saved, k, (b, t), k - 1 - j, c)? {
            sum += w.row(c)[j] * x;
        }
    }
    Ok(sum)
}

pub(super) fn oracle<T: Real>(ctx: &Ctx, saved: &Saved, w: &Tensor) -> Result<Tensor> {
    let mut y = ctx.empty::<T>(saved.x.dims())?;
    let (docs, w, mut ys) = (&saved.docs, w.view::<T>()?, y.view_mut::<T>()?);
    for b in 0..docs.batch() {
        for t in 0..docs.len() {
            for c in 0..w.rows() {
                ys.row_mut(b * docs.len() + t)[c] = silu(pre(saved, w, (b, t), c)?);
            }
        }
    }
    Ok(y)
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (docs, w, d_y) = (&saved.docs, w.view::<T>()?, d_y.view::<T>()?);
    let (k, c, len) = (w.cols(), w.rows(), docs.len());
    let (mut d_x, mut d_w) = (d_x.target::<T>(ctx)?, d_w.target::<T>(ctx)?);
    for (target, add) in [&mut d_x, &mut d_w].into_iter().flatten() {
        if !*add {
            target.fill(T::zero());
        }
    }
    for b in 0..docs.batch() {
        for t in 0..len {
            for c in 0..c {
                let d_p = d_y.row(b * len + t)[c] * silu_grad(pre(saved, w, (b, t), c)?);
                for j in 0..k {
                    let back = k - 1 - j;
                    let Some(x) = input::<T>(saved, k, (b, t), back, c)? else { continue };
                    if let Some((d_w, _)) = &mut d_w {
                        d_w.row_mut(c)[j] += d_p * x;
                    }
                    // Nothing flows into the tail.
                    if let (Some((d_x, _)), true) = (&mut d_x, back <= t) {
                        d_x.row_mut(b * len + t - back)[c] += w.row(c)[j] * d_p;
                    }
                }
            }
        }
    }
    Ok(())
}

/// The last Kc-1 rows of each row's last document, the newest last; zeros, or the old tail of a continued document,
/// before its first token.
pub(super) fn next_tail<T: Real>(ctx: &Ctx, saved: &Saved, k: usize) -> Result<Tensor> {
    let docs = &saved.docs;
    let mut next = ctx.zeros::<T>(&[docs.batch(), k - 1, saved.x.cols()])?;
    let x = saved.x.view::<T>()?;
    let old = saved.tail.as_ref().map(Tensor::view::<T>).transpose()?;
    let mut to = next.view_mut::<T>()?;
    for b in 0..docs.batch() {
        let len = docs.len();
        let (start, carried) = match len {
            0 => (0, docs.continued(b)),
            _ => (docs.start(b, len - 1), docs.carried(b, len - 1)),
        };
        for j in 0..k - 1 {
            // Row j of the tail stands for token len - (k - 1) + j, which may be negative.
            let at = len + j;
            let from = match &old {
                _ if at >= start + k - 1 => x.row(b * len + at - (k - 1)),
                Some(old) if carried => old.row(b * (k - 1) + at),
                _ => continue,
            };
            to.row_mut(b * (k - 1) + j).copy_from_slice(from);
        }
    }
    Ok(next)
}

/// The same order of sums as the other paths, a dropped term being a zero of the tail.
pub(super) fn step<T: Real>(x: Mat<'_, T>, w: Mat<'_, T>, mut tail: MatMut<'_, T>, mut y: MatMut<'_, T>) {
    let k = w.cols();
    for b in 0..x.rows() {
        for (c, y) in y.row_mut(b).iter_mut().enumerate() {
            let mut sum = T::zero();
            for j in 0..k - 1 {
                sum += w.row(c)[j] * tail.row(b * (k - 1) + j)[c];
            }
            *y = silu(sum + w.row(c)[k - 1] * x.row(b)[c]);
        }
        for j in 0..k - 1 {
            for c in 0..x.cols() {
                let next = if j + 2 < k { tail.row(b * (k - 1) + j + 1)[c] } else { x.row(b)[c] };
                tail.row_mut(b * (k - 1) + j)[c] = next;
            }
        }
    }
}
