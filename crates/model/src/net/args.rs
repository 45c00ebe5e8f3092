//! What the operations are called with, from a configuration: one place for training and decoding (HAZARD 7).

use crate::config::{GateAct, GdnConfig, MlaConfig, MoeConfig, NormConfig, Rope};
use hymo_ops::{act, attention, decay_gate, delta_rule, gated_norm, rms_norm, rotary, router};

/// A norm over the residual stream.
#[must_use]
pub fn norm(c: &NormConfig) -> rms_norm::Args {
    rms_norm::Args { eps: c.eps, zero_centred: c.zero_centred }
}

/// The latent's norm, whose gain is stored as it is.
#[must_use]
pub fn latent_norm(c: &NormConfig) -> rms_norm::Args {
    rms_norm::Args { eps: c.eps, zero_centred: false }
}

/// The gates of the delta rule.
#[must_use]
pub fn decay(c: &GdnConfig) -> decay_gate::Args {
    decay_gate::Args { allow_neg_eigval: c.allow_neg_eigval }
}

/// The delta rule.
#[must_use]
pub fn delta_rule(c: &GdnConfig) -> delta_rule::Args {
    delta_rule::Args { n_heads: c.n_heads, d_k: c.d_k, d_v: c.d_v, chunk: c.chunk_size, qk_l2norm: true }
}

/// The gated norm of a delta rule's output.
#[must_use]
pub fn gated_norm(c: &GdnConfig, norm: &NormConfig) -> gated_norm::Args {
    let act = match c.gate_act {
        GateAct::Sigmoid => act::GateAct::Sigmoid,
        GateAct::Silu => act::GateAct::Silu,
    };
    gated_norm::Args { eps: norm.eps, act, d_v: c.d_v }
}

/// The router, for a step of `tokens` tokens.
#[must_use]
pub fn router(c: &MoeConfig, tokens: f64) -> router::Args {
    router::Args { top_k: c.top_k, routed_scale: c.routed_scale, balance_loss: c.balance_loss, tokens }
}

/// How the rotary numbers turn, if they do.
#[must_use]
pub fn rope(c: &MlaConfig) -> Option<rotary::Rope> {
    if c.rope == Rope::None || c.d_rope == 0 {
        return None;
    }
    let yarn = c.yarn.as_ref().map(|y| rotary::Yarn { factor: y.factor, original_context: y.original_context });
    Some(rotary::Rope { d_rope: c.d_rope, theta: c.rope_theta, yarn })
}

/// How the heads of q and the groups of k_r lie for the rotation.
#[must_use]
pub fn rotary(c: &MlaConfig) -> [rotary::Args; 2] {
    [
        rotary::Args { n_heads: c.n_heads, head_dim: c.d_nope + c.d_rope },
        rotary::Args { n_heads: c.n_kv_groups, head_dim: c.d_rope },
    ]
}

/// Attention. The scale is that of a stretched context where there is one (MATH 2.6).
#[must_use]
pub fn attention(c: &MlaConfig) -> attention::Args {
    let stretch = c.yarn.as_ref().map_or(1., |y| rotary::yarn_scale(y.factor));
    let scale = ((c.d_nope + c.d_rope) as f64).sqrt().recip() * stretch;
    attention::Args {
        n_heads: c.n_heads,
        n_groups: c.n_kv_groups,
        d_nope: c.d_nope,
        d_rope: c.d_rope,
        d_v: c.d_v,
        scale,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::YarnConfig;
    use crate::presets;

    /// MATH 2.1 and 2.6: τ = (dn + dr)^(-1/2), times m² = 1.4591 for eight times the context.
    #[test]
    fn the_scale_of_a_stretched_context_is_larger() {
        let mut c = presets::hymo_434m().mla.expect("a preset with attention");
        let scale = |c: &MlaConfig| attention(c).scale;
        assert!((scale(&c) - 128f64.powf(-0.5)).abs() < 1e-15);
        c.yarn = Some(YarnConfig { factor: 8., original_context: 4096 });
        assert!((scale(&c) * 128f64.sqrt() - 1.4591).abs() < 5e-5, "{}", scale(&c));
    }
}
