//! One chunk of one head: what forward and backward both need of it (MATH 1.4, masks of 1.6).

use super::cpu::unit;
use super::{Dims, Views};
use crate::exp::exp_real;
use crate::gemm::local;
use hymo_tensor::{Ctx, MatMut, Real, Tensor};

/// Below this a decay is exactly zero in `f32` and `f64` alike; cut off there, sums of decays stay small enough for exact
/// differences, and no infinity is ever subtracted from another.
const FLOOR: f64 = -1000.;

/// e^x for x <= 0, zero where it is below `share` of the type's exponent range. Numbers near that range's end are a
/// hundred times slower to multiply, and a head that forgets fast is full of them.
#[inline(always)]
fn exp<T: Real>(x: f64, share: f64) -> T {
    if x < share * T::min_positive_value().f64().ln() { T::zero() } else { exp_real(T::of(x)) }
}

/// Between tokens of a chunk: two of these are multiplied with each other (e^-43 in `f32`).
const INSIDE: f64 = 0.5;

/// From a token onto the state, where all else may have been forgotten too (e^-70 in `f32`).
const EDGE: f64 = 0.8;

/// Rows that share a reference point in the decay matrix.
const ANCHOR: usize = 16;

/// `n` tokens from `from` on, of row `b` and head `h`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub b: usize,
    pub h: usize,
    pub from: usize,
    pub n: usize,
}

impl Span {
    /// Row of the batch's matrices that holds token `i` of the chunk.
    #[inline(always)]
    pub fn row(&self, d: Dims, i: usize) -> usize {
        self.b * d.len + self.from + i
    }

    /// First token of the chunk that is of token `i`'s document.
    #[inline(always)]
    fn first<T>(&self, x: &Views<'_, T>, i: usize) -> usize {
        x.docs.start(self.b, self.from + i).saturating_sub(self.from)
    }

    /// Whether token `i` is of the document that the state carried into the chunk belongs to.
    #[inline(always)]
    fn carried<T>(&self, x: &Views<'_, T>, i: usize) -> bool {
        let t = self.from + i;
        x.docs.start(self.b, t) < self.from || x.docs.carried(self.b, t)
    }

    /// b: the sums of the log decays up to each token. In f64, since only differences of them are used.
    #[inline(always)]
    fn sums<T: Real>(&self, x: &Views<'_, T>, d: Dims) -> Vec<f64> {
        let mut sum = 0.;
        let clip = |g: f64| if g < FLOOR { FLOOR } else { g }; // a NaN stays one
        let mut add = |i| {
            sum += clip(x.g.row(self.row(d, i))[self.h].f64());
            sum
        };
        (0..self.n).map(&mut add).collect()
    }

    /// What is left of the carried state after the chunk: e^{b_C}, or zero past a document's end.
    #[inline(always)]
    pub fn keep<T: Real>(&self, x: &Views<'_, T>, d: Dims) -> T {
        // The library's exponential: what is left may be a denormal number, and is all there is.
        let last = self.sums(x, d)[self.n - 1];
        if self.carried(x, self.n - 1) { T::of(last).exp() } else { T::zero() }
    }
}

/// Scratch from the pool; its contents are arbitrary.
pub(super) fn scratch<T: Real>(ctx: &Ctx, len: usize) -> Tensor {
    ctx.empty::<T>(&[len]).expect("invariant: one dimension cannot overflow")
}

/// The next rows x cols elements of `rest`.
#[inline(always)]
pub(super) fn carve<'a, T>(rest: &mut &'a mut [T], rows: usize, cols: usize) -> MatMut<'a, T> {
    MatMut::new(carve_slice(rest, rows * cols), rows, cols, cols)
}

/// The next `n` elements of `rest`.
#[inline(always)]
pub(super) fn carve_slice<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (mine, left) = std::mem::take(rest).split_at_mut(n);
    *rest = left;
    mine
}

/// A chunk's own quantities, in scratch.
pub(super) struct Local<'a, T> {
    /// K over Q̂ = s Q, normalised. [2n, K]
    pub kq: MatMut<'a, T>,
    /// 1 / |k| over 1 / |q|. [2n]
    pub norms: &'a mut [T],
    /// Γ: decay from token j to token i of one document, zero elsewhere. [n, n]
    pub gamma: MatMut<'a, T>,
    /// K Kᵀ ⊙ Γ below the diagonal, over P = Q̂ Kᵀ ⊙ Γ with the diagonal. [2n, n]
    pub mp: MatMut<'a, T>,
    /// A = diag(β) M. [n, n]
    pub a: MatMut<'a, T>,
    /// [n]
    pub beta: &'a mut [T],
    /// e^b where the document was carried in, else 0. [n]
    pub e_in: &'a mut [T],
    /// e^{b_C - b} where the document reaches the chunk's end, else 0. [n]
    pub e_out: &'a mut [T],
}

impl<'a, T: Real> Local<'a, T> {
    /// Elements of scratch for a chunk of `n`.
    pub fn len(n: usize, d: Dims) -> usize {
        2 * n * d.d_k + 2 * n + 4 * n * n + 3 * n
    }

    #[inline(always)]
    pub fn new(x: &Views<'_, T>, d: Dims, s: Span, rest: &mut &'a mut [T]) -> Self {
        let n = s.n;
        let mut l = Local {
            kq: carve(rest, 2 * n, d.d_k),
            norms: carve_slice(rest, 2 * n),
            gamma: carve(rest, n, n),
            mp: carve(rest, 2 * n, n),
            a: carve(rest, n, n),
            beta: carve_slice(rest, n),
            e_in: carve_slice(rest, n),
            e_out: carve_slice(rest, n),
        };
        for i in 0..n {
            let row = s.row(d, i);
            l.norms[i] = unit(l.kq.row_mut(i), x.k(row, s.h), d.l2norm, T::one());
            l.norms[n + i] = unit(l.kq.row_mut(n + i), x.q(row, s.h), d.l2norm, T::of(d.scale));
            l.beta[i] = x.beta.row(row)[s.h];
        }
        l.decays(x, d, s);
        local::nt(l.mp.reborrow(), l.kq.as_mat(), l.kq.as_mat().rows_at(0, n), T::one(), false);
        for i in 0..n {
            let (gamma, m, a) = (l.gamma.row(i), l.mp.row_mut(i), l.a.row_mut(i));
            m[..i].iter_mut().zip(gamma).for_each(|(m, &e)| *m *= e);
            m[i..].fill(T::zero());
            a.iter_mut().zip(&*m).for_each(|(a, &m)| *a = l.beta[i] * m);
            // Γ is zero where P must be; the product there is finite, since |k| and |q| are.
            l.mp.row_mut(n + i).iter_mut().zip(gamma).for_each(|(p, &e)| *p *= e);
        }
        l
    }

    /// Γ and the two edges. Every exponent is a difference of f64 sums and never positive. Between blocks of rows
    /// e^{b_i - b_j} is the product of the decays to and from the block's first token: fewer exponentials, same sign.
    #[inline(always)]
    fn decays(&mut self, x: &Views<'_, T>, d: Dims, s: Span) {
        let (n, b) = (s.n, s.sums(x, d));
        let e = |from: f64, to: f64| exp::<T>(to - from, INSIDE);
        let to = |to: f64, out: &mut [T], from: &[f64]| {
            out.iter_mut().zip(from).for_each(|(out, &from)| *out = e(from, to));
        };
        let mut column = vec![T::zero(); n];
        for block in (0..n).step_by(ANCHOR) {
            let end = (block + ANCHOR).min(n);
            let earliest = s.first(x, block).min(block);
            to(b[block], &mut column[earliest..block], &b[earliest..]);
            for i in block..end {
                let (first, row) = (s.first(x, i), self.gamma.row_mut(i));
                let to_here = e(b[block], b[i]);
                row.fill(T::zero());
                if first < block {
                    row[first..block].iter_mut().zip(&column[first..]).for_each(|(e, &c)| *e = to_here * c);
                }
                let first = first.max(block);
                to(b[i], &mut row[first..=i], &b[first..]);
            }
        }
        let ending = s.first(x, n - 1);
        for i in 0..n {
            self.e_in[i] = if s.carried(x, i) { e(0., b[i]) } else { T::zero() };
            self.e_out[i] = if i >= ending { exp(b[n - 1] - b[i], EDGE) } else { T::zero() };
        }
    }
}

/// The tiles of `m` [B T, H width], one a chunk, in the order row, head, chunk.
pub(super) fn tiles<'a, T>(m: MatMut<'a, T>, d: Dims, width: usize) -> Vec<MatMut<'a, T>> {
    let mut out = Vec::with_capacity(d.batch * d.heads * d.chunks());
    for row in m.row_blocks(d.len.max(1)) {
        let mut heads: Vec<Vec<_>> = (0..d.heads).map(|_| Vec::with_capacity(d.chunks())).collect();
        for (i, tile) in row.grid(d.chunk, width).into_iter().enumerate() {
            heads[i % d.heads].push(tile);
        }
        out.extend(heads.into_iter().flatten());
    }
    out
}

/// The chunks of every row and head, in the order of [`tiles`].
pub(super) fn spans(d: Dims) -> Vec<Span> {
    let mut out = Vec::with_capacity(d.batch * d.heads * d.chunks());
    for (b, h) in (0..d.batch).flat_map(|b| (0..d.heads).map(move |h| (b, h))) {
        out.extend((0..d.len).step_by(d.chunk).map(|t| Span { b, h, from: t, n: d.chunk.min(d.len - t) }));
    }
    out
}

/// Cuts `items`, `n` after `n`: a row and head's chunks.
pub(super) fn by_head<I>(items: impl IntoIterator<Item = I>, n: usize) -> Vec<Vec<I>> {
    let mut out: Vec<Vec<I>> = Vec::new();
    for (i, item) in items.into_iter().enumerate() {
        if i % n == 0 {
            out.push(Vec::with_capacity(n));
        }
        out.last_mut().expect("invariant: pushed above").push(item);
    }
    out
}
