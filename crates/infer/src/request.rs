//! One request on its way: its tokens, its states, and what it has put out.

use crate::cache::Sequence;
use crate::output::{Finish, Output, Stats, Token};
use crate::sample::{Logprobs, Sampler};
use crate::text::{Codec, Text};
use crate::weights::Weights;
use crate::{Constraint, Error, Result, SampleOptions};
use std::sync::Arc;

/// What is asked for.
#[derive(Debug)]
pub struct Request {
    /// The prompt: at least one token.
    pub prompt: Vec<u32>,
    /// How its continuation is chosen.
    pub options: SampleOptions,
    /// What may come at all.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// A prompt and its options, without a constraint.
    #[must_use]
    pub fn new(prompt: &[u32], options: &SampleOptions) -> Self {
        Request { prompt: prompt.to_vec(), options: options.clone(), constraint: None }
    }
}

/// A request that runs.
#[derive(Debug)]
pub(crate) struct Active {
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub prompt: usize,
    pub sequence: Sequence,
    /// Tokens that the sequence may have.
    pub context: usize,
    pub sampler: Sampler,
    text: Option<Text>,
    out: Vec<u8>,
    logprobs: Vec<Logprobs>,
    pub stats: Stats,
    pub finish: Option<Finish>,
    /// Positions in the prompt where a snapshot is to be taken, in order.
    pub marks: Vec<usize>,
    /// Whether its last pass verified drafts.
    drafted: bool,
}

impl Active {
    pub fn new(
        weights: &Weights,
        request: Request,
        context: usize,
        sequence: Sequence,
        codec: Option<&Codec>,
    ) -> Result<Self> {
        let Request { prompt, mut options, constraint } = request;
        let config = weights.config();
        check(weights, &prompt, context)?;
        if !options.stop.is_empty() && codec.is_none() {
            let found = format!("{} strings", options.stop.len());
            return Err(Error::option("stop", found, "none without a tokenizer, or stop_tokens"));
        }
        if let (Some(codec), false) = (codec, options.ignore_end) {
            options.stop_tokens.push(codec.tokenizer.end_of_text());
        }
        let text = codec.map(|c| Text::new(Arc::clone(&c.tokenizer), options.stop.clone()));
        let mut sampler = Sampler::new(options, &prompt, config.vocab_size)?;
        if let Some(codec) = codec {
            sampler = sampler.without(Arc::clone(&codec.never));
        }
        if let Some(constraint) = constraint {
            sampler = sampler.constrained(constraint);
        }
        Ok(Active {
            prompt: prompt.len(),
            stats: Stats { prompt_tokens: prompt.len(), ..Stats::default() },
            tokens: prompt,
            sequence,
            context,
            sampler,
            text,
            out: Vec::new(),
            logprobs: Vec::new(),
            finish: None,
            marks: Vec::new(),
            drafted: false,
        })
    }

    /// Tokens that the sequence has not seen.
    pub fn ahead(&self) -> &[u32] {
        &self.tokens[self.sequence.position()..]
    }

    /// All known tokens and the sequence, for a pass.
    pub fn split(&mut self) -> (&[u32], &mut Sequence) {
        (&self.tokens, &mut self.sequence)
    }

    /// Prompt tokens up to the next mark.
    pub fn piece(&self) -> usize {
        let at = self.sequence.position();
        self.marks.iter().find(|&&mark| mark > at).map_or(usize::MAX, |mark| mark - at)
    }

    /// Drafts that may still come true.
    pub fn room(&self) -> usize {
        let wanted = self.sampler.options().max_tokens.saturating_sub(self.generated() + 1);
        wanted.min(self.context.saturating_sub(self.tokens.len()))
    }

    /// Adds the time of the pass that was counted last.
    pub fn timed(&mut self, seconds: f64, decoding: bool) {
        let spec = &mut self.stats.speculation;
        match (decoding, self.drafted) {
            (true, true) => spec.seconds += seconds,
            (true, false) => spec.plain_seconds += seconds,
            (false, _) => {}
        }
    }

    /// Counts a pass that gave these tokens.
    pub fn count(&mut self, tokens: &[Token], drafts: &[u32]) {
        self.stats.passes += 1;
        self.drafted = !drafts.is_empty();
        let spec = &mut self.stats.speculation;
        if drafts.is_empty() {
            spec.plain_passes += 1;
            return;
        }
        let depths = spec.drafted.len().max(drafts.len());
        spec.drafted.resize(depths, 0);
        spec.accepted.resize(depths, 0);
        spec.cycles += 1;
        spec.tokens += tokens.len();
        let right = drafts.iter().zip(tokens).take_while(|(d, t)| **d == t.id).count();
        spec.drafted.iter_mut().take(drafts.len()).for_each(|n| *n += 1);
        spec.accepted.iter_mut().take(right).for_each(|n| *n += 1);
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Draws the next token from logits `[V]`; decides whether it is the last.
    pub fn take(&mut self, logits: &[f32]) -> Result<Token> {
        let picked = self.sampler.pick(logits, self.tokens.len())?;
        self.tokens.push(picked.id);
        self.stats.generated += 1;
        let stop_token = self.sampler.options().stop_tokens.contains(&picked.id);
        let mut bytes = Vec::new();
        if let (Some(text), false) = (&mut self.text, stop_token) {
            let piece = text.push(picked.id)?;
            bytes = piece.bytes;
            if piece.stopped {
                self.finish = Some(Finish::StopString);
            }
        }
        self.finish = self.finish.or(match () {
            () if stop_token => Some(Finish::StopToken(picked.id)),
            () if self.sampler.finished() => Some(Finish::Constraint),
            () if self.generated() >= self.sampler.options().max_tokens => Some(Finish::Length),
            () if self.tokens.len() > self.context => Some(Finish::Context),
            () => None,
        });
        if let (Some(finish), Some(text)) = (self.finish, &mut self.text) {
            if finish != Finish::StopString {
                bytes.append(&mut text.finish());
            }
        }
        self.out.extend_from_slice(&bytes);
        self.logprobs.extend(picked.logprobs.clone());
        Ok(Token { id: picked.id, bytes, logprobs: picked.logprobs })
    }

    pub fn into_output(self, finish: Finish) -> Output {
        Output {
            tokens: self.tokens[self.prompt..].to_vec(),
            text: self.out,
            logprobs: self.logprobs,
            finish,
            stats: self.stats,
        }
    }
}

/// Whether a prompt can be begun at all.
pub(crate) fn check(weights: &Weights, prompt: &[u32], context: usize) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if prompt.len() > context {
        return Err(Error::PromptTooLong { tokens: prompt.len(), context });
    }
    weights.check_tokens(prompt, 0)
}
