//! Many requests in one loop: they join and leave at any step, share passes, and begin from snapshots where they can.

mod options;
mod snapshots;
#[cfg(test)]
mod tests;
mod working;

pub use options::{Clock, EngineOptions};

use crate::cache::Sequence;
use crate::cycle::{Cycle, WAITING};
use crate::mtp::Choice;
use crate::output::{Finish, Output, Token};
use crate::request::{Active, Request, check};
use crate::text::Codec;
use crate::weights::Weights;
use crate::{Error, Mtp, Result};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use snapshots::Snapshots;
use std::collections::VecDeque;
use std::sync::Arc;

/// A request's name within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// What a step brought a request.
#[derive(Debug)]
pub struct Event {
    /// Whose it is.
    pub id: RequestId,
    /// What it is.
    pub what: What,
}

/// News of a request.
#[derive(Debug)]
pub enum What {
    /// A token. After the last one the output follows in the same step.
    Token(Token),
    /// It is done.
    Finished(Box<Output>),
    /// It ended with an error of its own; others go on.
    Failed(Error),
}

/// Bytes in use and free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The budget.
    pub budget: u64,
    /// What the largest pass works on.
    pub working: u64,
    /// What the running requests may come to need.
    pub planned: u64,
    /// What the running requests hold now.
    pub held: u64,
    /// What snapshots hold.
    pub snapshots: u64,
}

#[derive(Debug)]
struct Slot {
    id: RequestId,
    active: Active,
    /// Its largest size.
    bytes: u64,
    /// The snapshot that it began from.
    from: Option<u64>,
}

#[derive(Debug)]
struct Waiting {
    id: RequestId,
    request: Request,
    bytes: u64,
}

/// Runs requests side by side.
///
/// ```
/// use hymo_infer::{Engine, EngineOptions, Request, SampleOptions, Weights, WeightDtype, What};
/// use hymo_model::{Params, presets};
/// use hymo_tensor::Ctx;
/// use std::sync::Arc;
///
/// let (ctx, config) = (Ctx::cpu(), presets::hymo_nano());
/// let weights = Weights::new(&ctx, &config, &Params::init(&ctx, &config, 1)?, WeightDtype::Int8)?;
/// let mut engine = Engine::new(&ctx, Arc::new(weights), EngineOptions::default())?;
/// let options = SampleOptions { max_tokens: 3, ..SampleOptions::default() };
/// engine.submit(Request::new(&[1, 2, 3], &options))?;
/// engine.submit(Request::new(&[4], &options))?;
/// let mut outputs = Vec::new();
/// while !engine.idle() {
///     for event in engine.step() {
///         if let What::Finished(output) = event.what {
///             outputs.push((event.id, output));
///         }
///     }
/// }
/// assert_eq!(outputs.len(), 2);
/// # Ok::<(), hymo_infer::Error>(())
/// ```
#[derive(Debug)]
pub struct Engine {
    ctx: Ctx,
    weights: Arc<Weights>,
    codec: Option<Result<Codec>>,
    options: EngineOptions,
    waiting: VecDeque<Waiting>,
    running: Vec<Slot>,
    snapshots: Snapshots,
    choices: Vec<Choice>,
    next: u64,
}

impl Engine {
    /// An engine with nothing to do.
    ///
    /// # Errors
    /// Options out of range.
    pub fn new(ctx: &Ctx, weights: Arc<Weights>, options: EngineOptions) -> Result<Self> {
        let options = options.checked(weights.config().context_length)?;
        Ok(Engine {
            ctx: ctx.clone(),
            snapshots: Snapshots::new(options.snapshots),
            choices: vec![Choice::default(); usize::BITS as usize],
            weights,
            codec: None,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next: 0,
        })
    }

    /// Text beside tokens, stop strings, and an end where a document ends. Ids that no text has are never drawn. A tokenizer of
    /// another number of ids than the model's is an error of every request.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        self.codec = Some(Codec::new(tokenizer, self.weights.config().vocab_size));
        self
    }

    pub(crate) fn codec(&self) -> Result<Option<&Codec>> {
        self.codec.as_ref().map(|codec| codec.as_ref().map_err(Clone::clone)).transpose()
    }

    /// What it was told, the context filled in.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The same weights and tokenizer under other options, with nothing to do.
    pub(crate) fn under(&mut self, options: EngineOptions) {
        self.snapshots = Snapshots::new(options.snapshots);
        self.choices.fill(Choice::default());
        self.waiting.clear();
        self.running.clear();
        self.options = options;
    }

    /// The weights, to share them.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// An empty prompt or one beyond the context; a token that there is not; options out of range; a request that memory
    /// could not hold even alone.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.codec()?;
        check(&self.weights, &request.prompt, self.options.context)?;
        request.options.check(self.weights.config().vocab_size)?;
        let bytes = self.needs(&request)?;
        let needed = bytes.saturating_add(self.working());
        if needed > self.options.memory {
            return Err(Error::Memory { needed, budget: self.options.memory, raise: "memory" });
        }
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back(Waiting { id, request, bytes });
        Ok(id)
    }

    /// Bytes that a request may come to need: its states, and what waits or is kept for a commit while drafts are tried.
    fn needs(&self, request: &Request) -> Result<u64> {
        let config = self.weights.config();
        let tokens = request.prompt.len().saturating_add(request.options.max_tokens).min(self.options.context);
        let drafting = self.options.mtp != Mtp::Off;
        let states = Sequence::planned_bytes(config, self.options.cache, tokens, drafting)?;
        if !drafting {
            return Ok(states);
        }
        let modules = config.mtp.n_modules;
        let rows = modules * (WAITING + self.options.prefill_chunk + modules) * config.d_model;
        let trace = config.gdn.as_ref().map_or(0, |g| g.n_heads * (1 + g.d_k + g.d_v) + g.conv_channels());
        let kept = (modules + 1) * trace * config.n_layers;
        Ok(states.saturating_add((size_of::<f32>() * (rows + kept)) as u64))
    }

    /// Bytes of the largest pass: a chunk of prompts beside single tokens and drafts, or all rows that may wait for the
    /// prediction modules.
    fn working(&self) -> u64 {
        let (options, config) = (&self.options, self.weights.config());
        let drafting = options.mtp != Mtp::Off;
        let modules = if drafting { config.mtp.n_modules } else { 0 };
        let drawn = options.max_batch.saturating_mul(1 + modules);
        let waiting = if drafting { options.max_batch.saturating_mul(WAITING) } else { 0 };
        let rows = options.prefill_chunk.min(options.context.saturating_mul(options.max_batch));
        working::bytes(config, rows.saturating_add(drawn).saturating_add(waiting), drawn)
    }

    /// Bytes of the budget that states and snapshots may take.
    fn for_states(&self) -> u64 {
        self.options.memory.saturating_sub(self.working())
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Requests that run, and that wait for memory or a place.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Bytes planned and held.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let planned = self.running.iter().map(|s| s.bytes).sum();
        let held = self.running.iter().map(|s| s.active.sequence.held()).sum();
        Memory {
            budget: self.options.memory,
            working: self.working(),
            planned,
            held,
            snapshots: self.snapshots.bytes(),
        }
    }

    /// Ends a request now. What it has put out so far, if it was running.
    pub fn cancel(&mut self, id: RequestId) -> Option<Output> {
        self.waiting.retain(|w| w.id != id);
        let at = self.running.iter().position(|s| s.id == id)?;
        Some(self.running.remove(at).active.into_output(Finish::Cancelled))
    }

    /// Lets waiting requests begin, first come first served, as long as they fit. Snapshots give way to them.
    fn admit(&mut self, events: &mut Vec<Event>) {
        let budget = self.for_states();
        while self.running.len() < self.options.max_batch {
            let planned = self.memory().planned;
            let fits = |w: &Waiting| planned.saturating_add(w.bytes) <= budget;
            if !self.waiting.front().is_some_and(fits) {
                return;
            }
            let Some(Waiting { id, request, bytes }) = self.waiting.pop_front() else { return };
            match self.begin(id, request, bytes) {
                Ok(slot) => self.running.push(slot),
                Err(error) => events.push(Event { id, what: What::Failed(error) }),
            }
            let planned = self.memory().planned;
            self.snapshots.shrink(budget.saturating_sub(planned));
        }
    }

    fn begin(&mut self, id: RequestId, request: Request, bytes: u64) -> Result<Slot> {
        let found = self.snapshots.find(&request.prompt);
        let shared = self.snapshots.shared(&request.prompt).min(request.prompt.len() - 1);
        let (from, sequence) = match found {
            Some((from, sequence)) => (Some(from), sequence),
            None if self.options.mtp == Mtp::Off => (None, Sequence::new(self.weights.config(), self.options.cache)),
            None => (None, Sequence::drafting(self.weights.config(), self.options.cache)),
        };
        let cached = sequence.position();
        let mut active = Active::new(&self.weights, request, self.options.context, sequence, self.codec()?)?;
        active.stats.cached_tokens = cached;
        // Where two prompts part, a third one may begin.
        if shared > cached + SHARED {
            active.marks.push(shared);
        }
        Ok(Slot { id, active, bytes, from })
    }

    /// One pass: every request that runs moves on.
    pub fn step(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.admit(&mut events);
        if self.running.is_empty() {
            return events;
        }
        let decoding = self.running.iter().all(|s| s.active.ahead().len() == 1);
        let bucket = self.running.len().ilog2() as usize;
        let drafts = match self.options.mtp {
            Mtp::Off => false,
            Mtp::On => true,
            Mtp::Auto => self.options.clock.is_some() && decoding && self.choices[bucket].drafts(),
        };
        let cycle = Cycle {
            ctx: &self.ctx,
            weights: &self.weights,
            chunk: self.options.prefill_chunk,
            gates: drafts.then_some(&self.options.gates),
            // What drafting would need is not kept up where it does not pay.
            follow: drafts || self.options.mtp == Mtp::On || self.choices[bucket].faster(),
        };
        let before = self.options.clock.as_ref().map(Clock::now);
        let mut lot: Vec<&mut Active> = self.running.iter_mut().map(|s| &mut s.active).collect();
        let results = cycle.run(&mut lot).unwrap_or_else(|error| lot.iter().map(|_| Err(error.clone())).collect());
        let seconds = self.options.clock.as_ref().zip(before).map(|(clock, before)| clock.now() - before);
        if let Some(seconds) = seconds {
            self.timed(&results, (decoding, drafts, bucket), seconds);
        }
        self.deliver(results, &mut events);
        events
    }

    fn timed(&mut self, results: &[Result<Vec<Token>>], (decoding, drafts, bucket): (bool, bool, usize), seconds: f64) {
        let tokens = results.iter().flatten().map(Vec::len).sum();
        if decoding {
            self.choices[bucket].add(drafts, seconds, tokens);
        }
        for (slot, _) in self.running.iter_mut().zip(results).filter(|(_, r)| r.as_ref().is_ok_and(|t| !t.is_empty())) {
            slot.active.timed(seconds, decoding);
        }
    }

    /// Hands out what a pass gave, keeps snapshots, and lets the finished go.
    fn deliver(&mut self, results: Vec<Result<Vec<Token>>>, events: &mut Vec<Event>) {
        let slots = std::mem::take(&mut self.running);
        for (mut slot, result) in slots.into_iter().zip(results) {
            let id = slot.id;
            match result {
                Err(error) => {
                    if let Some(from) = slot.from {
                        self.snapshots.drop(from);
                    }
                    events.push(Event { id, what: What::Failed(error) });
                    continue;
                }
                Ok(tokens) => events.extend(tokens.into_iter().map(|t| Event { id, what: What::Token(t) })),
            }
            let finish = slot.active.finish;
            if finish.is_some() || slot.active.marks.contains(&slot.active.sequence.position()) {
                self.keep(&mut slot);
            }
            match finish {
                Some(finish) => {
                    events.push(Event { id, what: What::Finished(Box::new(slot.active.into_output(finish))) })
                }
                None => self.running.push(slot),
            }
        }
    }

    /// Keeps a request's state as it is now.
    fn keep(&mut self, slot: &mut Slot) {
        let position = slot.active.sequence.position();
        slot.active.marks.retain(|&mark| mark > position);
        if !self.snapshots.any() {
            return;
        }
        let (config, cache) = (self.weights.config(), self.options.cache);
        let drafting = !slot.active.sequence.modules.is_empty();
        let Ok(bytes) = Sequence::planned_bytes(config, cache, position, drafting) else { return };
        let bytes = bytes.max(slot.active.sequence.held()) + (size_of::<u32>() * position) as u64;
        let Memory { budget, planned, snapshots, .. } = self.memory();
        let planned = if slot.active.finish.is_some() { planned } else { planned + slot.bytes };
        let free = budget.saturating_sub(planned).saturating_sub(snapshots);
        self.snapshots.keep(&slot.active.tokens[..position], &slot.active.sequence, bytes, free);
    }
}

/// Tokens that a snapshot must save to be worth its memory.
const SHARED: usize = 16;
