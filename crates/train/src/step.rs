//! One step, top to bottom.

use crate::{Error, Trainer};
use hymo_data::loader::{MicroBatch, Step};
use hymo_model::config::OnNonFinite;
use hymo_model::{Batch, Counts, LayerStats, Options};
use hymo_ops::router::bias_update;
use hymo_optim::{GradNorm, Outcome};
use hymo_tape::Tape;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Steps in a row without a finite gradient after which a run ends whatever its policy.
const PATIENCE: u32 = 16;

/// What a step did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Loss of the head and of each prediction module, each the mean over its valid targets, nats a token.
    pub losses: Vec<f64>,
    /// Weighted sum of the losses, and the balance loss.
    pub total: f64,
    /// Balance losses of all layers.
    pub balance: f64,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Whether the parameters moved: a gradient that is not finite moves nothing.
    pub stepped: bool,
    /// Largest load of an expert over the mean load, less 1, by layer with experts.
    pub max_violation: Vec<f64>,
    /// Largest attention logit of all layers and heads.
    pub max_logit: f64,
    /// Tokens of this step, padding left out.
    pub tokens: u64,
    /// Tokens of the run so far.
    pub total_tokens: u64,
    /// Times the data has been read before.
    pub epoch: u64,
    /// Wall time.
    pub seconds: f64,
    /// Of it, waiting for data.
    pub data_seconds: f64,
}

impl Trainer {
    /// Takes one step; `None` when the data has ended. A batch whose gradient is not finite is written into `dump`, and then
    /// `train.on_non_finite` decides: an error, or a report that says that nothing moved.
    ///
    /// # Errors
    /// Data that cannot be read; a gradient that is not finite, by policy, or too often in a row.
    pub fn step(&mut self, dump: &Path) -> Result<Option<StepReport>, Error> {
        let start = Instant::now();
        let Some(data) = self.data.next_step()? else { return Ok(None) };
        let data_seconds = start.elapsed().as_secs_f64();

        // Means are over the whole step, so that how it is cut into micro-batches changes nothing.
        let counts = Counts { valid: data.valid.iter().map(|&n| n as f64).collect(), tokens: data.tokens as f64 };
        let options = Options { checkpoint: self.recomputed(), counts: Some(counts) };
        let mut grads = match self.grads.take() {
            Some(grads) => grads,
            None => self.params.zero_grads(&self.ctx)?,
        };
        for flat in grads.flats_mut() {
            flat.flat_mut::<f32>()?.fill(0.);
        }

        let mut sums = Sums::new(data.valid.len());
        for micro in &data.micro {
            let batch = self.batch(micro)?;
            let mut tape = Tape::training(&self.ctx, grads);
            let losses = self.model.loss(&mut tape, &self.params, &batch, &options)?;
            sums.add(losses.depths(), losses.total()?, losses.balance()?, &losses.stats);
            let done = tape.backward(&losses.seeds())?;
            grads = done.into_params().expect("invariant: a training tape returns its gradients");
        }

        self.state.step += 1;
        let norm = GradNorm::of(grads.flats())?;
        let lr = self.config.optim.lr * self.schedule.factor(self.state.step);
        let outcome = self.optimizer.step_with(&self.ctx, self.params.flats_mut(), grads.flats(), lr, norm)?;
        self.grads = Some(grads);
        let stepped = matches!(outcome, Outcome::Stepped { .. });
        if let Outcome::Refused { params, .. } = outcome {
            self.refused(&data, params.into_iter().next().unwrap_or_default(), dump)?;
        } else {
            self.state.in_a_row = 0;
            self.state.tokens += data.tokens;
            self.balance(&sums.stats)?;
            if let Some(ema) = &mut self.ema {
                ema.update(self.params.flats())?;
            }
        }
        Ok(Some(StepReport {
            step: self.state.step,
            losses: sums.losses,
            total: sums.total,
            balance: sums.balance,
            lr,
            grad_norm: norm.value(),
            stepped,
            max_violation: sums.stats.iter().filter_map(max_violation).collect(),
            max_logit: sums.stats.iter().flat_map(|s| &s.max_logits).copied().fold(f64::NEG_INFINITY, f64::max),
            tokens: data.tokens,
            total_tokens: self.state.tokens,
            epoch: data.begins.epoch(),
            seconds: start.elapsed().as_secs_f64(),
            data_seconds,
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
            bias_update(bias.flat_mut::<f32>()?, &stats.expert_counts, rate)?;
        }
        Ok(())
    }

    /// HAZARD 13: a step that is not finite leaves its batch behind, and there is a way past it.
    fn refused(&mut self, data: &Step, first: String, dump: &Path) -> Result<(), Error> {
        self.state.skipped += 1;
        self.state.in_a_row += 1;
        let (step, times) = (self.state.step, self.state.in_a_row);
        let dump = write_batch(data, step, dump)?;
        match self.config.train.on_non_finite {
            OnNonFinite::Stop => Err(Error::NonFinite { step, first, dump }),
            _ if times >= PATIENCE => Err(Error::NeverFinite { step, times, dump }),
            _ => Ok(()),
        }
    }
}

/// A step's tokens and documents as JSON, under a name of its own.
fn write_batch(data: &Step, step: u64, dir: &Path) -> Result<PathBuf, Error> {
    let path = dir.join(format!("non-finite-step-{step}.json"));
    let rows = |m: &MicroBatch| serde_json::json!({ "rows": m.rows, "tokens": m.tokens, "documents": m.documents });
    let text = serde_json::json!({
        "step": step, "begins": data.begins, "micro": data.micro.iter().map(rows).collect::<Vec<_>>(),
    });
    std::fs::write(&path, text.to_string()).map_err(|source| Error::Io {
        doing: "write",
        path: path.clone(),
        source,
    })?;
    Ok(path)
}

fn max_violation(stats: &LayerStats) -> Option<f64> {
    let total: u64 = stats.expert_counts.iter().sum();
    let most = *stats.expert_counts.iter().max()?;
    let mean = total as f64 / stats.expert_counts.len() as f64;
    Some(if total == 0 { 0. } else { most as f64 / mean - 1. })
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
