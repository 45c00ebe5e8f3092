use super::*;
use crate::check::{rms_error, values};
use crate::fixture;

fn noise(ctx: &Ctx, seed: u64, dims: &[usize]) -> Tensor {
    let n = dims.iter().product();
    let values: Vec<f32> = Noise::new(seed).normals(n).into_iter().map(|x| x as f32).collect();
    Tensor::from_slice(ctx, dims, &values).unwrap()
}

fn rows(t: &Tensor, range: std::ops::Range<usize>) -> Vec<u32> {
    bits(&t.slice_rows(range).unwrap())
}

fn bits(t: &Tensor) -> Vec<u32> {
    t.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn says_what_does_not_fit() {
    let ctx = Ctx::cpu();
    let zeros = |dims: &[usize]| ctx.zeros::<f32>(dims).unwrap();
    let docs = Arc::new(Docs::whole(1, 3));
    let err = |x: &[usize], w: &[usize], docs: &Arc<Docs>, tail: Option<Tensor>| {
        forward(&ctx, &zeros(x), &zeros(w), docs, tail.as_ref()).unwrap_err().to_string()
    };
    assert_eq!(err(&[3, 2], &[4, 4], &docs, None), "short_conv: w has shape [4, 4], want [2, 1 or more]");
    assert_eq!(err(&[4, 2], &[2, 4], &docs, None), "short_conv: x is 4 rows, want 1 x 3 tokens");
    let tail = Some(zeros(&[1, 4, 2]));
    assert_eq!(err(&[3, 2], &[2, 4], &docs, tail), "short_conv: tail has shape [1, 4, 2], want [1, 3, 2]");
    let going_on = Arc::new(Docs::continuing(1, 3, &[0; 3], &[true]).unwrap());
    let want = "short_conv: tail is missing, want the earlier piece's tail, as a row is continued";
    assert_eq!(err(&[3, 2], &[2, 4], &going_on, None), want);
}

/// HAZARD 4: cut at every point, the second piece fed the first one's tail, two rows give the bits of the whole, and
/// so do pieces of one token.
#[test]
fn any_split_gives_the_same_bits() {
    let ctx = Ctx::cpu().poisoned();
    let (batch, len, c) = (2, 70, 5);
    let seg: Vec<i32> = (0..batch * len).map(|n| if n % len < 66 || n > len { 0 } else { 1 }).collect();
    for k in [1, 2, 4, 6] {
        let (x, w) = (noise(&ctx, 1, &[batch * len, c]), noise(&ctx, 2, &[c, k]));
        let docs = Arc::new(Docs::new(batch, len, &seg).unwrap());
        let (whole, tail, _) = forward(&ctx, &x, &w, &docs, None).unwrap();
        for cuts in (0..=len).map(|cut| vec![0, cut, len]).chain([(0..=len).collect()]) {
            let mut tail_so_far: Option<Tensor> = None;
            for piece in cuts.windows(2) {
                let (from, n) = (piece[0], piece[1] - piece[0]);
                let take = |b: usize| b * len + from..b * len + piece[1];
                let both = |t: &Tensor| (0..batch).flat_map(|b| rows(t, take(b))).collect::<Vec<_>>();
                let part: Vec<f32> = both(&x).into_iter().map(f32::from_bits).collect();
                let part = Tensor::from_slice(&ctx, &[batch * n, c], &part).unwrap();
                let ids: Vec<i32> = (0..batch).flat_map(|b| &seg[take(b)]).copied().collect();
                let goes_on = |b: usize| from > 0 && (n == 0 || seg[b * len + from] == seg[b * len + from - 1]);
                let going_on: Vec<bool> = (0..batch).map(goes_on).collect();
                let docs = Arc::new(Docs::continuing(batch, n, &ids, &going_on).unwrap());
                let (y, next, _) = forward(&ctx, &part, &w, &docs, tail_so_far.as_ref()).unwrap();
                assert_eq!(bits(&y), both(&whole), "kernel {k}, cut {piece:?}");
                tail_so_far = Some(next);
            }
            assert_eq!(bits(&tail_so_far.unwrap()), bits(&tail), "kernel {k}, cuts {cuts:?}");
        }
    }
}

/// HAZARD 4, 20: decoding token by token, in a batch of any size, gives the bits of the forward over all tokens.
#[test]
fn steps_equal_the_forward() {
    let ctx = Ctx::cpu().poisoned();
    let (batch, len, c) = (3, 9, 6);
    for k in [1, 3, 4] {
        let (x, w) = (noise(&ctx, 3, &[batch, len, c]), noise(&ctx, 4, &[c, k]));
        let flat = x.reshape(&[batch * len, c]).unwrap();
        let (whole, next, _) = forward(&ctx, &flat, &w, &Arc::new(Docs::whole(batch, len)), None).unwrap();
        let mut tail = ctx.zeros::<f32>(&[batch, k - 1, c]).unwrap();
        for t in 0..len {
            let row: Vec<f32> = (0..batch)
                .flat_map(|b| flat.slice_rows(b * len + t..b * len + t + 1))
                .flat_map(|r| r.to_vec::<f32>().unwrap())
                .collect();
            let row = Tensor::from_slice(&ctx, &[batch, c], &row).unwrap();
            let y = step(&ctx, &row, &w, &mut tail).unwrap();
            for b in 0..batch {
                assert_eq!(rows(&y, b..b + 1), rows(&whole, b * len + t..b * len + t + 1), "kernel {k}, token {t}");
            }
        }
        assert_eq!(bits(&tail), bits(&next));
    }
}

/// The tail of a short document: what there is, zeros (or the old tail, when it goes on) before it.
#[test]
fn tails_of_short_documents() {
    let ctx = Ctx::cpu().poisoned();
    let x = Tensor::from_slice(&ctx, &[4, 1], &[1f32, 2., 3., 4.]).unwrap();
    let w = noise(&ctx, 5, &[1, 4]);
    let old = Tensor::from_slice(&ctx, &[2, 3, 1], &[-1f32, -2., -3., -4., -5., -6.]).unwrap();
    let tail = |seg: [i32; 4], continued: [bool; 2]| {
        let docs = Arc::new(Docs::continuing(2, 2, &seg, &continued).unwrap());
        forward(&ctx, &x, &w, &docs, Some(&old)).unwrap().1.to_vec::<f32>().unwrap()
    };
    assert_eq!(tail([0, 0, 1, 2], [false, false]), [0., 1., 2., 0., 0., 4.]);
    assert_eq!(tail([0, 0, 1, 2], [true, true]), [-3., 1., 2., 0., 0., 4.]);
    assert_eq!(tail([0, 1, 2, 2], [true, true]), [0., 0., 2., -6., 3., 4.]);
}

/// y, d_x and d_w of one piece with fixed upstream gradients.
fn run(ctx: &Ctx, x: &Tensor, d_y: &Tensor, w: &Tensor, docs: &Arc<Docs>) -> [Tensor; 3] {
    let mut tape = Tape::new(ctx);
    let (x, w) = (tape.leaf(x.clone()), tape.leaf(w.clone()));
    let (y, _) = apply(&mut tape, &x, &w, docs, None).unwrap();
    let value = y.value().clone();
    let mut grads = tape.backward_from(vec![(y, d_y.clone())]).unwrap();
    [value, grads.take(&x).unwrap(), grads.take(&w).unwrap()]
}

/// HAZARD 8, 9: packed documents, 5,000 of them of 1 to 3 tokens, equal the same documents alone: y and d_x bit for
/// bit, d_w up to the order of its sum. The columns of x lie apart, as those of a wider projection.
#[test]
fn packed_equals_separate() {
    let ctx = Ctx::cpu().poisoned();
    for lens in [&[1, 2, 3][..], &[130, 1, 63, 64, 65, 5, 2]] {
        let (len, c) = (if lens.len() == 3 { 9_999 } else { 330 }, 6);
        let docs = documents(1, len, lens, false);
        let wide = noise(&ctx, 6, &[len, c + 7]);
        let (x, d_y) = (wide.slice_cols(3..3 + c).unwrap(), noise(&ctx, 7, &[len, c]));
        let w = noise(&ctx, 8, &[c, 4]);
        let [y, d_x, d_w] = run(&ctx, &x, &d_y, &w, &docs);
        let mut sum = vec![0.; c * 4];
        for range in docs.ranges(0) {
            let part = |t: &Tensor| t.slice_rows(range.clone()).unwrap();
            let alone = Arc::new(Docs::whole(1, range.len()));
            let got = run(&ctx, &part(&x), &part(&d_y), &w, &alone);
            assert_eq!(rows(&y, range.clone()), bits(&got[0]));
            assert_eq!(rows(&d_x, range.clone()), bits(&got[1]));
            sum.iter_mut().zip(values(&got[2]).unwrap()).for_each(|(s, d)| *s += d);
        }
        assert!(rms_error(&values(&d_w).unwrap(), &sum) < 1e-6);
        assert!(lens.len() != 3 || docs.ranges(0).count() == 5_000);
    }
}

/// More channels than one block, an odd number of them.
#[test]
fn wide_rows() {
    case("wide", documents(2, 9, &[5, 2], true), 513, 4).check(&Ctx::cpu()).unwrap().assert();
}

/// Against torch in float64 (fixtures/make_ops.py).
#[test]
fn matches_the_reference() {
    let ctx = Ctx::cpu().poisoned();
    let all = fixture::load("ops");
    let get = |name: &str| &all[&format!("short_conv.{name}")];
    let [batch, len, c] = get("x").0[..] else { panic!("3 dimensions") };
    let seg: Vec<i32> = get("seg").1.iter().map(|&s| s as i32).collect();
    let docs = Arc::new(Docs::new(batch, len, &seg).unwrap());
    let tensor = |name: &str, dims: &[usize]| {
        Tensor::from_slice(&ctx, dims, &get(name).1.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
    };
    let (x, d_y, w) = (tensor("x", &[batch * len, c]), tensor("d_y", &[batch * len, c]), tensor("w", &[c, 4]));
    let got = run(&ctx, &x, &d_y, &w, &docs);
    for (got, name) in got.iter().zip(["y", "d_x", "d_w"]) {
        let error = rms_error(&values(got).unwrap(), &get(name).1);
        assert!(error < 4e-7, "{name}: {error:e}");
    }
}

/// HAZARD 4, 20: runs of two sequences side by side, cut anywhere and their tails moved on, give the bits of the whole; a
/// tail that stays where it was takes tokens back.
#[test]
fn runs_for_decoding_have_the_same_bits() {
    let ctx = Ctx::cpu().poisoned();
    for (k, c) in [(1, 5), (2, 3), (4, 1030), (6, 7)] {
        let (x, w) = (noise(&ctx, 1, &[20, c]), noise(&ctx, 2, &[c, k]));
        let docs = Arc::new(Docs::whole(2, 10));
        let whole = forward(&ctx, &x, &w, &docs, None).unwrap().0;
        let w = decode::transposed(&ctx, &w).unwrap();
        for cut in 1..10 {
            let mut tails = vec![vec![0.; (k - 1) * c]; 2];
            for piece in [0..cut, cut..10] {
                let n = piece.len();
                let of = |b: usize, t: &Tensor| rows(t, b * 10 + piece.start..b * 10 + piece.end);
                let both: Vec<f32> = [of(0, &x), of(1, &x)].concat().into_iter().map(f32::from_bits).collect();
                let part = Tensor::from_slice(&ctx, &[2 * n, c], &both).unwrap();
                let runs = [(0..n, &*tails[0]), (n..2 * n, &*tails[1])];
                let y = decode::advance(&ctx, &part, &w, &runs).unwrap();
                assert_eq!(bits(&y), bits(&decode::advance(&ctx, &part, &w, &runs).unwrap()));
                assert_eq!(bits(&y), [of(0, &whole), of(1, &whole)].concat(), "kernel {k}, cut at {cut}");
                for (b, tail) in tails.iter_mut().enumerate() {
                    decode::shift(tail, c, both[b * n * c..(b + 1) * n * c].chunks(c));
                }
            }
        }
        let err = decode::advance(&ctx, &x, &w, &[(1..20, &[])]).unwrap_err().to_string();
        assert!(err.contains("want rows from 0"), "{err}");
    }
}
