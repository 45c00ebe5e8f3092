//! What a prediction module carries from token to token (MATH 5.2).

use super::GdnCache;
use hymo_model::ModelConfig;

/// The state of one prediction module, and what it has still to see.
#[derive(Debug, Clone)]
pub(crate) struct ModuleCache {
    pub gdn: GdnCache,
    /// Positions it has taken.
    pub done: usize,
    /// [n, D]: hidden rows of the depth before that it has not taken, from position `done` on. It can take position i once
    /// token i + k is known, so the modules beyond the first always have some waiting.
    pub waiting: Vec<f32>,
    /// `[D]`: the hidden row of the last position taken.
    pub last: Vec<f32>,
}

impl ModuleCache {
    pub fn new(model: &ModelConfig) -> Self {
        ModuleCache { gdn: GdnCache::new(model), done: 0, waiting: Vec::new(), last: Vec::new() }
    }

    pub fn fork(&self) -> Self {
        ModuleCache { gdn: self.gdn.fork(), done: self.done, waiting: self.waiting.clone(), last: self.last.clone() }
    }
}
