use super::*;
use crate::check::{rms_error, values};
use crate::fixture;

fn rope(d_rope: usize) -> Rope {
    Rope { d_rope, theta: 1e4, yarn: None }
}

fn turned(x: &[f64], heads: usize, head_dim: usize, positions: &[i32], rope: Rope) -> Vec<f64> {
    let x = Tensor::from_vec(&[positions.len(), heads * head_dim], x.to_vec()).unwrap();
    let angles = Angles::new(positions, rope).unwrap();
    values(&forward(&Ctx::cpu(), &x, &angles, Args { n_heads: heads, head_dim }).unwrap()).unwrap()
}

/// The half-split convention is the same map after a permutation of the columns (MATH 2.1), bit for bit.
#[test]
fn half_split_is_a_permutation() {
    let (d, positions) = (32, [0, 1, 7, 4095, 31_999]);
    let x = Noise::new(1).normals(positions.len() * d);
    let permute =
        |x: &[f64]| x.chunks(d).flat_map(|r| (0..d).map(|j| r[j % (d / 2) * 2 + j / (d / 2)])).collect::<Vec<_>>();
    let got = permute(&turned(&x, 1, d, &positions, rope(d)));
    let frequencies = rope(d).frequencies().unwrap();
    let split = permute(&x);
    for (n, &position) in positions.iter().enumerate() {
        for i in 0..d / 2 {
            let (sin, cos) = (f64::from(position) * frequencies[i]).sin_cos();
            let (u, w) = (split[n * d + i], split[n * d + d / 2 + i]);
            assert_eq!(got[n * d + i], u * cos - w * sin);
            assert_eq!(got[n * d + d / 2 + i], w * cos + u * sin);
        }
    }
}

/// What rotary is for: products of queries and keys depend on the distance alone.
#[test]
fn products_depend_on_the_distance() {
    let (q, k) = (Noise::new(2).normals(8), Noise::new(3).normals(8));
    let product = |s, t| -> f64 {
        let (q, k) = (turned(&q, 1, 8, &[t], rope(8)), turned(&k, 1, 8, &[s], rope(8)));
        q.iter().zip(&k).map(|(q, k)| q * k).sum()
    };
    assert!((product(0, 5) - product(1000, 1005)).abs() < 1e-11);
    assert!((product(0, 5) - product(0, 6)).abs() > 1e-3);
}

/// The numbers of MATH 2.6: from 4,096 to 32,768 tokens.
#[test]
fn yarn_numbers() {
    let yarn = Yarn { factor: 8., original_context: 4096 };
    let stretched = Rope { yarn: Some(yarn), ..rope(32) };
    assert_eq!(stretched.ramp(yarn), (5., 12.));
    assert!((yarn_scale(8.) - 1.4591).abs() < 5e-5 && (yarn_scale(8.).sqrt() - 1.2079).abs() < 5e-5);
    assert_eq!(yarn_scale(1.), 1.);
    let (f, plain) = (stretched.frequencies().unwrap(), rope(32).frequencies().unwrap());
    assert_eq!(f[..6], plain[..6]);
    assert!(f[12..].iter().zip(&plain[12..]).all(|(f, p)| (f / p - 0.125).abs() < 1e-15));
    assert!((f[8] / plain[8] - (4. / 7. + 3. / 7. / 8.)).abs() < 1e-15);
    // A factor of 1 changes nothing, and a context too short for a ramp still gives numbers.
    let same = Rope { yarn: Some(Yarn { factor: 1., ..yarn }), ..rope(32) }.frequencies().unwrap();
    assert!(rms_error(&same, &plain) < 1e-15);
    let short = Rope { yarn: Some(Yarn { factor: 8., original_context: 4 }), ..rope(32) };
    assert!(short.frequencies().unwrap().iter().all(|f| f.is_finite()));
}

/// Tokens far apart and tokens in a row give the same numbers for the same positions.
#[test]
fn sparse_positions_match_dense_ones() {
    let x = Noise::new(4).normals(3 * 8);
    let apart = turned(&x, 2, 4, &[5, 30_000, 6], rope(4));
    for n in 0..3 {
        assert_eq!(apart[n * 8..n * 8 + 8], turned(&x[n * 8..n * 8 + 8], 2, 4, &[[5, 30_000, 6][n]], rope(4)));
    }
}

#[test]
fn says_what_does_not_fit() {
    let message = |r: Result<Tensor>| r.unwrap_err().to_string();
    let ctx = Ctx::cpu();
    let angles = Angles::new(&[0, 1], rope(4)).unwrap();
    let x = ctx.zeros::<f32>(&[2, 8]).unwrap();
    let args = Args { n_heads: 2, head_dim: 4 };
    assert_eq!(
        message(forward(&ctx, &x, &angles, Args { n_heads: 3, ..args })),
        "rotary: x has shape [2, 8], want [2, 3 x 4]"
    );
    assert_eq!(
        message(forward(&ctx, &x, &angles, Args { n_heads: 4, head_dim: 2 })),
        "rotary: d_rope is 4, want at most head_dim, 2"
    );
    for (positions, rope) in [(vec![0], rope(3)), (vec![-1], rope(2)), (vec![0], Rope { theta: 0., ..rope(2) })] {
        assert!(Angles::new(&positions, rope).is_err());
    }
    assert!(Angles::new(&[], rope(2)).unwrap().tokens() == 0);
}

/// Against complex rotation in PyTorch: documents, and positions where angles taken in f32 lose digits.
#[test]
fn matches_the_reference() {
    let tensors = fixture::load("ops");
    for case in ["documents", "far"] {
        let get = |name: &str| tensors[&format!("rotary.{case}.{name}")].clone();
        let (dims, x) = get("x");
        let positions: Vec<i32> = get("pos").1.iter().map(|&p| p as i32).collect();
        let args = Args { n_heads: dims[2], head_dim: dims[3] };
        let angles = Arc::new(Angles::new(&positions, rope(dims[3])).unwrap());
        let rows = [positions.len(), dims[2] * dims[3]];
        let f32s = |x: Vec<f64>| Tensor::from_vec(&rows, x.iter().map(|&x| x as f32).collect()).unwrap();
        let f64s = |x: Vec<f64>| Tensor::from_vec(&rows, x).unwrap();
        for (x, d_y) in [(f32s(x.clone()), f32s(get("d_y").1)), (f64s(x), f64s(get("d_y").1))] {
            let mut tape = Tape::new(&Ctx::cpu());
            let x = tape.leaf(x);
            let y = apply(&mut tape, &x, &angles, args).unwrap();
            assert!(rms_error(&values(y.value()).unwrap(), &get("y").1) < 8e-8, "{case}");
            let d_x = tape.backward_from(vec![(y, d_y)]).unwrap().take(&x).unwrap();
            assert!(rms_error(&values(&d_x).unwrap(), &get("d_x").1) < 8e-8, "{case}");
        }
    }
}
