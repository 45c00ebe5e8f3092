//! The oracle, then the fast path; both take the gates from the same two functions (HAZARD 7).
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Args, Inputs, Upstream};
use crate::act::{sigmoid, softplus};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

/// The log decay: -exp(A_log) softplus(a + dt_bias).
#[inline(always)]
pub fn log_decay<T: Real>(a: T, a_log: T, dt_bias: T) -> T {
    -a_log.exp() * softplus(a + dt_bias)
}

/// The writing strength: σ(b), or 2 σ(b).
#[inline(always)]
pub fn beta<T: Real>(b: T, args: Args) -> T {
    if args.allow_neg_eigval { T::of(2.) * sigmoid(b) } else { sigmoid(b) }
}

/// dβ/db, from β.
#[inline(always)]
fn beta_grad<T: Real>(beta: T, args: Args) -> T {
    beta * (T::one() - if args.allow_neg_eigval { T::of(0.5) * beta } else { beta })
}

pub(super) fn oracle<T: Real>(ctx: &Ctx, inputs: Inputs<'_>, args: Args) -> Result<[Tensor; 2]> {
    let (ab, a_log, dt) = (inputs.ab.view::<T>()?, inputs.a_log.flat::<T>()?, inputs.dt_bias.flat::<T>()?);
    let h = a_log.len();
    let (mut g, mut b) = (ctx.empty::<T>(&[ab.rows(), h])?, ctx.empty::<T>(&[ab.rows(), h])?);
    let (mut gs, mut bs) = (g.view_mut::<T>()?, b.view_mut::<T>()?);
    for i in 0..ab.rows() {
        for j in 0..h {
            gs.row_mut(i)[j] = log_decay(ab.row(i)[j], a_log[j], dt[j]);
            bs.row_mut(i)[j] = beta(ab.row(i)[h + j], args);
        }
    }
    Ok([g, b])
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    inputs: Inputs<'_>,
    upstream: Upstream<'_>,
    args: Args,
    [d_ab, d_a_log, d_dt]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (ab, a_log, dt) = (inputs.ab.view::<T>()?, inputs.a_log.flat::<T>()?, inputs.dt_bias.flat::<T>()?);
    let (d_g, d_beta) = (view::<T>(upstream.d_g)?, view::<T>(upstream.d_beta)?);
    let (n, h) = (ab.rows(), a_log.len());
    let at = |m: &Option<Mat<'_, T>>, i: usize, j: usize| m.as_ref().map_or(T::zero(), |m| m.row(i)[j]);
    let da = |i: usize, j: usize| -a_log[j].exp() * sigmoid(ab.row(i)[j] + dt[j]) * at(&d_g, i, j);
    let db = |i: usize, j: usize| beta_grad(beta(ab.row(i)[h + j], args), args) * at(&d_beta, i, j);
    let write = |to: &mut T, d: T, add: bool| *to = if add { *to + d } else { d };
    if let Some((mut d, add)) = d_ab.target::<T>(ctx)? {
        for i in 0..n {
            for j in 0..h {
                write(&mut d.row_mut(i)[j], da(i, j), add);
                write(&mut d.row_mut(i)[h + j], db(i, j), add);
            }
        }
    }
    if let Some((mut d, add)) = d_a_log.target::<T>(ctx)? {
        for j in 0..h {
            let sum = (0..n).map(|i| log_decay(ab.row(i)[j], a_log[j], dt[j]) * at(&d_g, i, j)).sum::<T>();
            write(&mut d.row_mut(0)[j], sum, add);
        }
    }
    if let Some((mut d, add)) = d_dt.target::<T>(ctx)? {
        for j in 0..h {
            write(&mut d.row_mut(0)[j], (0..n).map(|i| da(i, j)).sum::<T>(), add);
        }
    }
    Ok(())
}

fn view<T: Real>(t: Option<&Tensor>) -> Result<Option<Mat<'_, T>>> {
    t.map(Tensor::view::<T>).transpose()
}

/// Rows in a block of work; also the block of the parameters' sums, so it must not depend on threads.
const ROWS: usize = 64;

pub(super) fn forward(ctx: &Ctx, inputs: Inputs<'_>, args: Args) -> Result<[Tensor; 2]> {
    let (ab, a_log, dt) = (inputs.ab.view::<f32>()?, inputs.a_log.flat::<f32>()?, inputs.dt_bias.flat::<f32>()?);
    let h = a_log.len();
    let (mut g, mut b) = (ctx.empty::<f32>(&[ab.rows(), h])?, ctx.empty::<f32>(&[ab.rows(), h])?);
    let tasks = g.view_mut::<f32>()?.row_blocks(ROWS).into_iter().zip(b.view_mut::<f32>()?.row_blocks(ROWS)).collect();
    each!(tasks, |block, (mut gs, mut bs)| {
        for i in 0..gs.rows() {
            let (a, b) = ab.row(block * ROWS + i).split_at(h);
            for (((g, &a), &a_log), &dt) in gs.row_mut(i).iter_mut().zip(a).zip(a_log).zip(dt) {
                *g = log_decay(a, a_log, dt);
            }
            bs.row_mut(i).iter_mut().zip(b).for_each(|(y, &b)| *y = beta(b, args));
        }
    });
    Ok([g, b])
}

pub(super) fn backward(
    ctx: &Ctx,
    inputs: Inputs<'_>,
    upstream: Upstream<'_>,
    args: Args,
    [d_ab, d_a_log, d_dt]: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    let (ab, a_log, dt) = (inputs.ab.view::<f32>()?, inputs.a_log.flat::<f32>()?, inputs.dt_bias.flat::<f32>()?);
    let (d_g, d_beta) = (view::<f32>(upstream.d_g)?, view::<f32>(upstream.d_beta)?);
    let (n, h) = (ab.rows(), a_log.len());
    let target = d_ab.target::<f32>(ctx)?;
    let add = target.as_ref().is_some_and(|t| t.1);
    let blocks: Vec<Option<MatMut<'_, f32>>> = match target {
        Some((d, _)) => d.row_blocks(ROWS).into_iter().map(Some).collect(),
        None => (0..n.div_ceil(ROWS)).map(|_| None).collect(),
    };
    // One pass over the rows gives d_ab and, for each block, its share of d_A_log | d_dt_bias.
    let mut partial = ctx.zeros::<f32>(&[blocks.len().max(1), 2 * h])?;
    let tasks: Vec<_> = blocks.into_iter().zip(partial.flat_mut::<f32>()?.chunks_mut(2 * h)).collect();
    each!(tasks, |block, (mut d_ab, sums)| {
        let (sum_log, sum_dt) = sums.split_at_mut(h);
        for i in block * ROWS..(block * ROWS + ROWS).min(n) {
            let row = ab.row(i);
            let mut out = d_ab.as_mut().map(|d| d.row_mut(i - block * ROWS));
            for j in 0..h {
                let dg = d_g.as_ref().map_or(0., |d| d.row(i)[j]);
                let da = -a_log[j].exp() * sigmoid(row[j] + dt[j]) * dg;
                sum_log[j] += log_decay(row[j], a_log[j], dt[j]) * dg;
                sum_dt[j] += da;
                if let Some(out) = &mut out {
                    let db = beta_grad(beta(row[h + j], args), args) * d_beta.as_ref().map_or(0., |d| d.row(i)[j]);
                    out[j] = if add { out[j] + da } else { da };
                    out[h + j] = if add { out[h + j] + db } else { db };
                }
            }
        }
    });
    let partial = partial.flat::<f32>()?;
    sum_blocks(ctx, d_a_log, partial, (0, 2 * h))?;
    sum_blocks(ctx, d_dt, partial, (h, 2 * h))
}

/// A parameter's gradient: the blocks' sums from column `from` on, in block order.
fn sum_blocks(ctx: &Ctx, slot: &mut GradSlot<'_>, partial: &[f32], (from, width): (usize, usize)) -> Result<()> {
    if let Some((mut d, add)) = slot.target::<f32>(ctx)? {
        let out = d.row_mut(0);
        if !add {
            out.fill(0.);
        }
        for block in partial.chunks(width) {
            out.iter_mut().zip(&block[from..]).for_each(|(o, &p)| *o += p);
        }
    }
    Ok(())
}
