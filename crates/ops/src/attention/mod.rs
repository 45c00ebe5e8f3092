//! Grouped causal softmax attention within documents.
//! s_ti = scale q_t · k_i,  p_t = softmax(s_t),  o_t = Σ_i p_ti v_i,  over the keys i of t's document up to t.
//!
//! H heads, G groups; head h reads group h / (H / G). q [N, H (D + R)], a head's D content columns before its R rotary
//! ones; kv [N, G D + G V], the content keys of all groups before the values of all groups; k_r [N, G R], already
//! turned, as q is (R = 0: a tensor of no columns); o [N, H V]. f32 or f64; sums, statistics and the softmax in the
//! operands' dtype. Keys are taken in tiles under a running maximum, and tiles that no query sees are skipped: nothing
//! of size T x T exists, whatever the number of documents.
//! Saves q, kv, k_r, o and lse_t = ln Σ_i e^(s_ti) [N, H]; rebuilds p. With D_t = <d_o_t, o_t>:
//! dp = d_o vᵀ, ds = scale p (dp - D), d_q = ds k, d_k = Σ_heads dsᵀ q, d_v = Σ_heads pᵀ d_o. One pass owns tiles of
//! queries (d_q), one owns tiles of keys (d_k, d_v), each tile summed in order. Gradients follow their slots.
//! Deterministic. Three more forms without gradients: [`cached`] (queries are the last tokens of a longer sequence),
//! [`absorbed`] (the same over a latent cache) and [`decode`] (many sequences over paged caches).
//! Source: MATH 2.1 to 2.3, 2.5; the tiling of FlashAttention (arXiv 2205.14135).

mod absorbed;
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod decode;
mod flash;
mod operands;
mod window;

pub use absorbed::{Latent, absorbed};
pub use cases::{benches, cases};

use crate::Docs;
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, Device, Error, Result, Tensor};
use operands::Operands;
use std::sync::Arc;
use window::Window;

const OP: &str = "attention";

/// Heads and their widths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Args {
    /// H
    pub n_heads: usize,
    /// G, a divisor of H.
    pub n_groups: usize,
    /// D, content columns of a query and a key.
    pub d_nope: usize,
    /// R, rotary columns of a query and a key.
    pub d_rope: usize,
    /// V
    pub d_v: usize,
    /// What scores are multiplied by: (D + R)^(-1/2), times [`yarn_scale`](crate::rotary::yarn_scale) if stretched.
    pub scale: f64,
}

impl Args {
    fn check(&self) -> Result<()> {
        let Args { n_heads, n_groups, .. } = *self;
        if n_groups == 0 || n_heads == 0 || n_heads % n_groups != 0 {
            let got = format!("{n_groups} for {n_heads} heads");
            return Err(Error::value(OP, "n_groups", got, "a divisor of the number of heads"));
        }
        if self.d_k() == 0 || self.d_v == 0 || !self.scale.is_finite() {
            return Err(Error::value(OP, "args", format!("{self:?}"), "positive widths and a finite scale"));
        }
        Ok(())
    }

    /// Columns of a query or a key.
    fn d_k(&self) -> usize {
        self.d_nope + self.d_rope
    }

    /// Heads that share a group's keys.
    fn heads(&self) -> usize {
        self.n_heads / self.n_groups
    }
}

/// The result, and two statistics without gradients.
#[derive(Debug, Clone)]
pub struct Out<O> {
    /// [N, H V]
    pub o: O,
    /// ln Σ e^score of every token and head [N, H].
    pub lse: Tensor,
    /// The largest score of every head over all tokens but padding, \[H\]; -inf when there is none. For QK-clip.
    pub max_logit: Tensor,
}

/// What the backward needs.
#[derive(Debug, Clone)]
pub struct Saved {
    x: Operands,
    o: Tensor,
    lse: Tensor,
    window: Arc<Window>,
}

impl Saved {
    fn bytes(&self) -> usize {
        self.x.bytes() + self.o.bytes() + self.lse.bytes() + self.window.bytes()
    }
}

/// o, statistics and what the backward needs.
pub fn forward(
    ctx: &Ctx,
    q: &Tensor,
    kv: &Tensor,
    k_r: &Tensor,
    docs: &Docs,
    args: Args,
) -> Result<(Out<Tensor>, Saved)> {
    let window = Window::packed(docs)?;
    let x = Operands::grouped(q, kv, k_r, &window, args)?;
    let out = attend(ctx, &x, &window, args)?;
    let saved = Saved { x, o: out.o.clone(), lse: out.lse.clone(), window: Arc::new(window) };
    Ok((out, saved))
}

/// The last M tokens of one sequence over its cached keys: q [M, H (D + R)] (turned), kv [L, G D + G V] and
/// k_r [L, G R] (turned), whose last M rows are the queries' own tokens. Query i sees keys from `from[i]` (its
/// document's start, never falling) up to its own. No gradient.
pub fn cached(ctx: &Ctx, q: &Tensor, kv: &Tensor, k_r: &Tensor, from: &[usize], args: Args) -> Result<Out<Tensor>> {
    let window = Window::cached(from, kv.rows())?;
    let x = Operands::grouped(q, kv, k_r, &window, args)?;
    attend(ctx, &x, &window, args)
}

/// Every form's forward.
fn attend(ctx: &Ctx, x: &Operands, window: &Window, args: Args) -> Result<Out<Tensor>> {
    let (o, lse, max_logit) = match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, x.q.dtype(), "attention",
            fast: flash::forward(ctx, x, window, args), oracle: cpu::oracle, (ctx, x, window, args)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, x, window, args),
    }?;
    Ok(Out { o, lse, max_logit })
}

/// d_q, d_kv and d_k_r from d_o.
pub fn backward(ctx: &Ctx, saved: &Saved, d_o: &Tensor, args: Args, slots: [&mut GradSlot<'_>; 3]) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_o.dtype(), "attention",
            fast: flash::backward(ctx, saved, d_o, args, slots),
            oracle: cpu::oracle_backward, (ctx, saved, d_o, args, slots)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, d_o, args, slots),
    }
}

/// On the tape; only o has a gradient.
pub fn apply(tape: &mut Tape, q: &Var, kv: &Var, k_r: &Var, docs: &Docs, args: Args) -> Result<Out<Var>> {
    let (Out { o, lse, max_logit }, saved) = forward(tape.ctx(), q.value(), kv.value(), k_r.value(), docs, args)?;
    let bytes = saved.bytes();
    let [o] = tape.record(OP, [q, kv, k_r], [o], bytes, move |ctx, [d_o], [d_q, d_kv, d_k_r]| {
        let Some(d_o) = d_o else { return Ok(()) };
        backward(ctx, &saved, &d_o, args, [d_q, d_kv, d_k_r])
    });
    Ok(Out { o, lse, max_logit })
}

#[cfg(feature = "cuda")]
pub(crate) use cases::gpu_cases;

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod tests;
