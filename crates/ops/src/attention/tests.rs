use super::cases::{args, ids, materialise, training};
use super::*;
use crate::check::{Noise, rms_error, values};
use crate::rotary::{self, Angles, Rope};
use hymo_tensor::DType;

/// Inputs of `n` tokens, as doubles that f32 holds exactly.
struct Inputs {
    q: Vec<f64>,
    kv: Vec<f64>,
    k_r: Vec<f64>,
    d_o: Vec<f64>,
}

fn widths(a: Args) -> [usize; 4] {
    [a.n_heads * a.d_k(), a.n_groups * (a.d_nope + a.d_v), a.n_groups * a.d_rope, a.n_heads * a.d_v]
}

fn noise(seed: u64, len: usize) -> Vec<f64> {
    Noise::new(seed).normals(len).into_iter().map(|x| f64::from(x as f32)).collect()
}

fn inputs(n: usize, a: Args) -> Inputs {
    let [q, kv, k_r, d_o] = widths(a).map(|w| noise((n + w) as u64, n * w));
    Inputs { q, kv, k_r, d_o }
}

fn tensor(dtype: DType, rows: usize, data: &[f64]) -> Tensor {
    let dims = [rows, data.len() / rows.max(1)];
    match dtype {
        DType::F64 => Tensor::from_vec(&dims, data.to_vec()).unwrap(),
        _ => Tensor::from_vec(&dims, data.iter().map(|&x| x as f32).collect()).unwrap(),
    }
}

/// o, lse, the largest scores, d_q, d_kv, d_k_r.
fn run(dtype: DType, x: &Inputs, docs: &Docs, a: Args) -> [Vec<f64>; 6] {
    let ctx = Ctx::cpu().poisoned();
    let t = |data: &[f64]| tensor(dtype, docs.tokens(), data);
    let mut tape = Tape::new(&ctx);
    let [q, kv, k_r] = [&x.q, &x.kv, &x.k_r].map(|data| tape.leaf(t(data)));
    let out = apply(&mut tape, &q, &kv, &k_r, docs, a).unwrap();
    let (o, lse, max) = (out.o.value().clone(), out.lse, out.max_logit);
    let mut grads = tape.backward_from(vec![(out.o, t(&x.d_o))]).unwrap();
    [o, lse, max, grads.take(&q).unwrap(), grads.take(&kv).unwrap(), grads.take(&k_r).unwrap()]
        .map(|t| values(&t).unwrap())
}

#[track_caller]
fn close(what: &str, got: &[f64], want: &[f64], bound: f64) {
    let error = rms_error(got, want);
    assert!(error <= bound, "{what}: {error:e}, bound {bound:e}");
}

const NAMES: [&str; 6] = ["o", "lse", "max", "d_q", "d_kv", "d_k_r"];

/// Tiles against whole rows, every gradient: lengths around the tiles, head shapes from one head to the model's own.
#[test]
fn tiles_match_the_oracle() {
    for (len, lengths, a) in [
        (130, vec![130], args(16, 4, [96, 32, 128])),
        (1000, vec![1000], args(4, 2, [6, 2, 8])),
        (1000, vec![300, 1, 2, 129, 40], args(2, 1, [8, 4, 5])),
        (257, vec![128, 129], args(1, 1, [16, 0, 16])),
        (190, vec![64, 63], args(40, 1, [2, 2, 3])),
    ] {
        let docs = Docs::new(1, len, &ids(len, &lengths)).unwrap();
        let x = inputs(len, a);
        let (got, want) = (run(DType::F32, &x, &docs, a), run(DType::F64, &x, &docs, a));
        for (i, name) in NAMES.iter().enumerate().filter(|(i, _)| a.d_rope > 0 || *i < 5) {
            close(&format!("{len} {lengths:?} {a:?} {name}"), &got[i], &want[i], 1e-6);
        }
    }
}

/// HAZARD 1: every gradient at every length around a tile.
#[test]
fn every_length_up_to_two_tiles() {
    let a = args(2, 1, [3, 2, 2]);
    for len in 1..=130 {
        let docs = Docs::new(1, len, &ids(len, &[100, 7])).unwrap();
        let x = inputs(len, a);
        let (got, want) = (run(DType::F32, &x, &docs, a), run(DType::F64, &x, &docs, a));
        (0..6).for_each(|i| close(&format!("{len} {}", NAMES[i]), &got[i], &want[i], 1e-6));
    }
}

/// HAZARD 9: documents packed in a row equal the same documents alone, outputs and all gradients.
#[test]
fn packed_equals_separate() {
    let (lengths, a) = ([1, 70, 3, 2, 129, 1, 50], args(4, 2, [4, 2, 3]));
    let len = lengths.iter().sum();
    let docs = Docs::new(1, len, &ids(len, &lengths)).unwrap();
    let x = inputs(len, a);
    for (dtype, bound) in [(DType::F32, 1e-6), (DType::F64, 1e-15)] {
        let packed = run(dtype, &x, &docs, a);
        let mut alone: [Vec<f64>; 6] = Default::default();
        let mut at = 0;
        for n in lengths {
            let rows = |data: &[f64]| data[data.len() / len * at..data.len() / len * (at + n)].to_vec();
            let own = Inputs { q: rows(&x.q), kv: rows(&x.kv), k_r: rows(&x.k_r), d_o: rows(&x.d_o) };
            alone.iter_mut().zip(run(dtype, &own, &Docs::whole(1, n), a)).for_each(|(all, one)| all.extend(one));
            at += n;
        }
        // Over all documents at once: the d_q of a document of one token is nothing but rounding.
        [0, 1, 3, 4, 5].into_iter().for_each(|i| close(NAMES[i], &packed[i], &alone[i], bound));
    }
}

/// HAZARD 8: 5,000 documents of 1 to 3 tokens in one row, in memory that grows with the tokens alone.
#[test]
fn thousands_of_tiny_documents() {
    let (lengths, a) = ([1, 2, 3], args(2, 1, [4, 2, 4]));
    let len = 10_000;
    let docs = Docs::new(1, len, &ids(len, &lengths)).unwrap();
    assert!(docs.ranges(0).count() >= 5000);
    let x = inputs(len, a);
    let (got, want) = (run(DType::F32, &x, &docs, a), run(DType::F64, &x, &docs, a));
    (0..6).for_each(|i| close(NAMES[i], &got[i], &want[i], 1e-6));

    let ctx = Ctx::cpu();
    let t = |data: &[f64]| tensor(DType::F32, len, data);
    forward(&ctx, &t(&x.q), &t(&x.kv), &t(&x.k_r), &docs, a).unwrap();
    let rows: usize = a.n_heads * (a.d_v + 1);
    // Buffers come in steps of capacity, hence the factor; T x T scores would be 400 MB.
    assert!(ctx.pool().stats().peak <= 2 * len * rows * 4 + 4096, "{} bytes", ctx.pool().stats().peak);
}

/// No token sees its future: with token t changed, outputs before it keep their bits, and so do other documents'.
#[test]
fn no_token_sees_its_future() {
    let (len, a) = (150, args(2, 1, [4, 2, 3]));
    let docs = Docs::new(1, len, &ids(len, &[140, 10])).unwrap();
    let x = inputs(len, a);
    let out = |x: &Inputs, dtype| run(dtype, x, &docs, a)[0].chunks(6).map(<[f64]>::to_vec).collect::<Vec<_>>();
    for t in [0, 1, 63, 64, 127, 128, 139] {
        let mut moved = inputs(len, a);
        for (data, width) in [(&mut moved.q, 12), (&mut moved.kv, 7), (&mut moved.k_r, 2)] {
            data[t * width..(t + 1) * width].iter_mut().for_each(|v| *v += 1.);
        }
        for dtype in [DType::F32, DType::F64] {
            let (before, after) = (out(&x, dtype), out(&moved, dtype));
            assert!(before[..t] == after[..t] && before[140..] == after[140..], "{t}");
            assert!((t..140).all(|i| before[i] != after[i]), "{t}");
        }
    }
}

/// Scores of ±1e4 stay finite, forwards and backwards, and the largest is found.
#[test]
fn large_scores_are_finite() {
    let a = Args { scale: 1., ..args(2, 1, [4, 0, 2]) };
    let len = 200;
    let mut x = inputs(len, a);
    for (t, row) in x.q.chunks_mut(8).enumerate() {
        row.iter_mut().for_each(|q| *q = if t % 2 == 0 { 50. } else { -50. });
    }
    for (t, row) in x.kv.chunks_mut(6).enumerate() {
        row[..4].iter_mut().for_each(|k| *k = if t % 3 == 0 { 50. } else { -50. });
    }
    let docs = Docs::whole(1, len);
    let got = run(DType::F32, &x, &docs, a);
    assert!(got.iter().flatten().all(|v| v.is_finite()));
    assert_eq!(got[2], [1e4, 1e4]);
    close("o", &got[0], &run(DType::F64, &x, &docs, a)[0], 1e-6);
    assert_eq!(got[0][2..4], got[0][..2], "token 1 sees -1e4 and 1e4: all of its weight is on token 0");
}

/// Padding does not count for the largest score.
#[test]
fn padding_has_no_largest_score() {
    let a = args(2, 2, [3, 0, 2]);
    let mut x = inputs(4, a);
    x.q[12..].fill(100.);
    x.kv[20..].fill(100.);
    let max = |dtype, seg: &[i32]| run(dtype, &x, &Docs::new(1, 4, seg).unwrap(), a)[2].clone();
    for dtype in [DType::F32, DType::F64] {
        assert!(max(dtype, &[0, 0, 1, 1]).iter().all(|m| *m > 1e3));
        assert!(max(dtype, &[0, 0, -1, -1]).iter().all(|m| *m < 1e2));
        assert!(max(dtype, &[-1; 4]).iter().all(|m| *m == f64::NEG_INFINITY));
    }
}

/// HAZARD 4: a sequence fed in pieces over its cache gives what it gives whole, documents included.
#[test]
fn pieces_over_a_cache_equal_the_whole() {
    let (len, a) = (200, args(4, 2, [4, 2, 3]));
    let docs = Docs::new(1, len, &ids(len, &[90, 110])).unwrap();
    let x = inputs(len, a);
    let ctx = Ctx::cpu().poisoned();
    for (dtype, bound) in [(DType::F32, 3e-7), (DType::F64, 0.)] {
        let whole = run(dtype, &x, &docs, a);
        let [q, kv, k_r] = [&x.q, &x.kv, &x.k_r].map(|data| tensor(dtype, len, data));
        for pieces in [vec![1; len], vec![63, 1, 64, 2, 70], vec![199, 1], vec![len]] {
            let (mut at, mut o, mut lse) = (0, Vec::new(), Vec::new());
            for n in pieces {
                let from: Vec<usize> = (at..at + n).map(|t| docs.start(0, t)).collect();
                let rows = |t: &Tensor, range| t.slice_rows(range).unwrap();
                let (kv, k_r) = (rows(&kv, 0..at + n), rows(&k_r, 0..at + n));
                let out = cached(&ctx, &rows(&q, at..at + n), &kv, &k_r, &from, a).unwrap();
                o.extend(values(&out.o).unwrap());
                lse.extend(values(&out.lse).unwrap());
                at += n;
            }
            close("o", &o, &whole[0], bound);
            close("lse", &lse, &whole[1], bound);
        }
    }
}

/// The absorbed form equals attention over keys and values made from the latents: f64 to rounding, f32 to 1e-6, whole
/// and in pieces (HAZARD 4), with the model's own shape.
#[test]
fn absorbed_equals_materialised() {
    for (l, width, a) in [(90, 128, args(16, 4, [96, 32, 128])), (150, 10, args(4, 2, [6, 2, 5]))] {
        let scale = (width as f64).powf(-0.5);
        let map = |seed, rows: usize| noise(seed, rows * width).iter().map(|x| x * scale).collect::<Vec<_>>();
        let [q, _, k_r, _] = widths(a).map(|w| noise(w as u64, l * w));
        let (w_uk, w_uv) = (map(1, a.n_groups * a.d_nope), map(2, a.n_groups * a.d_v));
        let c = noise(3, l * width);
        let from: Vec<usize> = (0..l).map(|t| if t < 40 { 0 } else { 40 }).collect();
        for (dtype, bound) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
            let ctx = Ctx::cpu().poisoned();
            let [q, c, k_r] = [&q, &c, &k_r].map(|data| tensor(dtype, l, data));
            let w_uk = tensor(dtype, a.n_groups * a.d_nope, &w_uk);
            let w_uv = tensor(dtype, a.n_groups * a.d_v, &w_uv);
            let latent = Latent { c: &c, k_r: &k_r, w_uk: &w_uk, w_uv: &w_uv };
            let kv = materialise(&ctx, latent).unwrap();
            let want = values(&cached(&ctx, &q, &kv, &k_r, &from, a).unwrap().o).unwrap();
            for step in if width == 128 { vec![l, 41] } else { vec![l, 1, 41] } {
                let mut got = Vec::new();
                for at in (0..l).step_by(step) {
                    let end = (at + step).min(l);
                    let rows = |t: &Tensor, from| t.slice_rows(from..end).unwrap();
                    let (c, k_r) = (rows(&c, 0), rows(&k_r, 0));
                    let latent = Latent { c: &c, k_r: &k_r, ..latent };
                    let o = absorbed(&ctx, &rows(&q, at), latent, &from[at..end], a).unwrap();
                    got.extend(values(&o).unwrap());
                }
                close(&format!("{dtype} {l} by {step}"), &got, &want, bound);
            }
        }
    }
}

/// Wide projections hand out views; gradients that no one wants are left out; a batch has several rows.
#[test]
fn strided_inputs_and_partial_gradients() {
    let (batch, len, a) = (2, 70, args(2, 1, [4, 2, 3]));
    let docs = Docs::new(batch, len, &[ids(len, &[30, 40]), ids(len, &[1, 65])].concat()).unwrap();
    let n = batch * len;
    let x = inputs(n, a);
    let want = run(DType::F32, &x, &docs, a);
    let ctx = Ctx::cpu().poisoned();
    let [w_q, w_kv, w_r, w_o] = widths(a);
    let wide: Vec<f64> = (0..n)
        .flat_map(|i| {
            [(&x.q, w_q), (&x.kv, w_kv), (&x.k_r, w_r), (&x.d_o, w_o)].map(|(v, w)| v[i * w..(i + 1) * w].to_vec())
        })
        .flatten()
        .collect();
    let wide = tensor(DType::F32, n, &wide);
    let cols = |from: usize, w: usize| wide.slice_cols(from..from + w).unwrap();
    let parts = [cols(0, w_q), cols(w_q, w_kv), cols(w_q + w_kv, w_r)];
    for wanted in [[true, false, false], [false, true, false], [false, false, true]] {
        let mut tape = Tape::new(&ctx);
        let v: [Var; 3] = std::array::from_fn(|i| match wanted[i] {
            true => tape.leaf(parts[i].clone()),
            false => Var::constant(parts[i].clone()),
        });
        let o = apply(&mut tape, &v[0], &v[1], &v[2], &docs, a).unwrap().o;
        assert_eq!(values(o.value()).unwrap(), want[0]);
        let mut grads = tape.backward_from(vec![(o, cols(w_q + w_kv + w_r, w_o))]).unwrap();
        for i in 0..3 {
            assert_eq!(grads.take(&v[i]).map(|d| values(&d).unwrap()), wanted[i].then(|| want[3 + i].clone()));
        }
    }
}

#[test]
fn says_what_does_not_fit() {
    let (ctx, a) = (Ctx::cpu(), args(4, 2, [3, 1, 2]));
    let t = |rows: usize, cols: usize| ctx.zeros::<f32>(&[rows, cols]).unwrap();
    let docs = Docs::whole(1, 5);
    let message = |q: &Tensor, kv: &Tensor, a| forward(&ctx, q, kv, &t(5, 2), &docs, a).unwrap_err().to_string();
    assert_eq!(message(&t(5, 15), &t(5, 10), a), "attention: q has shape [5, 15], want [5, 16]");
    assert_eq!(message(&t(5, 16), &t(5, 9), a), "attention: kv has shape [5, 9], want [5, 10]");
    let message = |n_groups| message(&t(5, 16), &t(5, 10), Args { n_groups, ..a });
    assert_eq!(message(3), "attention: n_groups is 3 for 4 heads, want a divisor of the number of heads");
    assert!(message(0).contains("n_groups"));
    let out = cached(&ctx, &t(5, 16), &t(4, 10), &t(4, 2), &[0; 5], a);
    assert!(out.unwrap_err().to_string().contains("5 queries"));
    assert!(forward(&ctx, &t(0, 16), &t(0, 10), &t(0, 2), &Docs::whole(0, 5), a).is_ok());
}

/// The harness's own comparisons on a second context: fast path, differences, run twice, applied twice.
#[test]
fn rotary_and_attention_together() {
    let (n, a) = (40, args(4, 2, [4, 4, 3]));
    let positions: Vec<i32> = (0..n as i32).map(|t| t % 25).collect();
    let angles = Arc::new(Angles::new(&positions, Rope { d_rope: 4, theta: 1e4, yarn: None }).unwrap());
    let docs = Docs::new(1, n, &ids(n, &[25, 15])).unwrap();
    crate::check::Case::new("rotary, then attention", &["o"])
        .leaf("q", &[n, 32], noise(1, n * 32))
        .leaf("kv", &[n, 14], noise(2, n * 14))
        .leaf("k_r", &[n, 8], noise(3, n * 8))
        .apply(move |tape, v| {
            let q = rotary::apply(tape, &v[0], &angles, rotary::Args { n_heads: 4, head_dim: 8 })?;
            let k_r = rotary::apply(tape, &v[2], &angles, rotary::Args { n_heads: 2, head_dim: 4 })?;
            Ok(vec![apply(tape, &q, &v[1], &k_r, &docs, a)?.o])
        })
        .check(&Ctx::cpu())
        .unwrap()
        .assert();
    training(3, 33, &[33], a).check(&Ctx::cpu()).unwrap().assert();
}
