//! Projection with weights kept as f32, bf16 or int8, for inference.  y = x Wᵀ.
//!
//! x [.., I] f32, W [O, I], y [.., O] f32. int8 has a scale a row of W: w = scale_o q, |q| <= 127, sums over q first, the
//! scale once. Sums in f32, a register's lanes side by side (f64 in the oracle). Up to [`FEW`] rows of x, W is widened in
//! registers on its way from memory: decoding reads every weight once a token, so its bytes are its
//! time. Above, blocks of W are widened into the second-level cache and multiplied there, as prefill has enough rows to pay
//! for. An element's sum has one order whatever the number of rows, so that a row's bits are its own (HAZARD 20). No
//! gradient: training keeps f32. Deterministic.

mod cpu;
mod kept;
mod tiles;

use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::Var;
use hymo_tensor::{Ctx, DType, Device, Error, Result, Tensor};

const OP: &str = "packed_linear";

/// Rows of x up to which weights are widened in registers.
pub const FEW: usize = 8;

/// A weight matrix [O, I] in the form it is kept in.
#[derive(Debug, Clone)]
pub struct Weights {
    /// f32 [O, I], or words of several numbers.
    values: Tensor,
    dtype: DType,
    cols: usize,
    /// `[O]`, of int8.
    scales: Option<Tensor>,
}

impl Weights {
    /// Keeps W [O, I] (f32) as f32 (shared, not copied), bf16 (nearest, ties to even) or int8 (symmetric, a scale a row).
    ///
    /// # Errors
    /// Another dtype; a matrix that is not f32; an int8 row that is not finite.
    pub fn pack(ctx: &Ctx, w: &Tensor, dtype: DType) -> Result<Self> {
        w.dims2(OP, "w")?;
        let (values, scales) = match dtype {
            DType::F32 => w.view::<f32>().map(|_| (w.clone(), None))?,
            DType::BF16 => (cpu::to_bf16(ctx, w)?, None),
            DType::I8 => cpu::to_int8(ctx, w).map(|(values, scales)| (values, Some(scales)))?,
            got => return Err(Error::DType { op: OP, arg: "dtype", got, want: "f32, bf16 or i8" }),
        };
        Ok(Weights { values, dtype, cols: w.cols(), scales })
    }

    /// Rows: the outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.values.rows()
    }

    /// Columns: the inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// What the weights are kept as.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes that one product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.values.bytes() + self.scales.as_ref().map_or(0, Tensor::bytes)
    }

    /// Row `o` in f32, as the products see it: an embedding's look-up.
    ///
    /// # Errors
    /// A row that there is not; `to` of another length.
    pub fn widen_row(&self, o: usize, to: &mut [f32]) -> Result<()> {
        if o >= self.rows() || to.len() != self.cols() {
            let got = format!("row {o} into {}", to.len());
            return Err(Error::value(OP, "row", got, format!("a row of {} x {}", self.rows(), self.cols())));
        }
        cpu::widen_row(self, o, to)
    }

    /// W [O, I] in f32, as the products see it.
    ///
    /// # Errors
    /// None in practice: the shapes are this matrix's own.
    pub fn widen(&self, ctx: &Ctx) -> Result<Tensor> {
        cpu::widen(ctx, self)
    }
}

/// y [.., O] of x [.., I].
///
/// # Errors
/// An x that does not fit W, or is not f32.
pub fn forward(ctx: &Ctx, x: &Tensor, w: &Weights) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F32 | DType::F64 => x.cols() == w.cols(),
        _ => false,
    };
    if !wide {
        return Err(Error::Shape { op: OP, arg: "x", got: x.shape(), want: format!("[.., {}] in f32", w.cols()) });
    }
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, x.dtype(), "packed_linear",
            fast: cpu::forward(ctx, x, w), oracle: cpu::oracle, (ctx, x, w)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Err(crate::gpu::missing(OP, "product")),
    }
}

/// `f32` numbers of W, cheap to make.
fn weights(o: usize, i: usize) -> Vec<f32> {
    let mut noise = Noise::new((o + 7 * i) as u64);
    (0..o * i).map(|_| noise.uniform() as f32 - 0.5).collect()
}

/// Single rows and columns, sizes around the lanes, rows on both sides of [`FEW`], every dtype.
pub fn cases() -> Vec<Case> {
    let case = |n: usize, i: usize, o: usize, dtype: DType| {
        let mut noise = Noise::new((n * 100 + i) as u64);
        Case::new(format!("packed_linear {n} x {i} -> {o}, {dtype}"), &["y"])
            .constant("x", &[n, i], noise.normals(n * i))
            .bound("y", 4e-7)
            .apply(move |tape, v| {
                let w = Tensor::from_slice(tape.ctx(), &[o, i], &weights(o, i))?;
                let w = Weights::pack(tape.ctx(), &w, dtype)?;
                Ok(vec![Var::constant(forward(tape.ctx(), v[0].value(), &w)?)])
            })
    };
    let sizes = [(1, 1, 1), (1, 63, 65), (2, 64, 5), (FEW, 65, 64), (FEW + 1, 33, 130), (70, 100, 67)];
    let dtypes = [DType::F32, DType::BF16, DType::I8];
    dtypes.into_iter().flat_map(|dtype| sizes.map(|(n, i, o)| case(n, i, o, dtype))).collect()
}

/// One token against a matrix larger than the caches, and a prefill of 512 tokens.
pub fn benches() -> Vec<Bench> {
    let bench = |n: usize, i: usize, o: usize, dtype: DType| {
        let ctx = Ctx::cpu();
        let w = Tensor::from_slice(&ctx, &[o, i], &weights(o, i)).and_then(|w| Weights::pack(&ctx, &w, dtype));
        let bytes = w.as_ref().map_or(0, Weights::bytes) + 4 * n * (i + o);
        let case = Case::new(format!("packed_linear {n} x {i} -> {o}, {dtype}"), &["y"])
            .constant("x", &[n, i], Noise::new(1).normals(n * i))
            .apply(move |tape, v| {
                let w = w.as_ref().map_err(Clone::clone)?;
                Ok(vec![Var::constant(forward(tape.ctx(), v[0].value(), w)?)])
            });
        let bench = Bench::new(case).bytes(bytes as u64, 0);
        match n > FEW {
            true => bench.forward_product(crate::bench::Form::Nt, [n, o, i]),
            false => bench.flops((2 * n * o * i) as u64, 0),
        }
    };
    let mut out: Vec<Bench> = [DType::F32, DType::BF16, DType::I8].map(|t| bench(1, 1024, 65_536, t)).into();
    out.extend([DType::BF16, DType::I8].map(|t| bench(512, 896, 2048, t)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HAZARD 20: a row alone and among others has the same bits, whatever W is kept as and however many there are.
    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let ctx = Ctx::cpu().poisoned();
        let most = 75;
        for (i, o) in [(130, 37), (1100, 101), (7, 6)] {
            let w = Tensor::from_slice(&ctx, &[o, i], &weights(o, i)).unwrap();
            let x: Vec<f32> = Noise::new(3).normals(most * i).into_iter().map(|x| x as f32).collect();
            for dtype in [DType::F32, DType::BF16, DType::I8] {
                let w = Weights::pack(&ctx, &w, dtype).unwrap();
                let some = |n: usize| {
                    let x = Tensor::from_slice(&ctx, &[n, i], &x[..n * i]).unwrap();
                    forward(&ctx, &x, &w).unwrap().to_vec::<f32>().unwrap()
                };
                let all = some(most);
                for n in (1..=FEW + 6).chain([63, 64, 66]) {
                    assert_eq!(some(n), all[..n * o], "{dtype}: {n} rows");
                }
                let last = Tensor::from_slice(&ctx, &[1, i], &x[(most - 1) * i..]).unwrap();
                assert_eq!(forward(&ctx, &last, &w).unwrap().to_vec::<f32>().unwrap(), all[(most - 1) * o..]);
            }
        }
    }

    #[test]
    fn what_packing_costs() {
        let ctx = Ctx::cpu();
        let w = Tensor::from_slice(&ctx, &[20, 64], &weights(20, 64)).unwrap();
        let error = |dtype| {
            let packed = Weights::pack(&ctx, &w, dtype).unwrap();
            let (got, want) = (packed.widen(&ctx).unwrap(), w.to_vec::<f32>().unwrap());
            let worst = got.to_vec::<f32>().unwrap().iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0., f32::max);
            (worst, packed.bytes())
        };
        assert_eq!(error(DType::F32), (0., 4 * 20 * 64));
        let (bf16, bytes) = error(DType::BF16);
        assert!(bf16 > 0. && bf16 <= 0.5 / 256. && bytes == 2 * 20 * 64, "{bf16}");
        let (int8, bytes) = error(DType::I8);
        assert!(int8 > 0. && int8 <= 0.5 / 254. * 1.001 && bytes == 20 * 64 + 4 * 20, "{int8}");
        // A row of zeros has no scale to divide by.
        let zeros = Weights::pack(&ctx, &ctx.zeros::<f32>(&[2, 3]).unwrap(), DType::I8).unwrap();
        assert_eq!(zeros.widen(&ctx).unwrap().to_vec::<f32>().unwrap(), [0.; 6]);
    }

    #[test]
    fn says_what_does_not_fit() {
        let ctx = Ctx::cpu();
        let w = Tensor::from_slice(&ctx, &[2, 2], &[1f32, 2., f32::NAN, 0.]).unwrap();
        let err = Weights::pack(&ctx, &w, DType::I8).unwrap_err().to_string();
        assert_eq!(err, "packed_linear: w is NaN or infinite in row 1, want finite numbers");
        let err = Weights::pack(&ctx, &w, DType::I32).unwrap_err().to_string();
        assert!(err.contains("i32") && err.contains("f32, bf16 or i8"), "{err}");
        let w = Weights::pack(&ctx, &w, DType::BF16).unwrap();
        let err = forward(&ctx, &ctx.zeros::<f32>(&[1, 3]).unwrap(), &w).unwrap_err().to_string();
        assert_eq!(err, "packed_linear: x has shape [1, 3], want [.., 2] in f32");
    }
}
