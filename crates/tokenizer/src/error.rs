//! What can be wrong with a tokenizer, or with what it is asked.

use crate::{MAX_VOCAB, MIN_VOCAB};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A vocabulary without room for bytes and special tokens, or with ids beyond 16 bits.
    #[error(
        "a vocabulary of {size}: it must be {MIN_VOCAB} (256 bytes and 256 special tokens) to {MAX_VOCAB} (16-bit ids)"
    )]
    VocabSize {
        /// The size asked for or found.
        size: usize,
    },
    /// Training options that cannot be.
    #[error("{option} is {got}, want {want}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        got: usize,
        /// What would be right.
        want: &'static str,
    },
    /// Training on nothing.
    #[error("the input holds no text to learn from")]
    NoText,
    /// Not a file that the `tokenizers` crate reads.
    #[error("not a tokenizer.json: {why}")]
    Json {
        /// What the reader said.
        why: String,
    },
    /// A tokenizer.json of another kind than HyMo's.
    #[error("{part} is {got}; HyMo reads {want}")]
    Unsupported {
        /// The part of the file.
        part: &'static str,
        /// What stands there.
        got: String,
        /// What would be right.
        want: &'static str,
    },
    /// A splitting pattern that a DFA cannot run.
    #[error("the pattern cannot be used: {why}")]
    Pattern {
        /// What the regex compiler said.
        why: String,
    },
    /// A token that its own bytes do not encode to. Encoding would then depend on how it is done.
    #[error("token {id} ({bytes:?}) is not what its own bytes encode to")]
    Unreachable {
        /// Its id.
        id: u32,
        /// Its bytes, as text.
        bytes: String,
    },
    /// An id outside the vocabulary.
    #[error("there is no token {id}: the vocabulary has {size}")]
    Id {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        size: usize,
    },
    /// A special token that the vocabulary does not have.
    #[error("no special token is called {name:?}")]
    Special {
        /// The name asked for.
        name: String,
    },
    /// The `tokenizers` crate refused a pre-token.
    #[error("the pre-token at byte {at} cannot be encoded: {why}")]
    Encode {
        /// Offset of the pre-token in the text.
        at: usize,
        /// What the crate said.
        why: String,
    },
}
