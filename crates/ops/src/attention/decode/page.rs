//! One page of a cache against the queries of one token: scores, the running softmax, the sums of values. Several heads meet a
//! key at once; each head's sums have an order of their own, whatever stands beside it.

// Loops over registers are counted: a closure of an adapter would not be compiled for the vector units.
#![allow(clippy::needless_range_loop)]

use super::PAGE;
use crate::dots;
use crate::exp::exp;
use crate::lanes::largest;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Heads that meet a key at once.
const HEADS: usize = 4;
/// Keys that a head's query meets at once.
const KEYS: usize = 2;
/// Registers of a head's sums that stay while a page goes by.
const COLS: usize = 2;

/// The running softmax of several queries.
pub(super) struct Sums {
    max: Vec<f32>,
    sum: Vec<f32>,
    acc: Vec<f32>,
    width: usize,
}

impl Sums {
    pub fn new(n: usize, width: usize) -> Self {
        Sums { max: vec![f32::NEG_INFINITY; n], sum: vec![0.; n], acc: vec![0.; n * width], width }
    }

    /// Query `i`'s weighted values.
    #[inline(always)]
    pub fn finish(&mut self, i: usize) -> &[f32] {
        let (scale, acc) = (self.sum[i].recip(), &mut self.acc[i * self.width..(i + 1) * self.width]);
        acc.iter_mut().for_each(|a| *a *= scale);
        acc
    }

    /// Scores become weights e^(s - max), and what was summed before shrinks to the new maximum.
    #[inline(always)]
    fn rescale(&mut self, i: usize, scores: &mut [f32]) {
        let max = self.max[i].max(largest(scores));
        let shrink = exp(self.max[i] - max);
        scores.iter_mut().for_each(|s| *s = exp(*s - max));
        self.sum[i] = self.sum[i] * shrink + crate::lanes::sum(scores, |p| p);
        self.max[i] = max;
        if shrink != 1. {
            self.acc[i * self.width..(i + 1) * self.width].iter_mut().for_each(|a| *a *= shrink);
        }
    }
}

/// The heads of one token, which all see the same keys.
pub(super) struct Walk<'a> {
    pub sums: &'a mut Sums,
    /// The first head's place among the sums.
    pub first: usize,
    /// Their queries, one after the other, content before rotary numbers.
    pub queries: &'a [f32],
    /// Numbers of a query, and of them content.
    pub sizes: [usize; 2],
    pub scale: f32,
    /// Cached rows of `width` numbers, and the columns of content key, rotary key and value.
    pub rows: &'a [f32],
    pub width: usize,
    pub columns: [Range<usize>; 3],
}

impl WithSimd for Walk<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<V: Simd>(mut self, v: V) {
        let heads = self.queries.len() / self.sizes[0];
        let mut h = 0;
        while h + HEADS <= heads {
            self.heads::<V, HEADS>(v, h);
            h += HEADS;
        }
        while h < heads {
            self.heads::<V, 1>(v, h);
            h += 1;
        }
    }
}

impl Walk<'_> {
    /// H heads from `h` on.
    #[inline(always)]
    fn heads<V: Simd, const H: usize>(&mut self, v: V, h: usize) {
        let keys = self.rows.len() / self.width;
        let mut scores = [[0.; PAGE]; H];
        let mut t = 0;
        while t + KEYS <= keys {
            self.scores::<V, H, KEYS>(v, h, t, &mut scores);
            t += KEYS;
        }
        while t < keys {
            self.scores::<V, H, 1>(v, h, t, &mut scores);
            t += 1;
        }
        for j in 0..H {
            self.sums.rescale(self.first + h + j, &mut scores[j][..keys]);
        }
        let (width, lanes) = (self.sums.width, V::F32_LANES);
        let mut col = 0;
        while col + COLS * lanes <= width {
            self.values::<V, H, COLS>(v, h, col, &scores, keys);
            col += COLS * lanes;
        }
        while col + lanes <= width {
            self.values::<V, H, 1>(v, h, col, &scores, keys);
            col += lanes;
        }
        if col < width {
            self.last_values::<V, H>(v, h, col, &scores, keys);
        }
    }

    /// Scores of K keys from `t` on.
    #[inline(always)]
    fn scores<V: Simd, const H: usize, const K: usize>(&self, v: V, h: usize, t: usize, to: &mut [[f32; PAGE]; H]) {
        let [size, content] = self.sizes;
        let (mut q, mut q_r) = ([&[] as &[f32]; H], [&[] as &[f32]; H]);
        for j in 0..H {
            (q[j], q_r[j]) = self.queries[(h + j) * size..][..size].split_at(content);
        }
        let (mut k, mut k_r) = ([&[] as &[f32]; K], [&[] as &[f32]; K]);
        for i in 0..K {
            let row = &self.rows[(t + i) * self.width..][..self.width];
            (k[i], k_r[i]) = (&row[self.columns[0].clone()], &row[self.columns[1].clone()]);
        }
        let sums = dots::add(v, [[v.splat_f32s(0.); K]; H], q, k);
        let sums = dots::add(v, sums, q_r, k_r);
        for j in 0..H {
            for i in 0..K {
                to[j][t + i] = self.scale * v.reduce_sum_f32s(sums[j][i]);
            }
        }
    }

    /// C registers of values from column `col` on.
    #[inline(always)]
    fn values<V: Simd, const H: usize, const C: usize>(
        &mut self,
        v: V,
        h: usize,
        col: usize,
        weights: &[[f32; PAGE]; H],
        keys: usize,
    ) {
        let (n, width, from) = (C * V::F32_LANES, self.sums.width, self.columns[2].start + col);
        let mut acc = [[v.splat_f32s(0.); C]; H];
        for j in 0..H {
            let own = V::as_simd_f32s(&self.sums.acc[(self.first + h + j) * width + col..][..n]).0;
            acc[j][..C].copy_from_slice(&own[..C]);
        }
        for (t, row) in self.rows.chunks_exact(self.width).enumerate().take(keys.min(PAGE)) {
            let row = &V::as_simd_f32s(&row[from..from + n]).0[..C];
            for j in 0..H {
                let weight = v.splat_f32s(weights[j][t]);
                for c in 0..C {
                    acc[j][c] = v.mul_add_e_f32s(weight, row[c], acc[j][c]);
                }
            }
        }
        for j in 0..H {
            let own = V::as_mut_simd_f32s(&mut self.sums.acc[(self.first + h + j) * width + col..][..n]).0;
            own[..C].copy_from_slice(&acc[j]);
        }
    }

    /// The columns of values from `col` on that fill no register.
    #[inline(always)]
    fn last_values<V: Simd, const H: usize>(
        &mut self,
        v: V,
        h: usize,
        col: usize,
        weights: &[[f32; PAGE]; H],
        keys: usize,
    ) {
        let (width, value) = (self.sums.width, self.columns[2].clone());
        for j in 0..H {
            let own = &mut self.sums.acc[(self.first + h + j) * width..][col..width];
            let mut acc = v.partial_load_f32s(own);
            for (t, row) in self.rows.chunks_exact(self.width).enumerate().take(keys.min(PAGE)) {
                let row = v.partial_load_f32s(&row[value.start + col..value.end]);
                acc = v.mul_add_e_f32s(v.splat_f32s(weights[j][t]), row, acc);
            }
            v.partial_store_f32s(own, acc);
        }
    }
}
