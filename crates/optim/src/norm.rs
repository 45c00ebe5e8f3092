//! The norm of the whole gradient, and whether it is finite.

use crate::Error;
use hymo_tensor::{DType, Real, Tensor, par};

/// Elements of a block of the sum: fixed, so that the sum does not depend on the number of threads.
const BLOCK: usize = 1 << 16;
/// Partial sums side by side, which the compiler may keep in vector registers.
const LANES: usize = 16;

/// Norm of all gradients as one vector, summed in f64 whatever they are kept in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradNorm {
    sum: f64,
}

impl GradNorm {
    /// Of flat gradients (`f32` or `f64`, contiguous), padding included, which is zero. On a GPU this waits for it.
    ///
    /// # Errors
    /// A tensor of another dtype, or with gaps.
    pub fn of(grads: &[Tensor]) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        if grads.iter().any(Tensor::is_on_gpu) {
            return Ok(GradNorm { sum: crate::cuda::sum_of_squares(grads)?.item()? });
        }
        let mut sum = 0.0;
        for flat in grads {
            sum += match flat.dtype() {
                DType::F64 => blocks(flat.flat::<f64>()?),
                _ => blocks(flat.flat::<f32>()?),
            };
        }
        Ok(GradNorm { sum })
    }

    /// From a sum of squares, such as one added up over ranks.
    #[must_use]
    pub fn from_sum(sum: f64) -> Self {
        GradNorm { sum }
    }

    /// The sum of squares.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The norm.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.sum.sqrt()
    }

    /// Whether every gradient is finite. (Squares of `f32` do not overflow an f64.)
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.sum.is_finite()
    }

    /// Factor on gradients that brings a larger norm down to `limit`; a limit of 0 does not clip.
    #[must_use]
    pub fn clip(&self, limit: f64) -> f64 {
        let norm = self.value();
        if limit > 0.0 && norm > limit { limit / norm } else { 1.0 }
    }
}

fn blocks<T: Real>(x: &[T]) -> f64 {
    let n = x.len().div_ceil(BLOCK);
    let sums = par::map(n, |i| {
        let block = &x[i * BLOCK..x.len().min((i + 1) * BLOCK)];
        par::vector(
            #[inline(always)]
            || sum_of_squares(block),
        )
    });
    sums.into_iter().sum()
}

/// Σ x² in f64, in a fixed order.
#[inline(always)]
pub(crate) fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    let mut lanes = [0f64; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, x) in lanes.iter_mut().zip(chunk) {
            *sum += x.f64() * x.f64();
        }
    }
    for (sum, x) in lanes.iter_mut().zip(rest) {
        *sum += x.f64() * x.f64();
    }
    lanes.into_iter().sum()
}
