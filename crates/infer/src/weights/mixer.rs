//! What mixes tokens: Gated DeltaNet (MATH 1.2, 1.9), latent attention in its absorbed form (MATH 2.5).

use super::ffn::group_transposed;
use super::{Norm, Pack, section};
use crate::Result;
use crate::cache::{GdnCache, Latents};
use hymo_model::args;
use hymo_model::config::LayerKind;
use hymo_ops::delta_rule::decode::{self as recurrence, Then};
use hymo_ops::packed_linear::{self, Weights as Packed};
use hymo_ops::{attention, decay_gate, delta_rule, gated_norm, rotary, short_conv};
use hymo_tensor::{Ctx, Tensor};
use std::ops::Range;

/// What a pass leaves in a sequence's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// They move on past all its tokens.
    Move,
    /// Recurrent ones stay, and what the tokens did is kept to be committed in part.
    Keep,
    /// They stay, and nothing is kept.
    Forget,
}

#[derive(Debug)]
pub(crate) enum Mixer {
    Gdn(Gdn),
    Mla(Mla),
}

impl Mixer {
    pub fn new(pack: &Pack<'_>, prefix: &str, kind: LayerKind) -> Result<Self> {
        Ok(match kind {
            LayerKind::Gdn => Mixer::Gdn(Gdn::new(pack, prefix)?),
            LayerKind::Mla => Mixer::Mla(Mla::new(pack, prefix)?),
        })
    }

    pub fn bytes(&self) -> usize {
        match self {
            Mixer::Gdn(m) => m.bytes(),
            Mixer::Mla(m) => {
                m.proj.bytes() + m.out.bytes() + m.latent.as_ref().map_or(0, |l| l.uk.bytes() + l.uv_t.bytes())
            }
        }
    }
}

/// A Gated DeltaNet mixer.
#[derive(Debug)]
pub(crate) struct Gdn {
    /// Rows q | k | v | z.
    proj: Packed,
    /// Rows a | b: the gates, f32 whatever the rest is.
    gates: Packed,
    /// [Kc, C]
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    out: Packed,
    decay: decay_gate::Args,
    pub rule: delta_rule::Args,
    gated: gated_norm::Args,
    /// Channels of the convolution.
    pub channels: usize,
}

impl Gdn {
    pub fn new(pack: &Pack<'_>, prefix: &str) -> Result<Self> {
        let c = section(&pack.config.gdn, "model.gdn")?;
        let at = format!("{prefix}.gdn");
        let tensor = |name: &str| pack.tensor(&format!("{at}.{name}"));
        Ok(Gdn {
            proj: pack.packed_rows(&at, &["q", "k", "v", "z"])?,
            gates: pack.exact_rows(&at, &["a", "b"])?,
            conv: short_conv::decode::transposed(pack.ctx, &tensor("conv.weight")?)?,
            a_log: tensor("A_log")?,
            dt_bias: tensor("dt_bias")?,
            norm: tensor("norm.weight")?,
            out: pack.packed_rows(&at, &["o"])?,
            decay: args::decay(c),
            rule: args::delta_rule(c),
            gated: args::gated_norm(c, &pack.config.norm),
            channels: c.conv_channels(),
        })
    }

    pub fn bytes(&self) -> usize {
        self.proj.bytes() + self.gates.bytes() + self.out.bytes()
    }

    /// n [N, D] -> [N, D], each run of rows from its own state.
    pub fn forward(&self, ctx: &Ctx, n: &Tensor, runs: &mut [(Range<usize>, &mut GdnCache, Mode)]) -> Result<Tensor> {
        let projected = packed_linear::forward(ctx, n, &self.proj)?; // [N, C + H V]
        let (qkv, z) = (
            projected.slice_cols(0..self.channels)?,                // [N, C]
            projected.slice_cols(self.channels..projected.cols())?, // [N, H V]
        );
        let ab = packed_linear::forward(ctx, n, &self.gates)?; // [N, 2H]
        let tails: Vec<_> = runs.iter().map(|(rows, cache, _)| (rows.clone(), &*cache.tail)).collect();
        let mixed = short_conv::decode::advance(ctx, &qkv, &self.conv, &tails)?; // [N, C]
        let inputs = decay_gate::Inputs { ab: &ab, a_log: &self.a_log, dt_bias: &self.dt_bias };
        let [g, beta] = decay_gate::forward(ctx, inputs, self.decay)?; // [N, H] each
        let rows = qkv.view::<f32>()?;
        let mut steps = Vec::with_capacity(runs.len());
        for (range, cache, mode) in runs.iter_mut() {
            let fresh = rows.rows_at(range.start, range.len());
            steps.push(recurrence::Run {
                rows: range.clone(),
                then: match mode {
                    Mode::Move => {
                        short_conv::decode::shift(
                            &mut cache.tail,
                            self.channels,
                            (0..range.len()).map(|i| fresh.row(i)),
                        );
                        Then::Move
                    }
                    Mode::Forget => Then::Forget,
                    Mode::Keep => {
                        cache.fresh.clear();
                        (0..range.len()).for_each(|i| cache.fresh.extend_from_slice(fresh.row(i)));
                        Then::Keep(&mut cache.trace)
                    }
                },
                state: &mut cache.state,
            });
        }
        let o = recurrence::advance(ctx, [&mixed, &g, &beta], steps, self.rule)?; // [N, H V]
        let y = gated_norm::forward(ctx, &o, &z, &self.norm, self.gated)?.0;
        Ok(packed_linear::forward(ctx, &y, &self.out)?)
    }

    /// Moves a state on past the first `n` tokens of the last pass that kept.
    pub fn commit(&self, cache: &mut GdnCache, n: usize) -> Result<()> {
        recurrence::commit(&mut cache.state, &cache.trace, n, self.rule)?;
        let rows = cache.fresh.chunks(self.channels).take(n);
        short_conv::decode::shift(&mut cache.tail, self.channels, rows);
        Ok(())
    }
}

/// Latent attention, or ordinary grouped attention where there is no latent.
#[derive(Debug)]
pub(crate) struct Mla {
    /// Rows q | dkv | kr, or q | kr | uk | uv without a latent.
    proj: Packed,
    /// Widths of q, of the latent (or k_r) and of k_r (or keys and values).
    widths: [usize; 3],
    latent: Option<Latent>,
    out: Packed,
    rotary: [rotary::Args; 2],
    attention: attention::Args,
}

#[derive(Debug)]
struct Latent {
    norm: Norm,
    /// [G D, C] and [G C, V].
    uk: Tensor,
    uv_t: Tensor,
}

impl Mla {
    pub fn new(pack: &Pack<'_>, prefix: &str) -> Result<Self> {
        let c = section(&pack.config.mla, "model.mla")?;
        let at = format!("{prefix}.mla");
        let (q, kr) = (c.n_heads * c.d_qk(), c.n_kv_groups * c.d_rope);
        let latent = match c.kv_latent {
            0 => None,
            _ => Some(Latent {
                norm: pack.norm(&format!("{at}.latent_norm"), args::latent_norm)?,
                uk: pack.rows(&at, &["uk"])?,
                uv_t: group_transposed(pack.ctx, &pack.rows(&at, &["uv"])?, c.n_kv_groups)?,
            }),
        };
        let (mut names, widths) = match &latent {
            Some(_) => (vec!["q", "dkv", "kr"], [q, c.kv_latent, kr]),
            None => (vec!["q", "kr", "uk", "uv"], [q, kr, c.n_kv_groups * (c.d_nope + c.d_v)]),
        };
        names.retain(|&name| name != "kr" || kr > 0);
        Ok(Mla {
            proj: pack.packed_rows(&at, &names)?,
            widths,
            latent,
            out: pack.packed_rows(&at, &["o"])?,
            rotary: args::rotary(c),
            attention: args::attention(c),
        })
    }

    /// n [N, D] -> [N, D]. The rows of every run are appended to its cache first.
    pub fn forward(
        &self,
        ctx: &Ctx,
        n: &Tensor,
        angles: Option<&rotary::Angles>,
        runs: &mut [(Range<usize>, &mut Latents)],
    ) -> Result<Tensor> {
        let projected = packed_linear::forward(ctx, n, &self.proj)?;
        let [a, b, _] = self.widths;
        let q = projected.slice_cols(0..a)?; // [N, H (D + R)]
        let (kv, k_r) = (projected.slice_cols(a..a + b)?, projected.slice_cols(a + b..projected.cols())?);
        let (kv, k_r) = match &self.latent {
            Some(latent) => (latent.norm.forward(ctx, &kv)?, k_r), // [N, C], [N, G R]
            None => (k_r, kv),                                     // [N, G (D + V)], [N, G R]
        };
        let (q, k_r) = match angles {
            Some(angles) => {
                let [of_q, of_k] = self.rotary;
                (rotary::forward(ctx, &q, angles, of_q)?, rotary::forward(ctx, &k_r, angles, of_k)?)
            }
            None => (q, k_r),
        };
        let mut steps = Vec::with_capacity(runs.len());
        for (rows, latents) in runs.iter_mut() {
            latents.append(&kv, &k_r, rows.clone())?;
            let position = latents.len() - rows.len();
            steps.push(attention::decode::Run { rows: rows.clone(), position, pages: latents.pages() });
        }
        let maps = self.latent.as_ref().map(|l| attention::decode::Maps { w_uk: &l.uk, w_uv_t: &l.uv_t });
        let o = attention::decode::attend(ctx, &q, maps, &steps, self.attention)?; // [N, H V]
        Ok(packed_linear::forward(ctx, &o, &self.out)?)
    }
}
