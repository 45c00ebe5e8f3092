//! Sums over a row in an order that whole vectors can follow, the same on every machine: sixteen sums run side by side,
//! then halves are added to halves.

use hymo_tensor::Real;

/// Sums side by side: a vector of the widest units in `f32`.
const LANES: usize = 16;

#[inline(always)]
fn fold<T: Real>(s: [T; LANES]) -> T {
    // From register to register: in an array that shrinks in place every step waits for the store before it.
    let s: [T; 8] = std::array::from_fn(|i| s[i] + s[i + 8]);
    let s: [T; 4] = std::array::from_fn(|i| s[i] + s[i + 4]);
    (s[0] + s[2]) + (s[1] + s[3])
}

/// The terms of the last elements, in an array of their own, so that the sums never leave their register.
#[inline(always)]
fn rest<T: Real>(mut sums: [T; LANES], terms: impl Iterator<Item = T>) -> [T; LANES] {
    let mut last = [T::zero(); LANES];
    last.iter_mut().zip(terms).for_each(|(l, t)| *l = t);
    sums.iter_mut().zip(last).for_each(|(s, l)| *s += l);
    sums
}

/// Σ term(a).
#[inline(always)]
pub fn sum<T: Real>(a: &[T], term: impl Fn(T) -> T) -> T {
    let mut sums = [T::zero(); LANES];
    let chunks = a.chunks_exact(LANES);
    let tail = chunks.remainder();
    for a in chunks {
        sums.iter_mut().zip(a).for_each(|(s, &a)| *s += term(a));
    }
    if !tail.is_empty() {
        sums = rest(sums, tail.iter().map(|&a| term(a)));
    }
    fold(sums)
}

/// Σ term(a, b); `b` is at least as long as `a`.
#[inline(always)]
pub fn sum2<T: Real>(a: &[T], b: &[T], term: impl Fn(T, T) -> T) -> T {
    let mut sums = [T::zero(); LANES];
    let (aa, bb) = (a.chunks_exact(LANES), b[..a.len()].chunks_exact(LANES));
    let tail = aa.remainder().iter().zip(bb.remainder());
    for (a, b) in aa.zip(bb) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(s, (&a, &b))| *s += term(a, b));
    }
    if tail.len() > 0 {
        sums = rest(sums, tail.map(|(&a, &b)| term(a, b)));
    }
    fold(sums)
}

/// Σ term(a, b, c); `b` and `c` are at least as long as `a`.
#[inline(always)]
pub fn sum3<T: Real>(a: &[T], b: &[T], c: &[T], term: impl Fn(T, T, T) -> T) -> T {
    let mut sums = [T::zero(); LANES];
    let n = a.len();
    let (aa, bb, cc) = (a.chunks_exact(LANES), b[..n].chunks_exact(LANES), c[..n].chunks_exact(LANES));
    let tail = aa.remainder().iter().zip(bb.remainder()).zip(cc.remainder());
    for ((a, b), c) in aa.zip(bb).zip(cc) {
        sums.iter_mut().zip(a.iter().zip(b).zip(c)).for_each(|(s, ((&a, &b), &c))| *s += term(a, b, c));
    }
    if tail.len() > 0 {
        sums = rest(sums, tail.map(|((&a, &b), &c)| term(a, b, c)));
    }
    fold(sums)
}

/// Σ a b; `b` is at least as long as `a`.
#[inline(always)]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    sum2(a, b, |a, b| a * b)
}

/// The largest element, minus infinity of none. NaN is passed over.
#[inline(always)]
pub fn largest(x: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for x in chunks {
        best.iter_mut().zip(x).for_each(|(b, &x)| *b = if x > *b { x } else { *b });
    }
    best.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Noise;

    #[test]
    fn sums_match_double_precision() {
        for n in [0, 1, 15, 16, 17, 100] {
            let x: Vec<f32> = Noise::new(n as u64).normals(n).into_iter().map(|x| x as f32).collect();
            let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let longer = [x.clone(), vec![f32::NAN; 3]].concat();
            for got in [dot(&x, &longer), sum(&x, |x| x * x), sum3(&x, &longer, &longer, |a, b, c| a * (b + c) / 2.)] {
                assert!((f64::from(got) - want).abs() <= 1e-6 * want, "{n}: {got} {want}");
            }
        }
    }
}
