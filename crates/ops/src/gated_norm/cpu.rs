//! The oracle, then the fast path.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Args, Saved};
use crate::lanes::dot;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor, each};

pub(super) fn oracle<T: Real>(ctx: &Ctx, o: &Tensor, z: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let (heads, d_v) = (o.cols() / args.d_v, args.d_v);
    let mut y = ctx.empty::<T>(o.dims())?;
    let mut r = ctx.empty::<T>(&[o.rows(), heads])?;
    let (o, z, w) = (o.view::<T>()?, z.view::<T>()?, w.flat::<T>()?);
    let (mut ys, mut rs) = (y.view_mut::<T>()?, r.view_mut::<T>()?);
    for i in 0..o.rows() {
        for h in 0..heads {
            let head = &o.row(i)[h * d_v..(h + 1) * d_v];
            let mean = head.iter().map(|&o| o * o).sum::<T>() / T::of(d_v as f64);
            let r = (mean + T::of(args.eps)).sqrt().recip();
            rs.row_mut(i)[h] = r;
            for j in 0..d_v {
                ys.row_mut(i)[h * d_v + j] = w[j] * (head[j] * r) * args.act.value(z.row(i)[h * d_v + j]);
            }
        }
    }
    Ok((y, r))
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    [d_o, d_z, d_w]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (o, z, r, w) = (saved.o.view::<T>()?, saved.z.view::<T>()?, saved.r.view::<T>()?, w.flat::<T>()?);
    let (d_y, d_v) = (d_y.view::<T>()?, args.d_v);
    let n = |i: usize, j: usize| o.row(i)[j] * r.row(i)[j / d_v];
    let gate = |i: usize, j: usize| args.act.value(z.row(i)[j]);
    let d_n = |i: usize, j: usize| d_y.row(i)[j] * w[j % d_v] * gate(i, j);
    let kept = |add: bool, old: T| if add { old } else { T::zero() };
    if let Some((mut d_o, add)) = d_o.target::<T>(ctx)? {
        for i in 0..o.rows() {
            for j in 0..o.cols() {
                let head = j / d_v * d_v;
                let mean = (head..head + d_v).map(|j| d_n(i, j) * n(i, j)).sum::<T>() / T::of(d_v as f64);
                let out = &mut d_o.row_mut(i)[j];
                *out = r.row(i)[j / d_v] * (d_n(i, j) - n(i, j) * mean) + kept(add, *out);
            }
        }
    }
    if let Some((mut d_z, add)) = d_z.target::<T>(ctx)? {
        for i in 0..o.rows() {
            for (j, out) in d_z.row_mut(i).iter_mut().enumerate() {
                *out = d_y.row(i)[j] * w[j % d_v] * n(i, j) * args.act.grad(z.row(i)[j]) + kept(add, *out);
            }
        }
    }
    if let Some((mut d_w, add)) = d_w.target::<T>(ctx)? {
        for (j, out) in d_w.row_mut(0).iter_mut().enumerate() {
            let all = (0..o.rows()).flat_map(|i| (j..o.cols()).step_by(d_v).map(move |c| (i, c)));
            *out = all.map(|(i, c)| d_y.row(i)[c] * n(i, c) * gate(i, c)).sum::<T>() + kept(add, *out);
        }
    }
    Ok(())
}

/// Rows in a block of work; also the block of d_w's sum, so it is part of the result and must not depend on threads.
const ROWS: usize = 32;

pub(super) fn forward(ctx: &Ctx, o: &Tensor, z: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let d_v = args.d_v;
    let mut y = ctx.empty::<f32>(o.dims())?;
    let mut r = ctx.empty::<f32>(&[o.rows(), o.cols() / d_v])?;
    let (o, z, w) = (o.view::<f32>()?, z.view::<f32>()?, w.flat::<f32>()?);
    let tasks: Vec<_> =
        y.view_mut::<f32>()?.row_blocks(ROWS).into_iter().zip(r.view_mut::<f32>()?.row_blocks(ROWS)).collect();
    each!(tasks, |b, (mut ys, mut rs)| {
        for i in 0..ys.rows() {
            let heads = o.row(b * ROWS + i).chunks_exact(d_v).zip(z.row(b * ROWS + i).chunks_exact(d_v));
            let outs = ys.row_mut(i).chunks_exact_mut(d_v).zip(rs.row_mut(i));
            for ((o, z), (y, r)) in heads.zip(outs) {
                *r = (dot(o, o) / d_v as f32 + args.eps as f32).sqrt().recip();
                for (((y, &o), &z), &w) in y.iter_mut().zip(o).zip(z).zip(w) {
                    *y = w * (o * *r) * args.act.value(z);
                }
            }
        }
    });
    Ok((y, r))
}

/// One head's operands in the backward.
struct Head<'a> {
    g: &'a [f32],
    o: &'a [f32],
    z: &'a [f32],
    w: &'a [f32],
    r: f32,
    args: Args,
}

impl Head<'_> {
    /// Writes d_n and d_z (as they are, nothing added) and adds to d_w.
    #[inline(always)]
    fn gates(&self, d_n: &mut [f32], d_z: &mut [f32], d_w: &mut [f32]) {
        let operands = self.g.iter().zip(self.o).zip(self.z).zip(self.w);
        for (((((&g, &o), &z), &w), d_n), (d_z, d_w)) in operands.zip(d_n).zip(d_z.iter_mut().zip(d_w)) {
            let (gate, slope) = self.args.act.value_and_grad(z);
            let n = o * self.r;
            *d_n = g * w * gate;
            *d_z = g * w * n * slope;
            *d_w += g * n * gate;
        }
    }

    /// Turns d_n into d_o.
    #[inline(always)]
    fn norm(&self, d_n: &mut [f32]) {
        let (o, r) = (self.o, self.r);
        let mean = r * dot(o, d_n) / o.len() as f32;
        d_n.iter_mut().zip(o).for_each(|(d, &o)| *d = r * (*d - o * r * mean));
    }
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    [d_o, d_z, d_w]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (o, z, r, w) = (saved.o.view::<f32>()?, saved.z.view::<f32>()?, saved.r.view::<f32>()?, w.flat::<f32>()?);
    let (d_y, d_v, blocks) = (d_y.view::<f32>()?, args.d_v, o.rows().div_ceil(ROWS));
    let (d_o, d_z) = (d_o.target::<f32>(ctx)?, d_z.target::<f32>(ctx)?);
    let (add_o, add_z) = (d_o.as_ref().is_some_and(|t| t.1), d_z.as_ref().is_some_and(|t| t.1));
    // One pass over the rows gives d_o, d_z and, for each block, its share of d_w.
    let mut partial = ctx.zeros::<f32>(&[blocks.max(1), d_v])?;
    let tasks: Vec<_> = tiles(d_o.map(|t| t.0), blocks)
        .into_iter()
        .zip(tiles(d_z.map(|t| t.0), blocks))
        .zip(partial.flat_mut::<f32>()?.chunks_mut(d_v))
        .collect();
    each!(tasks, |b, ((mut d_o, mut d_z), d_w)| {
        let (mut own_o, mut own_z) = (vec![0.; d_v], vec![0.; d_v]);
        for n in b * ROWS..(b * ROWS + ROWS).min(o.rows()) {
            for (h, &r) in r.row(n).iter().enumerate() {
                let at = h * d_v..(h + 1) * d_v;
                let [g, o, z] = [d_y, o, z].map(|m| &m.row(n)[at.clone()]);
                let head = Head { g, o, z, w, r, args };
                head.gates(&mut own_o, &mut own_z, d_w);
                if let Some(d_o) = &mut d_o {
                    head.norm(&mut own_o);
                    put(&mut d_o.row_mut(n - b * ROWS)[at.clone()], &own_o, add_o);
                }
                if let Some(d_z) = &mut d_z {
                    put(&mut d_z.row_mut(n - b * ROWS)[at], &own_z, add_z);
                }
            }
        }
    });
    if let Some((mut d_w, add)) = d_w.target::<f32>(ctx)? {
        let out = d_w.row_mut(0);
        if !add {
            out.fill(0.);
        }
        partial.flat::<f32>()?.chunks(d_v).for_each(|share| put(out, share, true));
    }
    Ok(())
}

/// Blocks of a gradient's rows, or as many times nothing.
fn tiles(d: Option<MatMut<'_, f32>>, blocks: usize) -> Vec<Option<MatMut<'_, f32>>> {
    match d {
        Some(d) => d.row_blocks(ROWS).into_iter().map(Some).collect(),
        None => (0..blocks).map(|_| None).collect(),
    }
}

#[inline(always)]
fn put(to: &mut [f32], from: &[f32], add: bool) {
    let pairs = to.iter_mut().zip(from);
    if add { pairs.for_each(|(y, &x)| *y += x) } else { pairs.for_each(|(y, &x)| *y = x) }
}
