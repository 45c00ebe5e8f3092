//! What a sequence carries from one piece to the next: the delta rule's states, the convolutions' tails, the latent
//! caches. For one sequence at a time and in plain tensors; the decode engine has its own paged form.

use crate::ModelConfig;
use hymo_tensor::{Ctx, Error, Real, Result, Tensor};

/// The state of one sequence after some tokens.
#[derive(Debug, Clone)]
pub struct State {
    pub(crate) layers: Vec<LayerState>,
    pub(crate) position: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum LayerState {
    /// Nothing seen yet.
    Empty,
    Gdn {
        /// [1, H, K, V], f32 whatever the dtype of the weights (HAZARD 6); f64 under the oracle.
        h: Tensor,
        /// [1, conv_kernel - 1, C]: rows before the convolution.
        tail: Tensor,
    },
    Mla {
        /// [L, R]: normed latents; [L, G (dn + V)] without a latent.
        kv: Tensor,
        /// [L, G dr]: rotary keys after their rotation.
        k_r: Tensor,
    },
}

impl State {
    /// Before the first token.
    #[must_use]
    pub fn new(model: &ModelConfig) -> Self {
        State { layers: vec![LayerState::Empty; model.n_layers], position: 0 }
    }

    /// Tokens seen.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let of = |l: &LayerState| match l {
            LayerState::Empty => 0,
            LayerState::Gdn { h, tail } => h.bytes() + tail.bytes(),
            LayerState::Mla { kv, k_r } => kv.bytes() + k_r.bytes(),
        };
        self.layers.iter().map(of).sum()
    }
}

impl LayerState {
    /// Appends rows to an attention cache and returns the whole.
    pub(crate) fn grow(&mut self, ctx: &Ctx, kv: &Tensor, k_r: &Tensor) -> Result<(Tensor, Tensor)> {
        let (kv, k_r) = match self {
            LayerState::Mla { kv: old, k_r: old_r } => (append(ctx, old, kv)?, append(ctx, old_r, k_r)?),
            LayerState::Empty => (kv.copy(ctx)?, k_r.copy(ctx)?),
            LayerState::Gdn { .. } => return Err(other_kind("a delta rule's", "an attention layer's")),
        };
        *self = LayerState::Mla { kv: kv.clone(), k_r: k_r.clone() };
        Ok((kv, k_r))
    }
}

/// A state that another model left.
pub(crate) fn other_kind(got: &str, want: &str) -> Error {
    Error::value("extend", "state", format!("{got} where the model has another kind of layer"), want)
}

fn append(ctx: &Ctx, above: &Tensor, below: &Tensor) -> Result<Tensor> {
    fn go<T: Real>(ctx: &Ctx, above: &Tensor, below: &Tensor) -> Result<Tensor> {
        let mut out = ctx.empty::<T>(&[above.rows() + below.rows(), above.cols()])?;
        let (top, bottom) = (above.view::<T>()?, below.view::<T>()?);
        let mut rows = out.view_mut::<T>()?;
        for i in 0..rows.rows() {
            let from = if i < top.rows() { top.row(i) } else { bottom.row(i - top.rows()) };
            rows.row_mut(i).copy_from_slice(from);
        }
        Ok(out)
    }
    if above.cols() != below.cols() || above.dtype() != below.dtype() {
        let want = format!("[.., {}] in {}", above.cols(), above.dtype());
        return Err(Error::Shape { op: "state", arg: "new rows", got: below.shape(), want });
    }
    match above.dtype() {
        hymo_tensor::DType::F64 => go::<f64>(ctx, above, below),
        _ => go::<f32>(ctx, above, below),
    }
}
