use super::*;
use crate::check::{rms_error, values};
use crate::fixture;
use hymo_tape::{ParamGrads, checkpoint};
use std::{cell::RefCell, rc::Rc};

/// What one pass of the router gives, with gradients for fixed upstream gradients.
#[derive(Debug)]
struct Pass {
    gates: Vec<f64>,
    balance: f64,
    chosen: Vec<i32>,
    counts: Vec<u64>,
    stats: Stats,
    d_x: Vec<f64>,
    d_w: Vec<f64>,
}

fn tensor(ctx: &Ctx, dims: &[usize], x: &[f64]) -> Tensor {
    if ctx.path() == hymo_tensor::Path::Oracle {
        return Tensor::from_slice(ctx, dims, x).unwrap();
    }
    Tensor::from_slice(ctx, dims, &x.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
}

/// The oracle in f64, or the fast path in f32; `d_gates` of zeros leaves the balance loss alone.
fn pass(ctx: &Ctx, x: &[f64], w: &[f64], bias: &[f32], docs: &Docs, args: Args, d_gates: &[f64]) -> Pass {
    let (n, e) = (docs.tokens(), bias.len());
    let d = w.len() / e;
    let bias = Tensor::from_slice(ctx, &[e], bias).unwrap();
    let w = tensor(ctx, &[e, d], w);
    let zeros = ctx.zeros_real(w.dtype(), &[e * d]).unwrap();
    let mut tape = Tape::training(ctx, ParamGrads::new(vec![zeros]).unwrap());
    let (x, w) = (tape.leaf(tensor(ctx, &[n, d], x)), Var::param(w, 0, 0));
    let out = apply(&mut tape, &x, &w, &bias, docs, args).unwrap();
    let (gates, balance) = (values(out.gates.value()).unwrap(), out.balance.value().item().unwrap());
    let (d_gates, one) = (tensor(ctx, &[n, args.top_k], d_gates), tensor(ctx, &[1], &[1.]));
    let mut grads = tape.backward_from(vec![(out.gates, d_gates), (out.balance, one)]).unwrap();
    let d_x = values(&grads.take(&x).unwrap()).unwrap();
    let d_w = values(&grads.into_params().unwrap().flats()[0]).unwrap();
    let chosen = out.chosen.to_vec().unwrap();
    let (counts, stats) = (out.tally.counts().unwrap(), out.tally.stats().unwrap());
    Pass { gates, balance, chosen, counts, stats, d_x, d_w }
}

fn paths() -> [(Ctx, f64); 2] {
    [(Ctx::cpu().oracle().poisoned(), 1e-13), (Ctx::cpu().poisoned(), 1e-6)]
}

#[track_caller]
fn near(what: &str, got: &[f64], want: &[f64], bound: f64) {
    let error = rms_error(got, want);
    assert!(error <= bound, "{what}: {error:e} over {bound:e}");
}

/// HAZARD 9: documents packed in rows route, weigh and learn as they do apart.
#[test]
fn packed_equals_separate() {
    let lengths = [1, 2, 63, 1, 65, 130];
    let (n, d, e, k) = (262, 6, 8, 2);
    let Clear { x, w, bias } = Clear::new(n, d, e, k);
    let d_gates = Noise::new(4).normals(n * k);
    let seg: Vec<i32> = lengths.iter().zip([3, 9, 3, 4, 0, 1]).flat_map(|(&l, id)| vec![id; l]).collect();
    let args = Args { top_k: k, routed_scale: 1.412, balance_loss: 5., tokens: n as f64 };
    for (ctx, bound) in paths() {
        let whole = pass(&ctx, &x, &w, &bias, &Docs::new(2, n / 2, &seg).unwrap(), args, &d_gates);
        // The second row begins in the middle of the fifth document, and cuts it in two.
        let (mut gates, mut balance, mut d_x, mut d_w, mut counts) = (vec![], 0., vec![], vec![0.; e * d], vec![0; e]);
        let mut from = 0;
        for len in [1, 2, 63, 1, 64, 1, 130] {
            let (x, dg) = (&x[from * d..][..len * d], &d_gates[from * k..][..len * k]);
            let one = pass(&ctx, x, &w, &bias, &Docs::whole(1, len), args, dg);
            gates.extend(one.gates);
            d_x.extend(one.d_x);
            balance += one.balance;
            d_w.iter_mut().zip(one.d_w).for_each(|(s, x)| *s += x);
            counts.iter_mut().zip(one.counts).for_each(|(s, x)| *s += x);
            from += len;
        }
        near("gates", &gates, &whole.gates, bound);
        near("balance", &[balance], &[whole.balance], bound);
        near("d_x", &d_x, &whole.d_x, bound);
        near("d_w", &d_w, &whole.d_w, bound);
        assert_eq!(counts, whole.counts);
    }
}

/// HAZARD 15: padding is in no count, no statistic and no loss, and so it does not move the bias.
#[test]
fn padding_moves_nothing() {
    let (n, d, e, k) = (100, 5, 6, 2);
    let Clear { x, w, bias } = Clear::new(n, d, e, k);
    // Padding between documents and behind them, with values of its own that would show.
    let seg: Vec<i32> =
        [(20, 0), (20, -1), (30, 1), (20, 2), (10, -2)].iter().flat_map(|&(l, id)| vec![id; l]).collect();
    let real: Vec<usize> = (0..n).filter(|&t| seg[t] >= 0).collect();
    let pick =
        |x: &[f64], width: usize| real.iter().flat_map(|&t| x[t * width..][..width].to_vec()).collect::<Vec<_>>();
    let mut padded = x.clone();
    padded.iter_mut().enumerate().filter(|(i, _)| seg[i / d] < 0).for_each(|(_, x)| *x *= 40.);
    let d_gates: Vec<f64> = (0..n * k).map(|i| if seg[i / k] < 0 { 0. } else { (i as f64).sin() }).collect();
    let clean: Vec<i32> = real.iter().map(|&t| seg[t]).collect();
    let args = Args { top_k: k, routed_scale: 1., balance_loss: 5., tokens: real.len() as f64 };
    for (ctx, bound) in paths() {
        let with = pass(&ctx, &padded, &w, &bias, &Docs::new(1, n, &seg).unwrap(), args, &d_gates);
        let docs = Docs::new(1, real.len(), &clean).unwrap();
        let without = pass(&ctx, &pick(&x, d), &w, &bias, &docs, args, &pick(&d_gates, k));
        assert_eq!(with.counts, without.counts);
        assert_eq!(with.counts.iter().sum::<u64>(), (real.len() * k) as u64);
        near("gates", &pick(&with.gates, k), &without.gates, bound);
        near("balance", &[with.balance], &[without.balance], bound);
        near("top weight", &[with.stats.top_weight], &[without.stats.top_weight], bound);
        near("max logit", &[with.stats.max_logit], &[without.stats.max_logit], bound);
        near("d_x", &pick(&with.d_x, d), &without.d_x, bound);
        near("d_w", &with.d_w, &without.d_w, bound);
        let reached = (0..n * d).any(|i| seg[i / d] < 0 && with.d_x[i] != 0.);
        assert!(!reached, "a gradient reached padding");
        let (mut a, mut b) = (bias.clone(), bias.clone());
        bias_update(&mut a, &with.counts, 1e-3).unwrap();
        bias_update(&mut b, &without.counts, 1e-3).unwrap();
        assert!(a == b && a != bias);
    }
}

/// HAZARD 15: a checkpointed block runs twice and counts once.
#[test]
fn recomputation_counts_once() {
    let Clear { x, w, bias } = Clear::new(9, 4, 5, 2);
    let args = Args { top_k: 2, routed_scale: 1., balance_loss: 1., tokens: 9. };
    let ctx = Ctx::cpu();
    let w = Var::constant(tensor(&ctx, &[5, 4], &w));
    let bias = Tensor::from_slice(&ctx, &[5], &bias).unwrap();
    let total = Rc::new(RefCell::new(vec![0u64; 5]));
    let runs = Rc::new(RefCell::new(0));
    let mut tape = Tape::new(&ctx);
    let x = tape.leaf(tensor(&ctx, &[9, 4], &x));
    let (sum, seen) = (Rc::clone(&total), Rc::clone(&runs));
    let [balance] = checkpoint(&mut tape, [&x], move |tape, [x]| {
        let out = apply(tape, &x, &w, &bias, &Docs::whole(3, 3), args)?;
        sum.borrow_mut().iter_mut().zip(out.tally.counts()?).for_each(|(s, c)| *s += c);
        *seen.borrow_mut() += 1;
        Ok([out.balance])
    })
    .unwrap();
    tape.backward(&[(&balance, 1.)]).unwrap();
    assert_eq!((*runs.borrow(), total.borrow().iter().sum::<u64>()), (2, 18));
}

/// Permuting the experts permutes the choice and the counts, and nothing else.
#[test]
fn permuted_experts_permute_the_routing() {
    let (n, d, e, k) = (65, 5, 7, 3);
    let Clear { x, w, bias } = Clear::new(n, d, e, k);
    let to = [3, 6, 0, 2, 5, 1, 4]; // expert i becomes to[i]
    let (mut w2, mut bias2) = (w.clone(), bias.clone());
    for (i, &t) in to.iter().enumerate() {
        w2[t * d..][..d].copy_from_slice(&w[i * d..][..d]);
        bias2[t] = bias[i];
    }
    let args = Args { top_k: k, routed_scale: 2., balance_loss: 1., tokens: n as f64 };
    let d_gates = Noise::new(8).normals(n * k);
    for (ctx, bound) in paths() {
        let a = pass(&ctx, &x, &w, &bias, &Docs::whole(1, n), args, &d_gates);
        let b = pass(&ctx, &x, &w2, &bias2, &Docs::whole(1, n), args, &d_gates);
        assert_eq!(a.chosen.iter().map(|&c| to[c as usize] as i32).collect::<Vec<_>>(), b.chosen);
        assert!((0..e).all(|i| a.counts[i] == b.counts[to[i]]));
        near("gates", &b.gates, &a.gates, bound);
        near("balance", &[b.balance], &[a.balance], bound);
        near("d_x", &b.d_x, &a.d_x, bound);
    }
}

/// The fast path chooses as the oracle does, and their counts and statistics agree.
#[test]
fn fast_path_chooses_as_the_oracle() {
    for (n, e, k) in [(1, 2, 1), (64, 6, 6), (65, 16, 2), (1000, 8, 2)] {
        let Clear { x, w, bias } = Clear::new(n, 6, e, k);
        let args = Args { top_k: k, routed_scale: 1., balance_loss: 1., tokens: n as f64 };
        let [a, b] = paths().map(|(ctx, _)| pass(&ctx, &x, &w, &bias, &packed(n), args, &vec![0.; n * k]));
        assert_eq!((&a.chosen, &a.counts), (&b.chosen, &b.counts));
        near("max logit", &[b.stats.max_logit], &[a.stats.max_logit], 1e-6);
        near("top weight", &[b.stats.top_weight], &[a.stats.top_weight], 1e-6);
        let real = (0..n).filter(|&t| !packed(n).padding(0, t)).count();
        assert_eq!(a.counts.iter().sum::<u64>(), (real * k) as u64);
        assert!(a.gates.chunks(k).all(|g| (g.iter().sum::<f64>() - 1.).abs() < 1e-12));
    }
}

/// Scores of NaN, ties everywhere, scores that vanish: an expert in range, and nothing panics.
#[test]
fn odd_scores_stay_in_range() {
    let args = Args { top_k: 2, routed_scale: 1., balance_loss: 1., tokens: 4. };
    for (ctx, _) in paths() {
        let run = |x: &[f64]| pass(&ctx, x, &[1., 1., 1.], &[0.; 3], &Docs::whole(2, 2), args, &[1.; 8]);
        let nan = run(&[f64::NAN, 1., f64::NAN, -1.]);
        assert!(nan.chosen.chunks(2).all(|c| c == [0, 1]));
        assert_eq!(nan.counts, [4, 4, 0]);
        let gone = run(&[-1e4, 1e4, -200., 0.]);
        let finite = |v: &[f64]| v.iter().all(|x| x.is_finite());
        assert!(finite(&gone.gates) && finite(&gone.d_x) && finite(&gone.d_w) && gone.balance.is_finite());
    }
}

#[test]
fn no_balance_loss_and_only_padding() {
    let (w, bias) = (vec![0.5, -0.5], [0f32; 2]);
    for (ctx, _) in paths() {
        let args = Args { top_k: 1, routed_scale: 1., balance_loss: 0., tokens: 0. };
        let off = pass(&ctx, &[1., 2.], &w, &bias, &Docs::whole(1, 2), args, &[0.; 2]);
        assert_eq!((off.balance, off.d_x), (0., vec![0.; 2]));
        let args = Args { balance_loss: 1., ..args };
        let padding = pass(&ctx, &[1., 2.], &w, &bias, &Docs::new(1, 2, &[-1, -1]).unwrap(), args, &[0.; 2]);
        assert_eq!((padding.balance, padding.counts, padding.d_w), (0., vec![0; 2], vec![0.; 2]));
        assert_eq!(padding.stats, Stats { max_logit: f64::NEG_INFINITY, top_weight: 0. });
    }
}

#[test]
fn says_what_does_not_fit() {
    let ctx = Ctx::cpu();
    let good = Args { top_k: 2, routed_scale: 1., balance_loss: 1., tokens: 4. };
    let run = |x: [usize; 2], w: [usize; 2], bias: usize, docs: &Docs, args: Args| {
        let (x, w) = (ctx.zeros::<f32>(&x).unwrap(), ctx.zeros::<f32>(&w).unwrap());
        let bias = ctx.zeros::<f32>(&[bias]).unwrap();
        forward(&ctx, &x, &w, &bias, docs, args).map(|_| ()).map_err(|e| e.to_string())
    };
    let docs = Docs::whole(2, 2);
    assert_eq!(run([4, 3], [5, 3], 5, &docs, good), Ok(()));
    let err = |r: std::result::Result<(), String>| r.unwrap_err();
    assert_eq!(err(run([4, 2], [5, 3], 5, &docs, good)), "router: x has shape [4, 2], want [.., 3]");
    assert_eq!(err(run([4, 3], [5, 3], 4, &docs, good)), "router: bias has shape [4], want [5]");
    assert_eq!(err(run([3, 3], [5, 3], 5, &docs, good)), "router: x is 3 rows, want 2 x 2 tokens");
    let many = Args { top_k: 6, ..good };
    assert_eq!(err(run([4, 3], [5, 3], 5, &docs, many)), "router: top_k is 6, want 1 to the 5 experts");
    let none = Args { tokens: 0., ..good };
    assert!(err(run([4, 3], [5, 3], 5, &docs, none)).starts_with("router: tokens is 0"));
    let nan = Args { routed_scale: f64::NAN, ..good };
    assert!(err(run([4, 3], [5, 3], 5, &docs, nan)).starts_with("router: routed_scale is NaN"));
}

/// HAZARD 9: the balance loss of packed documents and its gradients, against the reference in float64.
#[test]
fn balance_loss_matches_the_fixture() {
    let all = fixture::load("moe");
    let get = |name: &str| &all[&format!("balance.{name}")];
    let (dims, x) = get("x");
    let bias: Vec<f32> = get("router.bias").1.iter().map(|&x| x as f32).collect();
    let seg: Vec<i32> = get("docs").1.iter().map(|&x| x as i32).collect();
    let docs = Docs::new(1, dims[0], &seg).unwrap();
    let args = Args { top_k: 2, routed_scale: 1., balance_loss: 0.5, tokens: dims[0] as f64 };
    for (ctx, _) in paths() {
        let got = pass(&ctx, x, &get("router.weight").1, &bias, &docs, args, &vec![0.; 2 * dims[0]]);
        near("loss", &[got.balance], &get("loss").1, 2e-7); // the file has f32
        near("d_x", &got.d_x, &get("d_x").1, 5e-7);
        near("d_w", &got.d_w, &get("d_router.weight").1, 5e-7);
    }
}
