use super::*;
use crate::check::{rms_error, values};
use crate::router::{self, Clear};
use crate::{Docs, fixture, gemm, linear, swiglu};
use hymo_tape::ParamGrads;
use hymo_tensor::Path;

/// The larger sweep: spreads, group sizes across the tiles, all experts chosen.
#[test]
fn spreads_and_sizes() {
    for sizes in [[1, 7, 5, 3, 1], [1, 7, 5, 3, 3], [130, 17, 13, 2, 2], [261, 19, 13, 8, 2], [1000, 6, 5, 8, 2]] {
        for spread in [Spread::Even, Spread::Skewed] {
            if sizes[3] > sizes[4] || matches!(spread, Spread::Even) {
                case(sizes, spread).check(&Ctx::cpu()).unwrap().assert();
            }
        }
    }
    for e in [0, 1, 3] {
        case([150, 7, 9, 4, 1], Spread::One(e)).check(&Ctx::cpu()).unwrap().assert();
    }
}

/// The same bits on 1, 2, 3 and 8 threads at a size of several tiles each way.
#[cfg(feature = "rayon")]
#[test]
fn thread_count_changes_no_bit() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| case([700, 24, 300, 3, 2], Spread::Skewed).bits(&Ctx::cpu()).unwrap())
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

fn tensor(ctx: &Ctx, dims: &[usize], x: &[f64]) -> Tensor {
    if ctx.path() == Path::Oracle {
        return Tensor::from_slice(ctx, dims, x).unwrap();
    }
    Tensor::from_slice(ctx, dims, &x.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
}

fn paths() -> [(Ctx, f64); 2] {
    [(Ctx::cpu().oracle().poisoned(), 1e-12), (Ctx::cpu().poisoned(), 1e-6)]
}

#[track_caller]
fn near(what: &str, got: &[f64], want: &[f64], bound: f64) {
    let error = rms_error(got, want);
    assert!(error <= bound, "{what}: {error:e} over {bound:e}");
}

/// Weights of a router with its experts: E experts of D x F.
#[derive(Clone)]
struct Moe {
    wr: Vec<f64>,
    bias: Vec<f32>,
    w13: Vec<f64>,
    w2: Vec<f64>,
}

impl Moe {
    fn noise(clear: &Clear, e: usize, d: usize, f: usize) -> Self {
        let mut noise = Noise::new(12);
        let mut scaled = |n| noise.normals(n).into_iter().map(|x| f64::from((0.7 * x) as f32)).collect();
        Moe { wr: clear.w.clone(), bias: clear.bias.clone(), w13: scaled(e * 2 * f * d), w2: scaled(e * d * f) }
    }
}

/// Output, balance loss, gradients of x and of the weights (router, w13, w2 in a row), the choice.
#[derive(Debug)]
struct Pass {
    y: Vec<f64>,
    balance: f64,
    d_x: Vec<f64>,
    d_w: Vec<f64>,
    chosen: Vec<i32>,
    gates: Vec<f64>,
    counts: Vec<u64>,
}

fn pass(ctx: &Ctx, moe: &Moe, x: &[f64], docs: &Docs, args: router::Args, d_y: &[f64]) -> Pass {
    let (n, e) = (docs.tokens(), moe.bias.len());
    let d = moe.wr.len() / e;
    let f = moe.w2.len() / (e * d);
    let flat = [&moe.wr[..], &moe.w13, &moe.w2].concat();
    let params = tensor(ctx, &[flat.len()], &flat);
    let grads = ctx.zeros_real(params.dtype(), &[flat.len()]).unwrap();
    let mut tape = Tape::training(ctx, ParamGrads::new(vec![grads]).unwrap());
    let param = |at: usize, dims: &[usize]| Var::param(params.slice_flat(at, dims).unwrap(), 0, at);
    let (wr, w13) = (param(0, &[e, d]), param(e * d, &[e, 2 * f, d]));
    let w2 = param(e * d + e * 2 * f * d, &[e, d, f]);
    let x = tape.leaf(tensor(ctx, &[n, d], x));
    let bias = Tensor::from_slice(ctx, &[e], &moe.bias).unwrap();
    let routed = router::apply(&mut tape, &x, &wr, &bias, docs, args).unwrap();
    let y = apply(&mut tape, &x, &routed.chosen, &routed.gates, &w13, &w2).unwrap();
    let (out, balance) = (values(y.value()).unwrap(), routed.balance.value().item().unwrap());
    let gates = values(routed.gates.value()).unwrap();
    let seeds = vec![(y, tensor(ctx, &[n, d], d_y)), (routed.balance, tensor(ctx, &[1], &[1.]))];
    let mut grads = tape.backward_from(seeds).unwrap();
    let d_x = values(&grads.take(&x).unwrap()).unwrap();
    let d_w = values(&grads.into_params().unwrap().flats()[0]).unwrap();
    Pass {
        y: out,
        balance,
        d_x,
        d_w,
        chosen: routed.chosen.to_vec().unwrap(),
        gates,
        counts: routed.tally.counts().unwrap(),
    }
}

/// HAZARD 9: documents packed in a row give what they give apart: outputs, balance loss and every gradient.
#[test]
fn packed_equals_separate() {
    let lengths = [1usize, 2, 63, 1, 65, 68];
    let (n, d, f, e, k) = (200, 8, 6, 6, 2);
    let clear = Clear::new(n, d, e, k);
    let moe = Moe::noise(&clear, e, d, f);
    let d_y = Noise::new(3).normals(n * d);
    let seg: Vec<i32> = lengths.iter().enumerate().flat_map(|(i, &l)| vec![i as i32; l]).collect();
    let args = router::Args { top_k: k, routed_scale: 1.412, balance_loss: 5., tokens: n as f64 };
    for (ctx, bound) in paths() {
        let whole = pass(&ctx, &moe, &clear.x, &Docs::new(1, n, &seg).unwrap(), args, &d_y);
        let (mut y, mut balance, mut d_x, mut d_w) = (vec![], 0., vec![], vec![0.; whole.d_w.len()]);
        let mut from = 0;
        for len in lengths {
            let range = from * d..(from + len) * d;
            let one = pass(&ctx, &moe, &clear.x[range.clone()], &Docs::whole(1, len), args, &d_y[range]);
            y.extend(one.y);
            d_x.extend(one.d_x);
            balance += one.balance;
            d_w.iter_mut().zip(one.d_w).for_each(|(s, x)| *s += x);
            from += len;
        }
        near("y", &y, &whole.y, bound);
        near("balance", &[balance], &[whole.balance], bound);
        near("d_x", &d_x, &whole.d_x, bound);
        near("d_w", &d_w, &whole.d_w, bound);
    }
}

/// Permuting router, bias and experts alike changes neither the output nor the gradient of the input.
#[test]
fn permuted_experts_give_the_same_output() {
    let (n, d, f, e, k) = (150, 6, 5, 5, 2);
    let clear = Clear::new(n, d, e, k);
    let moe = Moe::noise(&clear, e, d, f);
    let mut moved = moe.clone();
    for (i, t) in [2, 4, 1, 0, 3].into_iter().enumerate() {
        let copy =
            |to: &mut [f64], from: &[f64], len: usize| to[t * len..][..len].copy_from_slice(&from[i * len..][..len]);
        copy(&mut moved.wr, &moe.wr, d);
        copy(&mut moved.w13, &moe.w13, 2 * f * d);
        copy(&mut moved.w2, &moe.w2, d * f);
        moved.bias[t] = moe.bias[i];
    }
    let args = router::Args { top_k: k, routed_scale: 1., balance_loss: 1., tokens: n as f64 };
    let d_y = Noise::new(3).normals(n * d);
    for (ctx, bound) in paths() {
        let [a, b] = [&moe, &moved].map(|m| pass(&ctx, m, &clear.x, &Docs::whole(2, n / 2), args, &d_y));
        near("y", &b.y, &a.y, bound);
        near("d_x", &b.d_x, &a.d_x, bound);
    }
}

/// Gradients of an expert without tokens: written slots get zeros, flat slots get nothing added.
#[test]
fn an_empty_expert_gets_exactly_zero() {
    let (n, d, f, e) = (70, 5, 4, 3);
    let ctx = Ctx::cpu().poisoned();
    let mut noise = Noise::new(6);
    let chosen = Tensor::from_vec(&[n, 1], vec![1i32; n]).unwrap();
    let mut tape = Tape::new(&ctx);
    let mut leaf = |dims: &[usize]| tape.leaf(tensor(&ctx, dims, &noise.normals(dims.iter().product())));
    let (x, gates) = (leaf(&[n, d]), leaf(&[n, 1]));
    let (w13, w2) = (leaf(&[e, 2 * f, d]), leaf(&[e, d, f]));
    let y = apply(&mut tape, &x, &chosen, &gates, &w13, &w2).unwrap();
    let d_y = tensor(&ctx, &[n, d], &Noise::new(2).normals(n * d));
    let mut grads = tape.backward_from(vec![(y, d_y)]).unwrap();
    for w in [&w13, &w2] {
        let d_w = values(&grads.take(w).unwrap()).unwrap();
        let block = d_w.len() / e;
        assert!(d_w[..block].iter().chain(&d_w[2 * block..]).all(|&g| g == 0.));
        assert!(d_w[block..2 * block].iter().any(|&g| g != 0.));
    }
}

/// Rows of x, of the gates and of the upstream gradient that lie apart; leading dimensions that are kept.
#[test]
fn strided_operands() {
    let (n, d, f, e, k) = (66, 5, 3, 4, 2);
    let ctx = Ctx::cpu().poisoned();
    let mut noise = Noise::new(1);
    let chosen = Tensor::from_vec(&[n, k], (0..n * k).map(|_| noise.below(e) as i32).collect()).unwrap();
    let wide = tensor(&ctx, &[n, d + k + d], &noise.normals(n * (d + k + d)));
    let (w13, w2) = (
        tensor(&ctx, &[e, 2 * f, d], &noise.normals(e * 2 * f * d)),
        tensor(&ctx, &[e, d, f], &noise.normals(e * d * f)),
    );
    let parts = [0..d, d..d + k, d + k..d + k + d].map(|r| wide.slice_cols(r).unwrap());
    let run = |[x, gates, d_y]: [Tensor; 3]| {
        let mut tape = Tape::new(&ctx);
        let (x, gates) = (tape.leaf(x), tape.leaf(gates));
        let (w13, w2) = (tape.leaf(w13.clone()), tape.leaf(w2.clone()));
        let y = apply(&mut tape, &x, &chosen, &gates, &w13, &w2).unwrap();
        let mut all = vec![values(y.value()).unwrap()];
        let mut grads = tape.backward_from(vec![(y, d_y)]).unwrap();
        all.extend([x, gates, w13, w2].map(|v| values(&grads.take(&v).unwrap()).unwrap()));
        all
    };
    let apart = run(parts.clone());
    assert_eq!(apart, run(parts.clone().map(|p| p.copy(&ctx).unwrap())));
    let x3 = parts[0].copy(&ctx).unwrap().reshape(&[2, n / 2, d]).unwrap();
    let (y, _) = forward(&ctx, &x3, &chosen, &parts[1], &w13, &w2).unwrap();
    assert_eq!(y.dims(), [2, n / 2, d]);
    assert_eq!(values(&y).unwrap(), apart[0]);
}

#[test]
fn says_what_does_not_fit() {
    let ctx = Ctx::cpu();
    let zeros = |dims: &[usize]| ctx.zeros::<f32>(dims).unwrap();
    let chosen = |n: usize, k: usize| ctx.zeros::<i32>(&[n, k]).unwrap();
    let run = |x: Tensor, chosen: Tensor, gates: Tensor, w13: Tensor, w2: Tensor| {
        forward(&ctx, &x, &chosen, &gates, &w13, &w2).map(|_| ()).map_err(|e| e.to_string())
    };
    let (x, c, g, w13, w2) = (zeros(&[4, 3]), chosen(4, 2), zeros(&[4, 2]), zeros(&[5, 8, 3]), zeros(&[5, 3, 4]));
    assert_eq!(run(x.clone(), c.clone(), g.clone(), w13.clone(), w2.clone()), Ok(()));
    let err = |r: std::result::Result<(), String>| r.unwrap_err();
    let got = err(run(x.clone(), chosen(3, 2), g.clone(), w13.clone(), w2.clone()));
    assert_eq!(got, "experts: chosen has shape [3, 2], want [4, K]");
    let got = err(run(x.clone(), g.clone(), g.clone(), w13.clone(), w2.clone()));
    assert_eq!(got, "experts: chosen is f32, want i32");
    let got = err(run(x.clone(), c.clone(), g.clone(), zeros(&[5, 7, 3]), w2.clone()));
    assert_eq!(got, "experts: w13 has shape [5, 7, 3], want [E, 2F, 3], none 0");
    let got = err(run(x.clone(), c.clone(), g.clone(), w13.clone(), zeros(&[5, 4, 3])));
    assert_eq!(got, "experts: w2 has shape [5, 4, 3], want [5, 3, 4]");
    let bad = Tensor::from_vec(&[4, 2], vec![5i32; 8]).unwrap();
    assert_eq!(err(run(x, bad, g, w13, w2)), "experts: chosen is 5, want an expert of 0..5");
    assert_eq!(run(zeros(&[0, 3]), chosen(0, 2), zeros(&[0, 2]), zeros(&[5, 8, 3]), zeros(&[5, 3, 4])), Ok(()));
}

/// Output and d_x of the fixture's shared expert, which is the model's business and adds to what the routed ones give.
fn shared<'a>([d, f]: [usize; 2], get: &impl Fn(&str) -> &'a Vec<f64>) -> (Vec<f64>, Vec<f64>) {
    let ctx = Ctx::cpu();
    let mut tape = Tape::new(&ctx);
    let n = get("x").len() / d;
    let x = tape.leaf(tensor(&ctx, &[n, d], get("x")));
    let w13 = [&get("shared.w1.weight")[..], get("shared.w3.weight")].concat();
    let (w13, w2) = (tensor(&ctx, &[2 * f, d], &w13), tensor(&ctx, &[d, f], get("shared.w2.weight")));
    let ab = linear::apply(&mut tape, &x, &Var::constant(w13)).unwrap();
    let h = swiglu::apply(&mut tape, &ab).unwrap();
    let y = linear::apply(&mut tape, &h, &Var::constant(w2)).unwrap();
    let out = values(y.value()).unwrap();
    let mut grads = tape.backward_from(vec![(y, tensor(&ctx, &[n, d], get("d_y")))]).unwrap();
    (out, values(&grads.take(&x).unwrap()).unwrap())
}

/// Choice, gates, output and every gradient against transformers' DeepseekV3MoE, an empty expert among its cases.
#[test]
fn matches_the_fixture() {
    let all = fixture::load("moe");
    for (name, k, scale) in [("top2", 2, 1.412), ("top3", 3, 2.5), ("empty", 2, 1.)] {
        let get = |key: &str| &all[&format!("{name}.{key}")].1;
        let (x, d_y, counts) = (get("x"), get("d_y"), get("counts"));
        let (e, d, f) = (counts.len(), 16, 12);
        let stack = |what: &str, parts: &[&str]| -> Vec<f64> {
            let of = |i: usize| parts.iter().flat_map(move |p| get(&format!("{what}{i}.{p}.weight")).clone());
            (0..e).flat_map(of).collect()
        };
        let moe = Moe {
            wr: get("router.weight").clone(),
            bias: get("router.bias").iter().map(|&b| b as f32).collect(),
            w13: stack("experts.", &["w1", "w3"]),
            w2: stack("experts.", &["w2"]),
        };
        let n = x.len() / d;
        let args = router::Args { top_k: k, routed_scale: scale, balance_loss: 0., tokens: n as f64 };
        let (ys, d_xs) = shared([d, f], &get);
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let d_w = [&get("d_router.weight")[..], &stack("d_experts.", &["w1", "w3"]), &stack("d_experts.", &["w2"])];
        for (ctx, _) in paths() {
            let got = pass(&ctx, &moe, x, &Docs::whole(1, n), args, d_y);
            assert_eq!(got.chosen, get("indices").iter().map(|&i| i as i32).collect::<Vec<_>>(), "{name}");
            assert_eq!(got.counts, counts.iter().map(|&c| c as u64).collect::<Vec<_>>(), "{name}");
            near("gates", &got.gates, get("gates"), 3e-7);
            near("y", &sum(&got.y, &ys), get("y"), 5e-7);
            near("d_x", &sum(&got.d_x, &d_xs), get("d_x"), 5e-7);
            let (d_router, d_experts) = got.d_w.split_at(e * d);
            near("d_router", d_router, d_w[0], 2e-6); // the public router works in f32
            near("d_experts", d_experts, &d_w[1..].concat(), 1e-6);
            for (i, _) in counts.iter().enumerate().filter(|(_, c)| **c == 0.) {
                let block = &d_experts[i * 2 * f * d..][..2 * f * d];
                assert!(block.iter().all(|&g| g == 0.));
            }
        }
    }
}

/// One token on the layout alone, as decoding will: only the chosen experts are touched.
#[test]
fn one_token_touches_only_its_experts() {
    let (d, f, e) = (6, 4, 5);
    let ctx = Ctx::cpu().poisoned();
    let mut noise = Noise::new(2);
    let x = tensor(&ctx, &[1, d], &noise.normals(d));
    let chosen = Tensor::from_vec(&[1, 2], vec![3i32, 1]).unwrap();
    let gates = tensor(&ctx, &[1, 2], &[0.25, 0.75]);
    let (mut w13, mut w2) = (noise.normals(e * 2 * f * d), noise.normals(e * d * f));
    for i in [0, 2, 4] {
        w13[i * 2 * f * d..][..2 * f * d].fill(f64::NAN);
        w2[i * d * f..][..d * f].fill(f64::NAN);
    }
    let (w13, w2) = (tensor(&ctx, &[e, 2 * f, d], &w13), tensor(&ctx, &[e, d, f], &w2));
    let (y, _) = forward(&ctx, &x, &chosen, &gates, &w13, &w2).unwrap();
    let mut want = vec![0.; d];
    for (expert, gate) in [(3, 0.25), (1, 0.75)] {
        let (w13, w2) = (
            w13.view::<f32>().unwrap().rows_at(expert * 2 * f, 2 * f),
            w2.view::<f32>().unwrap().rows_at(expert * d, d),
        );
        let mut ab = ctx.empty::<f32>(&[1, 2 * f]).unwrap();
        gemm::nt(&ctx, ab.view_mut().unwrap(), x.view().unwrap(), w13, false);
        let h = swiglu::forward(&ctx, &ab).unwrap().0;
        let mut y = ctx.empty::<f32>(&[1, d]).unwrap();
        gemm::nt(&ctx, y.view_mut().unwrap(), h.view().unwrap(), w2, false);
        want.iter_mut().zip(values(&y).unwrap()).for_each(|(s, y)| *s += gate * y);
    }
    near("y", &values(&y).unwrap(), &want, 1e-6);
}
