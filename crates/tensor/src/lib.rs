//! Shapes, dtypes, devices and tensors: the ground that every other crate of HyMo stands on.
//!
//! A [`Tensor`] is row-major with one row stride, so a column slice of a projection's output is a view and needs no
//! copy. It is a cheap handle on shared storage: reading is free, writing ([`Tensor::view_mut`]) needs the only
//! handle. A [`Ctx`] says where work runs (device, fast path or oracle) and owns the pool that buffers come from and
//! go back to. There are no operations here and no gradients; `hymo-ops` and `hymo-tape` have those.
//!
//! ```
//! use hymo_tensor::{Ctx, Tensor};
//! let ctx = Ctx::cpu();
//! let qkv = Tensor::from_slice(&ctx, &[2, 6], &[0f32, 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11.])?;
//! let k = qkv.slice_cols(2..4)?; // [2, 2], a view
//! assert_eq!(k.to_vec::<f32>()?, [2., 3., 8., 9.]);
//! # Ok::<(), hymo_tensor::Error>(())
//! ```

mod ctx;
mod dtype;
mod error;
#[cfg(feature = "cuda")]
mod gpu;
mod mat;
pub mod par;
mod pool;
mod shape;
mod tensor;

pub use ctx::{Ctx, Device, Path};
pub use dtype::{DType, Element, Real};
pub use error::{Error, Result};
#[cfg(feature = "cuda")]
pub use gpu::{GpuMat, kernel_sources};
pub use half::bf16;
pub use mat::{Mat, MatMut};
pub use pool::{Pool, PoolStats};
pub use shape::Shape;
pub use tensor::Tensor;
