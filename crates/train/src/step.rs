//! One step, top to bottom.

use crate::guard::Fault;
use crate::profile::Profile;
use crate::record::{StepReport, now};
use crate::{Error, Trainer};
use hymo_data::loader::MicroBatch;
use hymo_model::{Batch, Counts, LayerStats, Options};
use hymo_ops::router::bias_update;
use hymo_optim::{GradNorm, Outcome};
use hymo_tape::{Observer, Tape};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

impl Trainer {
    /// Takes one step; `None` when the data has ended. A batch whose gradient is not finite is written into `dump`, and then
    /// `train.on_non_finite` decides: an error, or a report that says that nothing moved.
    ///
    /// # Errors
    /// Data that cannot be read; a gradient that is not finite, by policy, or too often in a row.
    pub fn step(&mut self, dump: &Path) -> Result<Option<StepReport>, Error> {
        let profile = self.profile.clone();
        let number = self.state.step + 1;
        Profile::span(profile.as_ref(), &format!("step {number}"), || self.step_inside(dump, profile.as_ref()))
    }

    // tidy: long, the step
    fn step_inside(&mut self, dump: &Path, profile: Option<&Arc<Profile>>) -> Result<Option<StepReport>, Error> {
        let start = Instant::now();
        let Some(data) = Profile::span(profile, "wait for data", || self.data.next_step())? else { return Ok(None) };
        let data_seconds = start.elapsed().as_secs_f64();

        // Means are over the whole step, so that how it is cut into micro-batches changes nothing.
        let counts = Counts { valid: data.valid.iter().map(|&n| n as f64).collect(), tokens: data.tokens as f64 };
        let options = Options { checkpoint: self.recomputed(), counts: Some(counts) };
        let mut grads = match self.grads.take() {
            Some(grads) => grads,
            None => self.params.zero_grads(&self.ctx)?,
        };
        for flat in grads.flats_mut() {
            flat.clear()?;
        }

        let mut sums = Sums::new(data.valid.len());
        for micro in &data.micro {
            let batch = self.batch(micro)?;
            let mut tape =
                Tape::training(&self.ctx, grads).observed(profile.map(|p| Arc::clone(p) as Arc<dyn Observer>));
            let forward = || self.model.loss(&mut tape, &self.params, &batch, &options);
            let losses = Profile::span(profile, "forward", forward)?;
            sums.add(losses.depths(), losses.total()?, losses.balance()?, &losses.stats);
            let done = Profile::span(profile, "backward", || tape.backward(&losses.seeds()))?;
            grads = done.into_params().expect("invariant: a training tape returns its gradients");
        }

        self.state.step += 1;
        let norm = Profile::span(profile, "gradient norm", || GradNorm::of(grads.flats()))?;
        let lr = self.config.optim.lr * self.schedule.factor(self.state.step);
        let refused = match self.fault(norm) {
            Some(fault) => Some(fault),
            None => match Profile::span(profile, "optimizer", || {
                self.optimizer.step_with(&self.ctx, self.params.flats_mut(), grads.flats(), lr, norm)
            })? {
                Outcome::Stepped { .. } => None,
                Outcome::Refused { params, .. } => {
                    Some(Fault::NonFinite(params.into_iter().next().unwrap_or_default()))
                }
            },
        };
        self.grads = Some(grads);
        let refused = match refused {
            Some(fault) => Some(self.refuse(&data, &fault, dump)?),
            None => {
                self.accept(norm);
                self.state.tokens += data.tokens;
                self.balance(&sums.stats)?;
                self.clip_queries(&sums.stats)?;
                if let Some(ema) = &mut self.ema {
                    ema.update(self.params.flats())?;
                }
                None
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let layers = sums.stats.iter().filter(|s| !s.expert_counts.is_empty());
        Ok(Some(StepReport {
            step: self.state.step,
            time: now(),
            losses: sums.losses,
            total: sums.total,
            balance: sums.balance,
            lr,
            grad_norm: norm.value(),
            stepped: refused.is_none(),
            refused,
            max_violation: layers.clone().map(max_violation).collect(),
            expert_load: layers.map(load).collect(),
            max_logits: sums.stats.iter().filter(|s| !s.max_logits.is_empty()).map(largest).collect(),
            tokens: data.tokens,
            total_tokens: self.state.tokens,
            epoch: data.begins.epoch(),
            seconds,
            data_seconds,
            mfu: self.peak_flops.map(|peak| self.flops_per_token * data.tokens as f64 / seconds / peak),
        }))
    }

    pub(crate) fn batch(&self, micro: &MicroBatch) -> Result<Batch, Error> {
        let model = &self.config.model;
        let (len, modules) = (model.context_length, model.mtp.n_modules);
        Ok(Batch::new(micro.rows, len, modules, &micro.tokens, &micro.documents)?)
    }

    /// The layers that are run again in the backward pass.
    fn recomputed(&self) -> Vec<usize> {
        match self.config.train.recompute {
            0 => Vec::new(),
            every => (0..self.config.model.n_layers).filter(|layer| layer % every == 0).collect(),
        }
    }

    /// Moves the routers' biases by what the step's tokens chose (HAZARD 15: counted once, padding left out).
    fn balance(&mut self, stats: &[LayerStats]) -> Result<(), Error> {
        let Some(moe) = &self.config.model.moe else { return Ok(()) };
        let rate = moe.bias_update_rate;
        for (layer, stats) in stats.iter().enumerate().filter(|(_, s)| !s.expert_counts.is_empty()) {
            let bias = self.params.buffer_mut(&format!("layers.{layer}.moe.router.bias"))?;
            let mut values = bias.to_vec::<f32>()?;
            bias_update(&mut values, &stats.expert_counts, rate)?;
            bias.write(&values)?;
        }
        Ok(())
    }
}

fn load(stats: &LayerStats) -> Vec<f32> {
    let total = stats.expert_counts.iter().sum::<u64>().max(1) as f64;
    stats.expert_counts.iter().map(|&n| (n as f64 / total) as f32).collect()
}

fn max_violation(stats: &LayerStats) -> f64 {
    let total: u64 = stats.expert_counts.iter().sum();
    let most = stats.expert_counts.iter().max().copied().unwrap_or(0);
    let mean = total as f64 / stats.expert_counts.len() as f64;
    if total == 0 { 0. } else { most as f64 / mean - 1. }
}

fn largest(stats: &LayerStats) -> f64 {
    stats.max_logits.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Sums over the micro-batches of a step.
struct Sums {
    losses: Vec<f64>,
    total: f64,
    balance: f64,
    stats: Vec<LayerStats>,
}

impl Sums {
    fn new(depths: usize) -> Self {
        Sums { losses: vec![0.; depths], total: 0., balance: 0., stats: Vec::new() }
    }

    fn add(&mut self, losses: &[f64], total: f64, balance: f64, stats: &[LayerStats]) {
        self.losses.iter_mut().zip(losses).for_each(|(sum, loss)| *sum += loss);
        self.total += total;
        self.balance += balance;
        if self.stats.is_empty() {
            self.stats = stats.to_vec();
            return;
        }
        for (sum, more) in self.stats.iter_mut().zip(stats) {
            sum.expert_counts.iter_mut().zip(&more.expert_counts).for_each(|(a, b)| *a += b);
            sum.max_logits.iter_mut().zip(&more.max_logits).for_each(|(a, b)| *a = a.max(*b));
        }
    }
}
