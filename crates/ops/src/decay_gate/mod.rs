//! Gates of the delta rule.  g = -exp(A_log) softplus(a + dt_bias),  β = σ(b), or 2 σ(b) with negative eigenvalues.
//!
//! ab [N, 2H] (columns a | b), A_log and dt_bias `[H]`, g and β [N, H]; g is the logarithm of the decay, never positive.
//! f32 throughout, A_log and dt_bias included (HAZARD 5). Saves ab; all else is one elementwise pass. With
//! da = -exp(A_log) σ(a + dt_bias) d_g: d_a = da, d_b = d_β β (1 - β) (with 2 σ: β (1 - β / 2)), which follow their slot
//! (write or add); d_dt_bias += Σ da and d_A_log += Σ d_g g, rows in fixed blocks. Deterministic.
//! Source: MATH 1.2 and 1.7.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};

pub use cpu::{beta, log_decay};

const OP: &str = "decay_gate";

/// What the gates may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Args {
    /// Whether β reaches 2, so that the state's transition may have negative eigenvalues.
    pub allow_neg_eigval: bool,
}

/// What the operation is given.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// [N, 2H], columns a | b.
    pub ab: &'a Tensor,
    /// `[H]`, the logarithm of the decay's rate.
    pub a_log: &'a Tensor,
    /// `[H]`
    pub dt_bias: &'a Tensor,
}

/// Gradients of the outputs; `None` counts as zero.
#[derive(Debug, Clone, Copy)]
pub struct Upstream<'a> {
    /// [N, H]
    pub d_g: Option<&'a Tensor>,
    /// [N, H]
    pub d_beta: Option<&'a Tensor>,
}

/// g and β.
pub fn forward(ctx: &Ctx, inputs: Inputs<'_>, args: Args) -> Result<[Tensor; 2]> {
    let Inputs { ab, a_log, dt_bias } = inputs;
    let [_, width] = ab.dims2(OP, "ab")?;
    if width == 0 || width % 2 != 0 {
        return Err(Error::Shape { op: OP, arg: "ab", got: ab.shape(), want: "[N, 2H], a and b side by side".into() });
    }
    for (arg, param) in [("a_log", a_log), ("dt_bias", dt_bias)] {
        param.expect(OP, arg, &[width / 2])?;
        if !crate::goes_with(param, ab) {
            return Err(Error::DType { op: OP, arg, got: param.dtype(), want: "the dtype of ab" });
        }
    }
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, ab.dtype(), "decay_gate",
            fast: cpu::forward(ctx, inputs, args), oracle: cpu::oracle, (ctx, inputs, args)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, inputs, args),
    }
}

/// d_ab, d_A_log and d_dt_bias from d_g and d_β.
pub fn backward(
    ctx: &Ctx,
    inputs: Inputs<'_>,
    upstream: Upstream<'_>,
    args: Args,
    slots: &mut [GradSlot<'_>; 3],
) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, inputs.ab.dtype(), "decay_gate",
            fast: cpu::backward(ctx, inputs, upstream, args, slots),
            oracle: cpu::oracle_backward, (ctx, inputs, upstream, args, slots)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, inputs, upstream, args, slots),
    }
}

/// On the tape: g and β.
pub fn apply(tape: &mut Tape, ab: &Var, a_log: &Var, dt_bias: &Var, args: Args) -> Result<[Var; 2]> {
    let inputs = Inputs { ab: ab.value(), a_log: a_log.value(), dt_bias: dt_bias.value() };
    let outputs = forward(tape.ctx(), inputs, args)?;
    let saved = [ab, a_log, dt_bias].map(|v| v.value().clone());
    let bytes = saved[0].bytes();
    Ok(tape.record(OP, [ab, a_log, dt_bias], outputs, bytes, move |ctx, [d_g, d_beta], slots| {
        let inputs = Inputs { ab: &saved[0], a_log: &saved[1], dt_bias: &saved[2] };
        backward(ctx, inputs, Upstream { d_g: d_g.as_ref(), d_beta: d_beta.as_ref() }, args, slots)
    }))
}

fn case(n: usize, h: usize, allow_neg_eigval: bool) -> Case {
    let mut noise = Noise::new((n * 10 + h) as u64);
    Case::new(format!("decay_gate {n} x {h}, negative eigenvalues {allow_neg_eigval}"), &["g", "beta"])
        .leaf("ab", &[n, 2 * h], noise.normals(2 * n * h).into_iter().map(|x| 2. * x).collect())
        .param("a_log", &[h], noise.normals(h))
        .param("dt_bias", &[h], noise.normals(h).into_iter().map(|x| x - 3.).collect())
        .bound("g", 3e-7)
        .bound("beta", 2e-7)
        .bound("d_ab", 3e-7)
        .bound("d_a_log", 2.5e-6) // terms of both signs; the oracle sums 1,000 of them one after another
        .apply(move |tape, v| Ok(apply(tape, &v[0], &v[1], &v[2], Args { allow_neg_eigval })?.into()))
}

/// One and several heads, rows across the blocks, both ranges of β.
pub fn cases() -> Vec<Case> {
    vec![case(1, 1, false), case(63, 4, true), case(64, 3, false), case(65, 16, true), case(1000, 4, false)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 4, false))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::values;

    const ARGS: Args = Args { allow_neg_eigval: false };

    #[test]
    fn says_what_does_not_fit() {
        let ctx = Ctx::cpu();
        let (ab, h) = (ctx.zeros::<f32>(&[3, 5]).unwrap(), ctx.zeros::<f32>(&[2]).unwrap());
        let err = forward(&ctx, Inputs { ab: &ab, a_log: &h, dt_bias: &h }, ARGS).unwrap_err().to_string();
        assert_eq!(err, "decay_gate: ab has shape [3, 5], want [N, 2H], a and b side by side");
        let ab = ctx.zeros::<f32>(&[3, 6]).unwrap();
        let err = forward(&ctx, Inputs { ab: &ab, a_log: &h, dt_bias: &h }, ARGS).unwrap_err().to_string();
        assert_eq!(err, "decay_gate: a_log has shape [2], want [3]");
    }

    /// HAZARD 2: gates at their extremes, values and gradients finite, g never positive, β within its range.
    #[test]
    fn extremes_are_finite() {
        let x = [-1e4, -100., -20., 0., 20., 100., 1e4];
        let ab: Vec<f32> = x.iter().flat_map(|&a| x.iter().flat_map(move |&b| [a, b])).collect();
        for a_log in [-20f32, 0., 5.] {
            let ctx = Ctx::cpu().poisoned();
            let mut tape = Tape::new(&ctx);
            let ab = tape.leaf(Tensor::from_slice(&ctx, &[49, 2], &ab).unwrap());
            let a_log = tape.leaf(Tensor::from_slice(&ctx, &[1], &[a_log]).unwrap());
            let dt = tape.leaf(Tensor::from_slice(&ctx, &[1], &[0.5f32]).unwrap());
            let [g, beta] = apply(&mut tape, &ab, &a_log, &dt, ARGS).unwrap();
            assert!(values(g.value()).unwrap().iter().all(|&g| g <= 0. && g.is_finite()));
            assert!(values(beta.value()).unwrap().iter().all(|b| (0. ..=1.).contains(b)));
            let ones = Tensor::from_vec(&[49, 1], vec![1f32; 49]).unwrap();
            let mut grads = tape.backward_from(vec![(g, ones.clone()), (beta, ones)]).unwrap();
            for v in [&ab, &a_log, &dt] {
                assert!(values(&grads.take(v).unwrap()).unwrap().iter().all(|d| d.is_finite()));
            }
        }
    }

    /// β = σ(b), and 2 σ(b) with negative eigenvalues: by value, as 1.5 σ(b) would have right gradients too.
    #[test]
    fn beta_by_value() {
        let b = [-3f64, -0.5, 0., 1., 4.];
        let ab: Vec<f32> = b.iter().flat_map(|&b| [0.3, b as f32]).collect();
        for ctx in [Ctx::cpu(), Ctx::cpu().oracle()] {
            let ab = Tensor::from_slice(&ctx, &[5, 2], &ab).unwrap();
            let h = ctx.zeros::<f32>(&[1]).unwrap();
            for (allow_neg_eigval, range) in [(false, 1.), (true, 2.)] {
                let inputs = Inputs { ab: &ab, a_log: &h, dt_bias: &h };
                let [_, beta] = forward(&ctx, inputs, Args { allow_neg_eigval }).unwrap();
                for (got, b) in values(&beta).unwrap().iter().zip(b) {
                    let want = range / (1. + (-b).exp());
                    assert!((got - want).abs() < 3e-7, "{allow_neg_eigval}, {b}: {got} {want}");
                }
            }
        }
    }

    /// a and b as columns of a wider projection, and only one of the two outputs used.
    #[test]
    fn strided_input_and_one_output() {
        for used in [0, 1] {
            let mut noise = Noise::new(4);
            Case::new("decay_gate of columns, one output used", &["y"])
                .leaf("x", &[70, 3], noise.normals(210))
                .param("w", &[9, 3], noise.normals(27))
                .param("a_log", &[2], noise.normals(2))
                .param("dt_bias", &[2], noise.normals(2))
                .apply(move |tape, v| {
                    let [_, ab, _] = crate::linear::apply_split(tape, &v[0], &v[1], [3, 4, 2])?;
                    Ok(vec![apply(tape, &ab, &v[2], &v[3], ARGS)?[used].clone()])
                })
                .check(&Ctx::cpu())
                .unwrap()
                .assert();
        }
    }

    /// The reference gates, in float64 on float32 inputs.
    #[test]
    fn reference_values() {
        let file = crate::fixture::load("ops");
        let get = |what: &str| file[&format!("decay_gate.{what}")].1.clone();
        let ctx = Ctx::cpu().poisoned();
        let tensor = |dims: &[usize], x: &[f64]| {
            Tensor::from_slice(&ctx, dims, &x.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
        };
        let beside = |a: &str, b: &str| -> Vec<f64> {
            get(a).chunks(4).zip(get(b).chunks(4)).flat_map(|(a, b)| [a, b].concat()).collect()
        };
        let mut tape = Tape::new(&ctx);
        let ab = tape.leaf(tensor(&[9, 8], &beside("a", "b")));
        let [a_log, dt] = ["A_log", "dt_bias"].map(|n| tape.leaf(tensor(&[4], &get(n))));
        let [g, beta] = apply(&mut tape, &ab, &a_log, &dt, ARGS).unwrap();
        let mut got = vec![values(g.value()).unwrap(), values(beta.value()).unwrap()];
        let seeds = vec![(g, tensor(&[9, 4], &get("d_g"))), (beta, tensor(&[9, 4], &get("d_beta")))];
        let mut grads = tape.backward_from(seeds).unwrap();
        got.extend([&ab, &a_log, &dt].map(|v| values(&grads.take(v).unwrap()).unwrap()));
        let want = [get("g"), get("beta"), beside("d_a", "d_b"), get("d_A_log"), get("d_dt_bias")];
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = crate::check::rms_error(got, want);
            assert!(error <= 3e-7, "{i}: {error:.2e}");
        }
    }
}
