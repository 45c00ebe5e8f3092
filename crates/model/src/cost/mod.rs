//! What a model costs: parameters, operations, memory. Everything is counted from the configuration and the parameter table;
//! nothing is measured.

mod flops;
mod memory;
mod saved;
#[cfg(test)]
mod tests;

pub use flops::{Flops, OpFlops};
pub use memory::{Cache, TrainingState};
pub use saved::{Activations, SavedPerToken};

use serde::Serialize;

use crate::config::{ModelConfig, Problem, Problems};
use crate::params::{OptimGroup, ParamSpec, ParamTable, Part};

/// What the costs that depend on a length or a count are counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CostOptions {
    /// Tokens of a sequence, in training as in decoding.
    pub context: usize,
    /// Sequences held at once: a micro-batch in training, requests in decoding.
    pub batch: usize,
}

/// All costs of a model. A figure that its type cannot hold is `u64::MAX`: that or more.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cost {
    /// What the figures are for.
    pub options: CostOptions,
    /// Parameters.
    pub params: ParamCounts,
    /// Operations for one token.
    pub flops_per_token: Flops,
    /// Bytes of weights, gradients and moments in training, on all ranks together.
    pub training_state: TrainingState,
    /// Bytes saved for the backward pass.
    pub activations: Activations,
    /// Bytes that decoding keeps.
    pub cache: Cache,
}

/// Parameters, counted by part and by optimizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ParamCounts {
    /// Parameters that one token uses: all but the routed experts it is not sent to.
    pub active: u64,
    /// All parameters.
    pub stored: u64,
    /// Parameters that NorMuon moves.
    pub normuon: u64,
    /// Parameters that Cautious AdamW moves.
    pub adamw: u64,
    /// Parts that the model has.
    pub parts: Vec<PartCount>,
}

/// Parameters of one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartCount {
    /// The part.
    pub part: Part,
    /// Layers or modules it is in; 1 for what is there once.
    pub count: u64,
    /// Parameters that one token uses.
    pub active: u64,
    /// All parameters.
    pub stored: u64,
}

impl Cost {
    /// Counts everything.
    ///
    /// # Errors
    /// What [`ModelConfig::validate`] finds, and a context or batch of zero or of 2^32 and more.
    pub fn new(model: &ModelConfig, options: CostOptions) -> Result<Self, Problems> {
        let table = ParamTable::new(model)?;
        let sizes = [("context", options.context), ("batch", options.batch)];
        let wrong = sizes.into_iter().filter(|(_, n)| *n == 0 || u32::try_from(*n).is_err());
        Problems::unless_empty(wrong.map(|(name, n)| Problem::new(name, n, "1 to 4294967295")).collect())?;
        Ok(Cost {
            options,
            params: ParamCounts::new(model, &table),
            flops_per_token: Flops::new(model, &table, options.context),
            training_state: TrainingState::new(&table),
            activations: Activations::new(model, (options.context as u64).saturating_mul(options.batch as u64)),
            cache: Cache::new(model, options),
        })
    }
}

/// A sum that stops at the largest number.
fn sum(terms: impl IntoIterator<Item = u64>) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

impl ParamCounts {
    fn new(model: &ModelConfig, table: &ParamTable) -> Self {
        let sum = |of: &dyn Fn(&ParamSpec) -> u64| table.params().iter().map(of).sum();
        let in_group = |p: &ParamSpec, muon| {
            if (p.group == OptimGroup::NorMuon) == muon { p.numel() as u64 } else { 0 }
        };
        let all = [Part::Embedding, Part::Gdn, Part::Mla, Part::Moe, Part::Ffn, Part::FinalNorm, Part::Mtp];
        let part = |part: Part| {
            let of = |p: &&ParamSpec| p.part == part;
            let active = table.params().iter().filter(of).map(|p| active(model, p)).sum();
            let stored = table.params().iter().filter(of).map(|p| p.numel() as u64).sum();
            PartCount { part, count: times(table, model, part), active, stored }
        };
        ParamCounts {
            active: sum(&|p| active(model, p)),
            stored: sum(&|p| p.numel() as u64),
            normuon: sum(&|p| in_group(p, true)),
            adamw: sum(&|p| in_group(p, false)),
            parts: all.into_iter().map(part).filter(|p| p.stored > 0).collect(),
        }
    }
}

/// Elements of a parameter that one token uses. All experts are alike, so the first `top_k` stand for the chosen ones.
fn active(model: &ModelConfig, spec: &ParamSpec) -> u64 {
    let chosen = model.moe.as_ref().map_or(0, |m| m.top_k);
    let used = spec.routed_expert.is_none_or(|e| e < chosen);
    if used { spec.numel() as u64 } else { 0 }
}

fn times(table: &ParamTable, model: &ModelConfig, part: Part) -> u64 {
    match part {
        Part::Embedding | Part::FinalNorm => 1,
        Part::Mtp => model.mtp.n_modules as u64,
        _ => table.units().filter(|&u| table.unit_params(u).iter().any(|p| p.part == part)).count() as u64,
    }
}
