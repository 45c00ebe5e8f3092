//! Whether and how to draft.

use crate::{Error, Result};

/// When prediction modules draft. The output is the same whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mtp {
    /// Never; their states are not kept.
    #[default]
    Off,
    /// In every pass.
    On,
    /// Both ways are timed, and the faster is kept (HAZARD 21). Without a clock it is off.
    Auto,
}

/// Least probabilities that a draft of each depth has by its own distribution, to be tried (MATH 5.4); the last one counts
/// for deeper ones too. A draft that is not tried costs nothing but itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Gates(Vec<f32>);

impl Gates {
    /// One for each depth.
    ///
    /// # Errors
    /// A number outside 0 (try every draft) to 1.
    pub fn new(gates: &[f32]) -> Result<Self> {
        match gates.iter().find(|g| !(0. ..=1.).contains(*g)) {
            Some(gate) => Err(Error::option("gates", gate, "probabilities from 0 to 1")),
            None => Ok(Gates(gates.to_vec())),
        }
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        &self.0
    }
}

impl Default for Gates {
    /// 0.80 and 0.75.
    fn default() -> Self {
        Gates(vec![0.80, 0.75])
    }
}

/// Seconds a token, newer passes counting more.
#[derive(Debug, Clone, Default)]
struct Rate {
    seconds: f64,
    tokens: f64,
    passes: usize,
}

impl Rate {
    const KEPT: f64 = 0.95;

    fn add(&mut self, seconds: f64, tokens: usize) {
        self.seconds = Rate::KEPT * self.seconds + seconds;
        self.tokens = Rate::KEPT * self.tokens + tokens as f64;
        self.passes += 1;
    }

    fn per_token(&self) -> f64 {
        self.seconds / self.tokens
    }
}

/// The faster of two ways, found by trying both. What trying has cost stays under a hundredth of all time, the first trial
/// aside.
#[derive(Debug, Clone, Default)]
pub(crate) struct Choice {
    plain: Rate,
    drafted: Rate,
    lost: f64,
    total: f64,
    since: usize,
    /// Whether the last pass drafted.
    drafting: bool,
}

impl Choice {
    /// Passes without drafts before the first trial, so that a short text pays for none.
    const BEFORE: usize = 24;
    /// Passes of the first trial that count.
    const FIRST: usize = 4;
    /// Passes of the faster way between two trials of the other.
    const APART: usize = 64;
    /// Passes of a trial, the first of which is not counted.
    const TRIAL: usize = 3;

    /// Whether to draft in the next pass.
    pub fn drafts(&self) -> bool {
        if self.plain.passes < Choice::BEFORE {
            return false;
        }
        if self.drafted.passes < Choice::FIRST {
            return true;
        }
        let trial = self.since >= Choice::APART && self.lost < 0.01 * self.total;
        self.faster() != trial
    }

    /// Whether drafting is the faster way by what is known.
    pub fn faster(&self) -> bool {
        self.drafted.passes > 0 && self.drafted.per_token() < 0.99 * self.plain.per_token()
    }

    /// Takes notice of a pass.
    pub fn add(&mut self, drafted: bool, seconds: f64, tokens: usize) {
        let best = if self.faster() { &self.drafted } else { &self.plain };
        if drafted == self.faster() {
            self.since += 1;
        } else if best.passes > 0 {
            self.lost += (seconds - best.per_token() * tokens as f64).max(0.);
            self.since = if self.since >= Choice::APART + Choice::TRIAL - 1 { 0 } else { self.since + 1 };
        }
        self.total += seconds;
        // The first pass that drafts takes the modules to where the sequences are; the ones after it are what drafting costs.
        let catching_up = drafted && !self.drafting;
        self.drafting = drafted;
        if !catching_up {
            let rate = if drafted { &mut self.drafted } else { &mut self.plain };
            rate.add(seconds, tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a machine on which a plain pass takes 1 s and a drafted one `cost` for `gain` tokens: the time of 4,000 tokens.
    fn run(cost: f64, gain: usize) -> f64 {
        let (mut choice, mut seconds, mut tokens) = (Choice::default(), 0., 0);
        while tokens < 4_000 {
            let (time, n) = if choice.drafts() { (cost, gain) } else { (1., 1) };
            choice.add(choice.drafts(), time, n);
            seconds += time;
            tokens += n;
        }
        seconds / tokens as f64
    }

    /// HAZARD 21: where drafts do not pay, trying them costs under 2%; where they do, most of the gain is had.
    #[test]
    fn auto_never_loses_more_than_a_fiftieth() {
        for (cost, gain) in [(1.2, 1), (2., 1), (5., 1), (2.5, 2)] {
            assert!(run(cost, gain) < 1.02, "{cost} for {gain}: {}", run(cost, gain));
        }
        for (cost, gain) in [(1.5, 2), (1.5, 3)] {
            let best = cost / gain as f64;
            assert!(run(cost, gain) < 1.02 * best, "{cost} for {gain}: {} of {best}", run(cost, gain));
        }
    }

    #[test]
    fn gates_are_probabilities() {
        assert!(Gates::new(&[0., 1.]).is_ok());
        let error = Gates::new(&[0.5, 1.5]).unwrap_err().to_string();
        assert_eq!(error, "gates is 1.5, want probabilities from 0 to 1");
    }
}
