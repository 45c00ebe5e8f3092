//! Two activations side by side.  y = [a | b].
//!
//! a [.., I], b [.., J], y [.., I + J]. Saves nothing. d_a and d_b are column views of d_y, handed over without a copy.
//! Deterministic. Source: MATH 5.1 (the prediction modules' input is [embedding | hidden]).

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Real, Result, Tensor, each};

const OP: &str = "concat";

/// [a | b].
pub fn forward(ctx: &Ctx, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.rows() != b.rows() || a.dtype() != b.dtype() {
        let want = format!("{} rows in {}", a.rows(), a.dtype());
        return Err(Error::Shape { op: OP, arg: "b", got: b.shape(), want });
    }
    match (ctx.device(), a.dtype()) {
        (Device::Cpu, DType::F64) => side_by_side::<f64>(ctx, a, b),
        (Device::Cpu, _) => side_by_side::<f32>(ctx, a, b),
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), _) => {
            let mut y = ctx.empty_real(a.dtype(), a.shape().with_cols(a.cols() + b.cols()).dims())?;
            let to = y.gpu_mut()?;
            to.cols_at(0, a.cols()).set(&a.gpu()?)?;
            to.cols_at(a.cols(), b.cols()).set(&b.gpu()?)?;
            Ok(y)
        }
    }
}

/// A copy: the fast path is the oracle.
fn side_by_side<T: Real>(ctx: &Ctx, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const ROWS: usize = 64;
    let mut y = ctx.empty::<T>(a.shape().with_cols(a.cols() + b.cols()).dims())?;
    let (a, b) = (a.view::<T>()?, b.view::<T>()?);
    each!(y.view_mut::<T>()?.row_blocks(ROWS), |k, mut y| {
        for i in 0..y.rows() {
            let (left, right) = y.row_mut(i).split_at_mut(a.cols());
            left.copy_from_slice(a.row(k * ROWS + i));
            right.copy_from_slice(b.row(k * ROWS + i));
        }
    });
    Ok(y)
}

/// On the tape.
pub fn apply(tape: &mut Tape, a: &Var, b: &Var) -> Result<Var> {
    let y = forward(tape.ctx(), a.value(), b.value())?;
    let (i, j) = (a.value().cols(), b.value().cols());
    let [y] = tape.record(OP, [a, b], [y], 0, move |ctx, [d_y], [d_a, d_b]| {
        let Some(d_y) = d_y else { return Ok(()) };
        d_a.give(ctx, d_y.slice_cols(0..i)?)?;
        d_b.give(ctx, d_y.slice_cols(i..i + j)?)
    });
    Ok(y)
}

fn case(n: usize, i: usize, j: usize) -> Case {
    let mut noise = Noise::new((n + i) as u64);
    Case::new(format!("concat {n} x [{i} | {j}]"), &["y"])
        .leaf("a", &[n, i], noise.normals(n * i))
        .leaf("b", &[n, j], noise.normals(n * j))
        .apply(|tape, v| Ok(vec![apply(tape, &v[0], &v[1])?]))
}

/// Unequal widths, rows across the blocks.
pub fn cases() -> Vec<Case> {
    vec![case(1, 1, 2), case(65, 63, 5)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 192, 192))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unequal_rows_are_refused() {
        let ctx = Ctx::cpu();
        let (a, b) = (ctx.zeros::<f32>(&[2, 3]).unwrap(), ctx.zeros::<f32>(&[3, 3]).unwrap());
        assert_eq!(forward(&ctx, &a, &b).unwrap_err().to_string(), "concat: b has shape [3, 3], want 2 rows in f32");
    }

    /// Both halves are the same variable: two views of one gradient add up.
    #[test]
    fn the_same_input_twice() {
        Case::new("concat [x | x]", &["y"])
            .leaf("x", &[3, 4], Noise::new(3).normals(12))
            .apply(|tape, v| Ok(vec![apply(tape, &v[0], &v[0])?]))
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }
}
