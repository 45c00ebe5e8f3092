//! Token embedding.  x_i = E_id_i,  x_i = 0 where id_i = -1.
//!
//! ids i32 `[N]`, E [V, D], x [N, D], in E's dtype. The id -1 gives a zero row that has no gradient: the input of an MTP
//! module whose token would lie beyond its document's end (HAZARD 10). Saves the ids. d_E_v += Σ d_x_i over id_i = v:
//! positions sorted by id, each id's rows added in the order of their positions, blocks of ids over the threads. When
//! the slot adds (a parameter) only the rows of E that occur are touched; when it is written, the others become zero.
//! No temporary of E's size. Deterministic.
//! Source: MATH 4.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};
use std::sync::Arc;

const OP: &str = "embedding";

/// What the backward needs.
#[derive(Debug, Clone)]
pub struct Saved {
    ids: Arc<[i32]>,
}

/// x [N, D] of N ids and E [V, D]; fails on an id outside -1..V, naming it and its position.
pub fn forward(ctx: &Ctx, ids: &Arc<[i32]>, e: &Tensor) -> Result<(Tensor, Saved)> {
    let [v, _] = e.dims2(OP, "E")?;
    if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| !fits(**id, v)) {
        return Err(Error::value(OP, "ids", format!("{id} at position {at}"), format!("-1 or in 0..{v}")));
    }
    let x = match ctx.device() {
        Device::Cpu => {
            on_cpu!(ctx, e.dtype(), "embedding", fast: cpu::forward(ctx, ids, e), oracle: cpu::oracle, (ctx, ids, e))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, ids, e),
    }?;
    Ok((x, Saved { ids: Arc::clone(ids) }))
}

fn fits(id: i32, v: usize) -> bool {
    id == -1 || usize::try_from(id).is_ok_and(|id| id < v)
}

/// d_E from d_x [N, D].
pub fn backward(ctx: &Ctx, saved: &Saved, d_x: &Tensor, d_e: &mut GradSlot<'_>) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_x.dtype(), "embedding",
            fast: cpu::backward(ctx, &saved.ids, d_x, d_e),
            oracle: cpu::oracle_backward, (ctx, &saved.ids, d_x, d_e)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, &saved.ids, d_x, d_e),
    }
}

/// On the tape.
pub fn apply(tape: &mut Tape, ids: &Arc<[i32]>, e: &Var) -> Result<Var> {
    let (x, saved) = forward(tape.ctx(), ids, e.value())?;
    let bytes = size_of_val(&*saved.ids);
    let [x] = tape.record(OP, [e], [x], bytes, move |ctx, [d_x], [d_e]| {
        let Some(d_x) = d_x else { return Ok(()) };
        backward(ctx, &saved, &d_x, d_e)
    });
    Ok(x)
}

/// `n` ids below `v`: repeats, some -1, the first and the last id.
fn some_ids(n: usize, v: usize) -> Arc<[i32]> {
    let mut noise = Noise::new((n * 7 + v) as u64);
    let id = |i: usize| match i % 11 {
        3 => -1,
        5 => v as i32 - 1,
        7 => 0,
        // Squared, so that some ids are frequent, as in text.
        _ => (noise.uniform().powi(2) * v as f64) as i32,
    };
    (0..n).map(id).collect()
}

fn case(n: usize, v: usize, d: usize, param: bool) -> Case {
    let ids = some_ids(n, v);
    let values = Noise::new((n + d) as u64).normals(v * d);
    let case = Case::new(format!("embedding of {n}, {v} x {d}, param {param}"), &["x"]);
    let case = if param { case.param("E", &[v, d], values) } else { case.leaf("E", &[v, d], values) };
    let sum = if n < 100 { 1.5e-7 } else { 4.5e-7 }; // an id's rows are one sum
    case.bound("x", 0.).bound("d_E", sum).apply(move |tape, vars| Ok(vec![apply(tape, &ids, &vars[0])?]))
}

/// E as a parameter (adds to its rows) and as an activation (written in full).
pub fn cases() -> Vec<Case> {
    vec![
        case(1, 1, 1, true),
        case(63, 5, 3, true),
        case(65, 40, 64, false),
        case(1000, 100, 17, true),
        case(1000, 33, 5, false),
    ]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    // Only the rows of the tokens are read; their gradients are read and written.
    let row = 4 * 192 * 2048;
    vec![Bench::new(case(2048, 4096, 192, true)).bytes(2 * row, 3 * row)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use hymo_tape::ParamGrads;

    #[test]
    fn an_id_out_of_range_is_named() {
        let ctx = Ctx::cpu();
        let e = ctx.zeros::<f32>(&[4, 2]).unwrap();
        for bad in [4, -2] {
            let err = forward(&ctx, &Arc::from([0, -1, 3, bad, 9]), &e).unwrap_err().to_string();
            assert_eq!(err, format!("embedding: ids is {bad} at position 3, want -1 or in 0..4"));
        }
    }

    /// HAZARD 10: an input beyond a document's end is a zero row and trains nothing.
    #[test]
    fn minus_one_is_a_zero_row_without_a_gradient() {
        let ctx = Ctx::cpu().poisoned();
        let e = Tensor::from_slice(&ctx, &[3, 2], &[1f32, 2., 3., 4., 5., 6.]).unwrap();
        let mut tape = Tape::new(&ctx);
        let e = tape.leaf(e);
        let x = apply(&mut tape, &Arc::from([-1, 1, -1]), &e).unwrap();
        assert_eq!(x.value().to_vec::<f32>().unwrap(), [0., 0., 3., 4., 0., 0.]);
        let d = Tensor::from_slice(&ctx, &[3, 2], &[7f32; 6]).unwrap();
        let d_e = tape.backward_from(vec![(x, d)]).unwrap().take(&e).unwrap();
        assert_eq!(d_e.to_vec::<f32>().unwrap(), [0., 0., 7., 7., 0., 0.]);
    }

    /// Only ids -1, and no id at all.
    #[test]
    fn nothing_to_add_is_zero() {
        for ids in [vec![-1; 5], vec![]] {
            let ctx = Ctx::cpu().poisoned();
            let mut tape = Tape::new(&ctx);
            let e = tape.leaf(ctx.zeros::<f32>(&[3, 2]).unwrap());
            let x = apply(&mut tape, &ids.into(), &e).unwrap();
            let d = Tensor::from_slice(&ctx, x.dims(), &vec![1f32; x.value().numel()]).unwrap();
            let d_e = tape.backward_from(vec![(x, d)]).unwrap().take(&e).unwrap();
            assert_eq!(d_e.to_vec::<f32>().unwrap(), [0.; 6]);
        }
    }

    /// A parameter's rows that do not occur keep their bits, and no temporary of E's size is taken from the pool.
    #[test]
    fn only_rows_that_occur_are_touched() {
        let ctx = Ctx::cpu();
        let (v, d) = (10_000, 64);
        let flat = ctx.zeros::<f32>(&[v * d]).unwrap();
        let mut start = ctx.empty::<f32>(&[v * d]).unwrap();
        start.flat_mut::<f32>().unwrap().fill(-0.);
        let mut tape = Tape::training(&ctx, ParamGrads::new(vec![start]).unwrap());
        let e = Var::param(flat.slice_flat(0, &[v, d]).unwrap(), 0, 0);
        let x = apply(&mut tape, &Arc::from([5, 9_999, 5]), &e).unwrap();
        let dy = Tensor::from_slice(&ctx, &[3, d], &vec![1f32; 3 * d]).unwrap();
        ctx.pool().reset_peak();
        let live = ctx.pool().stats().live;
        let grads = tape.backward_from(vec![(x, dy)]).unwrap().into_params().unwrap();
        assert!(ctx.pool().stats().peak - live < v * d);
        let got = grads.flats()[0].flat::<f32>().unwrap();
        for (row, got) in got.chunks(d).enumerate() {
            let want = [(5, 2f32), (9_999, 1.)].iter().find(|w| w.0 == row).map_or(-0f32, |w| w.1);
            assert!(got.iter().all(|x| x.to_bits() == want.to_bits()), "row {row}");
        }
    }
}
