//! The leaf that talks to NVIDIA GPUs. It knows bytes, streams and kernels, and nothing of tensors or models.
//!
//! Nothing is linked: the driver, NVRTC and cuBLASLt are opened when the first GPU is, so one binary runs with and
//! without them. A [`Gpu`] owns a context and one stream; its pool hands out [`Buffer`]s; [`Gpu::launch`] runs a kernel of a
//! [`Source`], which NVRTC compiles for the device's own architecture when it is first used and a cache on disk keeps;
//! [`Gpu::product`] is a matrix product by cuBLASLt. This is the only crate that calls any of these libraries, and with
//! `hymo-tensor`'s tiles and `hymo-ops`' matrix kernels the only one with `unsafe`.
//!
//! ```
//! use hymo_cuda::{Gpu, Toolkit};
//! match Gpu::open(0, Toolkit::standard()) {
//!     Ok(gpu) => assert!(gpu.info().memory > 0),
//!     Err(error) => assert!(!error.to_string().is_empty()), // no driver here, and it says so
//! }
//! ```

mod compile;
mod error;
mod gpu;
mod kernel;
mod memory;
mod products;
mod profile;
mod range;
mod toolkit;

pub use compile::{Compiled, Resources, Source, compile};
pub use error::{Error, Result};
pub use gpu::{Gpu, Info};
pub use kernel::{Arg, Launch};
pub use memory::{Buffer, Ptr, Stats};
pub use products::{Kind, Matrix, Product};
pub use profile::Spent;
pub use range::Range;
pub use toolkit::Toolkit;
