//! What a request asks of its tokens.

use crate::{Error, Result};

/// How tokens are chosen and when they end. The default is greedy, up to 128 tokens.
///
/// Filters apply in this order: penalties, bias, constraint; temperature; `min_p`, `top_k`, `top_p`.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOptions {
    /// Most tokens to generate. From 1.
    pub max_tokens: usize,
    /// Logits are divided by it. 0 takes the largest logit; up to 100.
    pub temperature: f32,
    /// Only the so many largest logits may be drawn. 0: all.
    pub top_k: usize,
    /// Only the fewest tokens that hold this share of the probability. Above 0, up to 1: all.
    pub top_p: f32,
    /// Only tokens with at least this share of the largest probability. 0: all; up to 1.
    pub min_p: f32,
    /// Logits of tokens in prompt or output are divided by it where positive, multiplied where negative. 1: none; above 0, up
    /// to 100.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for every time it was generated. 0: none; -100 to 100.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it was generated. 0: none; -100 to 100.
    pub presence_penalty: f32,
    /// Added to the logits of single tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// What random numbers follow from.
    pub seed: u64,
    /// Text that ends the output and is no part of it, even where it begins inside a token. Needs a tokenizer.
    pub stop: Vec<Vec<u8>>,
    /// Tokens that end the output and are no part of its text.
    pub stop_tokens: Vec<u32>,
    /// Goes on where a document ends. Otherwise the tokenizer's end-of-text token is one of the stop tokens.
    pub ignore_end: bool,
    /// The log-probability of every token, and of so many likeliest beside it, of the model's own distribution.
    pub logprobs: Option<usize>,
}

impl Default for SampleOptions {
    fn default() -> Self {
        SampleOptions {
            max_tokens: 128,
            temperature: 0.,
            top_k: 0,
            top_p: 1.,
            min_p: 0.,
            repetition_penalty: 1.,
            frequency_penalty: 0.,
            presence_penalty: 0.,
            logit_bias: Vec::new(),
            seed: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_end: false,
            logprobs: None,
        }
    }
}

impl SampleOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// The first field out of its range.
    pub fn check(&self, vocab_size: usize) -> Result<()> {
        let within = |option, x: f32, low: f32, high: f32, want| match (low..=high).contains(&x) {
            true => Ok(()),
            false => Err(Error::option(option, x, want)),
        };
        if self.max_tokens == 0 {
            return Err(Error::option("max_tokens", 0, "at least 1"));
        }
        within("temperature", self.temperature, 0., 100., "0 (greedy) to 100")?;
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1., "above 0, up to 1")?;
        within("min_p", self.min_p, 0., 1., "0 to 1")?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100., "0.01 to 100, 1 for none")?;
        within("frequency_penalty", self.frequency_penalty, -100., 100., "-100 to 100")?;
        within("presence_penalty", self.presence_penalty, -100., 100., "-100 to 100")?;
        let known = |id: u32| (id as usize) < vocab_size;
        let want = || format!("ids in 0..{vocab_size}");
        for &(id, bias) in &self.logit_bias {
            if !known(id) {
                return Err(Error::option("logit_bias", id, want()));
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(Error::option("logit_bias", format!("{bias} for token {id}"), "numbers or minus infinity"));
            }
        }
        if let Some(id) = self.stop_tokens.iter().find(|id| !known(**id)) {
            return Err(Error::option("stop_tokens", id, want()));
        }
        if self.stop.iter().any(Vec::is_empty) {
            return Err(Error::option("stop", "an empty string", "strings of at least one byte"));
        }
        Ok(())
    }

    /// Whether what was drawn changes what may be drawn.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1. || self.frequency_penalty != 0. || self.presence_penalty != 0.
    }
}
