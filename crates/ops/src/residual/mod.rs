//! The residual stream's sum.  y = x + branch.
//!
//! All [.., D]. Saves nothing. d_x and d_branch are both d_y: handed over without a copy, so the buffer is shared until
//! one of them is added to. Deterministic. Source: MATH 0.

#[cfg(feature = "cuda")]
mod cuda;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Real, Result, Tensor, each};

const OP: &str = "residual";

/// x + branch.
pub fn forward(ctx: &Ctx, x: &Tensor, branch: &Tensor) -> Result<Tensor> {
    branch.expect(OP, "branch", x.dims())?;
    match (ctx.device(), x.dtype()) {
        (Device::Cpu, DType::F64) => add::<f64>(ctx, x, branch),
        (Device::Cpu, _) => add::<f32>(ctx, x, branch),
        #[cfg(feature = "cuda")]
        (Device::Cuda(gpu), _) => cuda::forward(ctx, gpu, x, branch),
    }
}

/// One rounding an element whatever the order, so the fast path is the oracle.
fn add<T: Real>(ctx: &Ctx, x: &Tensor, branch: &Tensor) -> Result<Tensor> {
    const ROWS: usize = 64;
    let mut y = ctx.empty::<T>(x.dims())?;
    let (a, b) = (x.view::<T>()?, branch.view::<T>()?);
    each!(y.view_mut::<T>()?.row_blocks(ROWS), |k, mut y| {
        for i in 0..y.rows() {
            let terms = a.row(k * ROWS + i).iter().zip(b.row(k * ROWS + i));
            y.row_mut(i).iter_mut().zip(terms).for_each(|(y, (&a, &b))| *y = a + b);
        }
    });
    Ok(y)
}

/// On the tape.
pub fn apply(tape: &mut Tape, x: &Var, branch: &Var) -> Result<Var> {
    let y = forward(tape.ctx(), x.value(), branch.value())?;
    let [y] = tape.record(OP, [x, branch], [y], 0, |ctx, [d_y], [d_x, d_branch]| {
        let Some(d_y) = d_y else { return Ok(()) };
        d_x.give(ctx, d_y.clone())?;
        d_branch.give(ctx, d_y)
    });
    Ok(y)
}

fn case(n: usize, d: usize) -> Case {
    let mut noise = Noise::new(n as u64);
    Case::new(format!("residual {n} x {d}"), &["y"])
        .leaf("x", &[n, d], noise.normals(n * d))
        .leaf("branch", &[n, d], noise.normals(n * d))
        .apply(|tape, v| Ok(vec![apply(tape, &v[0], &v[1])?]))
}

/// Rows across the blocks.
pub fn cases() -> Vec<Case> {
    vec![case(1, 1), case(65, 63), case(1000, 8)]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case(2048, 192))]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// x + x: both contributions reach the one input, through a shared buffer.
    #[test]
    fn the_same_input_twice() {
        Case::new("residual x + x", &["y"])
            .leaf("x", &[3, 5], Noise::new(1).normals(15))
            .apply(|tape, v| Ok(vec![apply(tape, &v[0], &v[0])?]))
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }
}
