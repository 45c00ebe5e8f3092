//! Tensors in a GPU's memory: moving elements, and what operations hand to kernels.

use crate::tensor::{Storage, mismatch};
use crate::{Ctx, DType, Device, Element, Error, Result, Shape, Tensor};
use half::bf16;
use hymo_cuda::{Arg, Buffer, Gpu, Kind, Launch, Matrix, Ptr, Source};
use std::sync::Arc;

/// Elementwise work on tensors themselves.
pub(crate) const MOVE: Source = Source { name: "move", parts: &[("move.cu", include_str!("move.cu"))] };

/// This crate's kernel sources with the `#define`s that they are compiled with.
#[must_use]
pub fn kernel_sources() -> Vec<(Source, Vec<(&'static str, &'static str)>)> {
    let types = [("float", "float"), ("float", "bf16"), ("bf16", "float"), ("bf16", "bf16"), ("unsigned", "unsigned")];
    types.map(|(to, from)| (MOVE, vec![("TO", to), ("FROM", from)])).to_vec()
}

/// A matrix in a GPU's memory, as kernels are given it: a copy of a tensor's place, not a handle on its memory. Memory
/// that goes back to the pool is handed out again for later work of the same stream only, so work that is already on the
/// stream may go on reading it.
#[derive(Debug, Clone)]
pub struct GpuMat {
    gpu: Gpu,
    at: Ptr,
    rows: usize,
    cols: usize,
    stride: usize,
    dtype: DType,
}

impl GpuMat {
    /// The first element.
    pub fn at(&self) -> Ptr {
        self.at
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from row to row.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The GPU.
    pub fn device(&self) -> &Gpu {
        &self.gpu
    }

    /// `n` rows from `from`.
    pub fn rows_at(&self, from: usize, n: usize) -> GpuMat {
        assert!(from + n <= self.rows, "rows {from} + {n} of {}", self.rows);
        GpuMat { at: self.at.plus(from * self.stride * self.dtype.size()), rows: n, ..self.clone() }
    }

    /// `n` columns from `from`.
    pub fn cols_at(&self, from: usize, n: usize) -> GpuMat {
        assert!(from + n <= self.cols, "columns {from} + {n} of {}", self.cols);
        GpuMat { at: self.at.plus(from * self.dtype.size()), cols: n, ..self.clone() }
    }

    /// As a product's operand.
    pub fn matrix(&self, op: &'static str) -> Result<Matrix> {
        let kind = match self.dtype {
            DType::F32 => Kind::F32,
            DType::BF16 => Kind::Bf16,
            got => return Err(Error::DType { op, arg: "operand", got, want: "f32 or bf16" }),
        };
        Ok(Matrix { at: self.at, stride: self.stride, batch_stride: 0, kind })
    }

    /// Elements become zero.
    pub fn clear(&self) -> Result<()> {
        let args: [Arg; 4] = [self.at.into(), self.stride.into(), self.rows.into(), self.cols.into()];
        self.run("clear_rows", ("unsigned", word(self.dtype)?), self, &args)
    }

    /// Adds `from` (same shape) element by element, in f32.
    pub fn add(&self, from: &GpuMat) -> Result<()> {
        self.moved("add_rows", from)
    }

    /// Becomes `from` (same shape), rounded where this is narrower.
    pub fn set(&self, from: &GpuMat) -> Result<()> {
        self.moved("set_rows", from)
    }

    fn moved(&self, kernel: &'static str, from: &GpuMat) -> Result<()> {
        assert!((self.rows, self.cols) == (from.rows, from.cols), "shapes of one sum");
        let args: [Arg; 6] = [
            self.at.into(),
            self.stride.into(),
            from.at.into(),
            from.stride.into(),
            self.rows.into(),
            self.cols.into(),
        ];
        self.run(kernel, (c_type(self.dtype)?, c_type(from.dtype)?), self, &args)
    }

    fn run(&self, kernel: &'static str, (to, from): (&str, &str), shape: &GpuMat, args: &[Arg]) -> Result<()> {
        let blocks = (shape.rows * shape.cols).div_ceil(1024).min(1 << 16);
        let launch = Launch {
            source: &MOVE,
            defines: &[("TO", to), ("FROM", from)],
            kernel,
            grid: [blocks, 1, 1],
            threads: 256,
            shared: 0,
        };
        Ok(self.gpu.launch(&launch, args)?)
    }
}

/// The element type's name in kernels.
fn c_type(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float"),
        DType::BF16 => Ok("bf16"),
        got => Err(Error::DType { op: "move", arg: "tensor", got, want: "f32 or bf16" }),
    }
}

/// An integer type of the same size.
fn word(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 | DType::I32 => Ok("unsigned"),
        DType::BF16 => Ok("short"),
        got => Err(Error::DType { op: "clear", arg: "tensor", got, want: "f32, i32 or bf16" }),
    }
}

impl Tensor {
    /// A tensor of arbitrary contents, or of poison.
    pub(crate) fn on_gpu(gpu: &Gpu, dtype: DType, shape: Shape, poison: bool) -> Result<Tensor> {
        let buffer = gpu.alloc((shape.numel() * dtype.size()).max(1))?;
        if poison {
            let (size, value, per) = match dtype {
                DType::F32 => (4, f32::NAN.to_bits(), 1),
                DType::F64 => (4, u32::MAX, 2), // two words of ones are a NaN
                DType::BF16 => (2, u32::from(bf16::NAN.to_bits()), 1),
                DType::I32 => (4, i32::MIN as u32, 1),
                DType::I8 => (1, 0x80, 1),
            };
            buffer.fill(0, shape.numel() * per, size, value)?;
        }
        Ok(Tensor::new(Storage::Cuda(dtype, Arc::new(buffer)), shape))
    }

    fn buffer(&self) -> Result<&Arc<Buffer>> {
        match &self.storage {
            Storage::Cuda(_, buffer) => Ok(buffer),
            _ => Err(Error::Elsewhere { op: "gpu", place: "the processor's memory", want: "a GPU's" }),
        }
    }

    /// The elements for a kernel to read.
    pub fn gpu(&self) -> Result<GpuMat> {
        let (buffer, size) = (self.buffer()?, self.dtype().size());
        let (rows, cols) = (self.rows(), self.cols());
        let span = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * self.row_stride + cols };
        // Columns of no rows lie past the end of their buffer.
        let at = if span == 0 { buffer.at(0, 0)? } else { buffer.at(self.offset * size, span * size)? };
        Ok(GpuMat { gpu: buffer.gpu().clone(), at, rows, cols, stride: self.row_stride, dtype: self.dtype() })
    }

    /// The elements for a kernel to write; fails when another tensor holds the same storage.
    pub fn gpu_mut(&mut self) -> Result<GpuMat> {
        if !self.is_unique() {
            return Err(Error::Shared { op: "gpu_mut", shape: self.shape });
        }
        self.gpu()
    }

    pub(crate) fn clear_on_gpu(&mut self) -> Result<()> {
        let (offset, count) = (self.offset, self.numel());
        if !self.is_unique() {
            return Err(Error::Shared { op: "clear", shape: self.shape });
        }
        if !self.is_contiguous() {
            return self.gpu()?.clear();
        }
        let size = self.dtype().size();
        Ok(self.buffer()?.fill(offset * size, count * size / size.min(4), size.min(4), 0)?)
    }

    pub(crate) fn upload<T: Element>(&mut self, at: usize, data: &[T]) -> Result<()> {
        if T::DTYPE != self.dtype() {
            return Err(mismatch::<T>(self.dtype()));
        }
        if !self.is_unique() || !self.is_contiguous() {
            return Err(Error::Shared { op: "write", shape: self.shape });
        }
        Ok(self.buffer()?.upload((self.offset + at) * T::DTYPE.size(), bytemuck::cast_slice(data))?)
    }

    pub(crate) fn download<T: Element>(&self) -> Result<Vec<T>> {
        let mut data = vec![T::default(); self.numel()];
        self.download_into(&mut data)?;
        Ok(data)
    }

    /// Into as many elements as there are.
    pub(crate) fn download_into<T: Element>(&self, to: &mut [T]) -> Result<()> {
        if T::DTYPE != self.dtype() {
            return Err(mismatch::<T>(self.dtype()));
        }
        let (rows, cols, size) = (self.rows(), self.cols(), T::DTYPE.size());
        if rows * cols == 0 {
            return Ok(());
        }
        if self.is_contiguous() {
            return Ok(self.buffer()?.download(self.offset * size, bytemuck::cast_slice_mut(to))?);
        }
        let mut data = vec![T::default(); (rows - 1) * self.row_stride + cols];
        self.buffer()?.download(self.offset * size, bytemuck::cast_slice_mut(&mut data))?;
        for (to, from) in to.chunks_exact_mut(cols).zip(data.chunks(self.row_stride)) {
            to.copy_from_slice(&from[..cols]);
        }
        Ok(())
    }

    /// [`Tensor::copy`] where either side is a GPU's memory.
    pub(crate) fn copy_across(&self, ctx: &Ctx) -> Result<Tensor> {
        fn up<T: Element>(src: &Tensor, ctx: &Ctx) -> Result<Tensor> {
            Tensor::from_slice(ctx, src.dims(), &src.to_vec::<T>()?)
        }
        let within =
            matches!((ctx.device(), &self.storage), (Device::Cuda(gpu), Storage::Cuda(_, b)) if gpu == b.gpu());
        if !within {
            return match self.dtype() {
                DType::F32 => up::<f32>(self, ctx),
                DType::F64 => up::<f64>(self, ctx),
                DType::BF16 => up::<bf16>(self, ctx),
                DType::I32 => up::<i32>(self, ctx),
                DType::I8 => up::<i8>(self, ctx),
            };
        }
        let gpu = self.buffer()?.gpu();
        let out = Tensor::on_gpu(gpu, self.dtype(), self.shape, false)?;
        let (to, from, size) = (out.gpu()?, self.gpu()?, self.dtype().size());
        gpu.copy_rows(to.at, from.at, to.rows, to.cols * size, [from.stride * size, to.stride * size])?;
        Ok(out)
    }

    /// The same elements as f32 or bf16, rounded to nearest: the tensor itself when that is what it is.
    pub fn cast_on_gpu(&self, ctx: &Ctx, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        let mut out = ctx.empty_real(dtype, self.dims())?;
        out.gpu_mut()?.set(&self.gpu()?)?;
        Ok(out)
    }
}
