//! Products of rows with rows in tiles of registers.
//!
//! An element's sum runs along the row in as many lanes as a register has, each product fused into it, the last registers
//! filled up with zeros; then the lanes are added. That is one order for every tile and any number of rows: a row's bits do
//! not depend on what stands beside it (HAZARD 20). They do depend on the processor's registers, as matrix kernels' do.

// Loops over registers are counted: a closure of an adapter would not be compiled for the vector units.
#![allow(clippy::needless_range_loop)]

use super::kept::{Kept, WORDS};
use crate::dots;
use hymo_tensor::{Mat, MatMut};
use pulp::bytemuck::cast_slice;
use pulp::{Simd, WithSimd};

/// Numbers of the largest group.
const GROUP: usize = 4 * WORDS;
/// Rows of x that stay in the second-level cache beside a block's weights.
const ROWS: usize = 64;

/// Few rows of x: each row of W is widened in registers on its way from memory, and multiplied with all rows of x.
/// Neighbouring rows of W come one after the other: several at once lie in one page of memory, and the processor then
/// fetches ahead of none.
pub struct Few<'a, W: Kept> {
    pub x: Mat<'a, f32>,
    pub w: Mat<'a, W::Word>,
    pub y: MatMut<'a, f32>,
}

impl<W: Kept> WithSimd for Few<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<V: Simd>(self, v: V) {
        match self.x.rows() {
            0 => {}
            // A sum waits for its last product, and a row's instructions fill the processor's window: as many sums side by
            // side as hide that. Unwidened rows are large enough for memory alone to be waited for.
            1 if W::PER > 1 => self.rows::<V, 1, 4>(v),
            2 if W::PER > 1 => self.rows::<V, 2, 4>(v),
            3 if W::PER > 1 => self.rows::<V, 3, 2>(v),
            1 => self.rows::<V, 1, 1>(v),
            2 => self.rows::<V, 2, 1>(v),
            3 => self.rows::<V, 3, 1>(v),
            4 => self.rows::<V, 4, 1>(v),
            5 => self.rows::<V, 5, 1>(v),
            6 => self.rows::<V, 6, 1>(v),
            7 => self.rows::<V, 7, 1>(v),
            _ => self.rows::<V, 8, 1>(v),
        }
    }
}

impl<W: Kept> Few<'_, W> {
    /// All R rows of x with the rows of W, S at a time, each from its own part of the block.
    #[inline(always)]
    fn rows<V: Simd, const R: usize, const S: usize>(mut self, v: V) {
        let mut x: [&[f32]; R] = [&[]; R];
        for r in 0..R {
            x[r] = self.x.row(r);
        }
        let part = self.w.rows() / S;
        for o in 0..part {
            let mut w: [&[u32]; S] = [&[]; S];
            for s in 0..S {
                w[s] = cast_slice(self.w.row(s * part + o));
            }
            let sums = sums::<V, W, R, S>(v, x, w);
            for r in 0..R {
                for s in 0..S {
                    self.y.row_mut(r)[s * part + o] = v.reduce_sum_f32s(sums[r][s]);
                }
            }
        }
        for o in S * part..self.w.rows() {
            let sums = sums::<V, W, R, 1>(v, x, [cast_slice(self.w.row(o))]);
            for r in 0..R {
                self.y.row_mut(r)[o] = v.reduce_sum_f32s(sums[r][0]);
            }
        }
    }
}

/// x wᵀ, unfolded.
#[inline(always)]
fn sums<V: Simd, W: Kept, const R: usize, const S: usize>(v: V, x: [&[f32]; R], w: [&[u32]; S]) -> [[V::f32s; S]; R] {
    let group = WORDS * W::PER;
    let whole = x[0].len() / group;
    let (mut xs, mut ws) = ([&[] as &[f32]; R], [&[] as &[u32]; S]);
    for r in 0..R {
        xs[r] = &x[r][..whole * group];
    }
    for s in 0..S {
        ws[s] = &w[s][..whole * WORDS];
    }
    let sums = groups::<V, W, R, S>(v, [[v.splat_f32s(0.); S]; R], xs, ws);
    if whole * group == x[0].len() {
        return sums;
    }
    let (mut x_end, mut w_end) = ([[0f32; GROUP]; R], [[0u32; WORDS]; S]);
    for (to, x) in x_end.iter_mut().zip(x) {
        let end = &x[whole * group..];
        to[..end.len()].copy_from_slice(end);
    }
    for (to, w) in w_end.iter_mut().zip(w) {
        let end = &w[whole * WORDS..];
        to[..end.len()].copy_from_slice(end);
    }
    for r in 0..R {
        xs[r] = &x_end[r][..group];
    }
    for s in 0..S {
        ws[s] = &w_end[s];
    }
    groups::<V, W, R, S>(v, sums, xs, ws)
}

/// sums + x wᵀ over whole groups.
#[inline(always)]
fn groups<V: Simd, W: Kept, const R: usize, const S: usize>(
    v: V,
    mut sums: [[V::f32s; S]; R],
    x: [&[f32]; R],
    w: [&[u32]; S],
) -> [[V::f32s; S]; R] {
    let n = WORDS / V::F32_LANES;
    let groups = w[0].len() / WORDS;
    let (mut xs, mut ws) = ([&[] as &[V::f32s]; R], [&[] as &[V::u32s]; S]);
    for r in 0..R {
        xs[r] = &V::as_simd_f32s(x[r]).0[..groups * n * W::PER];
    }
    for s in 0..S {
        ws[s] = &V::as_simd_u32s(w[s]).0[..groups * n];
    }
    for g in 0..groups {
        for part in 0..W::PER {
            for i in 0..n {
                let mut wide = [v.splat_f32s(0.); S];
                for s in 0..S {
                    wide[s] = W::part(v, ws[s][g * n + i], part);
                }
                for r in 0..R {
                    let x = xs[r][(g * W::PER + part) * n + i];
                    for s in 0..S {
                        sums[r][s] = v.mul_add_e_f32s(x, wide[s], sums[r][s]);
                    }
                }
            }
        }
    }
    sums
}

/// A block of W widened into the second-level cache, then multiplied with all rows of x, some after others.
pub struct Many<'a, W: Kept> {
    pub x: Mat<'a, f32>,
    pub w: Mat<'a, W::Word>,
    /// [rows of w, columns of x], to be written.
    pub wide: MatMut<'a, f32>,
    pub y: MatMut<'a, f32>,
}

impl<W: Kept> WithSimd for Many<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<V: Simd>(mut self, v: V) {
        for o in 0..self.w.rows() {
            widen::<V, W>(v, self.w.row(o), self.wide.row_mut(o));
        }
        let rows = self.x.rows();
        for from in (0..rows).step_by(ROWS) {
            let to = rows.min(from + ROWS);
            // As many sums as registers hold beside what is multiplied.
            match V::REGISTER_COUNT {
                32.. => self.panel::<V, 4, 6>(v, from, to),
                _ => self.panel::<V, 4, 3>(v, from, to),
            }
        }
    }
}

#[inline(always)]
fn widen<V: Simd, W: Kept>(v: V, row: &[W::Word], to: &mut [f32]) {
    let whole = to.len() / (WORDS * W::PER);
    let n = WORDS / V::F32_LANES;
    let (head, end) = to.split_at_mut(whole * WORDS * W::PER);
    let words = V::as_simd_u32s(cast_slice(&row[..whole * WORDS])).0;
    let groups = V::as_mut_simd_f32s(head).0.chunks_exact_mut(n * W::PER);
    for (words, to) in words.chunks_exact(n).zip(groups) {
        for part in 0..W::PER {
            for i in 0..n {
                to[part * n + i] = W::part(v, words[i], part);
            }
        }
    }
    let at = whole * WORDS * W::PER;
    end.iter_mut().enumerate().for_each(|(k, to)| *to = W::number(row, at + k));
}

impl<W: Kept> Many<'_, W> {
    /// Rows `from..to` of x with all rows of W, R by S at a time.
    #[inline(always)]
    fn panel<V: Simd, const R: usize, const S: usize>(&mut self, v: V, from: usize, to: usize) {
        let mut i = from;
        while i + R <= to {
            self.strip::<V, R, S>(v, i);
            i += R;
        }
        while i < to {
            self.strip::<V, 1, S>(v, i);
            i += 1;
        }
    }

    /// R rows of x from `i` on, which stay in the first-level cache, with all rows of W.
    #[inline(always)]
    fn strip<V: Simd, const R: usize, const S: usize>(&mut self, v: V, i: usize) {
        let w = self.wide.as_mat();
        let x: [&[f32]; R] = std::array::from_fn(|r| self.x.row(i + r));
        let mut o = 0;
        while o + S <= w.rows() {
            let sums = dots::add(v, [[v.splat_f32s(0.); S]; R], x, std::array::from_fn(|s| w.row(o + s)));
            put(v, &mut self.y, (i, o), sums);
            o += S;
        }
        while o < w.rows() {
            let sums = dots::add(v, [[v.splat_f32s(0.)]; R], x, [w.row(o)]);
            put(v, &mut self.y, (i, o), sums);
            o += 1;
        }
    }
}

#[inline(always)]
fn put<V: Simd, const R: usize, const S: usize>(
    v: V,
    y: &mut MatMut<'_, f32>,
    (i, o): (usize, usize),
    sums: [[V::f32s; S]; R],
) {
    for (r, sums) in sums.into_iter().enumerate() {
        for (s, sum) in sums.into_iter().enumerate() {
            y.row_mut(i + r)[o + s] = v.reduce_sum_f32s(sum);
        }
    }
}
