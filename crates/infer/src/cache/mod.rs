//! What a sequence carries from token to token: the delta rule's states, the convolutions' tails, the latents.

mod latents;
mod modules;

pub(crate) use latents::Latents;
pub(crate) use modules::ModuleCache;

use crate::{Error, Result};
use hymo_model::ModelConfig;
use hymo_model::config::LayerKind;
use hymo_model::cost::{Cost, CostOptions};
use hymo_ops::attention::decode::PAGE;
use hymo_ops::delta_rule::decode::Trace;

/// What cached latents are kept as. The recurrent states and the convolutions' tails are f32 whatever it is (HAZARD 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheDtype {
    /// As they are computed.
    #[default]
    F32,
    /// Rounded when written; half the memory. Every path reads the rounded ones, so that they all agree still.
    Bf16,
}

impl CacheDtype {
    /// Bytes of a number.
    pub(crate) fn bytes(self) -> usize {
        match self {
            CacheDtype::F32 => size_of::<f32>(),
            CacheDtype::Bf16 => size_of::<hymo_tensor::bf16>(),
        }
    }
}

/// The state of one delta rule.
#[derive(Debug, Clone)]
pub(crate) struct GdnCache {
    /// [H, K, V]
    pub state: Vec<f32>,
    /// [Kc-1, C]: rows before the convolution.
    pub tail: Vec<f32>,
    /// What the last pass that kept its tokens did: writes, and rows before the convolution.
    pub trace: Trace,
    pub fresh: Vec<f32>,
}

impl GdnCache {
    pub fn new(model: &ModelConfig) -> Self {
        let (state, tail) =
            model.gdn.as_ref().map_or((0, 0), |c| (c.key_dim() * c.d_v, (c.conv_kernel - 1) * c.conv_channels()));
        GdnCache { state: vec![0.; state], tail: vec![0.; tail], trace: Trace::default(), fresh: Vec::new() }
    }

    /// Bytes of state and tail.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (self.state.len() + self.tail.len())
    }

    /// A copy without what was kept for a commit.
    pub fn fork(&self) -> Self {
        let (state, tail) = (self.state.clone(), self.tail.clone());
        GdnCache { state, tail, trace: Trace::default(), fresh: Vec::new() }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum LayerCache {
    Gdn(GdnCache),
    Mla(Latents),
}

/// The state of one sequence after some tokens.
///
/// [`Sequence::fork`] is a snapshot: recurrent states are copied, pages of latents are shared until one of the two writes.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) layers: Vec<LayerCache>,
    /// Of the prediction modules; none where nothing is drafted.
    pub(crate) modules: Vec<ModuleCache>,
    position: usize,
    /// Tokens of the last pass that kept them for a commit.
    kept: usize,
    dtype: CacheDtype,
}

impl Sequence {
    /// Before the first token.
    #[must_use]
    pub fn new(model: &ModelConfig, dtype: CacheDtype) -> Self {
        let width = model.mla.as_ref().map_or(0, |c| c.cache_numbers());
        let layer = |kind| match kind {
            LayerKind::Gdn => LayerCache::Gdn(GdnCache::new(model)),
            LayerKind::Mla => LayerCache::Mla(Latents::new(width, dtype)),
        };
        Sequence { layers: model.layers().map(layer).collect(), modules: Vec::new(), position: 0, kept: 0, dtype }
    }

    /// Before the first token, with states for drafting.
    pub(crate) fn drafting(model: &ModelConfig, dtype: CacheDtype) -> Self {
        let modules = (0..model.mtp.n_modules).map(|_| ModuleCache::new(model)).collect();
        Sequence { modules, ..Sequence::new(model, dtype) }
    }

    /// Bytes of a sequence of so many tokens, from the figures of `hymo inspect`: whole pages of latents, states and
    /// tails in f32.
    ///
    /// # Errors
    /// A configuration that its own check refuses.
    pub fn planned_bytes(model: &ModelConfig, dtype: CacheDtype, tokens: usize, drafting: bool) -> Result<u64> {
        let options = CostOptions { context: tokens.max(1), batch: 1 };
        let cost = Cost::new(model, options).map_err(hymo_model::Error::from)?.cache;
        let rows = (tokens.div_ceil(PAGE) * PAGE) as u64;
        let (layers, modules) = (model.num_layers_of(LayerKind::Gdn) as u64, model.mtp.n_modules as u64);
        // The figures are for tails in bf16, and for all modules.
        let tails = 2 * cost.conv_tail_bytes / (layers + modules).max(1);
        let drafting = if drafting { cost.mtp_state_bytes + modules * tails } else { 0 };
        let latents = rows.saturating_mul(cost.numbers_per_token * dtype.bytes() as u64);
        Ok(latents.saturating_add(cost.gdn_state_bytes + layers * tails + drafting))
    }

    /// Tokens seen.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// What its latents are kept as.
    #[must_use]
    pub fn dtype(&self) -> CacheDtype {
        self.dtype
    }

    /// Bytes held, shared pages counted in full: as planned. Rows that wait for a prediction module come on top.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let of = |l: &LayerCache| match l {
            LayerCache::Gdn(c) => c.bytes(),
            LayerCache::Mla(c) => c.bytes(),
        };
        self.layers.iter().map(of).sum::<usize>() + self.modules.iter().map(|m| m.gdn.bytes()).sum::<usize>()
    }

    /// All bytes held, with what waits and what is kept for a commit.
    pub(crate) fn held(&self) -> u64 {
        let own = |c: &GdnCache| size_of::<f32>() * c.fresh.len() + c.trace.bytes();
        let of = |l: &LayerCache| if let LayerCache::Gdn(c) = l { own(c) } else { 0 };
        let rows = |m: &ModuleCache| size_of::<f32>() * (m.waiting.len() + m.last.len());
        let more: usize = self.layers.iter().map(of).chain(self.modules.iter().map(rows)).sum();
        (self.bytes() + more) as u64
    }

    /// A second sequence that goes on from here. What one does changes nothing of the other.
    #[must_use]
    pub fn fork(&self) -> Self {
        let fork = |l: &LayerCache| match l {
            LayerCache::Gdn(c) => LayerCache::Gdn(c.fork()),
            LayerCache::Mla(c) => LayerCache::Mla(c.clone()),
        };
        Sequence {
            layers: self.layers.iter().map(fork).collect(),
            modules: self.modules.iter().map(ModuleCache::fork).collect(),
            position: self.position,
            kept: 0,
            dtype: self.dtype,
        }
    }

    pub(crate) fn moved(&mut self, n: usize) {
        self.position += n;
        self.kept = 0;
    }

    pub(crate) fn keeps(&mut self, n: usize) {
        self.kept = n;
    }

    /// Tokens that a commit may take.
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    pub(crate) fn check(&self, layers: usize) -> Result<()> {
        if self.layers.len() == layers {
            return Ok(());
        }
        Err(Error::State { found: format!("{} layers", self.layers.len()), want: format!("{layers} layers") })
    }
}
