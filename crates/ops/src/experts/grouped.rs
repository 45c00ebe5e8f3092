//! Products of consecutive groups of rows with a matrix of their own each.
//!
//! Group e has the rows `offsets[e]..offsets[e + 1]`; the matrices are stacked, E blocks of the same number of rows.
//! Work is handed out in tiles of the output whose size is fixed, so a group with many rows becomes many tiles, and the
//! threads are even however skewed the groups are. Every tile is one product with its whole sum: deterministic.

use crate::gemm::local;
use hymo_tensor::{Mat, MatMut, par};

/// A tile of nt and nn: enough work to outweigh packing its two operands.
const ROWS: usize = 256;
const COLS: usize = 512;
/// Rows and columns of a tile of tn.
const TN: usize = 512;

/// C = A W_eᵀ group by group: a [R, I], w [E O, I], c [R, O].
pub fn nt(c: MatMut<'_, f32>, a: Mat<'_, f32>, w: Mat<'_, f32>, offsets: &[usize]) {
    let out = c.cols();
    let mut tasks = Vec::new();
    for (e, c) in groups(c, offsets).into_iter().enumerate() {
        let (a, w) = (rows(a, offsets, e), w.rows_at(e * out, out));
        for (r, q, c) in tiles(c, ROWS, COLS) {
            tasks.push((a.rows_at(r, c.rows()), w.rows_at(q, c.cols()), c));
        }
    }
    par::each(tasks, |_, (a, w, c)| local::nt(c, a, w, 1., false));
}

/// C = A W_e group by group: a [R, O], w [E O, I], c [R, I].
pub fn nn(c: MatMut<'_, f32>, a: Mat<'_, f32>, w: Mat<'_, f32>, offsets: &[usize]) {
    let out = a.cols();
    let mut tasks = Vec::new();
    for (e, c) in groups(c, offsets).into_iter().enumerate() {
        let (a, w) = (rows(a, offsets, e), w.rows_at(e * out, out));
        for (r, q, c) in tiles(c, ROWS, COLS) {
            tasks.push((a.rows_at(r, c.rows()), w.cols_at(q, c.cols()), c));
        }
    }
    par::each(tasks, |_, (a, w, c)| local::nn(c, a, w, 1., false));
}

/// C_e = A_eᵀ B_e, or C_e += that when `add`. A group without rows gives zeros, or
/// adds nothing.
pub struct Tn<'a> {
    /// [E O, I]
    pub c: MatMut<'a, f32>,
    /// [R, O]
    pub a: Mat<'a, f32>,
    /// [R, I]
    pub b: Mat<'a, f32>,
    /// Whether to add to what is there.
    pub add: bool,
}

/// Several such products at once: each has few tiles, and threads that wait for the last of one would do the next.
pub fn tn<'a>(products: impl IntoIterator<Item = Tn<'a>>, offsets: &[usize]) {
    let mut tasks = Vec::new();
    for Tn { c, a, b, add } in products {
        let blocks: Vec<usize> = (0..offsets.len()).map(|e| e * a.cols()).collect();
        for (e, c) in groups(c, &blocks).into_iter().enumerate() {
            let (a, b) = (rows(a, offsets, e), rows(b, offsets, e));
            for (r, q, c) in tiles(c, TN, TN) {
                tasks.push((a.cols_at(r, c.rows()), b.cols_at(q, c.cols()), c, add));
            }
        }
    }
    par::each(tasks, |_, (a, b, c, add)| local::tn(c, a, b, 1., add));
}

fn rows<'a>(a: Mat<'a, f32>, offsets: &[usize], e: usize) -> Mat<'a, f32> {
    a.rows_at(offsets[e], offsets[e + 1] - offsets[e])
}

/// The rows of each group.
fn groups<'a>(c: MatMut<'a, f32>, offsets: &[usize]) -> Vec<MatMut<'a, f32>> {
    let mut below = c;
    let mut out = Vec::with_capacity(offsets.len());
    for pair in offsets.windows(2) {
        let group;
        (group, below) = below.split_rows(pair[1] - pair[0]);
        out.push(group);
    }
    out
}

/// Tiles with their first row and column.
fn tiles(c: MatMut<'_, f32>, rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize, MatMut<'_, f32>)> {
    let across = c.cols().div_ceil(cols).max(1);
    c.grid(rows, cols).into_iter().enumerate().map(move |(i, c)| (i / across * rows, i % across * cols, c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Noise;

    fn noise(seed: u64, n: usize) -> Vec<f32> {
        Noise::new(seed).normals(n).into_iter().map(|x| x as f32).collect()
    }

    /// Every form against one product a group, across the tiles' edges, with empty groups first, inside and last.
    #[test]
    fn groups_are_products_of_their_own() {
        let (o, i) = (COLS + 5, 9);
        let offsets = [0, 0, 1, ROWS + 2, ROWS + 2, 3 * ROWS, 3 * ROWS];
        let (r, e) = (3 * ROWS, offsets.len() - 1);
        let (x, y, w) = (noise(1, r * i), noise(2, r * o), noise(3, e * o * i));
        let (x, y, w) = (Mat::new(&x, r, i, i), Mat::new(&y, r, o, o), Mat::new(&w, e * o, i, i));
        let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-3);
        let (mut to_o, mut to_i, mut to_w) = (vec![f32::NAN; r * o], vec![f32::NAN; r * i], vec![f32::NAN; e * o * i]);
        nt(MatMut::new(&mut to_o, r, o, o), x, w, &offsets);
        nn(MatMut::new(&mut to_i, r, i, i), y, w, &offsets);
        let c = MatMut::new(&mut to_w, e * o, i, i);
        tn([Tn { c, a: y, b: x, add: false }], &offsets);
        let (mut want_o, mut want_i, mut want_w) = (vec![0.; r * o], vec![0.; r * i], vec![0.; e * o * i]);
        for g in 0..e {
            let (w, from, n) = (w.rows_at(g * o, o), offsets[g], offsets[g + 1] - offsets[g]);
            let (x, y) = (x.rows_at(from, n), y.rows_at(from, n));
            local::nt(MatMut::new(&mut want_o[from * o..], n, o, o), x, w, 1., false);
            local::nn(MatMut::new(&mut want_i[from * i..], n, i, i), y, w, 1., false);
            local::tn(MatMut::new(&mut want_w[g * o * i..], o, i, i), y, x, 1., false);
        }
        assert!(close(&to_o, &want_o) && close(&to_i, &want_i) && close(&to_w, &want_w));
        assert!(to_w[..o * i].iter().all(|&d| d == 0.), "an empty group's weight gradient is exactly zero");
        let before = to_w.clone();
        let c = MatMut::new(&mut to_w, e * o, i, i);
        tn([Tn { c, a: y, b: x, add: true }], &offsets);
        assert!(to_w.iter().zip(&before).all(|(g, b)| (g - 2. * b).abs() < 1e-3));
    }
}
