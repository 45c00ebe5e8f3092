//! The GPU's side: chunks of tokens by the whole vocabulary, as on the processor. Logits are f32; beside bf16 activations
//! d_l is rounded to bf16 for its two products, and so is E for all three.

use super::{Head, OP, Sink, Sinks, Sums, Token};
use crate::gpu::{CROSS_ENTROPY, Run, args, c_type, expect_f32};
use crate::matmul::{Form, matmul};
use hymo_cuda::Gpu;
use hymo_tensor::{Ctx, DType, Result, Tensor};

/// Logits of a chunk, at most (512 MiB), unless 128 rows have more.
const LOGITS: usize = 128 << 20;

/// What a pass leaves on the GPU.
pub(super) struct Found {
    /// nll, lse and whether the target's logit was the largest of each token [N, 3], f64.
    found: Tensor,
    /// `[N]`
    targets: Tensor,
}

impl Found {
    /// Waits for the GPU.
    pub fn tokens(&self) -> Result<Vec<Token>> {
        let found = self.found.to_vec::<f64>()?;
        let token = |x: &[f64]| Token { nll: x[0], lse: x[1], correct: x[2] > 0. };
        Ok(found.chunks_exact(3).map(token).collect())
    }

    /// The loss and the sums; waits for nothing.
    pub fn loss(&self, ctx: &Ctx, head: &Head<'_>) -> Result<(Tensor, Sums)> {
        let (mut loss, mut sums) = (ctx.empty::<f32>(&[1])?, ctx.empty::<f64>(&[4])?);
        let found = self.found.gpu()?;
        let run = Run { gpu: found.device(), source: &CROSS_ENTROPY, defines: &[("T", "float")] };
        let (to, n) = (sums.gpu_mut()?.at(), head.h.rows());
        let list = args![found.at(), self.targets.gpu()?.at(), n, head.scale, head.z_loss, to, loss.gpu_mut()?.at()];
        run.grid("cross_entropy_sums", [1, 1, 1], 1024, 0, list)?;
        Ok((loss, Sums(sums)))
    }
}

/// Makes gradients NaN unless `d_loss` is 1, for which they were computed.
pub(super) fn insist(gpu: &Gpu, d_loss: &Tensor, gradients: [Option<&Tensor>; 2]) -> Result<()> {
    for d in gradients.into_iter().flatten().filter(|d| d.numel() > 0) {
        let run = Run { gpu, source: &CROSS_ENTROPY, defines: &[("T", c_type(OP, d.dtype())?)] };
        let list = args![expect_f32(OP, "d_loss", d_loss)?.at(), d.gpu()?.at()];
        run.grid("cross_entropy_insist", [1, 1, 1], 32, 0, list)?;
    }
    Ok(())
}

pub(super) fn run(ctx: &Ctx, gpu: &Gpu, head: &Head<'_>, mut sinks: Sinks<'_, '_>) -> Result<Found> {
    let (n, v) = (head.h.rows(), head.e.rows());
    let rows = (LOGITS / v.max(1)).clamp(128, 8192).min(n.max(1));
    let dtype = head.h.dtype();
    let e = head.e.cast_on_gpu(ctx, dtype)?;
    let (h, e) = (head.h.gpu()?, e.gpu()?);
    let d_h = sinks.d_h.as_mut().map(|t| t.gpu_mut()).transpose()?;
    let d_e = match &mut sinks.d_e {
        None => None,
        Some(Sink::Zeros(t)) => Some(t.gpu_mut()?),
        Some(Sink::Param(slot)) => match slot.gpu(ctx)? {
            Some((d_e, add)) => {
                if !add {
                    d_e.clear()?;
                }
                Some(d_e)
            }
            None => None,
        },
    };
    let want = d_h.is_some() || d_e.is_some();
    let targets = Tensor::from_slice(ctx, &[n], head.targets)?;
    let mut found = ctx.empty::<f64>(&[n, 3])?;
    let mut logits = ctx.empty::<f32>(&[rows, v])?;
    let mut own = if want && dtype == DType::BF16 { Some(ctx.empty_real(dtype, &[rows, v])?) } else { None };
    let (to, ids, l) = (found.gpu_mut()?, targets.gpu()?, logits.gpu_mut()?);
    let d_l = match &mut own {
        Some(t) => t.gpu_mut()?,
        None => l.clone(),
    };
    let run = Run { gpu, source: &CROSS_ENTROPY, defines: &[("T", c_type(OP, d_l.dtype())?)] };
    for from in (0..n).step_by(rows) {
        let count = rows.min(n - from);
        let (h, l, d_l) = (h.rows_at(from, count), l.rows_at(0, count), d_l.rows_at(0, count));
        matmul(ctx, gpu, Form::Nt, &l, &h, &e, false)?;
        let ids = ids.at().plus(from * 4);
        let cap = head.soft_cap.unwrap_or(0.) as f32;
        let list = args![l.at(), d_l.at(), ids, to.rows_at(from, count).at(), v, head.scale, head.z_loss, cap, want];
        run.grid("cross_entropy", [count, 1, 1], 512, 0, list)?;
        if let Some(d_h) = &d_h {
            matmul(ctx, gpu, Form::Nn, &d_h.rows_at(from, count), &d_l, &e, false)?;
        }
        if let Some(d_e) = &d_e {
            matmul(ctx, gpu, Form::Tn, d_e, &d_l, &h, true)?;
        }
    }
    Ok(Found { found, targets })
}
