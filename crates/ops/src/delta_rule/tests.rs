use super::chunk::Span;
use super::*;
use crate::check::{rms_error, values};
use proptest::prelude::*;

fn args(n_heads: usize, d_k: usize, d_v: usize, chunk: usize) -> Args {
    Args { n_heads, d_k, d_v, chunk, qk_l2norm: true }
}

/// One set of inputs and upstream gradients.
#[derive(Clone)]
struct Setup {
    args: Args,
    docs: Docs,
    qkv: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    h0: Vec<f64>,
    d_o: Vec<f64>,
    d_h_t: Vec<f64>,
}

impl Setup {
    fn new(docs: Docs, args: Args) -> Self {
        let (n, h) = (docs.tokens(), args.n_heads);
        let mut noise = Noise::new((n * 7 + args.chunk) as u64);
        let [g, beta] = gates(&mut noise, n * h);
        let mut normals = |n: usize| -> Vec<f64> { noise.normals(n).iter().map(|&x| f64::from(x as f32)).collect() };
        let state = docs.batch() * h * args.d_k * args.d_v;
        let round = |x: Vec<f64>| x.into_iter().map(|x| f64::from(x as f32)).collect();
        Setup {
            qkv: normals(n * h * (2 * args.d_k + args.d_v)),
            h0: normals(state),
            d_o: normals(n * h * args.d_v),
            d_h_t: normals(state),
            g: round(g),
            beta: round(beta),
            args,
            docs,
        }
    }

    /// o, h_t, d_qkv, d_g, d_beta, d_h0 of the chunk form or the recurrence, in either precision.
    fn run<T: Real>(&self, chunked: bool) -> Vec<Vec<f64>> {
        let ctx = Ctx::cpu().poisoned();
        let mut tape = Tape::new(&ctx);
        let (d, h) = (Dims::new(&self.docs, self.args), self.args.n_heads);
        let n = self.docs.tokens();
        let of = |dims: &[usize], x: &[f64]| {
            Tensor::from_vec(dims, x.iter().map(|&x| T::of(x)).collect::<Vec<T>>()).unwrap()
        };
        let state = [d.batch, h, d.d_k, d.d_v];
        let vars = [
            of(&[n, h * (2 * d.d_k + d.d_v)], &self.qkv),
            of(&[n, h], &self.g),
            of(&[n, h], &self.beta),
            of(&state, &self.h0),
        ]
        .map(|t| tape.leaf(t));
        let [qkv, g, beta, h0] = vars.each_ref().map(Var::value);
        let inputs = Inputs { qkv, g, beta, h0: Some(h0), docs: &self.docs };
        check(inputs, self.args).unwrap();
        let form =
            if chunked { forward::forward::<T>(&ctx, inputs, d, true) } else { cpu::oracle::<T>(&ctx, inputs, d) };
        let (o, h_t, states) = form.unwrap();
        let [qkv, g, beta, h0] = [qkv, g, beta, h0].map(Clone::clone);
        let saved = Saved { qkv, g, beta, h0: Some(h0), docs: self.docs.clone(), states };
        let outs = tape.record(OP, vars.each_ref(), [o, h_t], 0, move |ctx, [d_o, d_h_t], slots| {
            let upstream = Upstream { d_o: d_o.as_ref(), d_h_t: d_h_t.as_ref() };
            if chunked {
                backward::backward::<T>(ctx, &saved, upstream, d, slots)
            } else {
                cpu::oracle_backward::<T>(ctx, &saved, upstream, d, slots)
            }
        });
        let mut all: Vec<_> = outs.iter().map(|v| values(v.value()).unwrap()).collect();
        let [o, h_t] = outs;
        let seeds = vec![(o, of(&[n, h * d.d_v], &self.d_o)), (h_t, of(&state, &self.d_h_t))];
        let mut grads = tape.backward_from(seeds).unwrap();
        all.extend(vars.iter().map(|v| values(&grads.take(v).unwrap()).unwrap()));
        all
    }
}

const NAMES: [&str; 6] = ["o", "h_t", "d_qkv", "d_g", "d_beta", "d_h0"];

#[track_caller]
fn assert_close(got: &[Vec<f64>], want: &[Vec<f64>], bound: f64, what: &str) {
    for ((got, want), name) in got.iter().zip(want).zip(NAMES) {
        let error = rms_error(got, want);
        assert!(error <= bound, "{what}: {name} is off by {error:.2e}, bound {bound:.0e}");
    }
}

/// The chunk form is the recurrence: in f64 the two agree to rounding, whatever the chunk, in all outputs and gradients.
#[test]
fn chunks_are_the_recurrence() {
    for chunk in [1, 2, 15, 16, 17, 64, 100, 128, 200] {
        for (len, cuts) in [(1, vec![]), (50, vec![7, 8, 48]), (131, vec![16, 17, 64, 100, 128]), (131, vec![])] {
            let s = Setup::new(packed(2, len, &cuts, true), args(2, 5, 7, chunk));
            assert_close(&s.run::<f64>(true), &s.run::<f64>(false), 1e-14, &format!("chunk {chunk}, {len} tokens"));
        }
    }
}

/// HAZARD 2, 3: no decay at all, decays to nothing, β at 0 and 1, the same key over and over: outputs and gradients are
/// finite and those of the recurrence, in f64 and f32.
#[test]
fn extreme_gates() {
    for chunk in [16, 64] {
        for case in 0..8 {
            let mut s = Setup::new(packed(1, 130, &[65], true), args(1, 8, 8, chunk));
            match case {
                0 => s.g.fill(0.),
                1 => s.g.fill(-40.),
                2 => s.g.fill(-1e4),
                3 => s.g.iter_mut().step_by(7).for_each(|g| *g = -1e4),
                4 => s.g.fill(f64::from(f32::MIN)),
                5 => s.beta.fill(0.),
                6 => s.beta.fill(1.),
                _ => {
                    s.g.fill(0.);
                    s.beta.fill(1.);
                    let first = s.qkv[8..16].to_vec();
                    s.qkv.chunks_mut(24).for_each(|row| row[8..16].copy_from_slice(&first));
                }
            }
            let want = s.run::<f64>(false);
            assert_close(&s.run::<f64>(true), &want, 3e-13, &format!("f64, case {case}"));
            assert_close(&s.run::<f32>(true), &want, 2e-6, &format!("f32, case {case}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Keys no longer than 1 and any gates: no element of the inverse exceeds β_i Γ_ij <= 1 (fla #537's explosion needs
    /// an A that no such keys can produce).
    #[test]
    fn inverse_is_bounded(seed in 0u64..1 << 40, n in 1usize..130, d_k in 1usize..9, spread in 0f64..2., slow in 0f64..6.) {
        let mut noise = Noise::new(seed);
        let args = Args { qk_l2norm: false, ..args(1, d_k, 1, n) };
        let mut s = Setup::new(Docs::whole(1, n), args);
        let common = noise.normals(d_k);
        for row in s.qkv.chunks_mut(2 * d_k + 1) {
            let key: Vec<f64> = common.iter().map(|c| c + spread * noise.normal()).collect();
            let norm = key.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-3);
            let length = if noise.uniform() < 0.7 { 1. } else { noise.uniform() };
            row[d_k..2 * d_k].iter_mut().zip(key).for_each(|(to, k)| *to = k * length / norm);
        }
        s.g.iter_mut().for_each(|g| *g = -10f64.powf(slow - 4.) * noise.uniform());
        s.beta.iter_mut().for_each(|b| *b = (1.2 * noise.uniform()).min(1.));
        let of = |dims: &[usize], x: &[f64]| Tensor::from_vec(dims, x.to_vec()).unwrap();
        let (qkv, g, beta) = (of(&[n, 2 * d_k + 1], &s.qkv), of(&[n, 1], &s.g), of(&[n, 1], &s.beta));
        let inputs = Inputs { qkv: &qkv, g: &g, beta: &beta, h0: None, docs: &s.docs };
        let t = forward::inverse::<f64>(&Ctx::cpu(), inputs, Dims::new(&s.docs, args), Span { b: 0, h: 0, from: 0, n });
        prop_assert!(t.iter().all(|t| t.abs() <= 1. + 1e-9));
    }

    /// HAZARD 4: any split of a sequence, the state carried over, gives the whole's outputs and final state.
    #[test]
    fn splits_equal_the_whole(len in 2usize..200, at in 0f64..1., chunk in 1usize..70, cut in 0usize..200) {
        let cuts: Vec<usize> = (cut < len).then_some(cut).into_iter().collect();
        let s = Setup::new(packed(2, len, &cuts, true), args(2, 4, 6, chunk));
        let want = s.run::<f32>(true);
        let at = 1 + (at * (len - 1) as f64) as usize;
        let ctx = Ctx::cpu();
        let (mut outs, mut state) = (vec![Vec::new(); 2], tensor(&[2, 2, 4, 6], &s.h0));
        for (from, to) in [(0, at), (at, len)] {
            let rows = |x: &[f64], w: usize| -> Vec<f64> {
                (0..2).flat_map(|b| x[(b * len + from) * w..(b * len + to) * w].to_vec()).collect()
            };
            let n = 2 * (to - from);
            let [qkv, g, beta] = [(&s.qkv, 28), (&s.g, 2), (&s.beta, 2)].map(|(x, w)| tensor(&[n, w], &rows(x, w)));
            let seg: Vec<i32> = (0..2).flat_map(|_| (from..to).map(|t| i32::from(cuts.iter().any(|&c| c <= t)))).collect();
            // The second piece goes on where the first one ended, unless a document begins there.
            let goes_on = |b: usize| if from == 0 { b == 0 } else { !cuts.contains(&from) };
            let docs = Docs::continuing(2, to - from, &seg, &[goes_on(0), goes_on(1)]).unwrap();
            let inputs = Inputs { qkv: &qkv, g: &g, beta: &beta, h0: Some(&state), docs: &docs };
            let (o, h_t, _) = forward(&ctx, inputs, s.args, false).unwrap();
            let o = values(&o).unwrap();
            outs.iter_mut().zip(o.chunks(o.len() / 2)).for_each(|(to, o)| to.extend_from_slice(o));
            state = h_t;
        }
        assert_close(&[outs.concat(), values(&state).unwrap()], &want[..2], 3e-7, "split");
    }
}

fn tensor(dims: &[usize], x: &[f64]) -> Tensor {
    Tensor::from_vec(dims, x.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
}

/// HAZARD 9: documents packed into one row give what each gives alone, in outputs and all gradients, and a document's
/// gradients do not depend on its neighbours.
#[test]
fn packed_equals_separate() {
    let cuts = [0, 1, 3, 30, 64, 65, 128, 190];
    for chunk in [16, 64] {
        let s = Setup::new(packed(1, 190, &cuts[1..7], false), args(2, 6, 10, chunk));
        let whole = s.run::<f32>(true);
        for (i, pair) in cuts.windows(2).enumerate() {
            let (from, to) = (pair[0], pair[1]);
            let rows = |x: &[f64]| x[x.len() / 190 * from..x.len() / 190 * to].to_vec();
            // Only the last document's state is the row's.
            let d_h_t = if to == 190 { s.d_h_t.clone() } else { vec![0.; s.d_h_t.len()] };
            let [qkv, g, beta, d_o] = [&s.qkv, &s.g, &s.beta, &s.d_o].map(|x| rows(x));
            let alone =
                Setup { docs: Docs::whole(1, to - from), qkv, g, beta, d_o, d_h_t, ..s.clone() }.run::<f32>(true);
            for n in [0, 2, 3, 4] {
                let error = rms_error(&rows(&whole[n]), &alone[n]);
                assert!(error <= 1e-6, "document {i}: {} is off by {error:.2e}", NAMES[n]);
            }
            if to == 190 {
                assert!(rms_error(&whole[1], &alone[1]) <= 1e-6);
            }
        }
        assert!(whole[5].iter().all(|&d| d == 0.), "a row that begins anew has no d_h0");
    }
}

/// HAZARD 8: 5,000 documents of one to three tokens in one row.
#[test]
fn thousands_of_tiny_documents() {
    let mut noise = Noise::new(8);
    let seg: Vec<i32> = (0..5000).flat_map(|doc| vec![doc; 1 + noise.below(3)]).collect();
    let s = Setup::new(Docs::new(1, seg.len(), &seg).unwrap(), args(1, 8, 8, 64));
    assert_eq!(s.docs.ranges(0).count(), 5000);
    assert_close(&s.run::<f32>(true), &s.run::<f64>(false), 3e-7, "tiny documents");
}

/// HAZARD 6, 7: decoding token by token from a prefilled state gives what one pass gives; the state is f32 or refused.
#[test]
fn steps_continue_a_prefill() {
    let s = Setup::new(packed(2, 90, &[], true), Args { n_heads: 2, d_k: 4, d_v: 6, chunk: 32, qk_l2norm: true });
    let want = s.run::<f32>(true);
    let ctx = Ctx::cpu().poisoned();
    // Row 0 continues from h0, row 1 begins: for the step that is a state of zeros.
    let mut h0 = s.h0.clone();
    h0[48..].fill(0.);
    let mut state = tensor(&[2, 2, 4, 6], &h0);
    let mut outs = vec![Vec::new(); 2];
    for t in 0..90 {
        let at = |x: &[f64], w: usize| [&x[t * w..(t + 1) * w], &x[(90 + t) * w..(91 + t) * w]].concat();
        let [qkv, g, beta] = [(&s.qkv, 28), (&s.g, 2), (&s.beta, 2)].map(|(x, w)| tensor(&[2, w], &at(x, w)));
        let o = values(&step(&ctx, &qkv, &g, &beta, &mut state, s.args).unwrap()).unwrap();
        outs.iter_mut().zip(o.chunks(12)).for_each(|(to, o)| to.extend_from_slice(o));
    }
    assert_close(&[outs.concat(), values(&state).unwrap()], &want[..2], 3e-7, "steps");
    let one = |w| tensor(&[2, w], &vec![0.; 2 * w]);
    let mut half = ctx.zeros::<hymo_tensor::bf16>(&[2, 2, 4, 6]).unwrap();
    let err = step(&ctx, &one(28), &one(2), &one(2), &mut half, s.args).unwrap_err().to_string();
    assert_eq!(err, "delta_rule: h0 is bf16, want the dtype of qkv, f32 beside bf16");
}

/// Only one output used, inputs that are columns of something wider, and a row of no tokens.
#[test]
fn unused_outputs_and_strided_inputs() {
    for used in [0, 1] {
        let mut noise = Noise::new(6);
        let a = args(1, 3, 4, 16);
        Case::new("delta_rule of columns, one output used", &["y"])
            .leaf("x", &[20, 5], noise.normals(100))
            .param("w", &[14, 5], noise.normals(70))
            .leaf("g", &[20, 1], gates(&mut noise, 20)[0].clone())
            .apply(move |tape, v| {
                let [_, qkv, _, beta, _] = crate::linear::apply_split(tape, &v[0], &v[1], [1, 10, 1, 1, 1])?;
                Ok(vec![apply(tape, &qkv, &v[2], &beta, None, &Docs::whole(1, 20), a)?[used].clone()])
            })
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }
    let ctx = Ctx::cpu();
    let [qkv, g] = [10, 1].map(|w| ctx.zeros::<f32>(&[0, w]).unwrap());
    let docs = Docs::continuing(1, 0, &[], &[true]).unwrap();
    let h0 = tensor(&[1, 1, 3, 4], &[2.; 12]);
    let inputs = Inputs { qkv: &qkv, g: &g, beta: &g, h0: Some(&h0), docs: &docs };
    let (_, h_t, _) = forward(&ctx, inputs, args(1, 3, 4, 16), true).unwrap();
    assert_eq!(values(&h_t).unwrap(), [2.; 12]);
}

#[test]
fn says_what_does_not_fit() {
    let ctx = Ctx::cpu();
    let (qkv, g) = (tensor(&[4, 10], &[0.; 40]), tensor(&[4, 1], &[0.; 4]));
    let docs = Docs::continuing(2, 2, &[0; 4], &[false, true]).unwrap();
    let inputs = Inputs { qkv: &qkv, g: &g, beta: &g, h0: None, docs: &docs };
    let err = |inputs, args| forward(&ctx, inputs, args, true).unwrap_err().to_string();
    assert_eq!(err(inputs, args(1, 3, 4, 0)), "delta_rule: chunk is 0, want at least 1");
    assert_eq!(err(inputs, args(1, 3, 5, 16)), "delta_rule: qkv has shape [4, 10], want [4, 11]");
    assert_eq!(err(inputs, args(1, 3, 4, 16)), "delta_rule: h0 is none, want the state that row 1 continues from");
}

/// HAZARD 1: the public forms of transformers and fla, outputs and every gradient; and their float64 values.
#[test]
fn public_references() {
    let file = crate::fixture::load("delta_rule");
    let names: Vec<&str> = file.keys().filter_map(|k| k.strip_suffix(".hT")).filter(|k| !k.ends_with(".f64")).collect();
    assert_eq!(names.len(), 13);
    for name in names {
        let get = |what: &str| &file[&format!("{name}.{what}")];
        let [batch, len, heads, d_k] = get("q").0[..] else { panic!("{name}: four dimensions") };
        let d_v = get("v").0[3];
        let args = Args { qk_l2norm: name.ends_with("_l2"), ..args(heads, d_k, d_v, 64) };
        let carried = name.contains("_h0");
        let beside = |prefix: &str| -> Vec<f64> {
            let [q, k, v] = ["q", "k", "v"].map(|n| &get(&format!("{prefix}{n}")).1);
            let row = |x: &[f64], i: usize| x[x.len() / (batch * len) * i..x.len() / (batch * len) * (i + 1)].to_vec();
            (0..batch * len).flat_map(|i| [row(q, i), row(k, i), row(v, i)].concat()).collect()
        };
        let docs = Docs::continuing(batch, len, &vec![0; batch * len], &vec![carried; batch]).unwrap();
        let mut s = Setup::new(docs, args);
        s.qkv = beside("");
        for (to, key) in [(&mut s.g, "g"), (&mut s.beta, "beta"), (&mut s.d_o, "d_o"), (&mut s.d_h_t, "d_hT")] {
            to.clone_from(&get(key).1);
        }
        if carried {
            s.h0.clone_from(&get("h0").1);
        }
        let want = |prefix: &str| -> Vec<Vec<f64>> {
            let of = |n: &str| get(&format!("{prefix}{n}")).1.clone();
            let mut all = vec![of("o"), of("hT"), beside(&format!("{prefix}d_")), of("d_g"), of("d_beta")];
            all.extend(carried.then(|| of("d_h0")));
            all
        };
        let fast = s.run::<f32>(true);
        assert_close(&fast, &want(""), 5e-6, name); // the references themselves are f32
        assert_close(&fast, &want("f64."), 4e-7, &format!("{name} against float64"));
        assert_close(&s.run::<f64>(false), &want("f64."), 1e-7, &format!("{name}, oracle"));
    }
}
