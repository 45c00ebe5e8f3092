//! What an engine is told once.

use crate::{CacheDtype, Error, Gates, Mtp, Result};
use std::fmt;
use std::sync::Arc;

/// Seconds from some moment on, in a world without clocks of its own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> f64 + Send + Sync>);

impl Clock {
    /// Reads the time by calling `seconds`.
    pub fn new(seconds: impl Fn() -> f64 + Send + Sync + 'static) -> Self {
        Clock(Arc::new(seconds))
    }

    pub(crate) fn now(&self) -> f64 {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Tokens that a sequence may have, prompt and output together. 0: the configuration's context; at most that, since
    /// positions beyond it were never trained (MATH 2.6 says how a configuration extends it).
    pub context: usize,
    /// Tokens of prompts in one pass, of all requests together. From 1. It changes no bit of any output.
    pub prefill_chunk: usize,
    /// How latents are kept.
    pub cache: CacheDtype,
    /// Whether prediction modules draft.
    pub mtp: Mtp,
    /// From which probabilities on drafts are tried.
    pub gates: Gates,
    /// Requests that run side by side at most. From 1.
    pub max_batch: usize,
    /// Bytes for what passes work on, the states of all sequences and snapshots; the weights come on top. A request begins when its largest size fits; until then it waits.
    pub memory: u64,
    /// Of these, bytes that snapshots may take. 0: none are kept. Running requests go first.
    pub snapshots: u64,
    /// What passes are timed with.
    pub clock: Option<Clock>,
}

impl Default for EngineOptions {
    /// One pass of up to 512 prompt tokens, 8 requests, no limit, no snapshots, no drafts.
    fn default() -> Self {
        EngineOptions {
            context: 0,
            prefill_chunk: 512,
            cache: CacheDtype::default(),
            mtp: Mtp::default(),
            gates: Gates::default(),
            max_batch: 8,
            memory: u64::MAX,
            snapshots: 0,
            clock: None,
        }
    }
}

impl EngineOptions {
    /// Checks every value against a model's context, and fills it in.
    pub(crate) fn checked(mut self, most: usize) -> Result<Self> {
        if self.context == 0 {
            self.context = most;
        }
        if self.context > most {
            return Err(Error::option("context", self.context, format!("1 to the model's {most} tokens")));
        }
        for (name, n) in [("prefill_chunk", self.prefill_chunk), ("max_batch", self.max_batch)] {
            if n == 0 {
                return Err(Error::option(name, 0, "at least 1"));
            }
        }
        Ok(self)
    }
}
