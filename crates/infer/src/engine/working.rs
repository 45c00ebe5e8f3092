//! What a pass works on: tensors that live between one operation and the next, none of which outlives the pass.

use hymo_model::config::{GdnConfig, MlaConfig, ModelConfig};

/// Most bytes of a pass over `rows` tokens that draws from `drawn` of them. Every tensor of a pass has a row a token, so the
/// largest layer's are counted as if they all lived at once. A third more, since the pool rounds
/// up by at most a sixteenth and may serve with a buffer a quarter larger than that.
pub(super) fn bytes(config: &ModelConfig, rows: usize, drawn: usize) -> u64 {
    let d = config.d_model;
    let layer = config.gdn.iter().map(|g| gdn(config, g)).chain(config.mla.iter().map(|m| mla(config, m))).max();
    // The residual stream, its norm and what a layer adds; in a prediction module two norms, the pair of them and its
    // copies of what goes in and out more.
    let module = if config.mtp.n_modules > 0 { 7 * d } else { 0 };
    let row = 3 * d + module + layer.unwrap_or(0);
    // Of a drawn row: itself, its norm and its logits.
    let numbers = rows.saturating_mul(row).saturating_add(drawn.saturating_mul(2 * d + config.vocab_size));
    let bytes = (numbers as u64).saturating_mul(size_of::<f32>() as u64).saturating_add(FIXED);
    bytes.saturating_add(bytes / 3)
}

/// Pages of small tensors: a number a row or a head, at least one step of the pool's capacities each.
const FIXED: u64 = 64 << 10;

fn gdn(config: &ModelConfig, g: &GdnConfig) -> usize {
    let value = g.n_heads * g.d_v;
    // The projections and gates, the convolution's output, o and its norm; all over before the feed-forward block.
    let mixer = 2 * g.conv_channels() + 3 * value + 6 * g.n_heads;
    mixer.max(g.d_ff.map_or(0, |f| 3 * f + config.d_model))
}

fn mla(config: &ModelConfig, m: &MlaConfig) -> usize {
    let (d, groups) = (config.d_model, m.n_kv_groups);
    let q = m.n_heads * m.d_qk();
    let own = if m.kv_latent > 0 { 2 * m.kv_latent } else { groups * (m.d_nope + m.d_v) };
    // Queries before and after their turn, keys and values, and the absorbed queries and sums of the tiles in work.
    let absorbed = m.n_heads * (m.kv_latent.max(m.d_nope) + m.d_rope + m.kv_latent.max(m.d_v));
    let mixer = 2 * q + own + 2 * groups * m.d_rope + m.n_heads * m.d_v + absorbed;
    let dense = m.d_ff.map_or(0, |f| 3 * f + d);
    let moe = config.moe.as_ref().map_or(0, |moe| {
        // One expert's rows may be all of them; the shared expert comes after the routed ones.
        let one = |f: usize| 3 * f + 2 * d;
        2 * moe.n_routed + 2 * moe.top_k + moe.top_k * d + d + one(moe.d_ff * moe.n_shared.max(1))
    });
    mixer.max(dense).max(moe)
}
