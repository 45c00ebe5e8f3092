//! The oracle: whole rows of scores, one head and one token at a time. The fast path is in `flash.rs`.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::operands::{Operands, Views};
use super::window::Window;
use super::{Args, Saved};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor};

pub(super) fn oracle<T: Real>(ctx: &Ctx, x: &Operands, w: &Window, args: Args) -> Result<(Tensor, Tensor, Tensor)> {
    let n = w.batch * w.queries;
    let mut o = ctx.zeros::<T>(&[n, args.n_heads * args.d_v])?;
    let mut lse = ctx.empty::<T>(&[n, args.n_heads])?;
    let mut max_logit = ctx.empty::<T>(&[args.n_heads])?;
    let (x, mut os, mut lses, max) =
        (x.views::<T>(args)?, o.view_mut::<T>()?, lse.view_mut::<T>()?, max_logit.flat_mut()?);
    max.fill(T::neg_infinity());
    for (b, i, h) in places(w, args) {
        let (row, g) = (b * w.queries + i, h / args.heads());
        let s = scores(&x, w, args, (b, i, h));
        let m = s.iter().copied().fold(T::neg_infinity(), T::max);
        let sum = s.iter().map(|&s| (s - m).exp()).sum::<T>();
        for (j, s) in w.seen(b, i).zip(&s) {
            let v = x.values(g, b * w.keys + j, 1).row(0);
            let p = (*s - m).exp() / sum;
            for d in 0..args.d_v {
                os.row_mut(row)[h * args.d_v + d] += p * v[d];
            }
        }
        lses.row_mut(row)[h] = m + sum.ln();
        if !w.padding(b, i) {
            max[h] = max[h].max(m);
        }
    }
    Ok((o, lse, max_logit))
}

/// Every row of the batch, query and head.
fn places(w: &Window, args: Args) -> impl Iterator<Item = (usize, usize, usize)> {
    let (queries, heads) = (w.queries, args.n_heads);
    (0..w.batch).flat_map(move |b| (0..queries).flat_map(move |i| (0..heads).map(move |h| (b, i, h))))
}

/// The scores of one query against the keys that it sees.
fn scores<T: Real>(x: &Views<'_, T>, w: &Window, args: Args, (b, i, h): (usize, usize, usize)) -> Vec<T> {
    let q = &x.q.row(b * w.queries + i)[h * args.d_k()..(h + 1) * args.d_k()];
    w.seen(b, i).map(|j| T::of(args.scale) * dot(q, key(x, h / args.heads(), b * w.keys + j))).collect()
}

fn key<'a, T: Real>(x: &Views<'a, T>, g: usize, n: usize) -> impl Iterator<Item = T> + 'a {
    x.content(g, n).iter().chain(x.rotary(g, n)).copied()
}

fn dot<T: Real>(a: &[T], b: impl Iterator<Item = T>) -> T {
    a.iter().zip(b).map(|(&a, b)| a * b).sum()
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    d_o: &Tensor,
    args: Args,
    slots: [&mut GradSlot<'_>; 3],
) -> Result<()> {
    let (x, w) = (saved.x.views::<T>(args)?, &saved.window);
    let (o, lse, d_o) = (saved.o.view::<T>()?, saved.lse.view::<T>()?, d_o.view::<T>()?);
    let (d_k, d_v, heads) = (args.d_k(), args.d_v, args.heads());
    let keys = w.batch * w.keys;
    let mut dq = vec![T::zero(); x.q.rows() * x.q.cols()];
    let mut dk = vec![T::zero(); keys * args.n_groups * d_k];
    let mut dv = vec![T::zero(); keys * args.n_groups * d_v];
    for (b, i, h) in places(w, args) {
        let (row, g) = (b * w.queries + i, h / heads);
        let q = &x.q.row(row)[h * d_k..(h + 1) * d_k];
        let (d_o, o) = (&d_o.row(row)[h * d_v..(h + 1) * d_v], &o.row(row)[h * d_v..(h + 1) * d_v]);
        let delta = dot(d_o, o.iter().copied());
        let s = scores(&x, w, args, (b, i, h));
        for (j, s) in w.seen(b, i).zip(s) {
            let n = b * w.keys + j;
            let p = (s - lse.row(row)[h]).exp();
            let dp = dot(d_o, x.values(g, n, 1).row(0).iter().copied());
            let ds = T::of(args.scale) * p * (dp - delta);
            for (d, k) in key(&x, g, n).enumerate() {
                dq[(row * args.n_heads + h) * d_k + d] += ds * k;
                dk[(n * args.n_groups + g) * d_k + d] += ds * q[d];
            }
            for d in 0..d_v {
                dv[(n * args.n_groups + g) * d_v + d] += p * d_o[d];
            }
        }
    }
    let content = args.n_groups * args.d_nope;
    let [d_q, d_kv, d_k_r] = slots;
    put(d_q.target::<T>(ctx)?, |n, c| dq[n * args.n_heads * d_k + c]);
    put(d_kv.target::<T>(ctx)?, |n, c| match c.checked_sub(content) {
        None => dk[(n * args.n_groups + c / args.d_nope) * d_k + c % args.d_nope],
        Some(c) => dv[n * args.n_groups * d_v + c],
    });
    put(d_k_r.target::<T>(ctx)?, |n, c| {
        dk[(n * args.n_groups + c / args.d_rope) * d_k + args.d_nope + c % args.d_rope]
    });
    Ok(())
}

fn put<T: Real>(target: Option<(MatMut<'_, T>, bool)>, value: impl Fn(usize, usize) -> T) {
    let Some((mut to, add)) = target else { return };
    for n in 0..to.rows() {
        for (c, to) in to.row_mut(n).iter_mut().enumerate() {
            *to = value(n, c) + if add { *to } else { T::zero() };
        }
    }
}
