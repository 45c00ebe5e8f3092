//! What happens when a step goes wrong (HAZARD 13): its batch is written down, and the policy decides.

use crate::checkpoint::Checkpoint;
use crate::trainer::Saved;
use crate::{Error, LoopState, Trainer};
use hymo_data::loader::{MicroBatch, Step};
use hymo_model::config::OnNonFinite;
use std::fmt;
use std::path::{Path, PathBuf};

/// Steps in a row that may be refused, and ways back to one checkpoint, before a run ends whatever its policy.
const PATIENCE: u32 = 16;
/// Norms that a spike is measured against, and how many there have to be.
const RECENT: usize = 64;
const ENOUGH: usize = 16;

/// Why a step moves nothing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    /// The gradient is not finite, first in this parameter.
    NonFinite(String),
    /// The gradient's norm is far above those of the steps before.
    Spike { norm: f64, median: f64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::NonFinite(first) => write!(f, "the gradient is not finite (first in {first})"),
            Fault::Spike { norm, median } => {
                let times = norm / median;
                write!(f, "the gradient's norm {norm:.3e} is {times:.1} times the median of the steps before")
            }
        }
    }
}

impl Trainer {
    /// The median of the norms of the steps before, where it is one to measure spikes against.
    pub(crate) fn usual(&self) -> Option<f64> {
        let recent = &self.state.norms;
        if self.config.train.spike == 0. || recent.len() < ENOUGH {
            return None;
        }
        let mut sorted = recent.clone();
        sorted.sort_by(f64::total_cmp);
        Some(sorted[sorted.len() / 2])
    }

    /// Why a step was refused: its norm, the parameters whose gradients are not finite, and what was [`Trainer::usual`].
    pub(crate) fn fault(norm: f64, params: Vec<String>, usual: Option<f64>) -> Fault {
        match usual {
            Some(median) if norm.is_finite() => Fault::Spike { norm, median },
            _ => Fault::NonFinite(params.into_iter().next().unwrap_or_default()),
        }
    }

    /// A step has moved the parameters.
    pub(crate) fn accept(&mut self, norm: f64) {
        self.state.in_a_row = 0;
        if self.config.train.spike > 0. {
            let norms = &mut self.state.norms;
            norms.drain(..norms.len().saturating_sub(RECENT - 1));
            norms.push(norm);
        }
    }

    /// A step has moved nothing: what there is to say of it, unless the run ends.
    pub(crate) fn refuse(&mut self, data: &Step, fault: &Fault, dump: &Path) -> Result<String, Error> {
        self.state.skipped += 1;
        self.state.in_a_row += 1;
        let (step, times) = (self.state.step, self.state.in_a_row);
        let dump = write_batch(data, step, dump)?;
        match self.config.train.on_non_finite {
            OnNonFinite::Stop => Err(Error::Refused { step, why: fault.to_string(), dump }),
            _ if times >= PATIENCE => Err(Error::NeverFinite { step, times, dump }),
            _ => Ok(format!("{fault}; its batch is in {}", dump.display())),
        }
    }

    /// Goes back to what a checkpoint of this run says, except that the data goes on where it is now: what led here is not
    /// read again.
    ///
    /// # Errors
    /// A checkpoint of another run; going back to it again and again.
    pub fn roll_back(&mut self, mut from: Checkpoint) -> Result<(), Error> {
        let failed = self.state.step;
        let saved = Saved::of(&from)?;
        self.take(&mut from)?;
        from.finish()?;
        let (skipped, (to, times)) = (self.state.skipped, self.state.rolled_back);
        let times = if to == saved.state.step { times + 1 } else { 1 };
        self.state = LoopState { skipped, rolled_back: (saved.state.step, times), in_a_row: 0, ..saved.state };
        if times >= PATIENCE {
            return Err(Error::NoWayForward { step: failed, times, back_to: self.state.step });
        }
        Ok(())
    }
}

/// A step's tokens and documents as JSON, under a name of its own.
fn write_batch(data: &Step, step: u64, dir: &Path) -> Result<PathBuf, Error> {
    let path = dir.join(format!("refused-step-{step}.json"));
    let rows = |m: &MicroBatch| serde_json::json!({ "rows": m.rows, "tokens": m.tokens, "documents": m.documents });
    let text = serde_json::json!({
        "step": step, "begins": data.begins, "micro": data.micro.iter().map(rows).collect::<Vec<_>>(),
    });
    std::fs::write(&path, text.to_string()).map_err(|source| Error::io("write", &path, source))?;
    Ok(path)
}
