use std::io;
use std::path::{Path, PathBuf};

/// What can be wrong with a checkpoint, or with writing one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// `read`, `write`, `rename`, ..
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The disk is full. Nothing that was there before is lost.
    #[error(
        "no space for {}: it takes {needed} bytes{}. Free some, or keep fewer checkpoints; the earlier ones are intact",
        .path.display(), .free.map_or(String::new(), |free| format!(", {free} are free"))
    )]
    NoSpace {
        /// The checkpoint.
        path: PathBuf,
        /// Bytes of its tensors.
        needed: u64,
        /// Bytes free where it was to be, where the system tells.
        free: Option<u64>,
    },
    /// The folder is not a checkpoint that this code reads.
    #[error("{}: {reason}", .path.display())]
    Unreadable {
        /// The folder or file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file is not what the manifest says.
    #[error("{}: {what} is {found}, expected {expected}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// `size`, `checksum`, ..
        what: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A tensor that is needed and not there, or there with another shape.
    #[error("{}: tensor \"{name}\": {problem}", .path.display())]
    Tensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Tensors that nothing asked for: they belong to another model.
    #[error("{}: {} tensors that this model does not have, the first \"{}\"", .path.display(), .names.len(), .names[0])]
    Unexpected {
        /// The checkpoint.
        path: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
    /// A tensor could not be read from memory.
    #[error(transparent)]
    Memory(#[from] hymo_tensor::Error),
}

impl Error {
    pub(super) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        Error::Io { doing, path: path.to_owned(), source }
    }

    pub(super) fn unreadable(path: &Path, reason: impl Into<String>) -> Self {
        Error::Unreadable { path: path.to_owned(), reason: reason.into() }
    }

    /// Whether the disk was full.
    pub(super) fn is_full(&self) -> bool {
        let full = |e: &io::Error| {
            matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
        };
        matches!(self, Error::Io { source, .. } if full(source))
    }
}
