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

    /// Begins anew with the newest `rows` of what waits for the first of `modules`, as if a document began there: what is older
    /// is not taken any more. Drafts may be worse for it; what is written is not theirs to decide.
    pub fn forget(modules: &mut [Self], model: &ModelConfig, rows: usize) {
        let Some(first) = modules.first_mut() else { return };
        let dropped = (first.waiting.len() / model.d_model).saturating_sub(rows);
        first.waiting.drain(..dropped * model.d_model);
        let (done, waiting) = (first.done + dropped, std::mem::take(&mut first.waiting));
        modules.iter_mut().for_each(|m| *m = ModuleCache { done, ..ModuleCache::new(model) });
        modules[0].waiting = waiting;
    }

    pub fn fork(&self) -> Self {
        ModuleCache { gdn: self.gdn.fork(), done: self.done, waiting: self.waiting.clone(), last: self.last.clone() }
    }
}
