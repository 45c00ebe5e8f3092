use crate::pool::Buf;
use crate::{Ctx, DType, Element, Error, Mat, MatMut, Result, Shape, par};
use half::bf16;
use std::{ops::Range, sync::Arc};

/// Shared memory of one dtype.
#[derive(Debug, Clone)]
pub enum Storage {
    F32(Arc<Buf<f32>>),
    F64(Arc<Buf<f64>>),
    BF16(Arc<Buf<bf16>>),
    I32(Arc<Buf<i32>>),
    I8(Arc<Buf<i8>>),
    #[cfg(feature = "cuda")]
    Cuda(DType, Arc<hymo_cuda::Buffer>),
}

/// A row-major array of 1 to 4 dimensions whose rows (the last dimension) may lie apart: a view of some columns or some
/// rows of another tensor. Cloning shares the memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub(crate) storage: Storage,
    pub(crate) offset: usize,
    pub(crate) shape: Shape,
    pub(crate) row_stride: usize,
}

impl Tensor {
    pub(crate) fn new(storage: Storage, shape: Shape) -> Self {
        Tensor { storage, offset: 0, shape, row_stride: shape.cols() }
    }

    /// A tensor over a vector, which it takes over.
    pub fn from_vec<T: Element>(dims: &[usize], data: Vec<T>) -> Result<Self> {
        let shape = shape_of("from_vec", dims, data.len())?;
        Ok(Tensor::new(T::wrap(Arc::new(Buf::owned(data))), shape))
    }

    /// A copy of a slice in a buffer of the context's pool.
    pub fn from_slice<T: Element>(ctx: &Ctx, dims: &[usize], data: &[T]) -> Result<Self> {
        shape_of("from_slice", dims, data.len())?;
        let mut out = ctx.empty::<T>(dims)?;
        out.write(data)?;
        Ok(out)
    }

    /// A tensor of one element.
    pub fn scalar<T: Element>(ctx: &Ctx, x: T) -> Result<Self> {
        Tensor::from_slice(ctx, &[1], &[x])
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.cols()
    }

    /// Elements in all.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Elements from one row to the next.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Bytes of the elements (of a view: those it shows).
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype().size()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match &self.storage {
            Storage::F32(_) => DType::F32,
            Storage::F64(_) => DType::F64,
            Storage::BF16(_) => DType::BF16,
            Storage::I32(_) => DType::I32,
            Storage::I8(_) => DType::I8,
            #[cfg(feature = "cuda")]
            Storage::Cuda(dtype, _) => *dtype,
        }
    }

    /// Fails unless the shape is `dims`.
    pub fn expect(&self, op: &'static str, arg: &'static str, dims: &[usize]) -> Result<()> {
        if self.dims() == dims {
            return Ok(());
        }
        Err(Error::Shape { op, arg, got: self.shape, want: format!("{dims:?}") })
    }

    /// The two dimensions of a matrix.
    pub fn dims2(&self, op: &'static str, arg: &'static str) -> Result<[usize; 2]> {
        self.dims().try_into().map_err(|_| Error::Shape { op, arg, got: self.shape, want: "2 dimensions".into() })
    }

    fn buf<T: Element>(&self) -> Result<&Arc<Buf<T>>> {
        self.on_host("view")?;
        T::unwrap(&self.storage).ok_or_else(|| mismatch::<T>(self.dtype()))
    }

    /// Fails where the memory is a GPU's: no loop of the processor runs there by mistake.
    fn on_host(&self, op: &'static str) -> Result<()> {
        if self.is_on_gpu() {
            return Err(Error::Elsewhere { op, place: "a GPU's memory", want: "the processor's" });
        }
        Ok(())
    }

    /// Whether the elements lie in a GPU's memory.
    pub fn is_on_gpu(&self) -> bool {
        #[cfg(feature = "cuda")]
        return matches!(self.storage, Storage::Cuda(..));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Elements that the view spans, gaps between its rows included.
    fn span(&self) -> Range<usize> {
        let n = self.rows();
        if n == 0 || self.cols() == 0 {
            return 0..0; // columns of no rows lie past the end of their buffer
        }
        self.offset..self.offset + (n - 1) * self.row_stride + self.cols()
    }

    /// The elements as a matrix of [`rows`](Self::rows) x [`cols`](Self::cols).
    pub fn view<T: Element>(&self) -> Result<Mat<'_, T>> {
        let data = &self.buf::<T>()?.as_slice()[self.span()];
        Ok(Mat::new(data, if data.is_empty() { 0 } else { self.rows() }, self.cols(), self.row_stride))
    }

    /// The elements as a writable matrix; fails when another tensor holds the same storage.
    pub fn view_mut<T: Element>(&mut self) -> Result<MatMut<'_, T>> {
        self.on_host("view_mut")?;
        let (span, rows, cols, stride) = (self.span(), self.rows(), self.cols(), self.row_stride);
        let (dtype, shape) = (self.dtype(), self.shape);
        let arc = T::unwrap_mut(&mut self.storage).ok_or_else(|| mismatch::<T>(dtype))?;
        let buf = Arc::get_mut(arc).ok_or(Error::Shared { op: "view_mut", shape })?;
        let data = &mut buf.as_mut_slice()[span];
        let rows = if data.is_empty() { 0 } else { rows };
        Ok(MatMut::new(data, rows, cols, stride))
    }

    /// All elements as one slice; fails when rows lie apart.
    pub fn flat<T: Element>(&self) -> Result<&[T]> {
        self.check_contiguous("flat")?;
        Ok(&self.buf::<T>()?.as_slice()[self.offset..self.offset + self.numel()])
    }

    /// All elements as one writable slice; fails when rows lie apart or the storage is shared.
    pub fn flat_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check_contiguous("flat_mut")?;
        self.on_host("flat_mut")?;
        let (range, dtype, shape) = (self.offset..self.offset + self.numel(), self.dtype(), self.shape);
        let arc = T::unwrap_mut(&mut self.storage).ok_or_else(|| mismatch::<T>(dtype))?;
        let buf = Arc::get_mut(arc).ok_or(Error::Shared { op: "flat_mut", shape })?;
        Ok(&mut buf.as_mut_slice()[range])
    }

    /// Whether rows follow each other without a gap.
    pub fn is_contiguous(&self) -> bool {
        self.row_stride == self.cols() || self.rows() <= 1
    }

    fn check_contiguous(&self, op: &'static str) -> Result<()> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(Error::NotContiguous { op, shape: self.shape, row_stride: self.row_stride })
    }

    /// Whether no other tensor holds this storage.
    pub fn is_unique(&self) -> bool {
        match &self.storage {
            Storage::F32(b) => Arc::strong_count(b) == 1,
            Storage::F64(b) => Arc::strong_count(b) == 1,
            Storage::BF16(b) => Arc::strong_count(b) == 1,
            Storage::I32(b) => Arc::strong_count(b) == 1,
            Storage::I8(b) => Arc::strong_count(b) == 1,
            #[cfg(feature = "cuda")]
            Storage::Cuda(_, b) => Arc::strong_count(b) == 1,
        }
    }

    /// Columns `range` of every row, as a view.
    pub fn slice_cols(&self, range: Range<usize>) -> Result<Tensor> {
        if range.start > range.end || range.end > self.cols() {
            return Err(Error::value(
                "slice_cols",
                "range",
                format!("{range:?}"),
                format!("inside 0..{}", self.cols()),
            ));
        }
        let shape = self.shape.with_cols(range.len());
        Ok(Tensor { storage: self.storage.clone(), offset: self.offset + range.start, shape, ..*self })
    }

    /// Rows `range` (all dimensions but the last counted together), as a view of shape [range, cols].
    pub fn slice_rows(&self, range: Range<usize>) -> Result<Tensor> {
        if range.start > range.end || range.end > self.rows() {
            return Err(Error::value(
                "slice_rows",
                "range",
                format!("{range:?}"),
                format!("inside 0..{}", self.rows()),
            ));
        }
        let shape = shape_of("slice_rows", &[range.len(), self.cols()], range.len() * self.cols())?;
        let offset = self.offset + range.start * self.row_stride;
        Ok(Tensor { storage: self.storage.clone(), offset, shape, ..*self })
    }

    /// `dims` elements from `offset` of a contiguous tensor, as a view: a parameter in its unit's flat buffer.
    pub fn slice_flat(&self, offset: usize, dims: &[usize]) -> Result<Tensor> {
        self.check_contiguous("slice_flat")?;
        let shape = Shape::new(dims).filter(|s| offset.checked_add(s.numel()).is_some_and(|end| end <= self.numel()));
        let shape = shape.ok_or_else(|| {
            Error::value(
                "slice_flat",
                "dims",
                format!("{dims:?} at {offset}"),
                format!("inside {} elements", self.numel()),
            )
        })?;
        Ok(Tensor { storage: self.storage.clone(), offset: self.offset + offset, shape, row_stride: shape.cols() })
    }

    /// The same elements under another shape. A view with gaps keeps its last dimension.
    pub fn reshape(&self, dims: &[usize]) -> Result<Tensor> {
        let shape = shape_of("reshape", dims, self.numel())?;
        if shape.cols() != self.cols() {
            self.check_contiguous("reshape")?;
            return Ok(Tensor { storage: self.storage.clone(), shape, row_stride: shape.cols(), ..*self });
        }
        Ok(Tensor { storage: self.storage.clone(), shape, ..*self })
    }

    /// The elements in order.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            return self.download();
        }
        let m = self.view::<T>()?;
        let mut to = Vec::with_capacity(self.numel());
        (0..m.rows()).for_each(|i| to.extend_from_slice(m.row(i)));
        Ok(to)
    }

    /// Copies the elements, in order, over as many of the caller's, on the worker threads: what waits for a copy of
    /// everything waits for memory's bandwidth and not for one core's.
    ///
    /// # Errors
    /// Another dtype, or another number of elements.
    pub fn read_into<T: Element>(&self, to: &mut [T]) -> Result<()> {
        shape_of("read_into", self.shape.dims(), to.len())?;
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            return self.download_into(to);
        }
        let (m, cols) = (self.view::<T>()?, self.cols());
        if !self.is_contiguous() {
            to.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(i, to)| to.copy_from_slice(m.row(i)));
            return Ok(());
        }
        let from = self.flat::<T>()?;
        par::each(to.chunks_mut(BLOCK).zip(from.chunks(BLOCK)).collect(), |_, (to, from)| to.copy_from_slice(from));
        Ok(())
    }

    /// The only element of a tensor of one, as a double.
    pub fn item(&self) -> Result<f64> {
        self.expect("item", "self", &[1])?;
        match self.dtype() {
            DType::F64 => Ok(self.to_vec::<f64>()?[0]),
            _ => Ok(f64::from(self.to_vec::<f32>()?[0])),
        }
    }

    /// All elements become zero; the storage must not be shared.
    pub fn clear(&mut self) -> Result<()> {
        fn go<T: Element>(t: &mut Tensor) -> Result<()> {
            t.flat_mut::<T>()?.fill(T::default());
            Ok(())
        }
        match &self.storage {
            #[cfg(feature = "cuda")]
            Storage::Cuda(..) => self.clear_on_gpu(),
            Storage::F32(_) => go::<f32>(self),
            Storage::F64(_) => go::<f64>(self),
            Storage::BF16(_) => go::<bf16>(self),
            Storage::I32(_) => go::<i32>(self),
            Storage::I8(_) => go::<i8>(self),
        }
    }

    /// Overwrites all elements with as many of the caller's; the storage must not be shared.
    pub fn write<T: Element>(&mut self, data: &[T]) -> Result<()> {
        shape_of("write", self.shape.dims(), data.len())?;
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            return self.upload(0, data);
        }
        self.flat_mut::<T>()?.copy_from_slice(data);
        Ok(())
    }

    /// Overwrites `data.len()` elements from element `at` on; the storage must not be shared, and rows not lie apart.
    pub fn write_at<T: Element>(&mut self, at: usize, data: &[T]) -> Result<()> {
        if at.checked_add(data.len()).is_none_or(|end| end > self.numel()) {
            let got = format!("{} elements from {at}", data.len());
            return Err(Error::value("write_at", "data", got, format!("at most {} elements", self.numel())));
        }
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            return self.upload(at, data);
        }
        self.flat_mut::<T>()?[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Fails while another tensor holds the same storage, or where rows lie apart: what a write would say, before it.
    pub fn expect_writable(&self, op: &'static str) -> Result<()> {
        self.check_contiguous(op)?;
        if self.is_unique() { Ok(()) } else { Err(Error::Shared { op, shape: self.shape }) }
    }

    /// A contiguous copy with storage of its own, in the memory of the context's device.
    pub fn copy(&self, ctx: &Ctx) -> Result<Tensor> {
        fn go<T: Element>(src: &Tensor, ctx: &Ctx) -> Result<Tensor> {
            let mut out = ctx.empty::<T>(src.dims())?;
            let from = src.view::<T>()?;
            par::each(out.view_mut::<T>()?.row_blocks(ROWS), |b, mut to| {
                for i in 0..to.rows() {
                    to.row_mut(i).copy_from_slice(from.row(b * ROWS + i));
                }
            });
            Ok(out)
        }
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() || *ctx.device() != crate::Device::Cpu {
            return self.copy_across(ctx);
        }
        match self.dtype() {
            DType::F32 => go::<f32>(self, ctx),
            DType::F64 => go::<f64>(self, ctx),
            DType::BF16 => go::<bf16>(self, ctx),
            DType::I32 => go::<i32>(self, ctx),
            DType::I8 => go::<i8>(self, ctx),
        }
    }

    /// Adds `other` (same shape and dtype, `f32` or `f64`) element by element; the storage must not be shared.
    pub fn add_assign(&mut self, other: &Tensor) -> Result<()> {
        fn go<T: crate::Real>(to: &mut Tensor, from: &Tensor) -> Result<()> {
            let from = from.view::<T>()?;
            par::each(to.view_mut::<T>()?.row_blocks(ROWS), |b, mut to| {
                for i in 0..to.rows() {
                    to.row_mut(i).iter_mut().zip(from.row(b * ROWS + i)).for_each(|(y, &x)| *y += x);
                }
            });
            Ok(())
        }
        other.expect("add_assign", "other", self.dims())?;
        #[cfg(feature = "cuda")]
        if self.is_on_gpu() {
            let to = self.gpu_mut()?;
            return to.add(&other.gpu()?);
        }
        match self.dtype() {
            DType::F32 => go::<f32>(self, other),
            DType::F64 => go::<f64>(self, other),
            got => Err(Error::DType { op: "add_assign", arg: "self", got, want: "f32 or f64" }),
        }
    }
}

/// Rows in a block of copying or adding: wide enough to outweigh handing it out.
const ROWS: usize = 64;

/// Elements that one task of a plain copy takes.
const BLOCK: usize = 1 << 18;

pub(crate) fn mismatch<T: Element>(got: DType) -> Error {
    let want = match T::DTYPE {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::I8 => "i8",
    };
    Error::DType { op: "view", arg: "tensor", got, want }
}

fn shape_of(op: &'static str, dims: &[usize], numel: usize) -> Result<Shape> {
    Shape::new(dims)
        .filter(|s| s.numel() == numel)
        .ok_or_else(|| Error::value(op, "dims", format!("{dims:?}"), format!("1 to 4 dimensions of {numel} elements")))
}
