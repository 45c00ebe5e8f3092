//! What a training step consists of: what `[train]` of a run file holds. The loop is `hymo-train`'s.

use serde::{Deserialize, Serialize};

/// A step's rows, and what happens when one goes wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// What a step does whose gradient is not finite.
    pub on_non_finite: OnNonFinite,
}

/// What follows a gradient that is not finite. Its batch is written down either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNonFinite {
    /// The run ends with an error.
    #[default]
    Stop,
    /// The step moves nothing, and the run goes on.
    Skip,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig { seed: 0, rows: 16, micro_rows: 4, recompute: 0, on_non_finite: OnNonFinite::Stop }
    }
}
