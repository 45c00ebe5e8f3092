//! Operations for one token. A multiplication with its addition counts as two.
//!
//! Every matrix is counted from the parameter table: forward once, backward twice (input and weight gradient). The delta
//! rule is counted in the chunk form as MATH 1.4 and 1.5 write it, full tiles, with what its backward pass recomputes there;
//! the operation takes fewer products (it saves the chunks' states and forms neither U, W nor the inverse in its backward).
//! Attention is causal: a token sees `(T + 1) / 2` keys on average, whole sequences, no document ends; its backward is five
//! products for the forward's two, 2.5 times.
//!
//! For `hymo-434m` at 4,096 tokens this gives 1.277 GFLOP forward and 3.93 GFLOP a training step. PERFORMANCE.md says about
//! 1.27 and 3.85. The difference is the delta rule: there a triangular product is counted as half of its tile and the
//! backward as twice the forward, 0.032 and 0.065 GFLOP; here tiles are whole, as matrix units compute them, and the backward
//! recomputes U, W, V', P, G and the chunk states: 0.045 and 0.119 GFLOP. Matrices (1.097 GFLOP forward) and attention
//! (0.134) agree. A model-FLOPs utilisation quoted against PERFORMANCE.md's figure is thus 2% lower than against this.

use serde::Serialize;

use super::{active, sum};
use crate::config::{GdnConfig, GdnFfn, LayerKind, MlaConfig, MlaFfn, ModelConfig};
use crate::params::{ParamSpec, ParamTable, Part};

/// Operations for one token, by op and summed. Sums are without `other`, as is usual.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Flops {
    /// Forward pass with the prediction modules and all heads.
    pub forward: u64,
    /// Forward and backward pass.
    pub training: u64,
    /// The same when every layer is run again in backward (not prediction modules and head).
    pub training_checkpointed: u64,
    /// Norms, activations, gates, softmax, loss, forward: counted, yet bound by memory and in no sum.
    pub other_forward: u64,
    /// The same, forward and backward.
    pub other_training: u64,
    /// The ops that the sums are made of.
    pub ops: Vec<OpFlops>,
}

/// Operations of one kind for one token, all layers together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OpFlops {
    /// What it is.
    pub op: &'static str,
    /// Forward pass.
    pub forward: u64,
    /// Backward pass.
    pub backward: u64,
}

const HEAD: &str = "head and its loss";
const MODULES: &str = "mtp projections";

impl Flops {
    pub(super) fn new(model: &ModelConfig, table: &ParamTable, context: usize) -> Self {
        let mut ops = matrices(model, table);
        // Forward, what only prediction modules do: like the head it is not run again.
        let mut once = sum(ops.iter().filter(|o| o.op == HEAD || o.op == MODULES).map(|o| o.forward));
        if let Some(gdn) = &model.gdn {
            let modules = model.mtp.n_modules as u64;
            let mut push = |op, forward: u64, backward: u64| {
                let layers = model.num_layers_of(LayerKind::Gdn) as u64 + modules;
                ops.push(OpFlops { op, forward: forward * layers, backward: backward * layers });
                once += forward * modules;
            };
            let conv = 2 * (gdn.conv_channels() * gdn.conv_kernel) as u64;
            push("short convolution", conv, 2 * conv);
            let (forward, backward) = delta_rule_macs(gdn);
            let all = |macs: f64| (2.0 * macs * gdn.n_heads as f64).round() as u64;
            push("delta rule", all(forward), all(backward));
        }
        if let Some(mla) = &model.mla {
            let macs = attention_macs(mla, context) * model.num_layers_of(LayerKind::Mla) as f64;
            let (forward, backward) = ((2.0 * macs).round() as u64, (5.0 * macs).round() as u64);
            ops.push(OpFlops { op: "attention", forward, backward });
        }
        ops.retain(|op| op.forward > 0);
        let forward = sum(ops.iter().map(|o| o.forward));
        let training = forward.saturating_add(sum(ops.iter().map(|o| o.backward)));
        let other = other(model, context);
        Flops {
            forward,
            training,
            training_checkpointed: training.saturating_add(forward - once),
            other_forward: other,
            // The backward of an elementwise op reads one more input and writes one more output.
            other_training: other.saturating_mul(3),
            ops,
        }
    }
}

/// One entry for each part that multiplies by matrices of the table.
fn matrices(model: &ModelConfig, table: &ParamTable) -> Vec<OpFlops> {
    let parts = [
        ("gdn projections", Part::Gdn),
        ("mla projections", Part::Mla),
        ("router and experts", Part::Moe),
        ("dense feed-forward", Part::Ffn),
        (MODULES, Part::Mtp),
        (HEAD, Part::Embedding),
    ];
    let is_matrix = |p: &&ParamSpec| p.shape.len() == 2 && !p.name.ends_with(".conv.weight");
    let entry = |(op, part): (&'static str, Part)| {
        let of_part = table.params().iter().filter(is_matrix).filter(|p| p.part == part);
        let macs: u64 = of_part.map(|p| active(model, p)).sum();
        let heads = if part == Part::Embedding { 1 + model.mtp.n_modules as u64 } else { 1 };
        let forward = 2 * macs * heads;
        OpFlops { op, forward, backward: 2 * forward }
    };
    parts.map(entry).into()
}

/// Multiply-adds of one head for one token, forward and backward, in chunks of C rows.
///
/// Forward, in units of a chunk: G, P and W take C^2 dk each; U and P V' take C^2 dv; W H, Q H and K^T V' take C dk dv; the
/// unit triangle is inverted in C^3 / 6. Backward: U, W, V', P, G and the states again (3 C^2 dk + C^2 dv + 2 C dk dv); then
/// dK_b, dK_b W^T, R K, R^T Q, N K, N^T K (C^2 dk), P^T dO, dP, T^T dV', dV_b U^T (C^2 dv), and K dH, X, Y, dW and the two
/// products of dH_in (C dk dv).
fn delta_rule_macs(gdn: &GdnConfig) -> (f64, f64) {
    let (c, dk, dv) = (gdn.chunk_size as f64, gdn.d_k as f64, gdn.d_v as f64);
    let forward = c * (3.0 * dk + 2.0 * dv) + 3.0 * dk * dv + c * c / 6.0;
    let backward = c * (9.0 * dk + 5.0 * dv) + 8.0 * dk * dv;
    (forward, backward)
}

/// Multiply-adds of one layer for one token, forward: scores and weighted values over the keys it sees on average.
fn attention_macs(mla: &MlaConfig, context: usize) -> f64 {
    let keys = (context as f64 + 1.0) / 2.0;
    mla.n_heads as f64 * (mla.d_qk() + mla.d_v) as f64 * keys
}

/// Elementwise operations for one token, forward. Per element: norm 4, gated norm 10, SiLU 5, gate product 1, rotation 3,
/// softmax and cross-entropy 5, residual addition 1; per head 14 for decay and write strength.
fn other(model: &ModelConfig, context: usize) -> u64 {
    let d = model.d_model as u64;
    let branch = 5 * d; // pre-norm and residual addition
    let ffn = |d_ff: usize| 6 * d_ff as u64 + branch;
    let gdn = model.gdn.as_ref().map_or(0, |g| {
        let mixer = 5 * g.conv_channels() + 8 * g.key_dim() + 10 * g.value_dim() + 14 * g.n_heads;
        let block = if g.ffn == GdnFfn::Swiglu { g.d_ff.map_or(0, ffn) } else { 0 };
        mixer as u64 + branch + block
    });
    let moe = model.moe.as_ref().map_or(0, |m| {
        let hidden = 6 * m.d_ff * (m.top_k + m.n_shared) + m.d_ff * m.top_k;
        (hidden + 8 * m.n_routed) as u64 + (m.top_k + m.n_shared) as u64 * d + branch
    });
    let mla = model.mla.as_ref().map_or(0, |m| {
        let turned = 3 * (m.n_heads + m.n_kv_groups) * m.d_rope + 4 * m.kv_latent;
        let scores = 5 * m.n_heads as u64 * (context as u64).div_ceil(2);
        let block = match m.ffn {
            MlaFfn::Moe => moe,
            MlaFfn::Swiglu => m.d_ff.map_or(0, ffn),
            MlaFfn::None => 0,
        };
        turned as u64 + scores + branch + block
    });
    let modules = model.mtp.n_modules as u64;
    let layers = |kind| model.num_layers_of(kind) as u64;
    let loss = (1 + modules) * (4 * d + 5 * model.vocab_size as u64);
    layers(LayerKind::Gdn) * gdn + layers(LayerKind::Mla) * mla + modules * (gdn + 8 * d) + loss
}
