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
    /// No text could be generated.
    #[error(transparent)]
    Infer(#[from] hymo_infer::Error),
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
    /// A step's gradient is not finite or far too large, and the policy is to stop.
    #[error(
        "step {step}: {why}; its batch is in {}. train.on_non_finite = \"skip\" goes on without such steps, \
         \"roll_back\" from the newest checkpoint",
        .dump.display()
    )]
    Refused {
        /// The step.
        step: u64,
        /// What is wrong with its gradient.
        why: String,
        /// Where its batch is.
        dump: PathBuf,
    },
    /// Steps without a usable gradient came again and again.
    #[error("step {step}: {times} steps in a row were refused, the batch of the last is in {}", .dump.display())]
    NeverFinite {
        /// The last of them.
        step: u64,
        /// How many.
        times: u32,
        /// Where its batch is.
        dump: PathBuf,
    },
    /// The same checkpoint was gone back to again and again.
    #[error("step {step}: went back to step {back_to} {times} times and never came past it")]
    NoWayForward {
        /// The step that was refused last.
        step: u64,
        /// How often.
        times: u32,
        /// The checkpoint's step.
        back_to: u64,
    },
    /// The tokenizer beside the data cannot be read, or is not the data's.
    #[error("{}: {source}", .path.display())]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: hymo_tokenizer::Error,
    },
    /// A model's output is not finite.
    #[error("{what} is not finite: the weights are damaged, or training went wrong")]
    NotFinite {
        /// What.
        what: String,
    },
    /// A line of a file of questions is none.
    #[error("{}: line {line}: {problem}", .path.display())]
    Question {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// The folder holds a run already, and it was asked to begin a new one.
    #[error("{} has checkpoints of an earlier run, the newest of step {step}; go on with it, or choose another folder", .dir.display())]
    AlreadyThere {
        /// The run's folder.
        dir: PathBuf,
        /// The newest checkpoint's step.
        step: u64,
    },
    /// There are checkpoints, and every one is damaged.
    #[error("{}: none of the checkpoints verifies: {problems}", .dir.display())]
    NoneVerifies {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// What is wrong with each, newest first.
        problems: String,
    },
    /// Another process trains in this folder.
    #[error("{} is in use by another process, which must end first", .dir.display())]
    InUse {
        /// The run's folder.
        dir: PathBuf,
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

impl Error {
    pub(crate) fn io(doing: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Error::Io { doing, path: path.to_owned(), source }
    }
}
