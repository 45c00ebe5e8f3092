//! Bytes: in training the state and what is saved for backward, in decoding the caches.
//!
//! An op saves what a product made and rebuilds what one elementwise pass makes: norms, activations, the convolution's
//! output, the gathered rows of the experts. "Wide" numbers are f32 whatever the run; the others are bf16 on a GPU and f32 on a
//! CPU.

use serde::Serialize;

use super::CostOptions;
use crate::config::{GdnConfig, GdnFfn, LayerKind, MlaConfig, MlaFfn, ModelConfig, MoeConfig};
use crate::params::{OptimGroup, ParamSpec, ParamTable};

const F32: u64 = 4;
const BF16: u64 = 2;

/// Bytes of weights, gradients and moments, on all ranks together; ranks share all of it but gathered copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrainingState {
    /// Master weights, f32.
    pub master: u64,
    /// Gradients, f32.
    pub gradients: u64,
    /// NorMuon: momentum of every element and second moment of every row, f32.
    pub normuon: u64,
    /// Cautious AdamW: two moments of every element, f32.
    pub adamw: u64,
    /// Weights for the products on a GPU, bf16. A CPU run reads the master weights.
    pub bf16_copy: u64,
    /// All of it, on a GPU.
    pub total: u64,
}

impl TrainingState {
    pub(super) fn new(table: &ParamTable) -> Self {
        let of = |muon: bool| table.params().iter().filter(move |p| (p.group == OptimGroup::NorMuon) == muon);
        let elements = |p: &ParamSpec| p.numel() as u64;
        let stored: u64 = table.params().iter().map(elements).sum();
        let normuon = F32 * of(true).map(|p| elements(p) + p.rows() as u64).sum::<u64>();
        let adamw = 2 * F32 * of(false).map(elements).sum::<u64>();
        let (master, gradients, bf16_copy) = (F32 * stored, F32 * stored, BF16 * stored);
        let total = master + gradients + normuon + adamw + bf16_copy;
        TrainingState { master, gradients, normuon, adamw, bf16_copy, total }
    }
}

/// Numbers saved for one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SavedPerToken {
    /// What saves them.
    pub block: &'static str,
    /// How many such blocks there are.
    pub count: u64,
    /// Numbers in the run's own type.
    pub numbers: u64,
    /// Numbers in f32.
    pub wide: u64,
}

impl SavedPerToken {
    fn bytes(&self, width: u64) -> u64 {
        width * self.numbers + F32 * self.wide
    }
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
    /// Bytes for a token when only block inputs are kept and one block at a time is run again, bf16 run.
    pub checkpointed_per_token_bf16: u64,
    /// The same, f32 run.
    pub checkpointed_per_token_f32: u64,
    /// Bytes for the whole micro-batch, bf16 run.
    pub batch_bf16: u64,
    /// The same with block checkpointing.
    pub batch_checkpointed_bf16: u64,
}

impl Activations {
    pub(super) fn new(model: &ModelConfig, options: CostOptions) -> Self {
        let blocks = saved_blocks(model);
        let plain = |width| blocks.iter().map(|b| b.count * b.bytes(width)).sum::<u64>();
        let is_head = |b: &&SavedPerToken| b.block == HEAD;
        let checkpointed = |width: u64| {
            let inputs: u64 =
                blocks.iter().filter(|b| !is_head(b)).map(|b| b.count * width * model.d_model as u64).sum();
            let head: u64 = blocks.iter().filter(is_head).map(|b| b.bytes(width)).sum();
            let largest = blocks.iter().filter(|b| !is_head(b)).map(|b| b.bytes(width)).max().unwrap_or(0);
            inputs + head + largest
        };
        let tokens = (options.context as u64).saturating_mul(options.batch as u64);
        Activations {
            per_token_bf16: plain(BF16),
            per_token_f32: plain(F32),
            checkpointed_per_token_bf16: checkpointed(BF16),
            checkpointed_per_token_f32: checkpointed(F32),
            batch_bf16: tokens.saturating_mul(plain(BF16)),
            batch_checkpointed_bf16: tokens.saturating_mul(checkpointed(BF16)),
            blocks,
        }
    }
}

const HEAD: &str = "head";

fn saved_blocks(model: &ModelConfig) -> Vec<SavedPerToken> {
    let d = model.d_model;
    let modules = model.mtp.n_modules;
    let layers = |kind| model.num_layers_of(kind);
    let block = |block, count: usize, (numbers, wide): (usize, usize)| SavedPerToken {
        block,
        count: count as u64,
        numbers: numbers as u64,
        wide: wide as u64,
    };
    let mut blocks = Vec::new();
    if let Some(gdn) = &model.gdn {
        let (numbers, wide) = saved_by_gdn(gdn, d);
        blocks.push(block("gdn layer", layers(LayerKind::Gdn), (numbers, wide)));
        // Beside its layer: the hidden state into hnorm, the state into out_norm, three norms' statistics.
        blocks.push(block("mtp module", modules, (numbers + 2 * d, wide + 3)));
    }
    if let Some(mla) = &model.mla {
        let attention = saved_by_mla(mla, d);
        let ffn = match (mla.ffn, mla.d_ff, &model.moe) {
            (MlaFfn::Moe, _, Some(moe)) => saved_by_moe(moe, d),
            (MlaFfn::Swiglu, Some(d_ff), _) => saved_by_dense(d_ff, d),
            _ => (0, 0),
        };
        let both = (attention.0 + ffn.0, attention.1 + ffn.1);
        blocks.push(block("mla layer", layers(LayerKind::Mla), both));
    }
    // The final norm's input, and the gradient of every head's input, which the loss computes in the forward pass.
    blocks.push(block(HEAD, 1, (d + (1 + modules) * d, 1)));
    blocks.retain(|b| b.count > 0);
    blocks
}

/// Input, q k v before the convolution, gate, inverse triangle, output; statistics of both norms, gate inputs a and b.
fn saved_by_gdn(gdn: &GdnConfig, d: usize) -> (usize, usize) {
    let numbers = d + gdn.conv_channels() + 2 * gdn.value_dim() + gdn.n_heads * gdn.chunk_size;
    let wide = 1 + 3 * gdn.n_heads;
    match (gdn.ffn, gdn.d_ff) {
        (GdnFfn::Swiglu, Some(d_ff)) => {
            let ffn = saved_by_dense(d_ff, d);
            (numbers + ffn.0, wide + ffn.1)
        }
        _ => (numbers, wide),
    }
}

/// Input, queries, latent, keys, values, output; statistics of the norms, log-sum-exp of each head.
fn saved_by_mla(mla: &MlaConfig, d: usize) -> (usize, usize) {
    let numbers = d + mla.n_heads * (mla.d_qk() + mla.d_v) + mla.n_kv_groups * (mla.d_qk() + mla.d_v) + mla.kv_latent;
    (numbers, 1 + usize::from(mla.kv_latent > 0) + mla.n_heads)
}

/// Input, both hidden products of each expert used; statistic of the norm, scores, chosen experts and gates.
fn saved_by_moe(moe: &MoeConfig, d: usize) -> (usize, usize) {
    (d + 2 * moe.d_ff * (moe.top_k + moe.n_shared), 1 + moe.n_routed + 2 * moe.top_k)
}

/// Input, both hidden products; statistic of the norm.
fn saved_by_dense(d_ff: usize, d: usize) -> (usize, usize) {
    (d + 2 * d_ff, 1)
}

/// Bytes that decoding keeps of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// Numbers of a token that grow with the sequence, all attention layers.
    pub numbers_per_token: u64,
    /// The same in bytes of bf16.
    pub bytes_per_token: u64,
    /// Bytes of one sequence at the context asked for, bf16.
    pub bytes_at_context: u64,
    /// What it would be with attention in every layer and a key and a value for every head, bf16; the design's comparison.
    pub mha_bytes_at_context: u64,
    /// Recurrent state of the GDN layers, f32, whatever the length.
    pub gdn_state_bytes: u64,
    /// The same for the prediction modules, which only drafting needs.
    pub mtp_state_bytes: u64,
    /// Rows that the convolutions look back on, bf16, prediction modules included.
    pub conv_tail_bytes: u64,
    /// Everything above for all sequences of the batch at the context, bf16.
    pub batch_bytes: u64,
}

impl Cache {
    pub(super) fn new(model: &ModelConfig, options: CostOptions) -> Self {
        let per_layer = model.mla.as_ref().map_or(0, MlaConfig::cache_numbers);
        let numbers_per_token = (per_layer * model.num_layers_of(LayerKind::Mla)) as u64;
        let context = options.context as u64;
        let per_head_pair = model.mla.as_ref().map_or(0, |m| m.n_heads * (m.d_qk() + m.d_v)) as u64;
        let state = model.gdn.as_ref().map_or(0, |g| g.key_dim() * g.d_v) as u64 * F32;
        let tail = model.gdn.as_ref().map_or(0, |g| g.conv_channels() * (g.conv_kernel - 1)) as u64 * BF16;
        let (layers, modules) = (model.num_layers_of(LayerKind::Gdn) as u64, model.mtp.n_modules as u64);
        let bytes_at_context = BF16 * numbers_per_token * context;
        let (gdn_state_bytes, mtp_state_bytes) = (state * layers, state * modules);
        let conv_tail_bytes = tail * (layers + modules);
        let one = bytes_at_context + gdn_state_bytes + mtp_state_bytes + conv_tail_bytes;
        Cache {
            numbers_per_token,
            bytes_per_token: BF16 * numbers_per_token,
            bytes_at_context,
            mha_bytes_at_context: (BF16 * per_head_pair * model.n_layers as u64).saturating_mul(context),
            gdn_state_bytes,
            mtp_state_bytes,
            conv_tail_bytes,
            batch_bytes: one.saturating_mul(options.batch as u64),
        }
    }
}
