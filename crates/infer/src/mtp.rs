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

/// The faster of two ways, found by trying both. What trying has cost stays under a hundredth of all time, and the first trial
/// comes late enough to be under a fiftieth of what was before it.
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
    /// Passes without drafts before the first trial: bringing the modules up to date and the trial cost some six of them, less
    /// than a fiftieth of these.
    const BEFORE: usize = 320;
    /// Passes of the first trial that count.
    const FIRST: usize = 3;
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
        // The first pass that drafts takes the modules to where the sequences are; the ones after it are what drafting costs.
        let catching_up = drafted && !self.drafting;
        let best = if self.faster() { &self.drafted } else { &self.plain };
        let slower = drafted != self.faster();
        if best.passes > 0 && (slower || catching_up) {
            self.lost += (seconds - best.per_token() * tokens as f64).max(0.);
        }
        let over = slower && self.since >= Choice::APART + Choice::TRIAL - 1;
        self.since = if over { 0 } else { self.since + 1 };
        self.total += seconds;
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

    /// The time of so many tokens on a machine where a plain pass takes 1 s, a drafted one `cost` for `gain` tokens, and the
    /// first one after plain passes 2 s more, for what the modules have missed.
    fn run(cost: f64, gain: usize, length: usize) -> f64 {
        let (mut choice, mut seconds, mut tokens, mut before) = (Choice::default(), 0., 0, false);
        while tokens < length {
            let drafts = choice.drafts();
            let (time, n) = match (drafts, before) {
                (false, _) => (1., 1),
                (true, true) => (cost, gain),
                (true, false) => (cost + 2., gain),
            };
            choice.add(drafts, time, n);
            before = drafts;
            seconds += time;
            tokens += n;
        }
        seconds / tokens as f64
    }

    /// HAZARD 21: where drafts do not pay, trying them costs under 2% of a text of any length; where they do, most of the
    /// gain is had in a long one.
    #[test]
    fn auto_never_loses_more_than_a_fiftieth() {
        for (cost, gain) in [(1.2, 1), (1.5, 1), (2., 1), (2.5, 2), (3.5, 3)] {
            for length in (1..2_000).chain([4_000, 20_000]) {
                let time = run(cost, gain, length);
                assert!(time < 1.02, "{cost} for {gain}, {length} tokens: {time}");
            }
        }
        for (cost, gain) in [(1.5, 2), (1.5, 3)] {
            let (best, time) = (cost / gain as f64, run(cost, gain, 40_000));
            assert!(time < 1.02 * best, "{cost} for {gain}: {time} of {best}");
        }
    }

    #[test]
    fn gates_are_probabilities() {
        assert!(Gates::new(&[0., 1.]).is_ok());
        let error = Gates::new(&[0.5, 1.5]).unwrap_err().to_string();
        assert_eq!(error, "gates is 1.5, want probabilities from 0 to 1");
    }
}
