//! The oracle, then the fast path, then the packing.

use super::{FEW, OP, Weights};
use crate::gemm::local;
use crate::lanes::dot;
use half::bf16;
use hymo_tensor::{Ctx, DType, Element, Error, Mat, MatMut, Real, Result, Tensor, each};

/// A number as weights are kept.
trait Kept: Element {
    fn wide(self) -> f32;
}

impl Kept for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Kept for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Kept for i8 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from(self)
    }
}

/// Runs a generic function on the values as they are kept.
macro_rules! kept {
    ($w:expr, $f:ident($($arg:expr),*)) => {
        match $w.dtype() {
            DType::BF16 => $f::<bf16>($($arg),*),
            DType::I8 => $f::<i8>($($arg),*),
            _ => $f::<f32>($($arg),*),
        }
    };
}

pub(super) fn oracle<T: Real>(ctx: &Ctx, x: &Tensor, w: &Weights) -> Result<Tensor> {
    let wide = widen(ctx, w)?;
    let (x, wide) = (x.view::<T>()?, wide.view::<f32>()?);
    let mut y = ctx.empty::<T>(&[x.rows(), wide.rows()])?;
    let mut ys = y.view_mut::<T>()?;
    for n in 0..x.rows() {
        for (o, y) in ys.row_mut(n).iter_mut().enumerate() {
            *y = x.row(n).iter().zip(wide.row(o)).map(|(&x, &w)| x * T::of(f64::from(w))).sum();
        }
    }
    Ok(y)
}

pub(super) fn forward(ctx: &Ctx, x: &Tensor, w: &Weights) -> Result<Tensor> {
    kept!(w, products(ctx, x, w))
}

/// Rows of W in a block of work.
const BLOCK: usize = 64;
/// Weights of a row that are widened at a time.
const PIECE: usize = 512;

fn products<W: Kept>(ctx: &Ctx, x: &Tensor, w: &Weights) -> Result<Tensor> {
    let mut y = ctx.empty::<f32>(x.shape().with_cols(w.rows()).dims())?;
    let (x, values) = (x.view::<f32>()?, w.values.view::<W>()?);
    let scales = w.scales.as_ref().map(|s| s.flat::<f32>()).transpose()?;
    // With few rows of x, columns of y in tiles of all rows: a task reads its rows of W once.
    each!(y.view_mut::<f32>()?.grid(x.rows().max(1), BLOCK), |block, mut y| {
        let w = values.rows_at(block * BLOCK, y.cols());
        if x.rows() <= FEW {
            few(x, w, &mut y);
        } else {
            many(ctx, x, w, y.reborrow());
        }
        if let Some(scales) = scales {
            for n in 0..y.rows() {
                y.row_mut(n).iter_mut().zip(&scales[block * BLOCK..]).for_each(|(y, &s)| *y *= s);
            }
        }
    });
    Ok(y)
}

/// Piece by piece of a row of W: widened into the first-level cache, then multiplied with every row of x. Two plain loops
/// become better vector code than one that does both, and the processor overlaps a row's sums with the next one's.
#[inline(always)]
fn few<W: Kept>(x: Mat<'_, f32>, w: Mat<'_, W>, y: &mut MatMut<'_, f32>) {
    let mut piece = [0f32; PIECE];
    for o in 0..w.rows() {
        let mut sums = [0f32; FEW];
        for (i, w) in w.row(o).chunks(PIECE).enumerate() {
            let piece = &mut piece[..w.len()];
            piece.iter_mut().zip(w).for_each(|(to, w)| *to = w.wide());
            for (n, sum) in sums[..x.rows()].iter_mut().enumerate() {
                *sum += dot(piece, &x.row(n)[i * PIECE..]);
            }
        }
        sums[..x.rows()].iter().enumerate().for_each(|(n, &sum)| y.row_mut(n)[o] = sum);
    }
}

/// One panel of W widened, then a product.
#[inline(always)]
fn many<W: Kept>(ctx: &Ctx, x: Mat<'_, f32>, w: Mat<'_, W>, y: MatMut<'_, f32>) {
    let mut panel = ctx.empty::<f32>(&[w.rows(), w.cols()]).expect("invariant: part of a matrix that is there");
    let mut to = panel.view_mut::<f32>().expect("invariant: fresh and f32");
    for o in 0..w.rows() {
        to.row_mut(o).iter_mut().zip(w.row(o)).for_each(|(to, w)| *to = w.wide());
    }
    local::nt(y, x, to.as_mat(), 1., false);
}

pub(super) fn widen(ctx: &Ctx, w: &Weights) -> Result<Tensor> {
    kept!(w, widened(ctx, w))
}

fn widened<W: Kept>(ctx: &Ctx, w: &Weights) -> Result<Tensor> {
    let values = w.values.view::<W>()?;
    let scales = w.scales.as_ref().map(|s| s.flat::<f32>()).transpose()?;
    let mut out = ctx.empty::<f32>(&[values.rows(), values.cols()])?;
    let mut to = out.view_mut::<f32>()?;
    for o in 0..values.rows() {
        let scale = scales.map_or(1., |s| s[o]);
        to.row_mut(o).iter_mut().zip(values.row(o)).for_each(|(to, w)| *to = scale * w.wide());
    }
    Ok(out)
}

pub(super) fn to_bf16(ctx: &Ctx, w: &Tensor) -> Result<Tensor> {
    let w = w.view::<f32>()?;
    let mut out = ctx.empty::<bf16>(&[w.rows(), w.cols()])?;
    each!(out.view_mut::<bf16>()?.row_blocks(BLOCK), |block, mut out| {
        for i in 0..out.rows() {
            out.row_mut(i).iter_mut().zip(w.row(block * BLOCK + i)).for_each(|(to, &w)| *to = bf16::from_f32(w));
        }
    });
    Ok(out)
}

/// q = round(w / scale), scale = max |w| / 127.
pub(super) fn to_int8(ctx: &Ctx, w: &Tensor) -> Result<(Tensor, Tensor)> {
    let w = w.view::<f32>()?;
    let (mut out, mut scales) = (ctx.empty::<i8>(&[w.rows(), w.cols()])?, ctx.empty::<f32>(&[w.rows()])?);
    let (mut to, scale) = (out.view_mut::<i8>()?, scales.flat_mut::<f32>()?);
    for (o, scale) in scale.iter_mut().enumerate() {
        if !w.row(o).iter().all(|w| w.is_finite()) {
            return Err(Error::value(OP, "w", format!("NaN or infinite in row {o}"), "finite numbers"));
        }
        *scale = w.row(o).iter().fold(0f32, |m, w| m.max(w.abs())) / 127.;
        let by = if *scale > 0. { scale.recip() } else { 0. };
        to.row_mut(o).iter_mut().zip(w.row(o)).for_each(|(to, &w)| *to = (w * by).round() as i8);
    }
    Ok((out, scales))
}
