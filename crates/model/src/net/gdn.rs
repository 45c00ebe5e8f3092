//! A Gated DeltaNet mixer (MATH 1.2).

use super::state::{LayerState, other_kind};
use super::{Pass, args, section};
use crate::config::ModelConfig;
use crate::params::ParamTable;
use crate::store::ParamRef;
use crate::{Error, store};
use hymo_ops::{decay_gate, delta_rule, gated_norm, linear, short_conv};
use hymo_tape::{Tape, Var};
use hymo_tensor::Result;

#[derive(Debug, Clone)]
pub(crate) struct Gdn {
    /// Rows q | k | v | z | a | b.
    proj: ParamRef,
    /// Widths of q|k|v, z and a|b.
    widths: [usize; 3],
    conv: ParamRef,
    a_log: ParamRef,
    dt_bias: ParamRef,
    norm: ParamRef,
    out: ParamRef,
    decay: decay_gate::Args,
    rule: delta_rule::Args,
    gated: gated_norm::Args,
}

impl Gdn {
    pub(crate) fn new(table: &ParamTable, model: &ModelConfig, prefix: &str) -> std::result::Result<Self, Error> {
        let c = section(&model.gdn, "model.gdn")?;
        let at = format!("{prefix}.gdn");
        let named = |name: &str| store::ParamRef::named(table, &format!("{at}.{name}"));
        Ok(Gdn {
            proj: ParamRef::rows(table, &at, &["q", "k", "v", "z", "a", "b"])?,
            widths: [2 * c.key_dim() + c.value_dim(), c.value_dim(), 2 * c.n_heads],
            conv: named("conv.weight")?,
            a_log: named("A_log")?,
            dt_bias: named("dt_bias")?,
            norm: named("norm.weight")?,
            out: named("o.weight")?,
            decay: args::decay(c),
            rule: args::delta_rule(c),
            gated: args::gated_norm(c, &model.norm),
        })
    }

    /// n [N, D] -> [N, D]. With a state: goes on from it, and leaves it after the last token.
    pub(crate) fn forward(&self, tape: &mut Tape, pass: &Pass, n: &Var, state: Option<&mut LayerState>) -> Result<Var> {
        let (h0, tail) = match &state {
            Some(LayerState::Gdn { h, tail }) => (Some(Var::constant(h.clone())), Some(tail.clone())),
            Some(LayerState::Mla { .. }) => return Err(other_kind("an attention layer's", "a delta rule's")),
            Some(LayerState::Empty) | None => (None, None),
        };
        let [qkv, z, ab] = linear::apply_split(tape, n, &pass.var(&self.proj)?, self.widths)?;
        let (qkv, tail) = short_conv::apply(tape, &qkv, &pass.var(&self.conv)?, &pass.docs, tail.as_ref())?;
        let [g, beta] = decay_gate::apply(tape, &ab, &pass.var(&self.a_log)?, &pass.var(&self.dt_bias)?, self.decay)?; // [N, H] each
        let [o, h] = delta_rule::apply(tape, &qkv, &g, &beta, h0.as_ref(), &pass.docs, self.rule)?; // [N, H V]
        let y = gated_norm::apply(tape, &o, &z, &pass.var(&self.norm)?, self.gated)?;
        if let Some(state) = state {
            *state = LayerState::Gdn { h: h.value().clone(), tail };
        }
        linear::apply(tape, &y, &pass.var(&self.out)?)
    }
}
