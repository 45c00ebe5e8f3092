//! One step, top to bottom.

use crate::profile::Profile;
use crate::record::{StepReport, now};
use crate::{Error, Trainer};
use hymo_data::loader::MicroBatch;
use hymo_model::{Batch, Counts, LayerStats, LossValues, Options};
use hymo_ops::router::bias_update;
use hymo_optim::Outcome;
use hymo_tape::{Observer, Tape};
use hymo_tensor::Ctx;
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
        let ctx = self.ctx.clone();
        let name = format!("step {number}");
        Profile::span(&ctx, profile.as_ref(), &name, || self.step_inside(&ctx, dump, profile.as_ref()))
    }

    // tidy: long, the step
    fn step_inside(
        &mut self,
        ctx: &Ctx,
        dump: &Path,
        profile: Option<&Arc<Profile>>,
    ) -> Result<Option<StepReport>, Error> {
        let start = Instant::now();
        let Some(data) = Profile::span(ctx, profile, "wait for data", || self.data.next_step())? else {
            return Ok(None);
        };
        let data_seconds = start.elapsed().as_secs_f64();

        // Means are over the whole step, so that how it is cut into micro-batches changes nothing.
        let counts = Counts { valid: data.valid.iter().map(|&n| n as f64).collect(), tokens: data.tokens as f64 };
        let options = Options { checkpoint: self.recomputed(), counts: Some(counts) };
        let mut grads = match self.grads.take() {
            Some(grads) => grads,
            None => self.params.zero_grads(ctx)?,
        };
        for flat in grads.flats_mut() {
            flat.clear()?;
        }

        let mut passes = Vec::with_capacity(data.micro.len());
        for micro in &data.micro {
            let batch = self.batch(micro)?;
            let mut tape = Tape::training(ctx, grads).observed(profile.map(|p| Arc::clone(p) as Arc<dyn Observer>));
            let forward = || self.model.loss(&mut tape, &self.params, &batch, &options);
            let losses = Profile::span(ctx, profile, "forward", forward)?;
            let done = Profile::span(ctx, profile, "backward", || tape.backward(&losses.seeds()))?;
            grads = done.into_params().expect("invariant: a training tape returns its gradients");
            passes.push(losses);
        }

        self.state.step += 1;
        let lr = self.config.optim.lr * self.schedule.factor(self.state.step);
        let usual = self.usual();
        let limit = usual.map_or(f64::INFINITY, |median| self.config.train.spike * median);
        // On a GPU the whole step has been asked for by now, and is waited for in here.
        let outcome = Profile::span(ctx, profile, "optimizer", || {
            self.optimizer.step_below(ctx, self.params.flats_mut(), grads.flats(), lr, limit)
        })?;
        let (norm, refused) = match outcome {
            Outcome::Stepped { grad_norm, .. } => (grad_norm, None),
            Outcome::Refused { grad_norm, params } => (grad_norm, Some(Self::fault(grad_norm, params, usual))),
        };
        self.grads = Some(grads);
        let mut sums = LossValues::default();
        for losses in passes {
            add(&mut sums, losses.read()?);
        }
        let refused = match refused {
            Some(fault) => Some(self.refuse(&data, &fault, dump)?),
            None => {
                self.accept(norm);
                self.state.tokens += data.tokens;
                self.balance(&sums.layers)?;
                self.clip_queries(&sums.layers)?;
                if let Some(ema) = &mut self.ema {
                    ema.update(self.params.flats())?;
                }
                None
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let layers = sums.layers.iter().filter(|s| !s.expert_counts.is_empty());
        Ok(Some(StepReport {
            step: self.state.step,
            time: now(),
            losses: sums.depths,
            total: sums.total,
            balance: sums.balance,
            lr,
            grad_norm: norm,
            stepped: refused.is_none(),
            refused,
            max_violation: layers.clone().map(max_violation).collect(),
            expert_load: layers.map(load).collect(),
            max_logits: sums.layers.iter().filter(|s| !s.max_logits.is_empty()).map(largest).collect(),
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

/// Adds a micro-batch to the step.
fn add(sums: &mut LossValues, more: LossValues) {
    if sums.depths.is_empty() {
        *sums = more;
        return;
    }
    sums.depths.iter_mut().zip(more.depths).for_each(|(sum, loss)| *sum += loss);
    sums.total += more.total;
    sums.balance += more.balance;
    for (sum, more) in sums.layers.iter_mut().zip(more.layers) {
        sum.expert_counts.iter_mut().zip(more.expert_counts).for_each(|(a, b)| *a += b);
        sum.max_logits.iter_mut().zip(more.max_logits).for_each(|(a, b)| *a = a.max(b));
    }
}
