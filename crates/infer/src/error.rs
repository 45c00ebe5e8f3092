//! What can go wrong in this crate.

/// An error of decoding. Each names what was found and what would be right.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A prompt of no tokens.
    #[error("the prompt has no tokens: begin with at least one, such as the end-of-text token")]
    EmptyPrompt,
    /// A prompt that the context cannot hold.
    #[error("the prompt has {tokens} tokens, the context holds {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that a sequence may have.
        context: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {id} at position {at} is not in the vocabulary of {vocab_size}")]
    Token {
        /// The id found.
        id: u32,
        /// Where.
        at: usize,
        /// Ids that there are.
        vocab_size: usize,
    },
    /// An option out of its range.
    #[error("{option} is {found}, want {want}")]
    Option {
        /// The field.
        option: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        want: String,
    },
    /// Logits that are not finite: the weights or the state hold NaN or infinity (HAZARD 18).
    #[error("the logits after {position} tokens are not finite (token {id} has {value}): the request ends here")]
    NotFinite {
        /// Tokens that the sequence had.
        position: usize,
        /// The first token with such a logit.
        id: u32,
        /// Its logit.
        value: f32,
    },
    /// No token has a probability above zero: everything was forbidden.
    #[error("every token is forbidden after {position} tokens: logit_bias or the constraint leaves none")]
    NothingAllowed {
        /// Tokens that the sequence had.
        position: usize,
    },
    /// A grammar that cannot be used, or that refuses a token.
    #[error("the grammar: {why}")]
    Grammar {
        /// What its parser says.
        why: String,
    },
    /// Memory that was planned does not hold a request, even alone.
    #[error("the request needs {needed} bytes, the budget is {budget}: raise {raise} or shorten the request")]
    Memory {
        /// Bytes that it may come to need.
        needed: u64,
        /// Bytes planned.
        budget: u64,
        /// The setting to change.
        raise: &'static str,
    },
    /// A snapshot or sequence of another model or another kind of cache.
    #[error("a state of {found}, want {want}")]
    State {
        /// What it is of.
        found: String,
        /// What this model has.
        want: String,
    },
    /// The model refused.
    #[error(transparent)]
    Model(#[from] hymo_model::Error),
    /// An operation refused.
    #[error(transparent)]
    Op(#[from] hymo_tensor::Error),
    /// The tokenizer refused.
    #[error(transparent)]
    Tokenizer(#[from] hymo_tokenizer::Error),
}

/// Shorthand for a result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn option(option: &'static str, found: impl ToString, want: impl ToString) -> Self {
        Error::Option { option, found: found.to_string(), want: want.to_string() }
    }
}
