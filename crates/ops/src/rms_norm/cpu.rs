//! The oracle, then the fast path.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Args, Saved};
use crate::lanes::{dot, sum3};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor, each};

pub(super) fn oracle<T: Real>(ctx: &Ctx, x: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let mut y = ctx.empty::<T>(x.dims())?;
    let mut r = ctx.empty::<T>(&[x.rows()])?;
    let (xs, w, mut ys, rs) = (x.view::<T>()?, w.flat::<T>()?, y.view_mut::<T>()?, r.flat_mut::<T>()?);
    for i in 0..xs.rows() {
        let row = xs.row(i);
        let mean = row.iter().map(|&x| x * x).sum::<T>() / T::of(row.len() as f64);
        rs[i] = (mean + T::of(args.eps)).sqrt().recip();
        for (j, y) in ys.row_mut(i).iter_mut().enumerate() {
            *y = gain(w[j], args) * row[j] * rs[i];
        }
    }
    Ok((y, r))
}

fn gain<T: Real>(w: T, args: Args) -> T {
    if args.zero_centred { T::one() + w } else { w }
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (x, r, w, dy) = (saved.x.view::<T>()?, saved.r.flat::<T>()?, w.flat::<T>()?, d_y.view::<T>()?);
    if let Some((mut dx, add)) = d_x.target::<T>(ctx)? {
        for i in 0..x.rows() {
            let n = |j: usize| x.row(i)[j] * r[i];
            let dn = |j: usize| dy.row(i)[j] * gain(w[j], args);
            let mean = (0..w.len()).map(|j| dn(j) * n(j)).sum::<T>() / T::of(w.len() as f64);
            for (j, out) in dx.row_mut(i).iter_mut().enumerate() {
                *out = r[i] * (dn(j) - n(j) * mean) + if add { *out } else { T::zero() };
            }
        }
    }
    if let Some((mut dw, add)) = d_w.target::<T>(ctx)? {
        for (j, out) in dw.row_mut(0).iter_mut().enumerate() {
            let sum = (0..x.rows()).map(|i| dy.row(i)[j] * x.row(i)[j] * r[i]).sum::<T>();
            *out = sum + if add { *out } else { T::zero() };
        }
    }
    Ok(())
}

/// Rows in a block of work; also the block of d_w's sum, so it is part of the result and must not depend on threads.
const ROWS: usize = 64;

pub(super) fn forward(ctx: &Ctx, x: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let mut y = ctx.empty::<f32>(x.dims())?;
    let mut r = ctx.empty::<f32>(&[x.rows()])?;
    let (xs, w) = (x.view::<f32>()?, w.flat::<f32>()?);
    let shift = if args.zero_centred { 1. } else { 0. };
    let tasks: Vec<_> =
        y.view_mut::<f32>()?.row_blocks(ROWS).into_iter().zip(r.flat_mut::<f32>()?.chunks_mut(ROWS)).collect();
    each!(tasks, |b, (mut ys, rs)| {
        for (i, r) in rs.iter_mut().enumerate() {
            let row = xs.row(b * ROWS + i);
            *r = (dot(row, row) / row.len() as f32 + args.eps as f32).sqrt().recip();
            for ((y, &x), &w) in ys.row_mut(i).iter_mut().zip(row).zip(w) {
                *y = (shift + w) * x * *r;
            }
        }
    });
    Ok((y, r))
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (x, r, w, dy) = (saved.x.view::<f32>()?, saved.r.flat::<f32>()?, w.flat::<f32>()?, d_y.view::<f32>()?);
    let (n, d) = (x.rows(), w.len());
    let shift = if args.zero_centred { 1. } else { 0. };
    let target = d_x.target::<f32>(ctx)?;
    let add = target.as_ref().is_some_and(|t| t.1);
    let blocks: Vec<Option<MatMut<'_, f32>>> = match target {
        Some((dx, _)) => dx.row_blocks(ROWS).into_iter().map(Some).collect(),
        None => (0..n.div_ceil(ROWS)).map(|_| None).collect(),
    };
    // One pass over the rows gives d_x and, for each block, its share of d_w.
    let mut partial = ctx.zeros::<f32>(&[blocks.len().max(1), d])?;
    let tasks: Vec<_> = blocks.into_iter().zip(partial.flat_mut::<f32>()?.chunks_mut(d)).collect();
    each!(tasks, |b, (mut dx, dw)| {
        for i in b * ROWS..(b * ROWS + ROWS).min(n) {
            let (row, g, r) = (x.row(i), dy.row(i), r[i]);
            for ((dw, &g), &x) in dw.iter_mut().zip(g).zip(row) {
                *dw += g * x * r;
            }
            if let Some(dx) = &mut dx {
                let mean = r * dot3(g, row, w, shift) / d as f32;
                row_gradient(dx.row_mut(i - b * ROWS), g, row, w, (shift, r, mean), add);
            }
        }
    });
    if let Some((mut dw, add)) = d_w.target::<f32>(ctx)? {
        let (out, partial) = (dw.row_mut(0), partial.flat::<f32>()?);
        if !add {
            out.fill(0.);
        }
        partial.chunks(d).for_each(|p| out.iter_mut().zip(p).for_each(|(o, &p)| *o += p));
    }
    Ok(())
}

#[inline(always)]
fn row_gradient(dx: &mut [f32], g: &[f32], x: &[f32], w: &[f32], (shift, r, mean): (f32, f32, f32), add: bool) {
    for (((dx, &g), &x), &w) in dx.iter_mut().zip(g).zip(x).zip(w) {
        let d = r * (g * (shift + w) - x * r * mean);
        *dx = if add { *dx + d } else { d };
    }
}

/// Σ g (shift + w) x.
#[inline(always)]
fn dot3(g: &[f32], x: &[f32], w: &[f32], shift: f32) -> f32 {
    sum3(g, w, x, |g, w, x| g * (shift + w) * x)
}
