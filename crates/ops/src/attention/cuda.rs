//! The GPU's side: launches of `attention.cu`.

use super::operands::Operands;
use super::window::Window;
use super::{Args, OP, Saved};
use crate::gpu::{ATTENTION, Run, args, c_type};
use hymo_cuda::{Arg, Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, DType, Error, GpuMat, Result, Tensor};

/// Rows that a block owns.
const OWN: usize = 64;

/// What the kernels are compiled for.
struct Shape {
    defines: Vec<(&'static str, String)>,
    /// Bytes of a row of queries or keys, and of values, in shared memory.
    row: [usize; 2],
    /// Keys of a tile, queries of a tile.
    tile: [usize; 2],
}

impl Shape {
    fn new(dtype: DType, a: Args) -> Result<Self> {
        let padded = |n: usize| (n.next_multiple_of(16) + 8) * dtype.size();
        if a.d_k() > 256 || a.d_v > 256 {
            let got = format!("{} and {}", a.d_k(), a.d_v);
            return Err(Error::value(OP, "head width", got, "at most 256 on a GPU"));
        }
        let tile = if dtype == DType::BF16 { [64, 32] } else { [32, 16] };
        let defines = vec![
            ("T", c_type(OP, dtype)?.to_owned()),
            ("D", a.d_nope.to_string()),
            ("R", a.d_rope.to_string()),
            ("V", a.d_v.to_string()),
            ("KEYS", tile[0].to_string()),
            ("QUERIES", tile[1].to_string()),
        ];
        Ok(Shape { defines, row: [padded(a.d_k()), padded(a.d_v)], tile })
    }

    fn run(&self, gpu: &Gpu, kernel: &'static str, grid: [usize; 3], shared: usize, list: &[Arg]) -> Result<()> {
        let defines: Vec<(&str, &str)> = self.defines.iter().map(|(n, v)| (*n, v.as_str())).collect();
        Run { gpu, source: &ATTENTION, defines: &defines }.grid(kernel, grid, 128, shared, list)
    }
}

/// The operands' places as the kernels take them: q, then the keys.
fn operands(x: &Operands, a: Args) -> Result<Vec<Arg>> {
    let (q, k_n, k_r, v) = (x.q.gpu()?, x.k_n.gpu()?, x.k_r.gpu()?, x.v.gpu()?);
    let [kn_step, v_step] = if x.shared { [0, 0] } else { [a.d_nope, a.d_v] };
    Ok(args![q.at(), q.stride(), k_n.at(), k_n.stride(), kn_step, k_r.at(), k_r.stride(), v.at(), v.stride(), v_step]
        .to_vec())
}

/// Sizes and the scale, last in every list.
fn sizes(w: &Window, a: Args) -> [Arg; 5] {
    let n = |x: usize| Arg::I32(x as i32);
    [n(w.queries), n(w.keys), n(a.n_heads), n(a.heads()), Arg::F32(a.scale as f32)]
}

pub(super) fn forward(ctx: &Ctx, gpu: &Gpu, x: &Operands, w: &Window, a: Args) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, shape) = (w.batch * w.queries, Shape::new(x.q.dtype(), a)?);
    let mut o = ctx.empty_real(x.q.dtype(), &[rows, a.n_heads * a.d_v])?;
    let (mut lse, mut most) = (ctx.empty::<f32>(&[rows, a.n_heads])?, ctx.empty::<f32>(&[rows, a.n_heads])?);
    let mut max_logit = ctx.empty::<f32>(&[a.n_heads])?;
    let (from, padding) = w.on_gpu(ctx, gpu)?;
    let mut list = operands(x, a)?;
    let (to_lse, to_most) = (lse.gpu_mut()?.at(), most.gpu_mut()?.at());
    list.extend_from_slice(args![from.gpu()?.at(), o.gpu_mut()?.at(), to_lse, to_most]);
    list.extend(sizes(w, a));
    let ([k, v], [keys, _]) = (shape.row, shape.tile);
    let grid = [w.queries.div_ceil(OWN), a.n_heads, w.batch];
    shape.run(gpu, "attention_fwd", grid, OWN * k + 2 * keys * (k + v), &list)?;
    let list = args![to_most, padding.gpu()?.at(), max_logit.gpu_mut()?.at(), rows, a.n_heads];
    shape.run(gpu, "attention_max", [a.n_heads, 1, 1], 0, list)?;
    Ok((o, lse, max_logit))
}

pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    d_o: &Tensor,
    a: Args,
    [d_q, d_kv, d_k_r]: [&mut GradSlot<'_>; 3],
) -> Result<()> {
    let (x, w) = (&saved.x, &saved.window);
    let (rows, shape) = (w.batch * w.queries, Shape::new(x.q.dtype(), a)?);
    let (d_o, lse, from) = (d_o.gpu()?, saved.lse.gpu()?.at(), w.on_gpu(ctx, gpu)?.0);
    let mut delta = ctx.empty::<f32>(&[rows, a.n_heads])?;
    let delta_at = delta.gpu_mut()?.at();
    let list = args![saved.o.gpu()?.at(), d_o.at(), d_o.stride(), delta_at, rows, a.n_heads];
    shape.run(gpu, "attention_delta", [(rows * a.n_heads).div_ceil(4), 1, 1], 0, list)?;
    let mut list = operands(x, a)?;
    list.extend_from_slice(args![from.gpu()?.at(), d_o.at(), d_o.stride(), lse, delta_at]);
    let ([k, v], [keys, queries]) = (shape.row, shape.tile);
    if let Some((to, add)) = d_q.gpu(ctx)? {
        let mut list = list.clone();
        list.extend_from_slice(args![to.at(), to.stride(), add]);
        list.extend(sizes(w, a));
        let grid = [w.queries.div_ceil(OWN), a.n_heads, w.batch];
        shape.run(gpu, "attention_bwd_q", grid, (OWN + 2 * keys) * (k + v), &list)?;
    }
    let (of_kv, of_kr) = (d_kv.gpu(ctx)?, d_k_r.gpu(ctx)?);
    let content = a.n_groups * a.d_nope;
    let place = |m: &GpuMat, from: usize, n: usize| {
        let part = m.cols_at(from, n);
        (part.at(), part.stride())
    };
    let (k_n, of_v, add) = match &of_kv {
        Some((m, add)) => (place(m, 0, content), place(m, content, a.n_groups * a.d_v), *add),
        None => ((Ptr::NULL, 0), (Ptr::NULL, 0), false),
    };
    let k_r = of_kr.as_ref().map_or((Ptr::NULL, 0, false), |(m, add)| (m.at(), m.stride(), *add));
    list.extend_from_slice(args![k_n.0, k_n.1, of_v.0, of_v.1, add, k_r.0, k_r.1, k_r.2]);
    list.extend(sizes(w, a));
    let grid = [w.keys.div_ceil(OWN), a.n_groups, w.batch];
    shape.run(gpu, "attention_bwd_kv", grid, (OWN + 2 * queries) * (k + v), &list)
}
