use super::operands::Operands;
use super::window::Window;
use super::{Args, OP, attend};
use crate::gemm;
use hymo_tensor::{Ctx, DType, Error, Real, Result, Tensor};

/// A sequence's latent cache and the maps out of it.
#[derive(Debug, Clone, Copy)]
pub struct Latent<'a> {
    /// The latents after their norm [L, C].
    pub c: &'a Tensor,
    /// The rotary keys, turned [L, G R].
    pub k_r: &'a Tensor,
    /// Latent to content keys [G D, C].
    pub w_uk: &'a Tensor,
    /// Latent to values [G V, C].
    pub w_uv: &'a Tensor,
}

/// o [M, H V] of the last M tokens of one sequence, straight over its latent cache: `q` [M, H (D + R)] turned, `from`
/// as in [`cached`](super::cached). No gradient.
///
/// The maps move to the other side of both products: q_n · (W_uk c) = (q_nᵀ W_uk) · c, and Σ p (W_uv c) =
/// W_uv (Σ p c). What is left is attention whose content keys and values are the latents themselves, the same for all
/// groups. Keys and values of the cached tokens never exist, which pays while queries are few.
pub fn absorbed(ctx: &Ctx, q: &Tensor, latent: Latent<'_>, from: &[usize], args: Args) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let hymo_tensor::Device::Cuda(gpu) = ctx.device() {
        return on_gpu(ctx, gpu, q, latent, from, args);
    }
    match q.dtype() {
        DType::F64 => run::<f64>(ctx, q, latent, from, args),
        DType::F32 => run::<f32>(ctx, q, latent, from, args),
        got => Err(Error::DType { op: OP, arg: "q", got, want: "f32 or f64" }),
    }
}

fn run<T: Real>(ctx: &Ctx, q: &Tensor, latent: Latent<'_>, from: &[usize], args: Args) -> Result<Tensor> {
    let Args { n_heads, d_nope, d_rope, d_v, .. } = args;
    let [l, width] = latent.c.dims2(OP, "c")?;
    let window = Window::cached(from, l)?;
    check(q, latent, from.len(), args)?;
    // Heads of the latent's width: content keys and values are both c.
    let inner = Args { d_nope: width, d_v: width, ..args };
    let (d_k, heads) = (args.d_k(), args.heads());

    let mut q_c = ctx.empty::<T>(&[from.len(), n_heads * inner.d_k()])?;
    let (qs, w_uk) = (q.view::<T>()?, latent.w_uk.view::<T>()?);
    for (h, head) in q_c.view_mut::<T>()?.grid(from.len().max(1), inner.d_k()).into_iter().enumerate() {
        let (content, mut rotary) = head.split_cols(width);
        gemm::nn(ctx, content, qs.cols_at(h * d_k, d_nope), w_uk.rows_at(h / heads * d_nope, d_nope), false);
        for i in 0..rotary.rows() {
            rotary.row_mut(i).copy_from_slice(&qs.row(i)[h * d_k + d_nope..][..d_rope]);
        }
    }

    let c = attend(ctx, &Operands::latent(q_c, latent.c, latent.k_r), &window, inner)?.o; // [M, H C]
    let mut o = ctx.empty::<T>(&[from.len(), n_heads * d_v])?;
    let (c, w_uv) = (c.view::<T>()?, latent.w_uv.view::<T>()?);
    for (h, head) in o.view_mut::<T>()?.grid(from.len().max(1), d_v).into_iter().enumerate() {
        gemm::nt(ctx, head, c.cols_at(h * width, width), w_uv.rows_at(h / heads * d_v, d_v), false);
    }
    Ok(o)
}

/// The same on a GPU.
#[cfg(feature = "cuda")]
fn on_gpu(
    ctx: &Ctx,
    gpu: &hymo_cuda::Gpu,
    q: &Tensor,
    latent: Latent<'_>,
    from: &[usize],
    args: Args,
) -> Result<Tensor> {
    use crate::matmul::{Form, matmul};
    let Args { n_heads, d_nope, d_rope, d_v, .. } = args;
    let [l, width] = latent.c.dims2(OP, "c")?;
    let window = Window::cached(from, l)?;
    check(q, latent, from.len(), args)?;
    let inner = Args { d_nope: width, d_v: width, ..args };
    let (d_k, heads, dtype) = (args.d_k(), args.heads(), q.dtype());
    let mut q_c = ctx.empty_real(dtype, &[from.len(), n_heads * inner.d_k()])?;
    let (qs, w_uk, to) = (q.gpu()?, latent.w_uk.cast_on_gpu(ctx, dtype)?.gpu()?, q_c.gpu_mut()?);
    for h in 0..n_heads {
        let (at, content) = (h * inner.d_k(), qs.cols_at(h * d_k, d_nope));
        matmul(ctx, gpu, Form::Nn, &to.cols_at(at, width), &content, &w_uk.rows_at(h / heads * d_nope, d_nope), false)?;
        to.cols_at(at + width, d_rope).set(&qs.cols_at(h * d_k + d_nope, d_rope))?;
    }
    let c = attend(ctx, &Operands::latent(q_c, latent.c, latent.k_r), &window, inner)?.o;
    let mut o = ctx.empty_real(dtype, &[from.len(), n_heads * d_v])?;
    let (c, w_uv, to) = (c.gpu()?, latent.w_uv.cast_on_gpu(ctx, dtype)?.gpu()?, o.gpu_mut()?);
    for h in 0..n_heads {
        let (head, map) = (c.cols_at(h * width, width), w_uv.rows_at(h / heads * d_v, d_v));
        matmul(ctx, gpu, Form::Nt, &to.cols_at(h * d_v, d_v), &head, &map, false)?;
    }
    Ok(o)
}

fn check(q: &Tensor, latent: Latent<'_>, queries: usize, args: Args) -> Result<()> {
    let [l, width] = latent.c.dims2(OP, "c")?;
    args.check()?;
    if args.d_nope == 0 || width == 0 {
        return Err(Error::value(OP, "c", format!("{args:?}, latent of {width}"), "content columns and a latent"));
    }
    q.expect(OP, "q", &[queries, args.n_heads * args.d_k()])?;
    latent.k_r.expect(OP, "k_r", &[l, args.n_groups * args.d_rope])?;
    latent.w_uk.expect(OP, "w_uk", &[args.n_groups * args.d_nope, width])?;
    latent.w_uv.expect(OP, "w_uv", &[args.n_groups * args.d_v, width])?;
    for (arg, t) in [("c", latent.c), ("k_r", latent.k_r), ("w_uk", latent.w_uk), ("w_uv", latent.w_uv)] {
        if t.dtype() != q.dtype() && !crate::goes_with(t, q) {
            return Err(Error::DType { op: OP, arg, got: t.dtype(), want: "the dtype of q" });
        }
    }
    Ok(())
}
