//! The fast path: blocks of tokens by blocks of channels, the channel innermost, the filters transposed to [Kc, C]
//! once. Every term is summed, a dropped one as a product with a row of zeros: one order of sums for every token, so a
//! document cut anywhere keeps its bits.

use super::Saved;
use crate::Docs;
use crate::act::{silu, silu_grad};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Result, Tensor, each};

/// Tokens in a block: part of the result (d_w is summed block by block), so it must not depend on threads. The
/// backward computes Kc-1 tokens beyond each block twice.
const ROWS: usize = 64;
/// Channels in a block: the rows in use at once stay in the first-level cache.
const COLS: usize = 512;

/// One block of channels: where a tap's row of x comes from.
struct Source<'a> {
    docs: &'a Docs,
    x: Mat<'a, f32>,
    tail: Option<Mat<'a, f32>>,
    /// Kc rows of the filters' taps.
    w: Mat<'a, f32>,
    zeros: &'a [f32],
}

impl<'a> Source<'a> {
    /// Tokens of the same document before token `n`, in this piece.
    #[inline(always)]
    fn history(&self, n: usize) -> usize {
        let (b, t) = (n / self.docs.len(), n % self.docs.len());
        t - self.docs.start(b, t)
    }

    /// The rows that token `n` sums over, oldest first.
    #[inline(always)]
    fn taps(&self, n: usize, out: &mut Vec<&'a [f32]>) {
        let (k, history) = (self.w.rows(), self.history(n));
        let (b, t) = (n / self.docs.len(), n % self.docs.len());
        out.clear();
        out.extend((0..k).rev().map(|back| match self.tail {
            _ if back <= history => self.x.row(n - back),
            Some(tail) if self.docs.carried(b, t) => tail.row(b * (k - 1) + (k - 1) + t - back),
            _ => self.zeros,
        }));
    }
}

/// out = Σ_j w_j ⊙ taps_j.
#[inline(always)]
fn weigh(out: &mut [f32], taps: &[&[f32]], w: impl Fn(usize) -> usize, rows: Mat<'_, f32>) {
    if let [a, b, c, d] = taps {
        let w = [rows.row(w(0)), rows.row(w(1)), rows.row(w(2)), rows.row(w(3))];
        return weigh_four(out, [a, b, c, d], w);
    }
    out.fill(0.);
    for (j, tap) in taps.iter().enumerate() {
        out.iter_mut().zip(*tap).zip(rows.row(w(j))).for_each(|((y, &x), &w)| *y += w * x);
    }
}

/// The usual kernel in one pass.
#[inline(always)]
fn weigh_four(out: &mut [f32], x: [&[f32]; 4], w: [&[f32]; 4]) {
    let n = out.len();
    let (x, w) = (x.map(|x| &x[..n]), w.map(|w| &w[..n]));
    for (i, y) in out.iter_mut().enumerate() {
        *y = w[0][i] * x[0][i] + w[1][i] * x[1][i] + w[2][i] * x[2][i] + w[3][i] * x[3][i];
    }
}

pub(super) fn transposed(ctx: &Ctx, w: &Tensor) -> Result<Tensor> {
    let w = w.view::<f32>()?;
    let mut out = ctx.empty::<f32>(&[w.cols(), w.rows()])?;
    let mut to = out.view_mut::<f32>()?;
    for j in 0..w.cols() {
        to.row_mut(j).iter_mut().enumerate().for_each(|(c, to)| *to = w.row(c)[j]);
    }
    Ok(out)
}

/// The sources of all blocks of channels.
fn sources<'a>(saved: &'a Saved, w: &'a Tensor, zeros: &'a [f32]) -> Result<Vec<Source<'a>>> {
    let (x, w) = (saved.x.view::<f32>()?, w.view::<f32>()?);
    let tail = saved.tail.as_ref().map(Tensor::view::<f32>).transpose()?.filter(|t| t.rows() > 0);
    let source = |from: usize| {
        let n = COLS.min(x.cols() - from);
        let tail = tail.map(|t| t.cols_at(from, n));
        Source { docs: &saved.docs, x: x.cols_at(from, n), tail, w: w.cols_at(from, n), zeros: &zeros[..n] }
    };
    Ok((0..x.cols()).step_by(COLS).map(source).collect())
}

pub(super) fn forward(ctx: &Ctx, saved: &Saved, w: &Tensor) -> Result<Tensor> {
    let mut y = ctx.empty::<f32>(saved.x.dims())?;
    let (w, zeros) = (transposed(ctx, w)?, [0.; COLS]);
    let sources = sources(saved, &w, &zeros)?;
    each!(y.view_mut::<f32>()?.grid(ROWS, COLS), |tile, mut y| {
        let (block, src) = (tile / sources.len(), &sources[tile % sources.len()]);
        let mut taps = Vec::with_capacity(src.w.rows());
        for i in 0..y.rows() {
            src.taps(block * ROWS + i, &mut taps);
            weigh(y.row_mut(i), &taps, |j| j, src.w);
            y.row_mut(i).iter_mut().for_each(|y| *y = silu(*y));
        }
    });
    Ok(y)
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (n, c, k) = (saved.x.rows(), w.rows(), w.cols());
    let (w_t, zeros) = (transposed(ctx, w)?, [0.; COLS]);
    let (sources, d_y) = (sources(saved, &w_t, &zeros)?, d_y.view::<f32>()?);
    let target = d_x.target::<f32>(ctx)?;
    let add = target.as_ref().is_some_and(|t| t.1);
    let blocks = n.div_ceil(ROWS);
    let tiles: Vec<Option<MatMut<'_, f32>>> = match target {
        Some((d_x, _)) => d_x.grid(ROWS, COLS).into_iter().map(Some).collect(),
        None => (0..blocks * sources.len()).map(|_| None).collect(),
    };
    // One pass over the tokens gives d_x and, for each block, its share of d_w.
    let mut partial = ctx.empty::<f32>(&[blocks.max(1) * k, c])?;
    let shares = partial.view_mut::<f32>()?.grid(k, COLS);
    each!(tiles.into_iter().zip(shares).collect(), |tile, (d_x, d_w)| {
        let (block, at) = (tile / sources.len(), tile % sources.len());
        let src = &sources[at];
        let d_y = d_y.cols_at(at * COLS, src.zeros.len());
        Block { src, d_y, from: block * ROWS, to: (block * ROWS + ROWS).min(n) }.run(d_x, d_w, add);
    });
    if let Some((mut d_w, add)) = d_w.target::<f32>(ctx)? {
        let mut sums = vec![0.; k * c];
        for share in partial.flat::<f32>()?.chunks(k * c).take(blocks) {
            sums.iter_mut().zip(share).for_each(|(s, &d)| *s += d);
        }
        for c_at in 0..c {
            for (j, out) in d_w.row_mut(c_at).iter_mut().enumerate() {
                *out = sums[j * c + c_at] + if add { *out } else { 0. };
            }
        }
    }
    Ok(())
}

/// Tokens `from..to` by one block of channels.
struct Block<'a> {
    src: &'a Source<'a>,
    d_y: Mat<'a, f32>,
    from: usize,
    to: usize,
}

impl Block<'_> {
    /// d_p of the block's tokens, and of those after it that its own tokens reach; with them d_x and this block's d_w.
    #[inline(always)]
    fn run(&self, mut d_x: Option<MatMut<'_, f32>>, mut d_w: MatMut<'_, f32>, add: bool) {
        let (src, k, width) = (self.src, self.src.w.rows(), self.src.zeros.len());
        let mut taps = Vec::with_capacity(k);
        let mut d_p = vec![0.; (self.to - self.from + k - 1) * width];
        let mut end = self.from;
        d_w.fill(0.);
        for (n, d_p) in (self.from..src.x.rows()).zip(d_p.chunks_mut(width)) {
            let beyond = n >= self.to;
            if beyond && (d_x.is_none() || src.history(n) <= n - self.to) {
                break;
            }
            src.taps(n, &mut taps);
            weigh(d_p, &taps, |j| j, src.w);
            d_p.iter_mut().zip(self.d_y.row(n)).for_each(|(p, &d)| *p = d * silu_grad(*p));
            if !beyond {
                for (j, tap) in taps.iter().enumerate() {
                    d_w.row_mut(j).iter_mut().zip(*tap).zip(&*d_p).for_each(|((w, &x), &d)| *w += d * x);
                }
            }
            end = n + 1;
        }
        let Some(d_x) = &mut d_x else { return };
        let (mut later, mut row) = (Vec::with_capacity(k), vec![0.; width]);
        for n in self.from..self.to {
            // Token n + i has n as a tap exactly when its document began i or more tokens before it.
            later.clear();
            later.extend((0..k).map(|i| match n + i {
                m if m < end && src.history(m) >= i => &d_p[(m - self.from) * width..][..width],
                _ => src.zeros,
            }));
            weigh(&mut row, &later, |i| k - 1 - i, src.w);
            let to = d_x.row_mut(n - self.from).iter_mut().zip(&row);
            if add { to.for_each(|(d, &r)| *d += r) } else { to.for_each(|(d, &r)| *d = r) }
        }
    }
}
