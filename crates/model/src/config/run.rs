//! What surrounds the steps of a run: what `[data]`, `[eval]` and `[checkpoint]` of a run file hold.

use serde::{Deserialize, Serialize};

/// What a run reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Folders that `hymo data prep` wrote, all with one tokenizer. A relative path is relative to where the command runs.
    pub shards: Vec<String>,
    /// Share of each folder in the tokens, relative to the others'. None: each by its size.
    pub weights: Vec<f64>,
    /// Whether documents are shuffled anew in every epoch.
    pub shuffle: bool,
    /// Seed of that order. 0 to 2^62.
    pub seed: u64,
}

/// When and on what a model is evaluated, on the way and at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Steps between evaluations. 0 to 2,000,000,000; 0 is at the end only.
    pub every: u64,
    /// Held-out tokens of an evaluation, the first of the split `val` of every folder. 0 to 2^40; 0 is all of them.
    pub tokens: u64,
    /// Beginnings that the model is asked to continue; none takes the beginnings of held-out documents.
    pub prompts: Vec<String>,
    /// Texts written at each evaluation. 0 to 64.
    pub samples: usize,
    /// Their length. Tokens, 1 to 65,536.
    pub sample_tokens: usize,
    /// Their temperature. 0 to 10; 0 always takes the likeliest.
    pub temperature: f64,
}

/// What a run leaves behind to go on from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between checkpoints. 0 to 2,000,000,000; 0 is at the end only.
    pub every: u64,
    /// The newest this many are kept. 1 to 1,000,000.
    pub keep_last: usize,
    /// Those whose step is a multiple of this are kept. 0 to 2,000,000,000; 0 is none.
    pub keep_every: u64,
    /// Whether the one with the best evaluation is kept.
    pub keep_best: bool,
}

impl Default for DataConfig {
    fn default() -> Self {
        DataConfig { shards: Vec::new(), weights: Vec::new(), shuffle: true, seed: 0 }
    }
}

impl Default for EvalConfig {
    fn default() -> Self {
        EvalConfig { every: 250, tokens: 262_144, prompts: Vec::new(), samples: 2, sample_tokens: 96, temperature: 0.8 }
    }
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every: 250, keep_last: 3, keep_every: 0, keep_best: true }
    }
}
