use crate::pool::{Buf, Pool};
use crate::{DType, Element, Error, Result, Shape, Tensor};
use std::sync::Arc;

/// Where tensors live and operations run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The host's processor.
    Cpu,
}

/// Which of an operation's CPU forms runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// The parallel path; `f64` tensors take the oracle all the same.
    Fast,
    /// The plain loops that the fast path is checked against.
    Oracle,
}

/// Where work runs and where its buffers come from. Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct Ctx {
    device: Device,
    path: Path,
    poison: bool,
    pool: Arc<Pool>,
}

impl Ctx {
    /// The processor's fast paths with a pool of their own.
    pub fn cpu() -> Self {
        Ctx { device: Device::Cpu, path: Path::Fast, poison: false, pool: Arc::default() }
    }

    /// The same context on the oracle's path.
    pub fn oracle(mut self) -> Self {
        self.path = Path::Oracle;
        self
    }

    /// The same context whose buffers come filled with NaN (integers: their minimum), for tests.
    pub fn poisoned(mut self) -> Self {
        self.poison = true;
        self
    }

    /// Where work runs.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The fast path or the oracle.
    pub fn path(&self) -> Path {
        self.path
    }

    /// The pool that buffers come from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A contiguous tensor with arbitrary contents, to be written in full.
    pub fn empty<T: Element>(&self, dims: &[usize]) -> Result<Tensor> {
        let shape = Shape::new(dims).ok_or_else(|| {
            Error::value("empty", "dims", format!("{dims:?}"), "1 to 4 dimensions that do not overflow")
        })?;
        let mut buf: Buf<T> = self.pool.take(shape.numel());
        if self.poison {
            buf.as_mut_slice().fill(T::POISON);
        }
        Ok(Tensor::new(T::wrap(Arc::new(buf)), shape))
    }

    /// As [`Ctx::empty`], the dtype given as a value. Only `f32` and `f64` carry gradients.
    pub fn empty_real(&self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.empty::<f32>(dims),
            DType::F64 => self.empty::<f64>(dims),
            got => Err(Error::DType { op: "empty_real", arg: "dtype", got, want: "f32 or f64" }),
        }
    }

    /// A contiguous tensor of zeros.
    pub fn zeros<T: Element>(&self, dims: &[usize]) -> Result<Tensor> {
        let mut out = self.empty::<T>(dims)?;
        out.flat_mut::<T>()?.fill(T::default());
        Ok(out)
    }

    /// As [`Ctx::zeros`], the dtype given as a value.
    pub fn zeros_real(&self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.zeros::<f32>(dims),
            DType::F64 => self.zeros::<f64>(dims),
            got => Err(Error::DType { op: "zeros_real", arg: "dtype", got, want: "f32 or f64" }),
        }
    }
}
