//! What the operations keep for the backward pass, op by op, in the order in which a layer runs them.
//!
//! A buffer is counted once, where the first operation that keeps it stands, however many do: the normed input is kept by
//! the projection, the router and the experts, and is one buffer; a column view keeps the whole buffer that it looks into.
//! What an operation's own documentation says it rebuilds is not here. A test holds every number to the bytes that the
//! tensors of a forward pass really hold. Tables of a few bytes a token that no tensor holds (ids, document windows) are
//! left out.

use serde::Serialize;

use super::memory::{BF16, F32};
use crate::config::{GdnConfig, GdnFfn, LayerKind, MlaConfig, MlaFfn, ModelConfig, MoeConfig, Rope};

/// Numbers saved for one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SavedPerToken {
    /// What saves them.
    pub block: &'static str,
    /// How many such blocks there are.
    pub count: u64,
    /// Numbers in the run's own type.
    pub numbers: u64,
    /// Numbers of four bytes whatever the run: norms' statistics, gates, states, scores, indices.
    pub wide: u64,
}

impl SavedPerToken {
    pub(super) fn bytes(&self, width: u64) -> u64 {
        width * self.numbers + F32 * self.wide
    }
}

pub(super) const HEAD: &str = "head";
pub(super) const MODULE: &str = "mtp module";

/// What each kind of block keeps of a token.
pub(super) fn blocks(model: &ModelConfig) -> Vec<SavedPerToken> {
    let d = model.d_model;
    let mut blocks = Vec::new();
    let mut put = |block, count: usize, held: Held| {
        if count > 0 {
            blocks.push(SavedPerToken { block, count: count as u64, numbers: held.numbers, wide: held.wide });
        }
    };
    if let Some(gdn) = &model.gdn {
        let layer = Held::sum([mixer(gdn, d), gdn_block(gdn, d)]);
        put("gdn layer", model.num_layers_of(LayerKind::Gdn), layer);
        let around = [
            narrow(d) + wide(1), // enorm: e, its statistic
            wide(1),             // hnorm: its statistic; h is the depth before's
            narrow(2 * d),       // linear: enorm and hnorm side by side
            depth(d),
        ];
        put(MODULE, model.mtp.n_modules, layer + Held::sum(around));
    }
    if let Some(mla) = &model.mla {
        put("mla layer", model.num_layers_of(LayerKind::Mla), attention(mla, d) + mla_block(model, mla));
    }
    put(HEAD, 1, depth(d));
    blocks
}

/// Numbers of one token, in the run's type and in four bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Held {
    numbers: u64,
    wide: u64,
}

fn narrow(numbers: usize) -> Held {
    Held { numbers: numbers as u64, wide: 0 }
}

fn wide(numbers: usize) -> Held {
    Held { numbers: 0, wide: numbers as u64 }
}

impl std::ops::Add for Held {
    type Output = Held;
    fn add(self, other: Held) -> Held {
        Held { numbers: self.numbers + other.numbers, wide: self.wide + other.wide }
    }
}

impl Held {
    fn sum<const N: usize>(parts: [Held; N]) -> Held {
        parts.into_iter().fold(Held::default(), |a, b| a + b)
    }
}

/// A branch's beginning, rms_norm: the residual stream as it is here, its statistic; and the normed input, which the
/// products after it keep.
fn pre_norm(d: usize) -> Held {
    narrow(d) + wide(1) + narrow(d)
}

/// The end of a depth: the norm before the head keeps the hidden state and its statistic, the loss the gradient of what it
/// read.
fn depth(d: usize) -> Held {
    narrow(d) + wide(1) + narrow(d)
}

fn mixer(gdn: &GdnConfig, d: usize) -> Held {
    let (conv, values, heads) = (gdn.conv_channels(), gdn.value_dim(), gdn.n_heads);
    Held::sum([
        pre_norm(d),
        narrow(conv + values + 2 * heads), // the projection q k v z a b: short_conv, gated_norm, decay_gate keep parts of it
        narrow(conv),                      // delta_rule: q k v after the convolution
        wide(2 * heads),                   // delta_rule: g and β
        wide((gdn.key_dim() * gdn.d_v).div_ceil(gdn.chunk_size)), // delta_rule: the state before each chunk
        narrow(values) + wide(heads),      // gated_norm: o, its statistics
        narrow(values),                    // linear: y
    ])
}

fn attention(mla: &MlaConfig, d: usize) -> Held {
    let (queries, rotary) = (mla.n_heads * mla.d_qk(), mla.n_kv_groups * mla.d_rope);
    let (kv, out) = (mla.n_kv_groups * (mla.d_nope + mla.d_v), mla.n_heads * mla.d_v);
    // The first product is one buffer, and something in it is kept: the latent, or keys and values, or the queries.
    let projected = match mla.kv_latent {
        0 => narrow(queries + rotary + kv),
        latent => narrow(queries + rotary + latent),
    };
    let latent = match mla.kv_latent {
        0 => Held::default(),
        latent => wide(1) + narrow(latent) + narrow(kv), // rms_norm's statistic; linear: c; attention: keys and values
    };
    let turned = if mla.rope == Rope::None { 0 } else { queries + rotary };
    Held::sum([
        pre_norm(d),
        projected,
        latent,
        narrow(turned),                  // attention: q and k_r after their rotation
        narrow(out) + wide(mla.n_heads), // attention, and linear after it: o; the logarithms of its sums
    ])
}

fn mla_block(model: &ModelConfig, mla: &MlaConfig) -> Held {
    match (mla.ffn, mla.d_ff, &model.moe) {
        (MlaFfn::Moe, _, Some(moe)) => experts(moe, model.d_model),
        (MlaFfn::Swiglu, Some(d_ff), _) => pre_norm(model.d_model) + dense(d_ff),
        _ => Held::default(),
    }
}

fn gdn_block(gdn: &GdnConfig, d: usize) -> Held {
    match (gdn.ffn, gdn.d_ff) {
        (GdnFfn::Swiglu, Some(d_ff)) => pre_norm(d) + dense(d_ff),
        _ => Held::default(),
    }
}

/// swiglu: a and b; linear: h.
fn dense(d_ff: usize) -> Held {
    narrow(2 * d_ff) + narrow(d_ff)
}

fn experts(moe: &MoeConfig, d: usize) -> Held {
    Held::sum([
        pre_norm(d),
        wide(moe.n_routed + moe.top_k),   // router: scores, chosen experts
        wide(3 * moe.top_k),              // experts: gates, the pairs sorted, and where each went
        narrow(2 * moe.d_ff * moe.top_k), // experts: a and b of each pair
        dense(moe.n_shared * moe.d_ff),
    ])
}

/// Bytes saved for the backward pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Activations {
    /// What one block of each kind saves for a token.
    pub blocks: Vec<SavedPerToken>,
    /// Bytes for a token, bf16 run.
    pub per_token_bf16: u64,
    /// Bytes for a token, f32 run.
    pub per_token_f32: u64,
    /// Bytes for a token when of every layer only the input is kept and one layer at a time is run again, bf16 run.
    /// Prediction modules and head are not run again; they are done when the first layer is.
    pub checkpointed_per_token_bf16: u64,
    /// The same, f32 run.
    pub checkpointed_per_token_f32: u64,
    /// Bytes for the whole micro-batch, bf16 run.
    pub batch_bf16: u64,
    /// The same with every layer run again.
    pub batch_checkpointed_bf16: u64,
}

impl Activations {
    pub(super) fn new(model: &ModelConfig, tokens: u64) -> Self {
        let blocks = blocks(model);
        let outside = |b: &SavedPerToken| b.block == HEAD || b.block == MODULE;
        let all = |width| blocks.iter().map(|b| b.count * b.bytes(width)).sum::<u64>();
        let checkpointed = |width: u64| {
            let rest: u64 = blocks.iter().filter(|b| outside(b)).map(|b| b.count * b.bytes(width)).sum();
            let largest = blocks.iter().filter(|b| !outside(b)).map(|b| b.bytes(width)).max().unwrap_or(0);
            width * (model.n_layers * model.d_model) as u64 + rest.max(largest)
        };
        Activations {
            per_token_bf16: all(BF16),
            per_token_f32: all(F32),
            checkpointed_per_token_bf16: checkpointed(BF16),
            checkpointed_per_token_f32: checkpointed(F32),
            batch_bf16: tokens.saturating_mul(all(BF16)),
            batch_checkpointed_bf16: tokens.saturating_mul(checkpointed(BF16)),
            blocks,
        }
    }
}
