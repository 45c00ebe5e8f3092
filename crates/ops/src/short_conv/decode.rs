//! Runs of tokens of many sequences, for decoding: each has its own tail, which only the caller moves on ([`shift`]), so that
//! tokens can be taken back.

use super::OP;
use crate::act::silu;
use hymo_tensor::{Ctx, Error, Result, Tensor, each};
use std::ops::Range;

/// Channels in a block of work.
const COLS: usize = 1024;
/// Numbers of a run that are one block: waking a thread takes longer than they do.
const SMALL: usize = 1 << 15;

/// The filters [C, Kc] as [Kc, C], as [`advance`] reads them.
///
/// # Errors
/// Filters that are not a matrix of f32.
pub fn transposed(ctx: &Ctx, w: &Tensor) -> Result<Tensor> {
    w.dims2(OP, "w")?;
    super::fast::transposed(ctx, w)
}

/// y [N, C] of x [N, C] (may be columns of a wider tensor) and filters [Kc, C], f32. Each run of rows, in order and without
/// gaps, goes on from its tail [Kc-1, C], zeros before a sequence's first token. The bits of [`forward`](super::forward).
///
/// # Errors
/// Shapes that do not fit; runs that are not all rows in order.
pub fn advance(ctx: &Ctx, x: &Tensor, w: &Tensor, runs: &[(Range<usize>, &[f32])]) -> Result<Tensor> {
    let [k, c] = w.dims2(OP, "w")?;
    x.expect(OP, "x", &[x.rows(), c])?;
    let mut y = ctx.empty::<f32>(x.dims())?;
    let (w, xs) = (w.view::<f32>()?, x.view::<f32>()?);
    let (mut rest, mut tasks, mut at) = (y.view_mut::<f32>()?, Vec::new(), 0);
    for (rows, tail) in runs {
        if rows.start != at || rows.end > x.rows() || rows.is_empty() || tail.len() != (k - 1) * c {
            let got = format!("rows {rows:?} with a tail of {}", tail.len());
            return Err(Error::value(OP, "runs", got, format!("rows from {at} and tails of {}", (k - 1) * c)));
        }
        let mine;
        (mine, rest) = rest.split_rows(rows.len());
        let cols = if rows.len() * c <= SMALL { c.max(1) } else { COLS };
        let tiles = mine.grid(rows.len(), cols).into_iter().enumerate();
        tasks.extend(tiles.map(|(i, tile)| (rows.clone(), *tail, i * cols, tile)));
        at = rows.end;
    }
    if at != x.rows() {
        return Err(Error::value(OP, "runs", format!("{at} rows"), format!("all {}", x.rows())));
    }
    each!(tasks, |_, (rows, tail, from, mut y)| {
        let n = y.cols();
        for t in 0..rows.len() {
            let y = y.row_mut(t);
            for j in 0..k {
                // The row that lies k - 1 - j tokens back.
                let tap = match (t + j).checked_sub(k - 1) {
                    Some(here) => &xs.row(rows.start + here)[from..from + n],
                    None => &tail[(t + j) * c + from..][..n],
                };
                let w = &w.row(j)[from..from + n];
                if j == 0 {
                    y.iter_mut().zip(tap).zip(w).for_each(|((y, &x), &w)| *y = w * x);
                } else {
                    y.iter_mut().zip(tap).zip(w).for_each(|((y, &x), &w)| *y += w * x);
                }
            }
            y.iter_mut().for_each(|y| *y = silu(*y));
        }
    });
    Ok(y)
}

/// Moves a tail [Kc-1, C] on past rows that were fed to [`advance`].
pub fn shift<'a>(tail: &mut [f32], channels: usize, rows: impl ExactSizeIterator<Item = &'a [f32]>) {
    let (kept, n) = (tail.len() / channels.max(1), rows.len());
    if n < kept {
        tail.copy_within(n * channels.., 0);
    }
    let first = kept.saturating_sub(n);
    let newest = rows.skip(n.saturating_sub(kept));
    tail.chunks_mut(channels.max(1)).skip(first).zip(newest).for_each(|(to, row)| to.copy_from_slice(row));
}
