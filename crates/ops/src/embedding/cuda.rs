//! The GPU's side: the positions are sorted by id on the processor, which has the ids.

use super::OP;
use crate::gpu::{EMBEDDING, Run, args, c_type, expect_f32};
use hymo_cuda::Gpu;
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Error, Result, Tensor};

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, ids: &[i32], e: &Tensor) -> Result<Tensor> {
    let (n, d, e) = (ids.len(), e.cols(), expect_f32(OP, "E", e)?);
    let mut x = ctx.empty_real(ctx.activations(), &[n, d])?;
    let ids = Tensor::from_slice(ctx, &[n], ids)?;
    let run = Run { gpu, source: &EMBEDDING, defines: &[("T", c_type(OP, x.dtype())?)] };
    run.each("embedding_fwd", n * d, args![ids.gpu()?.at(), e.at(), e.stride(), x.gpu_mut()?.at(), n, d])?;
    Ok(x)
}

pub(super) fn backward(ctx: &Ctx, gpu: &Gpu, ids: &[i32], d_x: &Tensor, d_e: &mut GradSlot<'_>) -> Result<()> {
    let Some((de, add)) = d_e.gpu(ctx)? else { return Ok(()) };
    if de.dtype() != hymo_tensor::DType::F32 {
        return Err(Error::DType { op: OP, arg: "d_E", got: de.dtype(), want: "f32" });
    }
    if !add {
        de.clear()?;
    }
    let mut order: Vec<i32> = (0..ids.len() as i32).filter(|&p| ids[p as usize] >= 0).collect();
    order.sort_by_key(|&p| ids[p as usize]); // a stable sort: positions of an id keep their order
    if order.is_empty() {
        return Ok(());
    }
    let (mut found, mut offsets) = (Vec::new(), Vec::new());
    for (at, &p) in order.iter().enumerate() {
        if found.last() != Some(&ids[p as usize]) {
            found.push(ids[p as usize]);
            offsets.push(at as i32);
        }
    }
    offsets.push(order.len() as i32);
    let up = |v: &[i32]| Tensor::from_slice(ctx, &[v.len()], v);
    let (found, offsets, order, dx) = (up(&found)?, up(&offsets)?, up(&order)?, d_x.gpu()?);
    let run = Run { gpu, source: &EMBEDDING, defines: &[("T", c_type(OP, dx.dtype())?)] };
    let a = args![
        found.gpu()?.at(),
        offsets.gpu()?.at(),
        order.gpu()?.at(),
        dx.at(),
        dx.stride(),
        de.at(),
        de.stride(),
        dx.cols()
    ];
    run.grid("embedding_bwd", [found.numel(), 1, 1], 256, 0, a)
}
