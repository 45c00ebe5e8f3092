use crate::pool::{Buf, Pool};
use crate::{DType, Element, Error, Result, Shape, Tensor};
use std::sync::Arc;

/// Where tensors live and operations run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// The host's processor.
    Cpu,
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(hymo_cuda::Gpu),
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
    activations: DType,
    pool: Arc<Pool>,
}

impl Ctx {
    /// The processor's fast paths with a pool of their own.
    pub fn cpu() -> Self {
        Ctx { device: Device::Cpu, path: Path::Fast, poison: false, activations: DType::F32, pool: Arc::default() }
    }

    /// A GPU's paths. Parameters and statistics are f32; activations are too, unless [`Ctx::bf16`] says otherwise.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn cuda(gpu: hymo_cuda::Gpu) -> Self {
        Ctx { device: Device::Cuda(gpu), ..Ctx::cpu() }
    }

    /// The same context whose activations are bf16: what an embedding hands out, and with it all that follows.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn bf16(mut self) -> Self {
        self.activations = DType::BF16;
        self
    }

    /// What activations are, where the operands do not say: f32 on the processor.
    pub fn activations(&self) -> DType {
        self.activations
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
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work asked for so far is done; on the processor it is.
    pub fn synchronize(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = &self.device {
            gpu.synchronize()?;
        }
        Ok(())
    }

    /// Bytes that this process may still have on a GPU, with those that it has; `None` on the processor.
    pub fn available_memory(&self) -> Result<Option<usize>> {
        match &self.device {
            Device::Cpu => Ok(None),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Some(gpu.available()?)),
        }
    }

    /// Runs `work` as a range that NVIDIA's profilers show under `name`; on the processor it just runs.
    pub fn range<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cuda")]
        let _range = match &self.device {
            Device::Cuda(gpu) => Some(gpu.range(name)),
            Device::Cpu => None,
        };
        let _ = name;
        work()
    }

    /// What computes, for people: `cpu`, or a GPU's name, architecture, memory and what activations are.
    pub fn describe(&self) -> String {
        match &self.device {
            Device::Cpu => "cpu".to_owned(),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let (info, activations) = (gpu.info(), self.activations);
                let gib = info.memory as f64 / f64::from(1 << 30);
                format!("cuda: {}, {}, {gib:.1} GiB, {activations}", info.name, info.arch)
            }
        }
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
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = &self.device {
            return Tensor::on_gpu(gpu, T::DTYPE, shape, self.poison);
        }
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
            #[cfg(feature = "cuda")]
            DType::BF16 if self.device != Device::Cpu => self.empty::<half::bf16>(dims),
            got => Err(Error::DType { op: "empty_real", arg: "dtype", got, want: "f32 or f64" }),
        }
    }

    /// A contiguous tensor of zeros.
    pub fn zeros<T: Element>(&self, dims: &[usize]) -> Result<Tensor> {
        let mut out = self.empty::<T>(dims)?;
        out.clear()?;
        Ok(out)
    }

    /// As [`Ctx::zeros`], the dtype given as a value.
    pub fn zeros_real(&self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.zeros::<f32>(dims),
            DType::F64 => self.zeros::<f64>(dims),
            #[cfg(feature = "cuda")]
            DType::BF16 if self.device != Device::Cpu => self.zeros::<half::bf16>(dims),
            got => Err(Error::DType { op: "zeros_real", arg: "dtype", got, want: "f32 or f64" }),
        }
    }
}
