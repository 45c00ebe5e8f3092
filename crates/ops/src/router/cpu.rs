//! The oracle, then the fast path.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Args, Routed, Saved, TINY, Tally, Upstream, select};
use crate::act::sigmoid;
use crate::{Docs, gemm};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, MatMut, Real, Result, Tensor, each};
use std::ops::Range;

/// What is given out, the scores, and c of every document when there is a balance loss.
type Out = (Routed<Tensor>, Tensor, Option<Tensor>);

fn logits<T: Real>(ctx: &Ctx, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let mut l = ctx.empty::<T>(&[x.rows(), w.rows()])?;
    gemm::nt(ctx, l.view_mut::<T>()?, x.view::<T>()?, w.view::<T>()?, false);
    Ok(l)
}

/// d_x and d_W_r from d_l.
fn products<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_l: &Tensor,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    if let Some((d_x, add)) = d_x.target::<T>(ctx)? {
        gemm::nn(ctx, d_x, d_l.view::<T>()?, w.view::<T>()?, add);
    }
    if let Some((d_w, add)) = d_w.target::<T>(ctx)? {
        gemm::tn(ctx, d_w, d_l.view::<T>()?, saved.x.view::<T>()?, add);
    }
    Ok(())
}

pub(super) fn oracle<T: Real>(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    bias: &Tensor,
    docs: &Docs,
    documents: &[Range<usize>],
    args: Args,
) -> Result<Out> {
    let (n, experts, k) = (x.rows(), w.rows(), args.top_k);
    let mut s = logits::<T>(ctx, x, w)?;
    let mut gates = ctx.empty::<T>(&[n, k])?;
    let mut chosen = ctx.empty::<i32>(&[n, k])?;
    let (mut ss, mut gs, mut cs) = (s.view_mut::<T>()?, gates.view_mut::<T>()?, chosen.view_mut::<i32>()?);
    let bias = bias.to_vec::<f32>()?;
    let (mut counts, mut tokens) = (vec![0u64; experts], 0usize);
    let (mut max_logit, mut top) = (f64::NEG_INFINITY, 0.);
    for i in 0..n {
        let real = !docs.padding(i / docs.len(), i % docs.len());
        let row = ss.row_mut(i);
        for s in row.iter_mut() {
            if real {
                max_logit = max_logit.max(s.f64());
            }
            *s = sigmoid(*s);
        }
        let order = select::ranked(row, &bias);
        let z = order[..k].iter().map(|&e| row[e]).sum::<T>() + T::of(TINY);
        let mut best = 0f64;
        for (j, &e) in order[..k].iter().enumerate() {
            cs.row_mut(i)[j] = e as i32;
            gs.row_mut(i)[j] = T::of(args.routed_scale) * row[e] / z;
            best = best.max((row[e] / z).f64());
            counts[e] += u64::from(real);
        }
        if real {
            (tokens, top) = (tokens + 1, top + best);
        }
    }
    let (balance, c) = oracle_balance::<T>(ctx, &s, &chosen, documents, args)?;
    let tally = Tally::new(ctx, &counts, [max_logit, top, tokens as f64])?;
    Ok((Routed { gates, balance, chosen, tally }, s, c))
}

fn oracle_balance<T: Real>(
    ctx: &Ctx,
    s: &Tensor,
    chosen: &Tensor,
    documents: &[Range<usize>],
    args: Args,
) -> Result<(Tensor, Option<Tensor>)> {
    if args.balance_loss == 0. || documents.is_empty() {
        return Ok((Tensor::scalar(ctx, T::zero())?, None));
    }
    let (experts, k) = (s.cols(), args.top_k);
    let (ss, chosen) = (s.view::<T>()?, chosen.view::<i32>()?);
    let mut c = ctx.empty::<T>(&[documents.len(), experts])?;
    let mut cs = c.view_mut::<T>()?;
    let mut loss = T::zero();
    for (d, range) in documents.iter().enumerate() {
        let len = T::of(range.len() as f64);
        for e in 0..experts {
            let hits = range.clone().filter(|&i| chosen.row(i).contains(&(e as i32))).count();
            let f = T::of(experts as f64 * hits as f64) / (T::of(k as f64) * len);
            let total = |i: usize| ss.row(i).iter().copied().sum::<T>() + T::of(TINY);
            let share = range.clone().map(|i| ss.row(i)[e] / total(i)).sum::<T>() / len;
            loss += T::of(args.balance_loss) * (len / T::of(args.tokens)) * f * share;
            cs.row_mut(d)[e] = T::of(args.balance_loss) * f / T::of(args.tokens);
        }
    }
    Ok((Tensor::scalar(ctx, loss)?, Some(c)))
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    upstream: &Upstream,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (s, chosen) = (saved.s.view::<T>()?, saved.chosen.view::<i32>()?);
    let mut d_l = ctx.zeros::<T>(saved.s.dims())?;
    let mut ds = d_l.view_mut::<T>()?;
    if let Some(d_gates) = &upstream.d_gates {
        let dg = d_gates.view::<T>()?;
        for i in 0..s.rows() {
            let at = |j: usize| chosen.row(i)[j] as usize;
            let z = (0..args.top_k).map(|j| s.row(i)[at(j)]).sum::<T>() + T::of(TINY);
            let mean = (0..args.top_k).map(|j| dg.row(i)[j] * (s.row(i)[at(j)] / z)).sum::<T>();
            for j in 0..args.top_k {
                ds.row_mut(i)[at(j)] += T::of(args.routed_scale) / z * (dg.row(i)[j] - mean);
            }
        }
    }
    if let (Some(balance), Some(d_balance)) = (&saved.balance, &upstream.d_balance) {
        let (c, d) = (balance.c.view::<T>()?, d_balance.flat::<T>()?[0]);
        for (r, range) in balance.documents.iter().enumerate() {
            for i in range.clone() {
                let total = s.row(i).iter().copied().sum::<T>() + T::of(TINY);
                let mean = (0..s.cols()).map(|e| c.row(r)[e] * s.row(i)[e] / total).sum::<T>();
                for e in 0..s.cols() {
                    ds.row_mut(i)[e] += d * (c.row(r)[e] - mean) / total;
                }
            }
        }
    }
    for i in 0..s.rows() {
        for e in 0..s.cols() {
            ds.row_mut(i)[e] *= s.row(i)[e] * (T::one() - s.row(i)[e]);
        }
    }
    products::<T>(ctx, saved, w, &d_l, d_x, d_w)
}

/// Tokens in a block of work; also the block of the mean of top weights.
const ROWS: usize = 64;

/// A block of tokens, what it writes and what it counts.
struct Block<'a> {
    s: MatMut<'a, f32>,
    gates: MatMut<'a, f32>,
    chosen: MatMut<'a, i32>,
    counts: &'a mut [u64],
    /// The largest logit, the sum of top weights, the tokens that are not padding.
    seen: &'a mut (f32, f64, usize),
}

pub(super) fn forward(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    bias: &Tensor,
    docs: &Docs,
    documents: &[Range<usize>],
    args: Args,
) -> Result<Out> {
    let (n, experts, k) = (x.rows(), w.rows(), args.top_k);
    let mut s = logits::<f32>(ctx, x, w)?;
    let mut gates = ctx.empty::<f32>(&[n, k])?;
    let mut chosen = ctx.empty::<i32>(&[n, k])?;
    let blocks = n.div_ceil(ROWS);
    let mut counts = vec![0u64; blocks * experts];
    let mut seen = vec![(f32::NEG_INFINITY, 0f64, 0usize); blocks];
    {
        let bias = bias.flat::<f32>()?;
        let s = s.view_mut::<f32>()?.row_blocks(ROWS).into_iter();
        let gates = gates.view_mut::<f32>()?.row_blocks(ROWS).into_iter();
        let chosen = chosen.view_mut::<i32>()?.row_blocks(ROWS).into_iter();
        let tally = counts.chunks_mut(experts).zip(&mut seen);
        let tasks: Vec<_> = s.zip(gates).zip(chosen).zip(tally).collect();
        each!(tasks, |b, (((s, gates), chosen), (counts, seen))| {
            route(b * ROWS, Block { s, gates, chosen, counts, seen }, bias, docs, args.routed_scale as f32);
        });
    }
    let mut total = vec![0u64; experts];
    counts.chunks(experts).for_each(|c| total.iter_mut().zip(c).for_each(|(t, c)| *t += c));
    let max_logit = seen.iter().fold(f32::NEG_INFINITY, |m, s| m.max(s.0));
    let (top, tokens) = seen.iter().fold((0., 0), |(top, n), s| (top + s.1, n + s.2));
    let (balance, c) = balance(ctx, &s, &chosen, documents, args)?;
    let tally = Tally::new(ctx, &total, [f64::from(max_logit), top, tokens as f64])?;
    Ok((Routed { gates, balance, chosen, tally }, s, c))
}

/// Scores, choice and gates of one block, whose first token is `first`.
#[inline(always)]
fn route(first: usize, block: Block<'_>, bias: &[f32], docs: &Docs, scale: f32) {
    let Block { mut s, mut gates, mut chosen, counts, seen } = block;
    for i in 0..s.rows() {
        let (row, gates, chosen) = (s.row_mut(i), gates.row_mut(i), chosen.row_mut(i));
        let largest = row.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
        let best = route_one(row, gates, chosen, bias, scale);
        if !docs.padding((first + i) / docs.len(), (first + i) % docs.len()) {
            chosen.iter().for_each(|&e| counts[e as usize] += 1);
            *seen = (seen.0.max(largest), seen.1 + f64::from(best), seen.2 + 1);
        }
    }
}

/// One token: its logits become scores; its experts, their gates, and the largest share of one.
#[inline(always)]
fn route_one(row: &mut [f32], gates: &mut [f32], chosen: &mut [i32], bias: &[f32], scale: f32) -> f32 {
    row.iter_mut().for_each(|s| *s = sigmoid(*s));
    select::top_k(chosen, row, bias);
    let z = chosen.iter().map(|&e| row[e as usize]).sum::<f32>() + TINY as f32;
    let mut best = 0f32;
    for (gate, &e) in gates.iter_mut().zip(&*chosen) {
        let p = row[e as usize] / z;
        best = best.max(p);
        *gate = scale * p;
    }
    best
}

pub(super) fn choose(ctx: &Ctx, logits: &Tensor, bias: &Tensor, args: Args) -> Result<(Tensor, Tensor)> {
    let n = logits.rows();
    let (mut chosen, mut gates) = (ctx.empty::<i32>(&[n, args.top_k])?, ctx.empty::<f32>(&[n, args.top_k])?);
    let (l, bias) = (logits.view::<f32>()?, bias.flat::<f32>()?);
    let (mut c, mut g) = (chosen.view_mut::<i32>()?, gates.view_mut::<f32>()?);
    for i in 0..n {
        route_one(&mut l.row(i).to_vec(), g.row_mut(i), c.row_mut(i), bias, args.routed_scale as f32);
    }
    Ok((chosen, gates))
}

/// Documents in a block of work.
const DOCUMENTS: usize = 16;

fn balance(
    ctx: &Ctx,
    s: &Tensor,
    chosen: &Tensor,
    documents: &[Range<usize>],
    args: Args,
) -> Result<(Tensor, Option<Tensor>)> {
    if args.balance_loss == 0. || documents.is_empty() {
        return Ok((Tensor::scalar(ctx, 0f32)?, None));
    }
    let experts = s.cols();
    let (s, chosen) = (s.view::<f32>()?, chosen.view::<i32>()?);
    let mut c = ctx.empty::<f32>(&[documents.len(), experts])?;
    let mut losses = vec![0f64; documents.len().div_ceil(DOCUMENTS)];
    let tasks: Vec<_> = c.view_mut::<f32>()?.row_blocks(DOCUMENTS).into_iter().zip(&mut losses).collect();
    each!(tasks, |b, (mut c, loss)| {
        let (mut hits, mut shares) = (vec![0u64; experts], vec![0f64; experts]);
        for (d, range) in documents[b * DOCUMENTS..].iter().take(DOCUMENTS).enumerate() {
            hits.fill(0);
            shares.fill(0.);
            for i in range.clone() {
                chosen.row(i).iter().for_each(|&e| hits[e as usize] += 1);
                let inverse = (s.row(i).iter().sum::<f32>() + TINY as f32).recip();
                shares.iter_mut().zip(s.row(i)).for_each(|(p, &s)| *p += f64::from(s * inverse));
            }
            // c_e = α f_e / tokens, and the document's part of the loss is Σ_e c_e Σ_t shares.
            let unit = args.balance_loss * experts as f64 / (args.top_k as f64 * range.len() as f64 * args.tokens);
            for ((c, &hits), &share) in c.row_mut(d).iter_mut().zip(&hits).zip(&shares) {
                *c = (unit * hits as f64) as f32;
                *loss += unit * hits as f64 * share;
            }
        }
    });
    Ok((Tensor::scalar(ctx, losses.iter().sum::<f64>() as f32)?, Some(c)))
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    upstream: &Upstream,
    args: Args,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (s, chosen) = (saved.s.view::<f32>()?, saved.chosen.view::<i32>()?);
    let d_gates = upstream.d_gates.as_ref().map(Tensor::view::<f32>).transpose()?;
    let balance = match (&saved.balance, &upstream.d_balance) {
        (Some(b), Some(d)) => Some((b, b.c.view::<f32>()?, d.view::<f32>()?.row(0)[0])),
        _ => None,
    };
    let scale = args.routed_scale as f32;
    let mut d_l = ctx.empty::<f32>(saved.s.dims())?;
    each!(d_l.view_mut::<f32>()?.row_blocks(ROWS), |b, mut d_l| {
        // The first document that ends after the block's first token; documents are in order.
        let mut doc = balance.map_or(0, |(b_, ..)| b_.documents.partition_point(|r| r.end <= b * ROWS));
        for i in 0..d_l.rows() {
            let (token, row) = (b * ROWS + i, d_l.row_mut(i));
            let s = s.row(token);
            row.fill(0.);
            if let Some(d_gates) = &d_gates {
                gates_gradient(row, s, chosen.row(token), d_gates.row(token), scale);
            }
            if let Some((balance, c, d)) = &balance {
                let documents = &balance.documents;
                doc += usize::from(documents.get(doc).is_some_and(|r| r.end <= token));
                if documents.get(doc).is_some_and(|r| r.contains(&token)) {
                    share_gradient(row, s, c.row(doc), *d);
                }
            }
            row.iter_mut().zip(s).for_each(|(d, &s)| *d *= s * (1. - s));
        }
    });
    products::<f32>(ctx, saved, w, &d_l, d_x, d_w)
}

/// d_s of the gates, added at the chosen experts.
#[inline(always)]
fn gates_gradient(d_s: &mut [f32], s: &[f32], chosen: &[i32], d_gates: &[f32], scale: f32) {
    let z = chosen.iter().map(|&e| s[e as usize]).sum::<f32>() + TINY as f32;
    let mean = chosen.iter().zip(d_gates).map(|(&e, &d)| d * (s[e as usize] / z)).sum::<f32>();
    for (&e, &d) in chosen.iter().zip(d_gates) {
        d_s[e as usize] += scale / z * (d - mean);
    }
}

/// d_s of the balance loss, added at every expert.
#[inline(always)]
fn share_gradient(d_s: &mut [f32], s: &[f32], c: &[f32], d: f32) {
    let inverse = (s.iter().sum::<f32>() + TINY as f32).recip();
    let mean = s.iter().zip(c).map(|(&s, &c)| s * c).sum::<f32>() * inverse;
    d_s.iter_mut().zip(c).for_each(|(o, &c)| *o += d * (c - mean) * inverse);
}
