//! Multi-head latent attention with KV groups (MATH 2), or ordinary grouped attention where there is no latent.

use super::state::LayerState;
use super::{Norm, Pass, args, section};
use crate::Error;
use crate::config::ModelConfig;
use crate::params::ParamTable;
use crate::store::ParamRef;
use hymo_ops::{attention, linear, rotary};
use hymo_tape::{Tape, Var};
use hymo_tensor::Result;

#[derive(Debug, Clone)]
pub(crate) struct Mla {
    /// Rows q | dkv | kr, or q | kr | uk | uv without a latent; no kr where nothing turns and `d_rope` is 0.
    proj: ParamRef,
    /// Widths of q, of the latent (or k | v) and of k_r, in the order of `proj`.
    widths: [usize; 3],
    latent: Option<Latent>,
    out: ParamRef,
    /// How the heads of q and the groups of k_r lie.
    rotary: [rotary::Args; 2],
    attention: attention::Args,
}

#[derive(Debug, Clone)]
struct Latent {
    norm: Norm,
    /// Rows uk | uv.
    up: ParamRef,
}

impl Mla {
    pub(crate) fn new(table: &ParamTable, model: &ModelConfig, prefix: &str) -> std::result::Result<Self, Error> {
        let c = section(&model.mla, "model.mla")?;
        let at = format!("{prefix}.mla");
        let (q, kr) = (c.n_heads * (c.d_nope + c.d_rope), c.n_kv_groups * c.d_rope);
        let kv = c.n_kv_groups * (c.d_nope + c.d_v);
        let latent = match c.kv_latent {
            0 => None,
            _ => Some(Latent {
                norm: Norm::plain(table, &format!("{at}.latent_norm"), &model.norm)?,
                up: ParamRef::rows(table, &at, &["uk", "uv"])?,
            }),
        };
        let (mut names, widths) = match &latent {
            Some(_) => (vec!["q", "dkv", "kr"], [q, c.kv_latent, kr]),
            None => (vec!["q", "kr", "uk", "uv"], [q, kr, kv]),
        };
        // Without rotary numbers there is no such parameter; k_r is then a tensor of no columns.
        names.retain(|&name| name != "kr" || kr > 0);
        Ok(Mla {
            proj: ParamRef::rows(table, &at, &names)?,
            widths,
            latent,
            out: ParamRef::named(table, &format!("{at}.o.weight"))?,
            rotary: args::rotary(c),
            attention: args::attention(c),
        })
    }

    /// n [N, D] -> [N, D]. With a state: the cache grows by these tokens, and they attend to all of it.
    pub(crate) fn forward(
        &self,
        tape: &mut Tape,
        pass: &Pass,
        n: &Var,
        state: Option<&mut LayerState>,
        layer: usize,
    ) -> Result<Var> {
        let [q, second, third] = linear::apply_split(tape, n, &pass.var(&self.proj)?, self.widths)?;
        // What is cached: the normed latent, or keys and values themselves.
        let (cached, k_r) = match &self.latent {
            Some(latent) => (latent.norm.forward(tape, pass, &second)?, third),
            None => (third, second),
        };
        let (q, k_r) = match &pass.angles {
            Some(angles) => {
                let [of_q, of_k] = self.rotary;
                (rotary::apply(tape, &q, angles, of_q)?, rotary::apply(tape, &k_r, angles, of_k)?)
            }
            None => (q, k_r),
        };
        let o = match state {
            Some(state) => Var::constant(self.over_cache(tape, pass, [&q, &cached, &k_r], state)?),
            None => {
                let kv = match &self.latent {
                    Some(latent) => linear::apply(tape, &cached, &pass.var(&latent.up)?)?, // [N, G (dn + V)]
                    None => cached,
                };
                let out = attention::apply(tape, &q, &kv, &k_r, &pass.docs, self.attention)?;
                if !tape.recomputing() {
                    pass.measured()[layer].max_logits = Some(out.max_logit);
                }
                out.o
            }
        };
        linear::apply(tape, &o, &pass.var(&self.out)?)
    }

    fn over_cache(
        &self,
        tape: &Tape,
        pass: &Pass,
        [q, new, k_r]: [&Var; 3],
        state: &mut LayerState,
    ) -> Result<hymo_tensor::Tensor> {
        let ctx = tape.ctx();
        let (kv, k_r) = state.grow(ctx, new.value(), k_r.value())?;
        // One document: every token sees the cache from its start.
        let from = vec![0; q.value().rows()];
        match &self.latent {
            Some(latent) => {
                let up = pass.var(&latent.up)?; // [G (dn + V), R]
                let split = self.attention.n_groups * self.attention.d_nope;
                let (w_uk, w_uv) = (up.value().slice_rows(0..split)?, up.value().slice_rows(split..up.value().rows())?);
                let latent = attention::Latent { c: &kv, k_r: &k_r, w_uk: &w_uk, w_uv: &w_uv };
                attention::absorbed(ctx, q.value(), latent, &from, self.attention)
            }
            None => Ok(attention::cached(ctx, q.value(), &kv, &k_r, &from, self.attention)?.o),
        }
    }
}
