//! Bytes: in training the state, in decoding the caches. What is saved for the backward pass is in `saved`.
//!
//! A figure too large for its type stands at the type's largest number.

use serde::Serialize;

use super::{CostOptions, sum};
use crate::config::{LayerKind, MlaConfig, ModelConfig};
use crate::params::{OptimGroup, ParamSpec, ParamTable};

pub(super) const F32: u64 = 4;
pub(super) const BF16: u64 = 2;

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
    /// Cache, states and tails for all sequences of the batch at the context, bf16.
    pub batch_bytes: u64,
}

impl Cache {
    pub(super) fn new(model: &ModelConfig, options: CostOptions) -> Self {
        let per_layer = model.mla.as_ref().map_or(0, MlaConfig::cache_numbers);
        let numbers_per_token = (per_layer as u64).saturating_mul(model.num_layers_of(LayerKind::Mla) as u64);
        let context = options.context as u64;
        let per_head_pair = model.mla.as_ref().map_or(0, |m| m.n_heads * (m.d_qk() + m.d_v)) as u64;
        let state = model.gdn.as_ref().map_or(0, |g| g.key_dim() * g.d_v) as u64 * F32;
        let tail = model.gdn.as_ref().map_or(0, |g| g.conv_channels() * (g.conv_kernel - 1)) as u64 * BF16;
        let (layers, modules) = (model.num_layers_of(LayerKind::Gdn) as u64, model.mtp.n_modules as u64);
        let bytes_at_context = (BF16 * numbers_per_token).saturating_mul(context);
        let (gdn_state_bytes, mtp_state_bytes) = (state * layers, state * modules);
        let conv_tail_bytes = tail * (layers + modules);
        let one = sum([bytes_at_context, gdn_state_bytes, mtp_state_bytes, conv_tail_bytes]);
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
