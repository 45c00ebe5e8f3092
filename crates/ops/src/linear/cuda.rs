//! The GPU's side: products. W is f32; beside bf16 activations it is rounded here, each time it is used.

use crate::matmul::{Form, matmul};
use hymo_cuda::Gpu;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Result, Tensor};

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, x: &Tensor, w: &Tensor, o: usize) -> Result<Tensor> {
    let mut y = ctx.empty_real(x.dtype(), x.shape().with_cols(o).dims())?;
    let w = w.cast_on_gpu(ctx, x.dtype())?;
    matmul(ctx, gpu, Form::Nt, &y.gpu_mut()?, &x.gpu()?, &w.gpu()?, false)?;
    Ok(y)
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    x: &Tensor,
    w: &Tensor,
    parts: &[(usize, Option<Tensor>)],
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    let w = w.cast_on_gpu(ctx, x.dtype())?;
    let (x, w) = (x.gpu()?, w.gpu()?);
    let mut row = 0;
    for (width, d_y) in parts {
        if let Some(d_y) = d_y.as_ref().filter(|_| *width > 0) {
            let d_y = d_y.gpu()?;
            if let Some((d_x, add)) = d_x.gpu(ctx)? {
                matmul(ctx, gpu, Form::Nn, &d_x, &d_y, &w.rows_at(row, *width), add)?;
            }
            if let Some((d_w, add)) = d_w.gpu(ctx)? {
                matmul(ctx, gpu, Form::Tn, &d_w.rows_at(row, *width), &d_y, &x, add)?;
            }
        }
        row += width;
    }
    Ok(())
}
