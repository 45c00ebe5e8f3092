//! The oracle, then the fast path, then the packing.

use super::kept::{Bf16, F32, Int8, Kept, WORDS};
use super::tiles::{Few, Many};
use super::{FEW, OP, Weights};
use half::bf16;
use hymo_tensor::{Ctx, DType, Error, Mat, Real, Result, Tensor, par};

/// Runs a generic function on words as they are kept.
macro_rules! kept {
    ($w:expr, $f:ident($($arg:expr),*)) => {
        match $w.dtype {
            DType::BF16 => $f::<Bf16>($($arg),*),
            DType::I8 => $f::<Int8>($($arg),*),
            _ => $f::<F32>($($arg),*),
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

/// Rows of W in a block of work: whole numbers of every tile's.
const BLOCK: usize = 48;

fn products<W: Kept>(ctx: &Ctx, x: &Tensor, w: &Weights) -> Result<Tensor> {
    let mut y = ctx.empty::<f32>(x.shape().with_cols(w.rows()).dims())?;
    let (x, values) = (x.view::<f32>()?, W::rows(&w.values)?);
    let scales = w.scales.as_ref().map(|s| s.flat::<f32>()).transpose()?;
    // Columns of y in tiles of all rows: a task reads its rows of W once.
    par::each(y.view_mut::<f32>()?.grid(x.rows().max(1), BLOCK), |block, mut y| {
        let w = values.rows_at(block * BLOCK, y.cols());
        if x.rows() <= FEW {
            pulp::Arch::new().dispatch(Few::<W> { x, w, y: y.reborrow() });
        } else {
            let mut panel = ctx.empty::<f32>(&[w.rows(), x.cols()]).expect("invariant: part of a matrix that is there");
            let wide = panel.view_mut::<f32>().expect("invariant: fresh and f32");
            pulp::Arch::new().dispatch(Many::<W> { x, w, wide, y: y.reborrow() });
        }
        if let Some(scales) = scales {
            for n in 0..y.rows() {
                y.row_mut(n).iter_mut().zip(&scales[block * BLOCK..]).for_each(|(y, &s)| *y *= s);
            }
        }
    });
    Ok(y)
}

pub(super) fn widen(ctx: &Ctx, w: &Weights) -> Result<Tensor> {
    let mut out = ctx.empty::<f32>(&[w.rows(), w.cols()])?;
    let mut to = out.view_mut::<f32>()?;
    for o in 0..w.rows() {
        widen_row(w, o, to.row_mut(o))?;
    }
    Ok(out)
}

pub(super) fn widen_row(w: &Weights, o: usize, to: &mut [f32]) -> Result<()> {
    kept!(w, widened_row(w, o, to))
}

fn widened_row<W: Kept>(w: &Weights, o: usize, to: &mut [f32]) -> Result<()> {
    let scale = w.scales.as_ref().map(|s| s.flat::<f32>()).transpose()?.map_or(1., |s| s[o]);
    let values = W::rows(&w.values)?;
    to.iter_mut().enumerate().for_each(|(k, to)| *to = scale * W::number(values.row(o), k));
    Ok(())
}

/// A matrix of words for [O, I] numbers, PER in each, the last group of a row filled up with zeros.
fn words<W: Kept>(ctx: &Ctx, w: Mat<'_, f32>, bits: impl Fn(usize, f32) -> u32 + Sync) -> Result<Tensor> {
    let width = w.cols().div_ceil(WORDS * W::PER) * WORDS;
    let mut out = ctx.zeros::<i32>(&[w.rows(), width])?;
    par::each(out.view_mut::<i32>()?.row_blocks(BLOCK), |block, mut out| {
        for i in 0..out.rows() {
            let o = block * BLOCK + i;
            for (k, &w) in w.row(o).iter().enumerate() {
                let (word, part) = W::place(k);
                out.row_mut(i)[word] |= (bits(o, w) << (part * 32 / W::PER)) as i32;
            }
        }
    });
    Ok(out)
}

pub(super) fn to_bf16(ctx: &Ctx, w: &Tensor) -> Result<Tensor> {
    words::<Bf16>(ctx, w.view::<f32>()?, |_, w| u32::from(bf16::from_f32(w).to_bits()))
}

/// q = round(w / scale), scale = max |w| / 127.
pub(super) fn to_int8(ctx: &Ctx, w: &Tensor) -> Result<(Tensor, Tensor)> {
    let w = w.view::<f32>()?;
    let mut scales = ctx.empty::<f32>(&[w.rows()])?;
    for (o, scale) in scales.flat_mut::<f32>()?.iter_mut().enumerate() {
        if !w.row(o).iter().all(|w| w.is_finite()) {
            return Err(Error::value(OP, "w", format!("NaN or infinite in row {o}"), "finite numbers"));
        }
        *scale = w.row(o).iter().fold(0f32, |m, w| m.max(w.abs())) / 127.;
    }
    let by = scales.to_vec::<f32>()?;
    let values = words::<Int8>(ctx, w, |o, w| {
        let by = if by[o] > 0. { by[o].recip() } else { 0. };
        Int8::bits((w * by).round() as i8)
    })?;
    Ok((values, scales))
}
