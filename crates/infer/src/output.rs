//! What a request gives back.

use crate::sample::Logprobs;

/// A generated token as it comes.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that became certain with it: whole characters, nothing of a stop string. Empty without a tokenizer.
    pub bytes: Vec<u8>,
    /// When asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    Context,
    /// One of the stop tokens came; it is the last of the output's tokens.
    StopToken(u32),
    /// A stop string came; the text ends before it.
    StopString,
    /// The constraint lets nothing more come.
    Constraint,
    /// Whoever listens asked for no more.
    Cancelled,
}

/// All of a request's output.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// Their text, without stop strings and stop tokens. Empty without a tokenizer.
    pub text: Vec<u8>,
    /// Log-probabilities of the tokens, when asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: Finish,
    /// What it took.
    pub stats: Stats,
}

impl Output {
    /// The text for a screen: what is no UTF-8 is replaced.
    #[must_use]
    pub fn text_lossy(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.text)
    }
}

/// What a request took.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that a snapshot had seen already.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Passes that generated: one token each, or one and what was accepted with it.
    pub passes: usize,
    /// What prediction did.
    pub speculation: Speculation,
}

/// Drafts and what became of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Speculation {
    /// Passes that verified at least one draft.
    pub cycles: usize,
    /// Tokens that these passes gave.
    pub tokens: usize,
    /// Drafts proposed, by depth.
    pub drafted: Vec<usize>,
    /// Drafts accepted, by depth.
    pub accepted: Vec<usize>,
    /// Seconds of passes with drafts, drafting included; 0 without a clock.
    pub seconds: f64,
    /// Passes without drafts, and their seconds.
    pub plain_passes: usize,
    /// As above.
    pub plain_seconds: f64,
}

impl Speculation {
    /// Share of drafts accepted at each depth.
    #[must_use]
    pub fn acceptance(&self) -> Vec<f64> {
        let share = |(&a, &d): (&usize, &usize)| if d == 0 { 0. } else { a as f64 / d as f64 };
        self.accepted.iter().zip(&self.drafted).map(share).collect()
    }

    /// Tokens of a cycle on average; 0 without cycles.
    #[must_use]
    pub fn tokens_per_cycle(&self) -> f64 {
        if self.cycles == 0 { 0. } else { self.tokens as f64 / self.cycles as f64 }
    }

    /// Milliseconds of a cycle on average; 0 without cycles or clock.
    #[must_use]
    pub fn ms_per_cycle(&self) -> f64 {
        if self.cycles == 0 { 0. } else { 1e3 * self.seconds / self.cycles as f64 }
    }

    /// Milliseconds of a plain pass on average; 0 without one or without a clock.
    #[must_use]
    pub fn ms_per_plain_pass(&self) -> f64 {
        if self.plain_passes == 0 { 0. } else { 1e3 * self.plain_seconds / self.plain_passes as f64 }
    }
}
