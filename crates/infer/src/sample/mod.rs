//! From logits to a token.
//!
//! A token is drawn with one uniform number that depends on the seed and on how many tokens came before, and on nothing
//! else. A draft is accepted exactly when it is the token drawn: its probability of that is p(draft), and what is drawn
//! otherwise has the distribution p without the draft, which is the rejection rule of MATH 5.3 for drafts that are the
//! largest of their distribution. So sampled text, too, is the same with prediction on and off, to the byte.

mod logprobs;
mod options;

pub use logprobs::Logprobs;
pub use options::SampleOptions;

use crate::{Error, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Restricts what may come next: a grammar, a schema, a list.
pub trait Constraint: Send + std::fmt::Debug {
    /// Sets the logit of every token that may not come next to minus infinity.
    ///
    /// # Errors
    /// A constraint that cannot go on.
    fn restrict(&mut self, logits: &mut [f32]) -> Result<()>;

    /// Takes notice of a token that came.
    ///
    /// # Errors
    /// A token that was not allowed.
    fn accept(&mut self, token: u32) -> Result<()>;

    /// Whether nothing more may come.
    fn finished(&self) -> bool {
        false
    }
}

/// How often a token has come.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    in_prompt: bool,
    drawn: u32,
}

/// Draws one request's tokens.
pub struct Sampler {
    options: SampleOptions,
    seen: BTreeMap<u32, Seen>,
    rng: ChaCha8Rng,
    drawn: u64,
    constraint: Option<Box<dyn Constraint>>,
    /// Ids that no text has.
    never: Arc<[Range<u32>]>,
    /// The logits at work.
    buf: Vec<f32>,
    candidates: Vec<(u32, f32)>,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler").field("options", &self.options).field("drawn", &self.drawn).finish_non_exhaustive()
    }
}

/// A token drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Picked {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the likeliest tokens', when asked for.
    pub logprobs: Option<Logprobs>,
}

impl Sampler {
    /// A sampler that has drawn nothing yet, after this prompt.
    ///
    /// # Errors
    /// Options out of range, which [`SampleOptions::check`] names.
    pub fn new(options: SampleOptions, prompt: &[u32], vocab_size: usize) -> Result<Self> {
        options.check(vocab_size)?;
        let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
        if options.penalises() {
            prompt.iter().for_each(|&t| seen.entry(t).or_default().in_prompt = true);
        }
        let rng = ChaCha8Rng::seed_from_u64(options.seed);
        let (buf, candidates) = (Vec::new(), Vec::new());
        Ok(Sampler { options, seen, rng, drawn: 0, constraint: None, never: Arc::default(), buf, candidates })
    }

    /// The same without some ids: slots of a vocabulary that were never trained (MATH 10).
    #[must_use]
    pub fn without(mut self, never: Arc<[Range<u32>]>) -> Self {
        self.never = never;
        self
    }

    /// The same under a constraint.
    #[must_use]
    pub fn constrained(mut self, constraint: Box<dyn Constraint>) -> Self {
        self.constraint = Some(constraint);
        self
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &SampleOptions {
        &self.options
    }

    /// Whether the constraint lets nothing more come.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.constraint.as_ref().is_some_and(|c| c.finished())
    }

    /// Draws the token after `position` tokens from the model's logits `[V]`, and takes notice of it.
    ///
    /// # Errors
    /// Logits that are not finite (HAZARD 18); no token left to draw; a constraint that cannot go on.
    pub fn pick(&mut self, logits: &[f32], position: usize) -> Result<Picked> {
        // HAZARD 18: the model's own logits, before a bias may forbid tokens.
        if let Some(id) = logits.iter().position(|l| !l.is_finite()) {
            return Err(Error::NotFinite { position, id: id as u32, value: logits[id] });
        }
        self.shape(logits)?;
        let id = match self.options.temperature > 0. {
            false => largest(&self.buf),
            true => {
                let u = self.uniform();
                self.weigh();
                draw(&self.candidates, u)
            }
        };
        let id = id.ok_or(Error::NothingAllowed { position })?;
        let logprobs = self.options.logprobs.map(|n| Logprobs::new(logits, id, n));
        self.drawn += 1;
        if self.options.penalises() {
            self.seen.entry(id).or_default().drawn += 1;
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id)?;
        }
        Ok(Picked { id, logprobs })
    }

    /// The distribution that the next token is drawn from, likeliest first: for tests and for people.
    ///
    /// # Errors
    /// As [`Sampler::pick`].
    pub fn distribution(&mut self, logits: &[f32]) -> Result<Vec<(u32, f64)>> {
        self.shape(logits)?;
        if self.options.temperature <= 0. {
            return Ok(largest(&self.buf).map(|id| (id, 1.)).into_iter().collect());
        }
        self.weigh();
        let sum: f64 = self.candidates.iter().map(|c| f64::from(c.1)).sum();
        let mut out: Vec<_> = self.candidates.iter().map(|&(id, w)| (id, f64::from(w) / sum)).collect();
        out.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Ok(out)
    }

    /// Logits with penalties, bias and constraint, in `buf`.
    fn shape(&mut self, logits: &[f32]) -> Result<()> {
        let SampleOptions { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.options;
        self.buf.clear();
        self.buf.extend_from_slice(logits);
        for (&id, seen) in &self.seen {
            let l = &mut self.buf[id as usize];
            *l = if *l > 0. { *l / repetition_penalty } else { *l * repetition_penalty };
            if seen.drawn > 0 {
                *l -= frequency_penalty * seen.drawn as f32 + presence_penalty;
            }
        }
        for &(id, bias) in &self.options.logit_bias {
            self.buf[id as usize] += bias;
        }
        for ids in self.never.iter() {
            self.buf[ids.start as usize..ids.end as usize].fill(f32::NEG_INFINITY);
        }
        match &mut self.constraint {
            Some(constraint) => constraint.restrict(&mut self.buf),
            None => Ok(()),
        }
    }

    /// The uniform number of the next token, in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.rng.set_word_pos(2 * u128::from(self.drawn));
        (self.rng.next_u64() >> 11) as f64 * (-53f64).exp2()
    }

    /// The tokens that may be drawn with weights e^((l - max) / T), in `candidates`: of the largest top_k the fewest that hold
    /// top_p of their weight, and of these the ones with at least min_p of the largest.
    fn weigh(&mut self) {
        let SampleOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let max = self.buf.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
        let weight = |l: f32| ((l - max) / temperature).exp();
        self.candidates.clear();
        // Of a weight of zero nothing is ever drawn; all else stays, in the order of ids.
        let all = self.buf.iter().enumerate().map(|(id, &l)| (id as u32, weight(l)));
        self.candidates.extend(all.filter(|&(_, w)| w > 0. && w >= min_p));
        if top_k > 0 && top_k < self.candidates.len() {
            first(&mut self.candidates, top_k);
        }
        if top_p < 1. {
            nucleus(&mut self.candidates, f64::from(top_p));
        }
    }
}

/// By weight, largest first; of equals the lower id.
fn order(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The `n` first in [`order`], in that order.
fn first(candidates: &mut Vec<(u32, f32)>, n: usize) {
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n, order);
        candidates.truncate(n);
    }
    candidates.sort_unstable_by(order);
}

/// Keeps the fewest, likeliest first, that hold at least `share` of the weight.
fn nucleus(candidates: &mut Vec<(u32, f32)>, share: f64) {
    let enough = share * candidates.iter().map(|c| f64::from(c.1)).sum::<f64>();
    // Mostly a few hold it, and sorting all of a large vocabulary takes longer than a layer.
    let mut n = 256;
    loop {
        let mut sorted = candidates.clone();
        first(&mut sorted, n);
        let mut sum = 0.;
        let found = sorted.iter().position(|c| {
            sum += f64::from(c.1);
            sum >= enough
        });
        match found {
            Some(last) => {
                sorted.truncate(last + 1);
                *candidates = sorted;
                return;
            }
            None if sorted.len() == candidates.len() => {
                *candidates = sorted;
                return;
            }
            None => n *= 8,
        }
    }
}

/// The largest logit's token; of equals the lowest id. None where all are minus infinity.
pub(crate) fn largest(logits: &[f32]) -> Option<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (id, &l) in logits.iter().enumerate() {
        if l > best.0 {
            best = (l, Some(id as u32));
        }
    }
    best.1
}

/// The candidate at `u` of the summed weights.
fn draw(candidates: &[(u32, f32)], u: f64) -> Option<u32> {
    let goal = u * candidates.iter().map(|c| f64::from(c.1)).sum::<f64>();
    let mut sum = 0.;
    for &(id, w) in candidates {
        sum += f64::from(w);
        if sum > goal {
            return Some(id);
        }
    }
    candidates.last().map(|c| c.0)
}
