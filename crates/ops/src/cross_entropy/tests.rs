use super::*;
use crate::check::{rms_error, values};
use crate::fixture;
use hymo_tape::ParamGrads;

fn noise(ctx: &Ctx, seed: u64, dims: &[usize], size: f64) -> Tensor {
    let n = dims.iter().product();
    let values: Vec<f32> = Noise::new(seed).normals(n).into_iter().map(|x| (size * x) as f32).collect();
    Tensor::from_slice(ctx, dims, &values).unwrap()
}

fn plain(count: f64) -> Args {
    Args { weight: 1., count, z_loss: 0., soft_cap: None }
}

/// The loss, its parts and the gradients of two leaves.
fn run(ctx: &Ctx, h: &Tensor, e: &Tensor, targets: &[i32], args: Args) -> (f64, Stats, Vec<f64>, Vec<f64>) {
    let mut tape = Tape::new(ctx);
    let (h, e) = (tape.leaf(h.clone()), tape.leaf(e.clone()));
    let (loss, sums) = apply(&mut tape, &h, &e, targets, args).unwrap();
    let value = loss.value().item().unwrap();
    let mut grads = tape.backward(&[(&loss, 1.)]).unwrap();
    let [d_h, d_e] = [h, e].map(|v| values(&grads.take(&v).unwrap()).unwrap());
    (value, sums.read().unwrap(), d_h, d_e)
}

#[test]
fn says_what_does_not_fit() {
    let ctx = Ctx::cpu();
    let h = ctx.zeros::<f32>(&[3, 2]).unwrap();
    let err = |e: &[usize], targets: &[i32], args: Args| {
        forward(&ctx, &h, &ctx.zeros::<f32>(e).unwrap(), targets, args).unwrap_err().to_string()
    };
    assert_eq!(err(&[5, 3], &[0; 3], plain(3.)), "cross_entropy: E has shape [5, 3], want [V, 2]");
    assert_eq!(err(&[5, 2], &[0; 2], plain(3.)), "cross_entropy: targets is 2 targets, want 3, one a row of h");
    for bad in [5, -100] {
        let want = format!("cross_entropy: targets is {bad} at position 1, want -1 or in 0..5");
        assert_eq!(err(&[5, 2], &[0, bad, 9], plain(3.)), want);
    }
    let want = "cross_entropy: count is 0, want the number of valid targets, at least 1";
    assert_eq!(err(&[5, 2], &[0; 3], plain(0.)), want);
    let args = Args { soft_cap: Some(0.), ..plain(3.) };
    assert_eq!(err(&[5, 2], &[0; 3], args), "cross_entropy: soft_cap is Some(0.0), want a positive number or none");
}

/// A seed other than 1, or a loss used twice, would scale d_h but not d_E, which is already summed.
#[test]
fn an_upstream_gradient_other_than_one_is_refused() {
    let ctx = Ctx::cpu();
    for seeds in [&[0.5][..], &[1., 1.]] {
        let mut tape = Tape::new(&ctx);
        let h = tape.leaf(noise(&ctx, 1, &[3, 2], 1.));
        let e = Var::constant(noise(&ctx, 2, &[5, 2], 1.));
        let (loss, _) = apply(&mut tape, &h, &e, &[0, 4, -1], plain(2.)).unwrap();
        let seeds: Vec<_> = seeds.iter().map(|&s| (&loss, s)).collect();
        let err = tape.backward(&seeds).unwrap_err().to_string();
        assert!(err.starts_with("cross_entropy: d_loss is") && err.contains("Args::weight"), "{err}");
    }
}

/// All targets ignored: the loss and all gradients are 0, also where the global count is 0.
#[test]
fn all_ignored_is_zero() {
    for ctx in [Ctx::cpu().poisoned(), Ctx::cpu().poisoned().oracle()] {
        let (h, e) = (noise(&ctx, 1, &[70, 3], 1.), noise(&ctx, 2, &[9, 3], 1.));
        for count in [0., 12.] {
            let (loss, stats, d_h, d_e) = run(&ctx, &h, &e, &[-1; 70], plain(count));
            assert_eq!((loss, stats), (0., Stats::default()));
            assert!(d_h.iter().chain(&d_e).all(|&d| d == 0.));
        }
    }
}

/// HAZARD 18: logits of 1e4 give finite losses and gradients; one that is not a number shows in the loss.
#[test]
fn extreme_logits_are_finite_and_nan_is_not_hidden() {
    let ctx = Ctx::cpu().poisoned();
    let h = Tensor::from_slice(&ctx, &[3, 1], &[100f32, -100., 1e-3]).unwrap();
    let e: Vec<f32> = (0..40).map(|i| (i as f32 - 20.) * 5.).collect();
    let e = Tensor::from_slice(&ctx, &[40, 1], &e).unwrap();
    let args = Args { z_loss: 1e-4, ..plain(3.) };
    let (loss, stats, d_h, d_e) = run(&ctx, &h, &e, &[0, 39, 20], args);
    assert!(loss.is_finite() && d_h.iter().chain(&d_e).all(|d| d.is_finite()));
    assert!((stats.nll - (19_500. + 19_500. + 40f64.ln())).abs() < 0.01, "{stats:?}");
    let h = Tensor::from_slice(&ctx, &[3, 1], &[1f32, f32::NAN, 1.]).unwrap();
    let (loss, ..) = run(&ctx, &h, &e, &[0, 39, 20], args);
    assert!(loss.is_nan());
    assert!(token_nll(&ctx, &h, &e, &[0, 39, 20], None).unwrap()[1].is_nan());
}

/// The gradients do not depend on the chunk's size, whole ignored chunks included; nor does the loss of one product.
#[test]
fn chunks_of_any_size_agree() {
    let ctx = Ctx::cpu().poisoned();
    let (n, v, d) = (200, 77, 9);
    let (h, e) = (noise(&ctx, 1, &[n, d], 1.), noise(&ctx, 2, &[v, d], 1.));
    let mut targets = some_targets(n, v);
    targets[64..140].fill(-1);
    let args = Args { weight: 2., z_loss: 1e-3, ..plain(100.) };
    let (loss, stats, d_h, d_e) = run(&ctx, &h, &e, &targets, args);
    let head = Head::new(&h, &e, &targets, args).unwrap();
    for rows in [1, 7, 64, 199, 500] {
        let (mut got_h, mut got_e) = (ctx.empty::<f32>(&[n, d]).unwrap(), ctx.zeros::<f32>(&[v, d]).unwrap());
        let sinks = Sinks { d_h: Some(&mut got_h), d_e: Some(Sink::Zeros(&mut got_e)) };
        let tokens = fast::run(&ctx, &head, sinks, rows).unwrap();
        let (got, sums) = head.loss(&ctx, &Found::Here(tokens)).unwrap();
        let got_stats = sums.read().unwrap();
        assert!((got.item().unwrap() / loss - 1.).abs() < 1e-6 && got_stats.correct == stats.correct);
        assert!(rms_error(&values(&got_h).unwrap(), &d_h) < 1e-6, "{rows} rows");
        assert!(rms_error(&values(&got_e).unwrap(), &d_e) < 1e-6, "{rows} rows");
    }
    let (alone, sums) = forward(&ctx, &h, &e, &targets, args).unwrap();
    let alone_stats = sums.read().unwrap();
    assert!((alone.item().unwrap() / loss - 1.).abs() < 1e-6);
    let nll = token_nll(&ctx, &h, &e, &targets, None).unwrap();
    assert!(nll.iter().zip(&targets).all(|(nll, y)| (*y < 0) == (*nll == 0.)));
    assert!((nll.iter().map(|&x| f64::from(x)).sum::<f64>() / alone_stats.nll - 1.).abs() < 1e-6);
}

/// HAZARD 9: the tokens of a batch in pieces, each over the batch's count, sum to the batch: loss and gradients.
#[test]
fn pieces_sum_to_the_batch() {
    let ctx = Ctx::cpu().poisoned();
    let (n, v, d) = (90, 30, 6);
    let (h, e) = (noise(&ctx, 3, &[n, d], 1.), noise(&ctx, 4, &[v, d], 1.));
    let targets = some_targets(n, v);
    let args = Args { z_loss: 1e-3, ..plain(70.) };
    let (loss, _, d_h, d_e) = run(&ctx, &h, &e, &targets, args);
    let (mut sum, mut sum_e) = (0., vec![0.; v * d]);
    for (from, to) in [(0, 1), (1, 4), (4, 70), (70, 90)] {
        let got = run(&ctx, &h.slice_rows(from..to).unwrap(), &e, &targets[from..to], args);
        sum += got.0;
        assert!(rms_error(&got.2, &d_h[from * d..to * d]) < 1e-6);
        sum_e.iter_mut().zip(&got.3).for_each(|(s, d)| *s += d);
    }
    assert!((sum / loss - 1.).abs() < 1e-6 && rms_error(&sum_e, &d_e) < 1e-6);
}

/// Columns of a wider tensor as h; a large vocabulary with a tail of odd size; uniform logits give ln V.
#[test]
fn a_large_vocabulary() {
    let ctx = Ctx::cpu().poisoned();
    let wide = noise(&ctx, 5, &[5, 40], 1.);
    let h = wide.slice_cols(7..23).unwrap();
    let v = 64_255;
    let e = noise(&ctx, 6, &[v, 16], 0.5);
    let targets = [0, v as i32 - 1, -1, 33, 7];
    let args = Args { z_loss: 1e-4, ..plain(4.) };
    let want = run(&ctx.clone().oracle(), &values_f64(&h), &values_f64(&e), &targets, args);
    let got = run(&ctx, &h, &e, &targets, args);
    assert!((got.0 / want.0 - 1.).abs() < 2e-7, "{} {}", got.0, want.0);
    for (name, error) in [("d_h", rms_error(&got.2, &want.2)), ("d_E", rms_error(&got.3, &want.3))] {
        assert!(error < 1e-6, "{name}: {error:e}");
    }
    let (_, sums) = forward(&ctx, &h, &ctx.zeros::<f32>(&[v, 16]).unwrap(), &targets, args).unwrap();
    let stats = sums.read().unwrap();
    assert!((stats.nll / 4. - (v as f64).ln()).abs() < 1e-6);
}

fn values_f64(t: &Tensor) -> Tensor {
    Tensor::from_vec(t.dims(), values(t).unwrap()).unwrap()
}

/// The pool never holds the matrix of logits, only a chunk of it and d_h; a chunk has 32 MiB at most.
#[test]
fn memory_is_bounded() {
    let ctx = Ctx::cpu();
    let (n, v, d) = (4096, 8192, 8);
    let (h, flat) = (noise(&ctx, 1, &[n, d], 1.), noise(&ctx, 2, &[v * d], 1.));
    let targets = some_targets(n, v);
    let grads = ParamGrads::new(vec![ctx.zeros::<f32>(&[v * d]).unwrap()]).unwrap();
    let live = ctx.pool().stats().live;
    ctx.pool().reset_peak();
    let mut tape = Tape::training(&ctx, grads);
    let (h, e) = (tape.leaf(h), Var::param(flat.slice_flat(0, &[v, d]).unwrap(), 0, 0));
    let (loss, _) = apply(&mut tape, &h, &e, &targets, plain(4096.)).unwrap();
    tape.backward(&[(&loss, 1.)]).unwrap();
    let (peak, logits) = (ctx.pool().stats().peak - live, n * v * 4);
    assert!(peak < logits / 7, "{peak} bytes, the logits would be {logits}");
    for v in [2, 4096, 32_000, 64_256, 65_536] {
        assert!(fast::chunk_rows(v) >= 128 && fast::chunk_rows(v) * v * 4 <= 32 << 20);
    }
}

/// Against torch in float64 (fixtures/make_ops.py): with and without z-loss and cap.
#[test]
fn matches_the_reference() {
    let ctx = Ctx::cpu().poisoned();
    let all = fixture::load("ops");
    for (name, z_loss, soft_cap) in
        [("plain", 0., None), ("z_loss", 1e-2, None), ("soft_cap", 0., Some(5.)), ("soft_cap_z_loss", 1e-2, Some(5.))]
    {
        let get = |what: &str| &all[&format!("cross_entropy.{name}.{what}")];
        let tensor = |what: &str| {
            let (dims, values) = get(what);
            Tensor::from_slice(&ctx, dims, &values.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
        };
        let targets: Vec<i32> = get("target").1.iter().map(|&y| y as i32).collect();
        let count = targets.iter().filter(|&&y| y >= 0).count() as f64;
        let args = Args { weight: 1., count, z_loss, soft_cap };
        let (h, e) = (tensor("h"), tensor("w"));
        let (loss, _, d_h, d_e) = run(&ctx, &h, &e, &targets, args);
        let nll: Vec<f64> = token_nll(&ctx, &h, &e, &targets, soft_cap).unwrap().into_iter().map(f64::from).collect();
        for (got, what) in [(vec![loss], "loss"), (nll, "nll"), (d_h, "d_h"), (d_e, "d_w")] {
            let error = rms_error(&got, &get(what).1);
            assert!(error < 5e-7, "{name} {what}: {error:e}");
        }
    }
}
