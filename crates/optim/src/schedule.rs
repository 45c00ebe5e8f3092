//! The learning rate over the steps: warm-up, then stable and decay, half a cosine, or constant. Source: MATH, section 8.

use crate::Error;
use hymo_model::config::{DecayShape, ScheduleConfig, ScheduleKind};
use hymo_model::{Problems, RunConfig, presets};

/// A checked schedule: a pure function from a step's number to a factor on the learning rate.
///
/// With `W` steps of warm-up, `D` the last stable step and `S` steps in all, step `s`, the first being 1, has the factor
/// `s / W` up to `W`, 1 up to `D`, and then `f + (1 - f) shape((s - D) / (S - D))`, `f` being the final factor. A cosine
/// falls from `W` on, a constant never. After `S` the factor stays what it was.
///
/// ```
/// use hymo_model::config::ScheduleConfig;
/// use hymo_optim::Schedule;
///
/// let wsd = Schedule::new(&ScheduleConfig { num_steps: 1000, ..Default::default() })?;
/// assert_eq!([1, 20, 800].map(|s| wsd.factor(s)), [0.05, 1.0, 1.0]);
/// assert_eq!([850, 1000].map(|s| wsd.factor(s)), [0.5, 0.0]); // 1 - sqrt(x)
/// let branch = wsd.branch(400, 100)?; // finishes what a checkpoint of step 400 holds
/// assert_eq!([400, 425, 500].map(|s| branch.factor(s)), [1.0, 0.5, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    kind: ScheduleKind,
    shape: DecayShape,
    warmup: u64,
    decay_from: u64,
    num_steps: u64,
    last: f64,
}

impl Schedule {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Every problem that [`RunConfig::validate`] finds in the section.
    pub fn new(config: &ScheduleConfig) -> Result<Self, Problems> {
        // Checked as part of a run, whose other sections are known to be right.
        RunConfig { schedule: config.clone(), ..RunConfig::new(presets::hymo_nano()) }.validate()?;
        Ok(Schedule {
            kind: config.kind,
            shape: config.decay_shape,
            warmup: config.warmup_steps(),
            decay_from: config.decay_start(),
            num_steps: config.num_steps,
            last: config.final_factor,
        })
    }

    /// The factor of a step, the first being 1; 0 for step 0 of a warm-up.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup {
            return step as f64 / self.warmup as f64;
        }
        let (from, shape): (_, fn(f64) -> f64) = match (self.kind, self.shape) {
            (ScheduleKind::Constant, _) => return 1.0,
            (ScheduleKind::Cosine, _) => (self.warmup, |x| 0.5 + 0.5 * libm::cos(std::f64::consts::PI * x)),
            (ScheduleKind::Wsd, DecayShape::OneMinusSqrt) => (self.decay_from, |x| 1.0 - x.sqrt()),
            (ScheduleKind::Wsd, DecayShape::Linear) => (self.decay_from, |x| 1.0 - x),
            (ScheduleKind::Wsd, DecayShape::Exponential) => (self.decay_from, |x| libm::exp2(-5.0 * x)),
        };
        if step <= from {
            return 1.0;
        }
        // A step past `from` is past it within the run too, or the run ends there.
        let x = (step.min(self.num_steps).saturating_sub(from)) as f64 / (self.num_steps - from).max(1) as f64;
        self.last + (1.0 - self.last) * shape(x)
    }

    /// Steps of the run.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// First and last step at which the factor stays 1, from which a run can branch off; none for a cosine.
    #[must_use]
    pub fn stable(&self) -> Option<(u64, u64)> {
        match self.kind {
            ScheduleKind::Wsd => Some((self.warmup, self.decay_from)),
            ScheduleKind::Constant => Some((self.warmup, self.num_steps)),
            ScheduleKind::Cosine => None,
        }
    }

    /// The schedule that decays from a stable step over the next `decay_steps`, in this one's shape: what finishes a run
    /// from a checkpoint of that step.
    ///
    /// # Errors
    /// [`Error::NotStable`] when the step is not stable, and a range when there is nothing to decay over.
    pub fn branch(&self, step: u64, decay_steps: u64) -> Result<Schedule, Error> {
        let (from, to) = self.stable().unwrap_or((1, 0));
        if step < from || step > to {
            return Err(Error::NotStable { step, from, to });
        }
        let end = step.checked_add(decay_steps).filter(|&end| decay_steps > 0 && end <= MOST_STEPS);
        let num_steps = end.ok_or_else(|| {
            let want = format!("1 to {}", MOST_STEPS.saturating_sub(step));
            hymo_tensor::Error::value("schedule", "decay_steps", decay_steps, want)
        })?;
        Ok(Schedule { kind: ScheduleKind::Wsd, decay_from: step, num_steps, ..*self })
    }
}

/// Most steps of a run: the step's number is saved as an `i32`.
pub(crate) const MOST_STEPS: u64 = 2_000_000_000;
