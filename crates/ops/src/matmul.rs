//! Products on a GPU: cuBLASLt where the operands lie as it likes them, else `matmul.cu`, which also multiplies groups of
//! rows by a matrix each. Which one runs follows from shapes, strides and addresses' alignment alone.

use crate::gpu::{COLUMNS, Run, args, c_type};
use hymo_cuda::{Gpu, Product, Ptr, Source};
use hymo_tensor::{Ctx, DType, GpuMat, Result, Tensor};

const OP: &str = "matmul";

pub(crate) const MATMUL: Source = Source {
    name: "matmul",
    parts: &[
        ("prelude.cuh", include_str!("prelude.cuh")),
        ("mma.cuh", include_str!("mma.cuh")),
        ("matmul.cu", include_str!("matmul.cu")),
    ],
};

pub(crate) const PANELS: Source = Source {
    name: "panels",
    parts: &[
        ("prelude.cuh", include_str!("prelude.cuh")),
        ("mma.cuh", include_str!("mma.cuh")),
        ("panels.cu", include_str!("panels.cu")),
    ],
};

/// What is transposed in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// C = A Bᵀ.
    Nt,
    /// C = A B.
    Nn,
    /// C = Aᵀ B.
    Tn,
}

impl Form {
    fn transposed(self) -> [bool; 2] {
        match self {
            Form::Nt => [false, true],
            Form::Nn => [false, false],
            Form::Tn => [true, false],
        }
    }

    fn mnk(self, a: &GpuMat, b: &GpuMat) -> [usize; 3] {
        let [ta, tb] = self.transposed();
        let (m, k) = if ta { (a.cols(), a.rows()) } else { (a.rows(), a.cols()) };
        let (kb, n) = if tb { (b.cols(), b.rows()) } else { (b.rows(), b.cols()) };
        assert!(k == kb, "matmul: sums of {k} and {kb}");
        [m, n, k]
    }
}

/// C = op(A) op(B), or C += that when `add`. Sums in f32.
pub(crate) fn matmul(ctx: &Ctx, gpu: &Gpu, form: Form, c: &GpuMat, a: &GpuMat, b: &GpuMat, add: bool) -> Result<()> {
    let [m, n, k] = form.mnk(a, b);
    assert!((c.rows(), c.cols()) == (m, n), "matmul: [{m}, {n}] into {} x {}", c.rows(), c.cols());
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        return if add { Ok(()) } else { c.clear() };
    }
    if a.dtype() == b.dtype()
        && (c.dtype() == a.dtype() || c.dtype() == DType::F32)
        && [c, a, b].iter().all(|m| lies_well(m))
    {
        let beta = if add { 1. } else { 0. };
        let product = Product { mnk: [m, n, k], batch: 1, transposed: form.transposed(), alpha: 1., beta };
        return Ok(gpu.product(&product, c.matrix(OP)?, a.matrix(OP)?, b.matrix(OP)?)?);
    }
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    let whole = c.dtype() == DType::F32 && (c.stride() == n || m == 1);
    if whole && tiles < 128 && k >= 2 * SHARE {
        let shares = k.div_ceil(SHARE);
        let mut parts = ctx.empty::<f32>(&[shares * m, n])?;
        let to = parts.gpu_mut()?;
        own(gpu, form, &to, a, b, false, [m, n, k], Some(SHARE))?;
        let run = Run { gpu, source: &COLUMNS, defines: &[] };
        return run.each("sum_partials", m * n, args![c.at(), to.at(), shares, m * n, add]);
    }
    own(gpu, form, c, a, b, add, [m, n, k], None)
}

/// Rows and columns of a tile of `matmul.cu`.
const TILE: usize = 128;
/// Terms of a sum that one block takes where blocks are few.
const SHARE: usize = 1024;

/// Whether cuBLASLt has fast kernels: every row begins at a multiple of 16 bytes.
fn lies_well(m: &GpuMat) -> bool {
    m.at().alignment() >= 16 && (m.rows() <= 1 || m.stride() * m.dtype().size() % 16 == 0)
}

#[allow(clippy::too_many_arguments)] // one product's operands; a struct would only name them twice
fn own(
    gpu: &Gpu,
    form: Form,
    c: &GpuMat,
    a: &GpuMat,
    b: &GpuMat,
    add: bool,
    [m, n, k]: [usize; 3],
    share: Option<usize>,
) -> Result<()> {
    let share = share.unwrap_or(k);
    let grid = [n.div_ceil(TILE), m.div_ceil(TILE), k.div_ceil(share)];
    launch(gpu, "0", form, [c, a, b], add, grid, [m, n, k], (Ptr::NULL, 0, 0), share)
}

/// Groups of rows, each with a matrix of its own: `offsets` `[groups + 1]` i32 says where a group's rows begin.
pub(crate) struct Groups<'a> {
    pub offsets: &'a Tensor,
    pub count: usize,
}

impl Groups<'_> {
    /// C = A op(W_e) by groups of rows: nt with w [E O, I], nn with w [E O, I] as [E][O, I].
    pub fn rows(&self, gpu: &Gpu, form: Form, c: &GpuMat, a: &GpuMat, w: &GpuMat) -> Result<()> {
        let (rows, n, k) = (c.rows(), c.cols(), a.cols());
        // Every group may end in a tile that is not full.
        let tiles = rows.div_ceil(TILE) + self.count;
        let matrix = w.rows() / self.count.max(1) * w.stride();
        let offsets = (self.offsets.gpu()?.at(), self.count, matrix);
        if k % 8 == 0 && (form == Form::Nt || n % 8 == 0) && [a, w].iter().all(|m| fits_panels(m)) {
            return panels(gpu, "1", form, [c, a, w], false, [n.div_ceil(TILE), tiles, 1], [rows, n, k], offsets);
        }
        launch(gpu, "1", form, [c, a, w], false, [n.div_ceil(TILE), tiles, 1], [rows, n, k], offsets, k)
    }

    /// C_e (+)= A_eᵀ B_e, c [E O, I]; a group without rows writes zeros, or adds nothing.
    pub fn outer(&self, gpu: &Gpu, c: &GpuMat, a: &GpuMat, b: &GpuMat, add: bool) -> Result<()> {
        let (m, n) = (c.rows() / self.count.max(1), c.cols());
        let offsets = (self.offsets.gpu()?.at(), self.count, m * c.stride());
        let grid = [n.div_ceil(TILE), m.div_ceil(TILE), self.count];
        if m % 8 == 0 && n % 8 == 0 && [a, b].iter().all(|m| fits_panels(m)) {
            return panels(gpu, "2", Form::Tn, [c, a, b], add, grid, [m, n, a.rows()], offsets);
        }
        launch(gpu, "2", Form::Tn, [c, a, b], add, grid, [m, n, a.rows()], offsets, a.rows())
    }
}

#[allow(clippy::too_many_arguments)] // one product's operands; a struct would only name them twice
fn launch(
    gpu: &Gpu,
    mode: &str,
    form: Form,
    [c, a, b]: [&GpuMat; 3],
    add: bool,
    grid: [usize; 3],
    [m, n, k]: [usize; 3],
    (offsets, groups, matrix): (Ptr, usize, usize),
    share: usize,
) -> Result<()> {
    let [ta, tb] = form.transposed().map(|t| if t { "1" } else { "0" });
    let both = a.dtype() == DType::BF16 && b.dtype() == DType::BF16;
    let defines = [
        ("MODE", mode),
        ("TA", c_type(OP, a.dtype())?),
        ("TB", c_type(OP, b.dtype())?),
        ("TC", c_type(OP, c.dtype())?),
        ("S", if both { "bf16" } else { "float" }),
        ("A_T", ta),
        ("B_T", tb),
    ];
    let run = Run { gpu, source: &MATMUL, defines: &defines };
    let list =
        args![a.at(), a.stride(), b.at(), b.stride(), c.at(), c.stride(), add, m, n, k, offsets, groups, matrix, share];
    run.grid("matmul", grid, 256, 0, list)
}

/// Whether `panels.cu` can read this: bf16, every row at a multiple of 16 bytes.
fn fits_panels(m: &GpuMat) -> bool {
    m.dtype() == DType::BF16 && lies_well(m)
}

/// Steps of [`PANELS`] in flight, and terms of a sum in each.
const PANEL: [usize; 2] = [4, 32];

#[allow(clippy::too_many_arguments)] // one product's operands; a struct would only name them twice
fn panels(
    gpu: &Gpu,
    mode: &str,
    form: Form,
    [c, a, b]: [&GpuMat; 3],
    add: bool,
    grid: [usize; 3],
    [m, n, k]: [usize; 3],
    (offsets, groups, matrix): (Ptr, usize, usize),
) -> Result<()> {
    let [ta, tb] = form.transposed();
    let bit = |t: bool| if t { "1" } else { "0" };
    let defines = [("MODE", mode), ("TC", c_type(OP, c.dtype())?), ("A_T", bit(ta)), ("B_T", bit(tb))];
    let [stages, step] = PANEL;
    let tile = |along: bool| if along { TILE * (step + 8) } else { step * (TILE + 8) };
    let shared = stages * (tile(!ta) + tile(tb)) * 2;
    let list = args![a.at(), a.stride(), b.at(), b.stride(), c.at(), c.stride(), add, m, n, k, offsets, groups, matrix];
    Run { gpu, source: &PANELS, defines: &defines }.grid("panels", grid, 256, shared, list)
}
