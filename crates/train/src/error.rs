use crate::checkpoint;
use std::path::PathBuf;

/// What can go wrong in a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model refused a batch or its parameters.
    #[error(transparent)]
    Model(#[from] hymo_model::Error),
    /// A tensor operation refused its operands.
    #[error(transparent)]
    Tensor(#[from] hymo_tensor::Error),
    /// The data could not be read.
    #[error(transparent)]
    Data(#[from] hymo_data::Error),
    /// The optimizer refused its state or a step.
    #[error(transparent)]
    Optim(#[from] hymo_optim::Error),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A field of the configuration does not fit the rest of the run.
    #[error("{field}: found {found}, expected {expected}")]
    Config {
        /// Dotted path.
        field: &'static str,
        /// The value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A step's gradient is not finite, and the policy is to stop.
    #[error(
        "step {step}: the gradient is not finite (first in {first}); its batch is in {}. \
         train.on_non_finite = \"skip\" goes on without such steps",
        .dump.display()
    )]
    NonFinite {
        /// The step.
        step: u64,
        /// A parameter whose gradient is not finite.
        first: String,
        /// Where its batch is.
        dump: PathBuf,
    },
    /// Steps that are not finite came again and again.
    #[error("step {step}: {times} steps in a row were not finite, the last batch is in {}", .dump.display())]
    NeverFinite {
        /// The last of them.
        step: u64,
        /// How many.
        times: u32,
        /// Where its batch is.
        dump: PathBuf,
    },
    /// The loop's state in a checkpoint is not what this program writes.
    #[error("{}: state: {problem}", .path.display())]
    State {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The file system refused.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// `write`, ..
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
