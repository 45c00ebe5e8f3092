//! What can be wrong with inputs, shards, options and positions.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate. Each names the file and the place in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The disk is full. What was finished before is intact.
    #[error(
        "{}: the disk is full; free about {} MB there and run the same command again{}",
        path.display(), needed.div_ceil(1_000_000), if *goes_on { ": finished shards are kept" } else { "" }
    )]
    Full {
        /// What was being written.
        path: PathBuf,
        /// Bytes that it needs at most.
        needed: u64,
        /// Whether the command then goes on where it was.
        goes_on: bool,
    },
    /// An input that is not there, or a folder without text.
    #[error("{input}: {why}")]
    NoInput {
        /// The path or pattern as given.
        input: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An input that cannot be read to its end.
    #[error("{input}, {place}: {why}")]
    Read {
        /// The file.
        input: String,
        /// Line, row or byte.
        place: String,
        /// What is wrong there.
        why: String,
    },
    /// Records without the text field.
    #[error("{input}, {place}: no text field {field:?}; there are {found} (choose with --text-field)")]
    NoField {
        /// The file.
        input: String,
        /// Line or column list.
        place: String,
        /// The field asked for.
        field: String,
        /// The fields that are there.
        found: String,
    },
    /// A shard that is cut short, damaged, or no shard.
    #[error("{}, {place}: {why}", path.display())]
    Shard {
        /// The shard.
        path: PathBuf,
        /// Where in it.
        place: String,
        /// What is wrong.
        why: String,
    },
    /// A manifest or journal that does not say what one must.
    #[error("{}: {why}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The folder holds the output of another command.
    #[error("{}: holds the output of another command ({what}); choose another folder, or empty this one", path.display())]
    OtherRun {
        /// The folder.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// Inputs of a command that was broken off are not what they were.
    #[error("{input} has changed since this folder was begun; empty {} and start again", path.display())]
    Changed {
        /// The input.
        input: String,
        /// The output folder.
        path: PathBuf,
    },
    /// The shards were made with another tokenizer.
    #[error("{}: made with the tokenizer {shards}, not with {given} (SHA-256 of tokenizer.json)", path.display())]
    Tokenizer {
        /// The data folder.
        path: PathBuf,
        /// Hash in the manifest.
        shards: String,
        /// Hash of the tokenizer given.
        given: String,
    },
    /// No token to read.
    #[error("{}: no tokens in the split {split:?}; {}", path.display(), splits(there))]
    Empty {
        /// The data folder.
        path: PathBuf,
        /// The split asked for.
        split: String,
        /// Those that have tokens.
        there: Vec<String>,
    },
    /// An option that cannot be.
    #[error("{option} is {got}, want {want}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        got: String,
        /// What would be right.
        want: String,
    },
    /// A position in another stream.
    #[error("the position does not fit this data: {why}")]
    Position {
        /// What does not fit.
        why: String,
    },
    /// From the tokenizer.
    #[error(transparent)]
    Encode(#[from] hymo_tokenizer::Error),
    /// A document that could not be encoded.
    #[error("{input}: {source}")]
    Document {
        /// The file and the place.
        input: String,
        /// Why.
        source: hymo_tokenizer::Error,
    },
    /// A thread could not be started, or ended before its time.
    #[error("a worker thread {0}")]
    Thread(String),
}

fn splits(there: &[String]) -> String {
    if there.is_empty() { "none has any".to_owned() } else { format!("there are {}", there.join(", ")) }
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn option(option: &'static str, got: impl ToString, want: impl Into<String>) -> Error {
        Error::Option { option, got: got.to_string(), want: want.into() }
    }
}
