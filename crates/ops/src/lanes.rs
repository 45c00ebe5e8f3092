//! Sums over a row in an order that whole vectors can follow, the same on every machine.

use hymo_tensor::Real;

/// Σ term(i) for i in 0..n. Sixteen sums run side by side, then fold in order.
#[inline(always)]
pub fn lanes<T: Real>(n: usize, term: impl Fn(usize) -> T) -> T {
    let mut sums = [T::zero(); 16];
    let whole = n / 16 * 16;
    for i in (0..whole).step_by(16) {
        for (l, s) in sums.iter_mut().enumerate() {
            *s += term(i + l);
        }
    }
    for i in whole..n {
        sums[i - whole] += term(i);
    }
    sums.iter().copied().sum()
}

/// Σ a b; `b` is at least as long as `a`.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let b = &b[..a.len()];
    lanes(a.len(), |i| a[i] * b[i])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Noise;

    #[test]
    fn dot_matches_double_precision() {
        for n in [0, 1, 15, 16, 17, 100] {
            let x: Vec<f32> = Noise::new(n as u64).normals(n).into_iter().map(|x| x as f32).collect();
            let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            assert!((f64::from(dot(&x, &x)) - want).abs() <= 1e-6 * want);
        }
    }
}
