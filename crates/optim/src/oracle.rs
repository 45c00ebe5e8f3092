//! Plain loops for both optimizers, one formula a line, that the fast paths are checked against. In the order of MATH,
//! sections 6.2, 6.3 and 7; a tall matrix is transposed, as it says there.

use crate::normuon::coefficients;
use hymo_model::config::{AdamWConfig, NorMuonConfig, Orth};
use hymo_tensor::Real;

/// What a step of one tensor takes besides its numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The step's number, from 1.
    pub number: u64,
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient.
    pub clip: f64,
}

/// A product of `p [n, k]` and `q [k, m]`.
fn product<T: Real>(p: &[T], q: &[T], [n, k, m]: [usize; 3]) -> Vec<T> {
    let mut out = Vec::with_capacity(n * m);
    for i in 0..n {
        out.extend((0..m).map(|j| (0..k).map(|l| p[i * k + l] * q[l * m + j]).sum::<T>()));
    }
    out
}

fn transposed<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..cols).flat_map(|j| (0..rows).map(move |i| x[i * cols + j])).collect()
}

/// Orth(X) of `x [rows, cols]`.
#[must_use]
pub fn orthogonalise<T: Real>(orth: Orth, x: &[T], rows: usize, cols: usize) -> Vec<T> {
    if rows > cols {
        let flat = orthogonalise(orth, &transposed(x, rows, cols), cols, rows);
        return transposed(&flat, cols, rows);
    }
    let (steps, over) = coefficients(orth);
    let norm = x.iter().map(|&x| x * x).sum::<T>().sqrt();
    let mut x: Vec<T> = x.iter().map(|&x| x / (T::of(over) * norm + T::of(1e-7))).collect();
    for step in steps {
        let [a, b, c] = step.map(T::of);
        let gram = product(&x, &transposed(&x, rows, cols), [rows, cols, rows]);
        let square = product(&gram, &gram, [rows, rows, rows]);
        let poly: Vec<T> = gram.iter().zip(&square).map(|(&g, &s)| b * g + c * s).collect();
        let more = product(&poly, &x, [rows, rows, cols]);
        x = x.iter().zip(more).map(|(&x, more)| a * x + more).collect();
    }
    x
}

/// A step of NorMuon on one whole matrix: `w`, `g`, `m` `[v.len(), n]`, `v` `[rows]`.
pub fn normuon<T: Real>(config: &NorMuonConfig, step: &Step, w: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    let (rows, cols) = (v.len(), w.len() / v.len());
    let [b1, b2] = [config.beta1, config.beta2].map(T::of);
    let mut x = Vec::with_capacity(w.len());
    for (m, &g) in m.iter_mut().zip(g) {
        let g = g * T::of(step.clip);
        *m = b1 * *m + (T::one() - b1) * g;
        x.push(if config.nesterov { (T::one() - b1) * g + b1 * *m } else { *m });
    }
    let mut o = orthogonalise(config.orth, &x, rows, cols);
    for (o, v) in o.chunks_mut(cols).zip(v) {
        let mean = o.iter().map(|&o| o * o).sum::<T>() / T::of(cols as f64);
        *v = b2 * *v + (T::one() - b2) * mean;
        o.iter_mut().for_each(|o| *o /= v.sqrt() + T::of(config.eps));
    }
    let norm = o.iter().map(|&o| o * o).sum::<T>().sqrt();
    let scale = T::of(config.rms) * T::of((rows * cols) as f64).sqrt() / (norm + T::of(1e-10));
    for (w, o) in w.iter_mut().zip(o) {
        let u = scale * o;
        let mask = !config.cautious_decay || u * *w >= T::zero();
        let decay = if mask { T::of(step.lr * step.weight_decay) * *w } else { T::zero() };
        *w = *w - decay - T::of(step.lr) * u;
    }
}

/// A step of Cautious AdamW on one tensor, all slices of its length.
pub fn adamw<T: Real>(config: &AdamWConfig, step: &Step, w: &mut [T], g: &[T], m: &mut [T], v: &mut [T]) {
    let [b1, b2] = [config.beta1, config.beta2].map(T::of);
    let g: Vec<T> = g.iter().map(|&g| g * T::of(step.clip)).collect();
    for ((m, v), &g) in m.iter_mut().zip(v.iter_mut()).zip(&g) {
        *m = b1 * *m + (T::one() - b1) * g;
        *v = b2 * *v + (T::one() - b2) * g * g;
    }
    let open: Vec<bool> = m.iter().zip(&g).map(|(&m, &g)| !config.cautious || m * g > T::zero()).collect();
    let mean = T::of(open.iter().filter(|&&o| o).count() as f64 / w.len() as f64).max(T::of(1e-3));
    let t = step.number as f64;
    for (((w, open), &m), &v) in w.iter_mut().zip(open).zip(m.iter()).zip(v.iter()) {
        let m = m / T::of(1.0 - libm::pow(config.beta1, t));
        let v = v / T::of(1.0 - libm::pow(config.beta2, t));
        let u = if open { m / (v.sqrt() + T::of(config.eps)) } else { T::zero() };
        *w = *w - T::of(step.lr * step.weight_decay) * *w - T::of(step.lr) * u / mean;
    }
}
