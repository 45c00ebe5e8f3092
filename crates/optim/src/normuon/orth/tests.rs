use super::*;
use crate::norm::sum_of_squares;
use crate::oracle;
use hymo_ops::check::Noise;

/// O of X `[m, n]` on the fast path, in memory filled with NaN.
fn fast<T: Real>(orth: Orth, x: &[T], m: usize, n: usize) -> Vec<T> {
    let nan = T::of(f64::NAN);
    let [xs, ys, squares] = Work::<T>::elements(m, n);
    let (mut x, mut y, mut squares) = (x[..xs].to_vec(), vec![nan; ys], vec![nan; squares]);
    let mut sums: Vec<f64> = x.chunks(n).map(sum_of_squares).collect();
    let mut work = Work { x: &mut x, y: &mut y, squares: &mut squares, sums: &mut sums };
    orthogonalise(&Ctx::cpu(), orth, m, n, &mut work);
    work.x.to_vec()
}

fn gap<T: Real>(got: &[T], want: &[f64]) -> f64 {
    let errors = got.iter().zip(want).map(|(g, w)| (g.f64() - w).powi(2)).sum::<f64>();
    (errors / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

#[test]
fn agrees_with_the_plain_loops_at_odd_sizes() {
    for (m, n) in [(1, 1), (1, 7), (9, 1), (5, 3), (16, 40), (63, 65), (64, 64), (130, 137), (161, 129)] {
        for orth in [Orth::PolarExpress, Orth::NewtonSchulz] {
            let x = Noise::new(7).normals(m * n);
            let want = oracle::orthogonalise(orth, &x, m, n);
            let single: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            let exact = gap(&fast(orth, &x, m, n), &want);
            assert!(exact < 1e-12, "{m} x {n}, {orth:?}: {exact:e} in f64");
            let rounded = gap(&fast(orth, &single, m, n), &want);
            assert!(rounded < 2e-5, "{m} x {n}, {orth:?}: {rounded:e} in f32");
        }
    }
}

/// MATH 6.3's measured maps, through diagonal matrices.
#[test]
fn singular_values_go_where_the_specification_says() {
    for (orth, ranges) in [
        (Orth::NewtonSchulz, [(1e-2, 1.0, 0.68, 1.13), (1e-3, 1e-3, 0.46, 0.48), (1e-4, 1e-4, 0.04, 0.06)]),
        (Orth::PolarExpress, [(1e-2, 1.0, 0.86, 1.14), (1e-3, 1e-3, 0.84, 0.86), (1e-4, 1e-4, 0.09, 0.11)]),
    ] {
        for (low, high, least, most) in ranges {
            for i in 0..50 {
                let s = low * f64::powf(high / low, f64::from(i) / 49.0);
                // A diagonal matrix of norm 1 (times the overestimate), one of whose values is s.
                let over = coefficients(orth).1;
                let rest = (1.0 - s * s).max(0.0).sqrt();
                let x = [s * over, 0.0, 0.0, rest * over];
                let [mut own, mut y, mut squares] = [x, [0.0; 4], [0.0; 4]].map(|v| v.to_vec());
                squares.resize(12, 0.0);
                let mut sums = [1.0, 0.0];
                let mut work = Work { x: &mut own, y: &mut y, squares: &mut squares, sums: &mut sums };
                orthogonalise(&Ctx::cpu(), orth, 2, 2, &mut work);
                let got = work.x[0];
                // The text gives two digits.
                assert!(got >= least - 0.005 && got <= most + 0.005, "{orth:?}: {s:e} -> {got}");
            }
        }
    }
}

/// From some size on all threads share a product.
#[test]
fn a_large_matrix_is_orthogonal_too() {
    let (m, n) = (520, 530);
    let x: Vec<f32> = Noise::new(3).normals(m * n).into_iter().map(|x| x as f32).collect();
    let o = fast(Orth::PolarExpress, &x, m, n);
    let (o, rows) = (Mat::new(&o, m, n, n), 40);
    // O Oᵀ is near the identity: rows are near orthogonal and of norm near 1.
    for i in 0..rows {
        for j in 0..=i {
            let dot: f32 = o.row(i).iter().zip(o.row(j)).map(|(a, b)| a * b).sum();
            let want = if i == j { 1.0 } else { 0.0 };
            assert!((dot - want).abs() < 0.35, "{i} {j}: {dot}");
        }
    }
}
