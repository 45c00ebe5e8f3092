//! The oracle, then the fast path; both by one form of a row, which the experts share.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use crate::act::{sigmoid, silu, silu_grad};
use crate::lanes::dot;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Real, Result, Tensor, each};

pub(super) fn oracle<T: Real>(ctx: &Ctx, ab: &Tensor) -> Result<Tensor> {
    let f = ab.cols() / 2;
    let mut h = ctx.empty::<T>(ab.shape().with_cols(f).dims())?;
    let (ab, mut hs) = (ab.view::<T>()?, h.view_mut::<T>()?);
    for i in 0..ab.rows() {
        for j in 0..f {
            hs.row_mut(i)[j] = silu(ab.row(i)[j]) * ab.row(i)[f + j];
        }
    }
    Ok(h)
}

pub(super) fn oracle_backward<T: Real>(ctx: &Ctx, ab: &Tensor, d_h: &Tensor, d_ab: &mut GradSlot<'_>) -> Result<()> {
    let f = ab.cols() / 2;
    let (ab, dh) = (ab.view::<T>()?, d_h.view::<T>()?);
    let Some((mut out, add)) = d_ab.target::<T>(ctx)? else { return Ok(()) };
    for i in 0..ab.rows() {
        for j in 0..f {
            let (a, b, d) = (ab.row(i)[j], ab.row(i)[f + j], dh.row(i)[j]);
            let row = out.row_mut(i);
            let old = if add { (row[j], row[f + j]) } else { (T::zero(), T::zero()) };
            row[j] = old.0 + d * b * silu_grad(a);
            row[f + j] = old.1 + d * silu(a);
        }
    }
    Ok(())
}

/// Rows in a block of work.
const ROWS: usize = 64;

pub(super) fn forward(ctx: &Ctx, ab: &Tensor) -> Result<Tensor> {
    let mut h = ctx.empty::<f32>(ab.shape().with_cols(ab.cols() / 2).dims())?;
    let ab = ab.view::<f32>()?;
    each!(h.view_mut::<f32>()?.row_blocks(ROWS), |block, mut h| {
        for i in 0..h.rows() {
            gated(h.row_mut(i), ab.row(block * ROWS + i), 1.);
        }
    });
    Ok(h)
}

pub(super) fn backward(ctx: &Ctx, ab: &Tensor, d_h: &Tensor, d_ab: &mut GradSlot<'_>) -> Result<()> {
    let (ab, dh) = (ab.view::<f32>()?, d_h.view::<f32>()?);
    let Some((out, add)) = d_ab.target::<f32>(ctx)? else { return Ok(()) };
    each!(out.row_blocks(ROWS), |block, mut out| {
        for i in 0..out.rows() {
            let row = block * ROWS + i;
            row_gradient(out.row_mut(i), ab.row(row), dh.row(row), add);
        }
    });
    Ok(())
}

#[inline(always)]
fn row_gradient(d_ab: &mut [f32], ab: &[f32], d_h: &[f32], add: bool) {
    let ((d_a, d_b), (a, b)) = (d_ab.split_at_mut(d_h.len()), ab.split_at(d_h.len()));
    for ((((d_a, d_b), &a), &b), &d) in d_a.iter_mut().zip(d_b).zip(a).zip(b).zip(d_h) {
        let s = sigmoid(a);
        let (x, y) = (d * b * slope(a, s), d * a * s);
        (*d_a, *d_b) = if add { (*d_a + x, *d_b + y) } else { (x, y) };
    }
}

/// [`silu_grad`] where the sigmoid is known.
#[inline(always)]
fn slope(a: f32, s: f32) -> f32 {
    s * (1. + a * (1. - s))
}

/// h = gate silu(a) b of one row.
#[inline(always)]
pub(crate) fn gated(h: &mut [f32], ab: &[f32], gate: f32) {
    let (a, b) = ab.split_at(h.len());
    for ((h, &a), &b) in h.iter_mut().zip(a).zip(b) {
        *h = gate * (a * sigmoid(a) * b);
    }
}

/// The gradients of one row of h = gate silu(a) b from `d_h`, in one pass: d_ab is written, `d_h` is replaced by h
/// itself (which the gradient of the next projection's weight needs), and the gradient of the gate is returned.
#[inline(always)]
pub(crate) fn gated_gradient(d_ab: &mut [f32], d_h: &mut [f32], ab: &[f32], gate: f32) -> f32 {
    let ((d_a, d_b), (a, b)) = (d_ab.split_at_mut(d_h.len()), ab.split_at(d_h.len()));
    // h and the sigmoid wait where the gradients will be, so that each loop is plain vector code.
    for (((h, s), &a), &b) in d_a.iter_mut().zip(&mut *d_b).zip(a).zip(b) {
        *s = sigmoid(a);
        *h = a * *s * b;
    }
    let d_gate = dot(d_h, d_a);
    for ((((d_a, d_b), &a), &b), d) in d_a.iter_mut().zip(d_b).zip(a).zip(b).zip(d_h) {
        let (h, s, g) = (*d_a, *d_b, gate * *d);
        *d_a = g * b * slope(a, s);
        *d_b = g * a * s;
        *d = gate * h;
    }
    d_gate
}
