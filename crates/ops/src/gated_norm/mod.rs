//! Gated RMSNorm, one norm a head, the norm before the gate.
//! n = o r,  r = (mean(o²) + ε)^(-1/2) over the head's V numbers,  y = w ⊙ n ⊙ φ(z).
//!
//! o, z, y [N, H V] (each may be columns of a wider tensor), w `[V]` shared by the heads (plain: 1 is the identity), φ
//! silu or sigmoid. Sums in the operands' dtype, at least f32; n is not rounded before it meets w. Saves o, z and
//! r [N, H]; φ(z) is recomputed. With d_n = d_y ⊙ w ⊙ φ(z): d_o = r (d_n - n mean(d_n ⊙ n)), d_z = d_y ⊙ w ⊙ n ⊙ φ'(z),
//! both following their slots (write or add); d_w += Σ d_y ⊙ n ⊙ φ(z), rows in fixed blocks. Deterministic.
//! Source: MATH 1.7.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::act::GateAct;
use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};

const OP: &str = "gated_norm";

/// How the norm is taken and gated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// Added to the mean square.
    pub eps: f64,
    /// φ.
    pub act: GateAct,
    /// Numbers of a head.
    pub d_v: usize,
}

/// What the backward needs beside the weight.
#[derive(Debug, Clone)]
pub struct Saved {
    o: Tensor,
    z: Tensor,
    /// [N, H]
    r: Tensor,
}

impl Saved {
    fn bytes(&self) -> usize {
        self.o.bytes() + self.z.bytes() + self.r.bytes()
    }
}

/// y and what the backward needs, of o and z [N, H V] and w `[V]`.
pub fn forward(ctx: &Ctx, o: &Tensor, z: &Tensor, w: &Tensor, args: Args) -> Result<(Tensor, Saved)> {
    if args.d_v == 0 || o.cols() % args.d_v != 0 {
        return Err(Error::value(OP, "d_v", args.d_v, format!("a divisor of o's {} columns", o.cols())));
    }
    z.expect(OP, "z", o.dims())?;
    w.expect(OP, "w", &[args.d_v])?;
    for (arg, t, fits) in [("z", z, z.dtype() == o.dtype()), ("w", w, crate::goes_with(w, o))] {
        if !fits {
            return Err(Error::DType { op: OP, arg, got: t.dtype(), want: "the dtype of o" });
        }
    }
    let (y, r) = match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, o.dtype(), "gated_norm",
            fast: cpu::forward(ctx, o, z, w, args),
            oracle: cpu::oracle, (ctx, o, z, w, args)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, o, z, w, args),
    }?;
    Ok((y, Saved { o: o.clone(), z: z.clone(), r }))
}

/// The gradients of o, z and w, in this order, from d_y.
pub fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    args: Args,
    grads: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_y.dtype(), "gated_norm",
            fast: cpu::backward(ctx, saved, w, d_y, args, grads),
            oracle: cpu::oracle_backward, (ctx, saved, w, d_y, args, grads)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, w, d_y, args, grads),
    }
}

/// On the tape.
pub fn apply(tape: &mut Tape, o: &Var, z: &Var, w: &Var, args: Args) -> Result<Var> {
    let (y, saved) = forward(tape.ctx(), o.value(), z.value(), w.value(), args)?;
    let (w_value, bytes) = (w.value().clone(), saved.bytes());
    let [y] = tape.record(OP, [o, z, w], [y], bytes, move |ctx, [d_y], grads| {
        let Some(d_y) = d_y else { return Ok(()) };
        backward(ctx, &saved, &w_value, &d_y, args, grads)
    });
    Ok(y)
}

fn case(n: usize, h: usize, d_v: usize, act: GateAct) -> Case {
    let (mut noise, width) = (Noise::new((n + 3 * d_v) as u64), h * d_v);
    Case::new(format!("gated_norm {n} x {h} x {d_v}, {act:?}"), &["y"])
        .leaf("o", &[n, width], noise.normals(n * width))
        .leaf("z", &[n, width], noise.normals(n * width).into_iter().map(|z| 2. * z).collect())
        .param("w", &[d_v], noise.normals(d_v))
        .bound("y", 1.6e-7)
        .bound("d_o", 3.5e-7)
        .bound("d_z", 2.6e-7)
        .bound("d_w", if n < 100 { 5e-7 } else { 1.6e-6 }) // the oracle's is one long sum
        .apply(move |tape, v| Ok(vec![apply(tape, &v[0], &v[1], &v[2], Args { eps: 1e-6, act, d_v })?]))
}

/// Odd head sizes, single rows and rows across the blocks, both gates.
pub fn cases() -> Vec<Case> {
    use GateAct::{Sigmoid, Silu};
    vec![
        case(1, 1, 2, Silu),
        case(2, 3, 5, Sigmoid),
        case(63, 2, 16, Silu),
        case(65, 3, 17, Sigmoid),
        case(1000, 2, 8, Silu),
    ]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 4, 64, GateAct::Sigmoid))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{rms_error, values};
    use crate::fixture;

    #[test]
    fn says_what_does_not_fit() {
        let ctx = Ctx::cpu();
        let zeros = |dims: &[usize]| ctx.zeros::<f32>(dims).unwrap();
        let err = |z: &[usize], w: usize, d_v: usize| {
            let args = Args { eps: 1e-6, act: GateAct::Silu, d_v };
            forward(&ctx, &zeros(&[2, 6]), &zeros(z), &zeros(&[w]), args).unwrap_err().to_string()
        };
        assert_eq!(err(&[2, 6], 4, 4), "gated_norm: d_v is 4, want a divisor of o's 6 columns");
        assert_eq!(err(&[2, 6], 0, 0), "gated_norm: d_v is 0, want a divisor of o's 6 columns");
        assert_eq!(err(&[2, 5], 3, 3), "gated_norm: z has shape [2, 5], want [2, 6]");
        assert_eq!(err(&[2, 6], 2, 3), "gated_norm: w has shape [2], want [3]");
    }

    /// A head of zeros (a document's first tokens while the state is empty) stays zero and has a finite gradient, and
    /// so do gates far out.
    #[test]
    fn zero_heads_and_extreme_gates_are_finite() {
        for act in [GateAct::Sigmoid, GateAct::Silu] {
            Case::new("gated_norm of zeros", &["y"])
                .leaf("o", &[2, 4], vec![0., 0., 1., 2., 0., 0., 0., 0.])
                .leaf("z", &[2, 4], vec![1., -1., 1e4, -1e4, 100., -100., 0., 3.])
                .param("w", &[2], vec![0.5, -1.])
                .difference(1e-3) // the differences' step is not small beside sqrt(eps)
                .bound("d_z", 4e-7)
                .apply(move |tape, v| Ok(vec![apply(tape, &v[0], &v[1], &v[2], Args { eps: 1e-6, act, d_v: 2 })?]))
                .check(&Ctx::cpu())
                .unwrap()
                .assert();
        }
    }

    /// y and all gradients, o and z being columns of one wider tensor or not.
    fn run(ctx: &Ctx, o: &Tensor, z: &Tensor, w: &Tensor, d_y: &Tensor, args: Args) -> [Vec<f64>; 4] {
        let mut tape = Tape::new(ctx);
        let leaves = [o, z, w].map(|t| tape.leaf(t.clone()));
        let y = apply(&mut tape, &leaves[0], &leaves[1], &leaves[2], args).unwrap();
        let value = values(y.value()).unwrap();
        let mut grads = tape.backward_from(vec![(y, d_y.clone())]).unwrap();
        let [d_o, d_z, d_w] = leaves.map(|v| values(&grads.take(&v).unwrap()).unwrap());
        [value, d_o, d_z, d_w]
    }

    /// Columns of a wider projection give the bits of a copy.
    #[test]
    fn strided_inputs_give_the_same_bits() {
        let ctx = Ctx::cpu().poisoned();
        let wide: Vec<f32> = Noise::new(4).normals(40 * 50).into_iter().map(|x| x as f32).collect();
        let wide = Tensor::from_slice(&ctx, &[40, 50], &wide).unwrap();
        let part = |from: usize| wide.slice_cols(from..from + 12).unwrap();
        let (o, z, d_y) = (part(1), part(20), part(37));
        let w = Tensor::from_slice(&ctx, &[6], &[0.5f32, -1., 2., 1., 0.1, 3.]).unwrap();
        let args = Args { eps: 1e-6, act: GateAct::Silu, d_v: 6 };
        let copy = |t: &Tensor| t.copy(&ctx).unwrap();
        let want = run(&ctx, &copy(&o), &copy(&z), &w, &copy(&d_y), args);
        assert_eq!(run(&ctx, &o, &z, &w, &d_y, args), want);
    }

    /// Against a public reference (transformers' Qwen3NextRMSNormGated for silu) in float64, fixtures/make_ops.py.
    #[test]
    fn matches_the_reference() {
        let ctx = Ctx::cpu().poisoned();
        let all = fixture::load("ops");
        for (name, act) in [("silu", GateAct::Silu), ("sigmoid", GateAct::Sigmoid)] {
            let get = |what: &str| &all[&format!("gated_rms_norm.{name}.{what}")];
            let [n, h, d_v] = get("o").0[..] else { panic!("3 dimensions") };
            let tensor = |what: &str, dims: &[usize]| {
                Tensor::from_slice(&ctx, dims, &get(what).1.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
            };
            let [o, z, d_y] = ["o", "z", "d_y"].map(|what| tensor(what, &[n, h * d_v]));
            let got = run(&ctx, &o, &z, &tensor("w", &[d_v]), &d_y, Args { eps: 1e-6, act, d_v });
            for (got, what) in got.iter().zip(["y", "d_o", "d_z", "d_w"]) {
                let error = rms_error(got, &get(what).1);
                assert!(error < 4e-7, "{name} {what}: {error:e}");
            }
        }
    }
}
