//! Projection.  y = x Wᵀ, its columns handed out in parts.
//!
//! x [.., I], W [O, I], y [.., O]; parts are column views of one product. Sums in the operands' dtype (f32 on the
//! processor). Adjacent parameters (q, k, v, z ..) are read as one W. Saves x. d_x = Σ parts d_y W (written by the first
//! part, added by the others); d_W += d_yᵀ x, part by part. Deterministic.
//! Source: MATH 0 (W is stored [out, in]).

#[cfg(feature = "cuda")]
mod cuda;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use crate::gemm;
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Real, Result, Tensor};

const OP: &str = "linear";

/// y [.., O] of x [.., I] and W [O, I].
pub fn forward(ctx: &Ctx, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let [o, i] = w.dims2(OP, "w")?;
    if x.cols() != i || !crate::goes_with(w, x) {
        return Err(Error::Shape { op: OP, arg: "x", got: x.shape(), want: format!("[.., {i}] in {}", w.dtype()) });
    }
    match (ctx.device(), x.dtype()) {
        (Device::Cpu, DType::F64) => product::<f64>(ctx, x, w, o),
        (Device::Cpu, _) => product::<f32>(ctx, x, w, o),
        #[cfg(feature = "cuda")]
        (Device::Cuda(gpu), _) => cuda::forward(ctx, gpu, x, w, o),
    }
}

fn product<T: Real>(ctx: &Ctx, x: &Tensor, w: &Tensor, o: usize) -> Result<Tensor> {
    let mut y = ctx.empty::<T>(x.shape().with_cols(o).dims())?;
    gemm::nt(ctx, y.view_mut::<T>()?, x.view::<T>()?, w.view::<T>()?, false);
    Ok(y)
}

/// d_x and d_W from the gradients of the parts, which have the given widths; a part without a gradient counts as zero.
pub fn backward(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    parts: &[(usize, Option<Tensor>)],
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    match (ctx.device(), x.dtype()) {
        (Device::Cpu, DType::F64) => products::<f64>(ctx, x, w, parts, d_x, d_w),
        (Device::Cpu, _) => products::<f32>(ctx, x, w, parts, d_x, d_w),
        #[cfg(feature = "cuda")]
        (Device::Cuda(gpu), _) => cuda::backward(ctx, gpu, x, w, parts, d_x, d_w),
    }
}

fn products<T: Real>(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    parts: &[(usize, Option<Tensor>)],
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let (x, w) = (x.view::<T>()?, w.view::<T>()?);
    let mut row = 0;
    for (width, d_y) in parts {
        // A part of no columns (no rotary numbers, say) has nothing to add, and a matrix of no rows for a view.
        if let Some(d_y) = d_y.as_ref().filter(|_| *width > 0) {
            let d_y = d_y.view::<T>()?;
            if let Some((d_x, add)) = d_x.target::<T>(ctx)? {
                gemm::nn(ctx, d_x, d_y, w.rows_at(row, *width), add);
            }
            if let Some((d_w, add)) = d_w.target::<T>(ctx)? {
                let (_, below) = d_w.split_rows(row);
                gemm::tn(ctx, below.split_rows(*width).0, d_y, x, add);
            }
        }
        row += width;
    }
    Ok(())
}

/// On the tape, the output cut into `O` parts of the given widths, which must sum to W's rows.
pub fn apply_split<const O: usize>(tape: &mut Tape, x: &Var, w: &Var, widths: [usize; O]) -> Result<[Var; O]> {
    let y = forward(tape.ctx(), x.value(), w.value())?;
    if widths.iter().sum::<usize>() != y.cols() {
        return Err(Error::value(OP, "widths", format!("{widths:?}"), format!("a sum of {}", y.cols())));
    }
    let mut from = 0;
    let mut parts = Vec::with_capacity(O);
    for width in widths {
        parts.push(y.slice_cols(from..from + width)?);
        from += width;
    }
    let parts: [Tensor; O] = parts.try_into().expect("invariant: one part a width");
    let saved = (x.value().clone(), w.value().clone());
    let bytes = saved.0.bytes();
    Ok(tape.record(OP, [x, w], parts, bytes, move |ctx, d_y, [d_x, d_w]| {
        let parts: Vec<_> = widths.into_iter().zip(d_y).collect();
        backward(ctx, &saved.0, &saved.1, &parts, d_x, d_w)
    }))
}

/// On the tape, the output whole.
pub fn apply(tape: &mut Tape, x: &Var, w: &Var) -> Result<Var> {
    let width = w.value().rows();
    let [y] = apply_split(tape, x, w, [width])?;
    Ok(y)
}

fn case(n: usize, i: usize, widths: [usize; 2]) -> Case {
    let o = widths[0] + widths[1];
    let mut noise = Noise::new((n * 1000 + i) as u64);
    Case::new(format!("linear {n} x {i} -> {widths:?}"), &["y0", "y1"])
        .leaf("x", &[n, i], noise.normals(n * i))
        .param("w", &[o, i], noise.normals(o * i))
        .apply(move |tape, v| Ok(apply_split(tape, &v[0], &v[1], widths)?.into()))
}

/// Odd sizes around the blocks of the matrix kernels, whole and in parts.
pub fn cases() -> Vec<Case> {
    vec![case(1, 3, [2, 1]), case(63, 65, [17, 30]), case(65, 64, [64, 5]), case(1000, 33, [40, 24])]
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    let bench = |n, i, widths: [usize; 2]| Bench::new(case(n, i, widths)).projection([n, i, widths[0] + widths[1]], 1);
    vec![bench(2048, 192, [512, 264]), bench(2048, 256, [100, 92]), bench(1024, 384, [1536, 780])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_does_not_fit() {
        let ctx = Ctx::cpu();
        let (x, w) = (ctx.zeros::<f32>(&[2, 3]).unwrap(), ctx.zeros::<f32>(&[5, 4]).unwrap());
        let err = forward(&ctx, &x, &w).unwrap_err().to_string();
        assert_eq!(err, "linear: x has shape [2, 3], want [.., 4] in f32");
        let (x, w) = (Var::constant(ctx.zeros::<f32>(&[2, 4]).unwrap()), Var::constant(w));
        let err = apply_split(&mut Tape::off(&ctx), &x, &w, [2, 2]).unwrap_err().to_string();
        assert_eq!(err, "linear: widths is [2, 2], want a sum of 5");
    }

    /// A part of no columns, as of attention without rotary numbers: used, and of no effect.
    #[test]
    fn parts_may_be_empty() {
        for widths in [[0, 7, 0], [3, 0, 4]] {
            let mut noise = Noise::new(9);
            Case::new("linear, empty parts", &["y0", "y1", "y2"])
                .leaf("x", &[5, 4], noise.normals(20))
                .param("w", &[7, 4], noise.normals(28))
                .apply(move |tape, v| Ok(apply_split(tape, &v[0], &v[1], widths)?.into()))
                .check(&Ctx::cpu())
                .unwrap()
                .assert();
        }
    }

    /// Only one of two parts is used: the other counts as zero.
    #[test]
    fn unused_parts_are_zero() {
        let mut noise = Noise::new(9);
        Case::new("linear, second part unused", &["y"])
            .leaf("x", &[5, 4], noise.normals(20))
            .param("w", &[7, 4], noise.normals(28))
            .apply(|tape, v| Ok(vec![apply_split(tape, &v[0], &v[1], [3, 4])?[0].clone()]))
            .check(&Ctx::cpu())
            .unwrap()
            .assert();
    }
}
