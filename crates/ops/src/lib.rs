//! HyMo's fused operations, one folder each: formula, forward, backward, tape entry and tests side by side.
//!
//! Every operation has an oracle (plain loops, generic over `f32` and `f64`) and a fast path for `f32` on the processor.
//! Which one runs follows from the context and the tensors: `f64` tensors and a context made by `Ctx::oracle` take the
//! oracle, all else the fast path. The oracles are part of the library because `hymo doctor` and the gradient checks
//! ([`check`]) need them at run time.
//!
//! Shape letters used throughout: `B` rows of a batch, `T` tokens of a row, `N = B T`, `D` d_model, `H` heads,
//! `K` d_k, `V` d_v (or the vocabulary, where no head is in sight), `E` experts, `F` d_ff.

/// Runs the fast path or the oracle of an operation, by the context's path and the tensors' dtype.
macro_rules! on_cpu {
    ($ctx:expr, $dtype:expr, $op:literal, fast: $fast:expr, oracle: $oracle:path, $args:tt) => {
        match ($ctx.path(), $dtype) {
            (hymo_tensor::Path::Fast, hymo_tensor::DType::F32) => $fast,
            (_, hymo_tensor::DType::F32) => on_cpu!(@call $oracle, f32, $args),
            (_, hymo_tensor::DType::F64) => on_cpu!(@call $oracle, f64, $args),
            (_, got) => Err(hymo_tensor::Error::DType { op: $op, arg: "input", got, want: "f32 or f64" }),
        }
    };
    (@call $oracle:path, $t:ty, ($($arg:expr),* $(,)?)) => { { use $oracle as oracle; oracle::<$t>($($arg),*) } };
}

pub mod act;
pub mod attention;
pub mod bench;
pub mod check;
pub mod concat;
pub mod cross_entropy;
pub mod decay_gate;
pub mod delta_rule;
mod docs;
mod dots;
pub mod embedding;
mod exp;
pub mod experts;
#[cfg(test)]
mod fixture;
pub mod gated_norm;
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod gpu;
mod lanes;
pub mod linear;
#[cfg(feature = "cuda")]
mod matmul;
pub mod packed_linear;
pub mod registry;
pub mod residual;
pub mod rms_norm;
pub mod rotary;
pub mod router;
pub mod short_conv;
pub mod swiglu;

pub use docs::Docs;

/// Whether a parameter goes with activations: of the same dtype, or f32 beside bf16.
pub(crate) fn goes_with(param: &hymo_tensor::Tensor, x: &hymo_tensor::Tensor) -> bool {
    param.dtype() == x.dtype() || (param.dtype(), x.dtype()) == (hymo_tensor::DType::F32, hymo_tensor::DType::BF16)
}
