//! The network: layers over the fused operations, and the loss.
//!
//! A layer finds its parameters once, when it is built; a forward pass then reads as the formulas do. Training and
//! carried-state decoding share the layers' code: the difference is whether a state is handed in.

pub mod args;
mod ffn;
mod gdn;
mod head;
mod hymo;
mod mla;
mod mtp;
mod state;

pub use hymo::{HyMo, LossValues, Losses, Options};
pub use state::State;

use crate::config::{LayerKind, ModelConfig, NormConfig};
use crate::params::ParamTable;
use crate::store::{ParamRef, Params};
use crate::{Error, config};
use hymo_ops::{Docs, residual, rms_norm, rotary, router};
use hymo_tape::{Tape, Var};
use hymo_tensor::{Result, Tensor};
use state::LayerState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a forward pass reads beside activations. Cloned into checkpointed blocks: all of it is shared.
#[derive(Clone)]
pub(crate) struct Pass {
    pub params: Params,
    pub docs: Arc<Docs>,
    /// Rotary angles at the tokens' positions in their documents; none where nothing turns.
    angles: Option<Arc<rotary::Angles>>,
    /// Non-padding tokens of the whole step: the balance loss's denominator.
    pub tokens: f64,
    measured: Arc<Mutex<Vec<Measured>>>,
}

/// What one layer of one forward pass measured, for the step and for people.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerStats {
    /// Tokens that each routed expert got, padding left out; empty without experts.
    pub expert_counts: Vec<u64>,
    /// Largest attention logit of each head; empty without attention.
    pub max_logits: Vec<f64>,
}

/// [`LayerStats`] before they are read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    pub experts: Option<router::Tally>,
    /// `[n_heads]`
    pub max_logits: Option<Tensor>,
}

impl Measured {
    fn read(&self) -> Result<LayerStats> {
        Ok(LayerStats {
            expert_counts: self.experts.as_ref().map(router::Tally::counts).transpose()?.unwrap_or_default(),
            max_logits: self.max_logits.as_ref().map(hymo_ops::check::values).transpose()?.unwrap_or_default(),
        })
    }
}

impl Pass {
    fn new(model: &HyMo, params: &Params, docs: Arc<Docs>, positions: &[i32], tokens: f64) -> Result<Self> {
        let measured = Arc::new(Mutex::new(vec![Measured::default(); model.config().n_layers]));
        let rope = model.config().mla.as_ref().and_then(args::rope);
        let angles = rope.map(|rope| rotary::Angles::new(positions, rope)).transpose()?.map(Arc::new);
        Ok(Pass { params: params.clone(), docs, angles, tokens, measured })
    }

    fn measured(&self) -> MutexGuard<'_, Vec<Measured>> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take_measured(&self) -> Vec<Measured> {
        std::mem::take(&mut self.measured())
    }

    pub(crate) fn var(&self, at: &ParamRef) -> Result<Var> {
        self.params.var(at)
    }
}

/// A norm over the residual stream.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    weight: ParamRef,
    args: rms_norm::Args,
}

impl Norm {
    pub(crate) fn new(table: &ParamTable, name: &str, norm: &NormConfig) -> std::result::Result<Self, Error> {
        Ok(Norm { weight: ParamRef::named(table, &format!("{name}.weight"))?, args: args::norm(norm) })
    }

    /// The latent's norm, whose gain is stored as it is.
    pub(crate) fn plain(table: &ParamTable, name: &str, norm: &NormConfig) -> std::result::Result<Self, Error> {
        Ok(Norm { args: args::latent_norm(norm), ..Norm::new(table, name, norm)? })
    }

    pub(crate) fn forward(&self, tape: &mut Tape, pass: &Pass, x: &Var) -> Result<Var> {
        rms_norm::apply(tape, x, &pass.var(&self.weight)?, self.args)
    }
}

/// What mixes tokens.
#[derive(Debug, Clone)]
enum Mixer {
    Gdn(gdn::Gdn),
    Mla(mla::Mla),
}

/// One layer: pre-norm, mixer, and the feed-forward block where the configuration has one.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    index: usize,
    norm: Norm,
    mixer: Mixer,
    ffn: Option<(Norm, ffn::Ffn)>,
}

impl Layer {
    fn new(table: &ParamTable, model: &ModelConfig, index: usize, kind: LayerKind) -> std::result::Result<Self, Error> {
        let prefix = format!("layers.{index}");
        let norm = Norm::new(table, &format!("{prefix}.norm"), &model.norm)?;
        let mixer = match kind {
            LayerKind::Gdn => Mixer::Gdn(gdn::Gdn::new(table, model, &prefix)?),
            LayerKind::Mla => Mixer::Mla(mla::Mla::new(table, model, &prefix)?),
        };
        let ffn = ffn::Ffn::new(table, model, &prefix, kind)?;
        let ffn_norm = || Norm::new(table, &format!("{prefix}.ffn_norm"), &model.norm);
        let ffn = ffn.map(|f| Ok::<_, Error>((ffn_norm()?, f))).transpose()?;
        Ok(Layer { index, norm, mixer, ffn })
    }

    fn has_experts(&self) -> bool {
        matches!(self.ffn, Some((_, ffn::Ffn::Moe(_))))
    }

    /// x [N, D] -> x [N, D] and the layer's balance loss (a constant 0 without experts).
    fn forward(&self, tape: &mut Tape, pass: &Pass, x: &Var, state: Option<&mut LayerState>) -> Result<[Var; 2]> {
        let n = self.norm.forward(tape, pass, x)?; // [N, D]
        let mixed = match &self.mixer {
            Mixer::Gdn(m) => m.forward(tape, pass, &n, state)?,
            Mixer::Mla(m) => m.forward(tape, pass, &n, state, self.index)?,
        };
        let x = residual::apply(tape, x, &mixed)?;
        let Some((norm, ffn)) = &self.ffn else { return Ok([x, zero(tape, pass)?]) };
        let n = norm.forward(tape, pass, &x)?;
        let (y, balance) = ffn.forward(tape, pass, &n, self.index)?;
        let x = residual::apply(tape, &x, &y)?;
        Ok([x, if let Some(b) = balance { b } else { zero(tape, pass)? }])
    }
}

fn zero(tape: &Tape, pass: &Pass) -> Result<Var> {
    Ok(Var::constant(tape.ctx().zeros_real(pass.params.dtype(), &[1])?))
}

/// The part of a configuration that its validation guarantees for this kind of layer.
fn section<'a, T>(found: &'a Option<T>, field: &str) -> std::result::Result<&'a T, Error> {
    found.as_ref().ok_or_else(|| {
        Error::Config(config::Problem::new(field, "nothing", "the section that the pattern asks for").into())
    })
}
