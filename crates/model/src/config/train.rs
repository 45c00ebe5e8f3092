//! What a training step consists of: what `[train]` of a run file holds. The loop is `hymo-train`'s.

use serde::{Deserialize, Serialize};

/// A step's rows, and what happens when one goes wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Seed of the initial parameters. 0 to 2^62.
    pub seed: u64,
    /// Rows of `model.context_length` tokens in a step, all ranks together. 1 to 1,048,576, a multiple of `micro_rows`.
    pub rows: usize,
    /// Rows that are computed at once: memory grows with them, the result does not change. 1 to 65,536.
    pub micro_rows: usize,
    /// Every how many layers one keeps nothing for the backward pass and runs again there. 0 to 1,024; 0 is none.
    pub recompute: usize,
    /// A gradient whose norm is so many times the median of the last 64 is treated like one that is not finite. 0 to 1e6;
    /// 0 is off, as in the first 16 steps.
    pub spike: f64,
    /// What a step does whose gradient is not finite.
    pub on_non_finite: OnNonFinite,
    /// Largest attention logit that a head may reach: after a step that saw a larger one, the head's queries are scaled
    /// down to it (QK-clip, MATH 2.6). 0 to 1e6; 0 is off.
    pub qk_clip: f64,
}

/// What follows a gradient that is not finite. Its batch is written down either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnNonFinite {
    /// The run ends with an error.
    #[default]
    Stop,
    /// The step moves nothing, and the run goes on.
    Skip,
    /// The run goes back to its newest checkpoint, and on with the data behind the step.
    RollBack,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            seed: 0,
            rows: 16,
            micro_rows: 4,
            recompute: 0,
            spike: 0.0,
            on_non_finite: OnNonFinite::Stop,
            qk_clip: 0.0,
        }
    }
}
