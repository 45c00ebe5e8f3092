//! Matrix products by cuBLASLt: row-major, any row strides, plans kept.
#![allow(unsafe_code)]

use crate::gpu::lock;
use crate::{Buffer, Error, Gpu, Ptr, Result};
use cudarc::cublaslt::{result, sys};
use std::collections::HashMap;
use std::ffi::c_void;

/// What a matrix's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Single precision.
    F32,
    /// Brain float.
    Bf16,
}

impl Kind {
    /// Bytes of an element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::Bf16 => 2,
        }
    }

    fn lt(self) -> sys::cudaDataType {
        match self {
            Kind::F32 => sys::cudaDataType::CUDA_R_32F,
            Kind::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        }
    }
}

/// A matrix in device memory: where it begins and how many elements lie from row to row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// The first element.
    pub at: Ptr,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements from one matrix to the next, of a batch.
    pub batch_stride: usize,
    /// What the elements are.
    pub kind: Kind,
}

/// C = alpha op(A) op(B) + beta C, `batch` of them. op(A) `[m, k]`, op(B) `[k, n]`, C `[m, n]`, all row-major. A and B are of one
/// kind; sums are f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// Rows of C, columns of C, length of a sum.
    pub mnk: [usize; 3],
    /// How many.
    pub batch: usize,
    /// Whether A is stored `[k, m]`, B `[n, k]`.
    pub transposed: [bool; 2],
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on what C holds: 0 to write, 1 to add.
    pub beta: f32,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    mnk: [usize; 3],
    batch: usize,
    transposed: [bool; 2],
    strides: [usize; 3],
    batches: [usize; 3],
    kinds: [Kind; 3],
    alignments: [u32; 3],
    adds: bool,
}

#[derive(Clone, Copy)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algo: sys::cublasLtMatmulAlgo_t,
}

/// The library's handle, its workspace and the plans made so far.
pub(crate) struct Products {
    handle: sys::cublasLtHandle_t,
    /// Not from the pool: it lives as long as the handle, and a pooled buffer would hold the GPU that holds it.
    workspace: Ptr,
    plans: HashMap<Key, Plan>,
}

/// What NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

impl Products {
    fn new(gpu: &Gpu) -> Result<Self> {
        gpu.0.toolkit.cublaslt()?;
        let problem = |e: result::CublasError| Error::Product { product: "handle".to_owned(), problem: e.to_string() };
        let handle = result::create_handle().map_err(problem)?;
        let mut address = 0;
        // SAFETY: the pointer is to an integer of this frame; the context is current.
        let status = unsafe { cudarc::driver::sys::cuMemAlloc_v2(&mut address, WORKSPACE) };
        crate::gpu::check("cuMemAlloc", status)?;
        Ok(Products { handle, workspace: Ptr(address), plans: HashMap::new() })
    }

    /// Frees everything; no product runs any more.
    pub fn release(self) {
        // SAFETY: made by this type, used by nobody else.
        unsafe {
            for plan in self.plans.values() {
                destroy(plan);
            }
            result::destroy_handle(self.handle).ok();
            cudarc::driver::sys::cuMemFree_v2(self.workspace.0);
        }
    }
}

/// # Safety
/// The plan's parts are not used again.
unsafe fn destroy(plan: &Plan) {
    // SAFETY: the caller's promise.
    unsafe {
        for layout in plan.layouts {
            result::destroy_matrix_layout(layout).ok();
        }
        result::destroy_matmul_desc(plan.desc).ok();
    }
}

impl Gpu {
    /// Puts a product on the stream. Deterministic: a plan is a function of shapes, strides and alignments.
    ///
    /// # Errors
    /// No cuBLASLt; a product that it has no kernel for.
    // tidy: long, one call of cuBLASLt after another
    pub fn product(&self, product: &Product, c: Matrix, a: Matrix, b: Matrix) -> Result<()> {
        let [m, n, k] = product.mnk;
        if m == 0 || n == 0 || k == 0 || product.batch == 0 {
            let problem = "an empty product: the caller's to leave out or to write as zeros".to_owned();
            return Err(Error::Product { product: format!("{product:?}"), problem });
        }
        self.enter()?;
        let mut guard = lock(&self.0.products);
        let products = match &mut *guard {
            Some(products) => products,
            empty => empty.insert(Products::new(self)?),
        };
        // Row-major C is column-major Cᵀ = op(B)ᵀ op(A)ᵀ: B comes first, and a stored row is a column.
        let key = Key {
            mnk: product.mnk,
            batch: product.batch,
            transposed: product.transposed,
            strides: [b.stride, a.stride, c.stride],
            batches: [b.batch_stride, a.batch_stride, c.batch_stride],
            kinds: [b.kind, a.kind, c.kind],
            alignments: [b.at, a.at, c.at].map(Ptr::alignment),
            adds: product.beta != 0.,
        };
        let plan = match products.plans.get(&key) {
            Some(plan) => *plan,
            None => {
                let plan = plan(products.handle, &key)
                    .map_err(|e| Error::Product { product: format!("{key:?}"), problem: e.to_string() })?;
                products.plans.insert(key, plan);
                plan
            }
        };
        let (alpha, beta) = (&raw const product.alpha, &raw const product.beta);
        let (handle, workspace, stream) = (products.handle, products.workspace, self.0.stream);
        let name = || {
            let kind = |m: &Matrix| if m.kind == Kind::F32 { "f32" } else { "bf16" };
            let sizes = format!("{m} x {n} x {k}, {} of {}", kind(&c), kind(&a));
            (format!("product {sizes}"), 2 * (product.batch * m * n * k) as u64)
        };
        // SAFETY: plan and handle live; the matrices were in range when their places were made; alpha and beta are read
        // before the call returns; the workspace is used by this stream alone.
        let run = || unsafe {
            result::matmul(
                handle,
                plan.desc,
                alpha.cast(),
                beta.cast(),
                b.at.0 as *const c_void,
                plan.layouts[0],
                a.at.0 as *const c_void,
                plan.layouts[1],
                c.at.0 as *const c_void,
                plan.layouts[2],
                c.at.0 as *mut c_void,
                plan.layouts[2],
                &plan.algo,
                workspace.0 as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
            .map_err(|e| Error::Product { product: format!("{key:?}"), problem: e.to_string() })
        };
        self.measured(name, run)
    }

    /// A matrix of `rows` rows of `cols` elements, `stride` apart, at an element of a buffer.
    ///
    /// # Errors
    /// One that reaches past the buffer's end.
    pub fn matrix(buffer: &Buffer, first: usize, [rows, cols, stride]: [usize; 3], kind: Kind) -> Result<Matrix> {
        let span = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * stride + cols };
        let at = buffer.at(first * kind.size(), span * kind.size())?;
        Ok(Matrix { at, stride, batch_stride: 0, kind })
    }
}

fn plan(handle: sys::cublasLtHandle_t, key: &Key) -> std::result::Result<Plan, result::CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Desc;
    use sys::cublasLtMatmulPreferenceAttributes_t as Pref;
    use sys::cublasLtMatrixLayoutAttribute_t as Layout;
    let [m, n, k] = key.mnk.map(|x| x as u64);
    let [ta, tb] = key.transposed;
    let pointer = |x: &dyn std::any::Any| -> *const c_void { std::ptr::from_ref(x).cast() };
    let desc = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)?;
    // The column-major views of B, A and C.
    let sizes = [if tb { (k, n) } else { (n, k) }, if ta { (m, k) } else { (k, m) }, (n, m)];
    let mut layouts = [std::ptr::null_mut(); 3];
    // SAFETY: descriptors are made before they are written to; every attribute gets a value of its type and size.
    unsafe {
        for (attribute, transposed) in
            [(Desc::CUBLASLT_MATMUL_DESC_TRANSA, tb), (Desc::CUBLASLT_MATMUL_DESC_TRANSB, ta)]
        {
            let op: i32 = i32::from(transposed); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
            result::set_matmul_desc_attribute(desc, attribute, pointer(&op), 4)?;
        }
        for (i, layout) in layouts.iter_mut().enumerate() {
            let (rows, cols) = sizes[i];
            *layout = result::create_matrix_layout(key.kinds[i].lt(), rows, cols, key.strides[i] as i64)?;
            if key.batch > 1 {
                let (count, stride) = (key.batch as i32, key.batches[i] as i64);
                let count_of = Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                result::set_matrix_layout_attribute(*layout, count_of, pointer(&count), 4)?;
                let stride_of = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                result::set_matrix_layout_attribute(*layout, stride_of, pointer(&stride), 8)?;
            }
        }
        let pref = result::create_matmul_pref()?;
        let workspace = WORKSPACE as u64;
        result::set_matmul_pref_attribute(
            pref,
            Pref::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            pointer(&workspace),
            8,
        )?;
        // The library takes 256 bytes for granted unless it is told otherwise.
        let [b, a, c] = key.alignments;
        for (attribute, bytes) in [
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            result::set_matmul_pref_attribute(pref, attribute, pointer(&bytes), 4)?;
        }
        let [lb, la, lc] = layouts;
        let found = result::get_matmul_algo_heuristic(handle, desc, lb, la, lc, lc, pref);
        result_of(pref);
        let found = found.inspect_err(|_| {
            for layout in layouts {
                result::destroy_matrix_layout(layout).ok();
            }
            result::destroy_matmul_desc(desc).ok();
        })?;
        Ok(Plan { desc, layouts, algo: found.algo })
    }
}

fn result_of(pref: sys::cublasLtMatmulPreference_t) {
    // SAFETY: made by the caller and not used again.
    unsafe { result::destroy_matmul_pref(pref) }.ok();
}
