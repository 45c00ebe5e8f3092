//! A run in memory: parameters, optimizer, place in the data; to and from a checkpoint.

use crate::Error;
use crate::checkpoint::{Checkpoint, Snapshot};
use crate::profile::Profile;
use hymo_data::corpus::Corpus;
use hymo_data::loader::{Loader, LoaderOptions, Prefetch};
use hymo_data::stream::Position;
use hymo_model::config::{RunConfig, TrainConfig};
use hymo_model::cost::{Cost, CostOptions};
use hymo_model::{HyMo, Params};
use hymo_optim::{Ema, Optimizer, Schedule};
use hymo_tape::ParamGrads;
use hymo_tensor::{Ctx, Tensor};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Steps that the loader makes ahead of the one that runs.
const AHEAD: usize = 2;

/// Everything that a step reads and writes. [`Trainer::step`] is in `step.rs`.
#[derive(Debug)]
pub struct Trainer {
    pub(crate) ctx: Ctx,
    pub(crate) config: RunConfig,
    pub(crate) model: HyMo,
    pub(crate) params: Params,
    pub(crate) optimizer: Optimizer,
    pub(crate) schedule: Schedule,
    pub(crate) ema: Option<Ema>,
    /// The flat gradients, between steps.
    pub(crate) grads: Option<ParamGrads>,
    pub(crate) data: Prefetch,
    pub(crate) state: LoopState,
    pub(crate) flops_per_token: f64,
    params_count: (u64, u64),
    /// What MFU is relative to.
    pub(crate) peak_flops: Option<f64>,
    /// The trace of the steps that are being taken.
    pub(crate) profile: Option<Arc<Profile>>,
    corpus: Arc<Corpus>,
}

/// What the loop goes on from, beside tensors and the place in the data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoopState {
    /// Steps taken, those without an update too.
    pub step: u64,
    /// Steps that were refused.
    pub skipped: u64,
    /// Of these, the last ones in a row.
    pub in_a_row: u32,
    /// The step that the run last went back to, and how often in a row.
    pub rolled_back: (u64, u32),
    /// Norms of the last gradients, where spikes are looked for.
    pub norms: Vec<f64>,
    /// Tokens trained on.
    pub tokens: u64,
    /// The best evaluation: its step and its loss.
    pub best: Option<(u64, f64)>,
}

/// The state as it stands in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Saved {
    #[serde(rename = "loop")]
    pub state: LoopState,
    pub data: Position,
}

impl Saved {
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let wrong = |problem: String| Error::State { path: checkpoint.path().to_owned(), problem };
        let saved: Saved = serde_json::from_value(checkpoint.state().clone()).map_err(|e| wrong(e.to_string()))?;
        if saved.state.step != checkpoint.step() {
            return Err(wrong(format!("loop.step is {}, the manifest's {}", saved.state.step, checkpoint.step())));
        }
        Ok(saved)
    }
}

impl Trainer {
    /// A run at its beginning, its parameters drawn from `train.seed`.
    ///
    /// # Errors
    /// A configuration that does not fit the data; rows that do not divide into micro-batches.
    pub fn new(ctx: &Ctx, config: &RunConfig, corpus: Arc<Corpus>) -> Result<Self, Error> {
        let params = Params::init(ctx, &config.model, config.train.seed)?;
        Trainer::with_params(ctx, config, corpus, params)
    }

    /// From now on steps are traced into this, or no longer traced. What they compute stays the same to the bit.
    pub fn trace(&mut self, profile: Option<Arc<Profile>>) {
        self.profile = profile;
    }

    /// A run at its beginning, from parameters of one's own.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_params(ctx: &Ctx, config: &RunConfig, corpus: Arc<Corpus>, params: Params) -> Result<Self, Error> {
        if corpus.vocab_size() > config.model.vocab_size {
            return Err(Error::Config {
                field: "model.vocab_size",
                found: config.model.vocab_size.to_string(),
                expected: format!("at least {}, the vocabulary of the data's tokenizer", corpus.vocab_size()),
            });
        }
        let options = CostOptions { context: config.model.context_length, batch: config.train.micro_rows };
        let cost = Cost::new(&config.model, options).map_err(hymo_model::Error::from)?;
        let schedule = Schedule::new(&config.schedule).map_err(hymo_model::Error::from)?;
        let ema = match config.optim.ema {
            0. => None,
            decay => Some(Ema::new(ctx, params.flats(), decay)?),
        };
        Ok(Trainer {
            ctx: ctx.clone(),
            config: config.clone(),
            model: HyMo::new(&config.model)?,
            optimizer: Optimizer::new(ctx, &params, &config.optim)?,
            schedule,
            ema,
            grads: Some(params.zero_grads(ctx)?),
            data: loader(config, &corpus, None)?,
            state: LoopState::default(),
            flops_per_token: cost.flops_per_token.training as f64,
            params_count: (cost.params.active, cost.params.stored),
            peak_flops: None,
            profile: None,
            params,
            corpus,
        })
    }

    /// What computes.
    #[must_use]
    pub fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// The run's configuration.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The data that it reads.
    #[must_use]
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The network.
    #[must_use]
    pub fn model(&self) -> &HyMo {
        &self.model
    }

    /// The parameters as they are now.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// The optimizers, their groups and their state.
    #[must_use]
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// How far the loop has come.
    #[must_use]
    pub fn state(&self) -> &LoopState {
        &self.state
    }

    /// What is evaluated and exported: the average of the weights where one is kept, else the weights. Drop it before the
    /// next step, which writes into the same memory.
    ///
    /// # Errors
    /// None in practice: the average has the layout of the parameters.
    pub fn averaged(&self) -> Result<Params, Error> {
        match &self.ema {
            None => Ok(self.params.clone()),
            Some(ema) => Ok(self.params.with_flats(ema.flats().to_vec())?),
        }
    }

    /// Parameters that a token uses, and all.
    #[must_use]
    pub fn params_count(&self) -> (u64, u64) {
        self.params_count
    }

    /// Takes an evaluation's bits a byte; tells whether they are the best so far.
    pub(crate) fn judge(&mut self, score: f64) -> bool {
        let best = score.is_finite() && self.state.best.is_none_or(|(_, best)| score < best);
        if best {
            self.state.best = Some((self.state.step, score));
        }
        best
    }

    /// Takes this as the device's FLOP/s at dense products: steps then report their share of it.
    pub fn set_peak_flops(&mut self, peak: f64) {
        self.peak_flops = Some(peak);
    }

    /// FLOPs of a token in training, forward and backward.
    #[must_use]
    pub fn flops_per_token(&self) -> f64 {
        self.flops_per_token
    }

    /// Whether the schedule has ended.
    #[must_use]
    pub fn done(&self) -> bool {
        self.state.step >= self.schedule.num_steps()
    }

    /// Everything that the run goes on from, copied, so that it can be written while the next step runs.
    ///
    /// # Errors
    /// None in practice: the tensors are the run's own.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        self.snapshot_over(None)
    }

    /// [`Trainer::snapshot`] into the memory of an earlier one of this run, where there is one.
    ///
    /// # Errors
    /// As there.
    pub fn snapshot_over(&self, old: Option<Snapshot>) -> Result<Snapshot, Error> {
        let json = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
        let saved = Saved { state: self.state.clone(), data: self.data.position().clone() };
        let config = json(serde_json::to_value(&self.config));
        let mut snapshot = Snapshot::new(self.state.step, config, json(serde_json::to_value(saved)));
        snapshot = old.into_iter().fold(snapshot, Snapshot::over);
        for (name, tensor) in self.named()? {
            snapshot.add(name, &tensor)?;
        }
        Ok(snapshot)
    }

    /// Every tensor of the run under its name in a checkpoint.
    fn named(&self) -> Result<Vec<(String, Tensor)>, Error> {
        let mut out = Vec::new();
        for spec in self.params.table().params() {
            out.push((format!("model.{}", spec.name), self.params.get(&spec.name)?));
        }
        for spec in self.params.table().buffers() {
            out.push((format!("model.{}", spec.name), self.params.buffer(&spec.name)?.clone()));
        }
        out.extend(self.optimizer.tensors()?);
        for (unit, flat) in self.ema.iter().flat_map(|ema| ema.flats().iter().enumerate()) {
            out.push((format!("ema.{unit}"), flat.clone()));
        }
        Ok(out)
    }

    /// The run that a checkpoint was made of, as it was then, down to the bit.
    ///
    /// # Errors
    /// Another model or optimizer than the checkpoint's, other data; all is taken over or nothing.
    pub fn resume(ctx: &Ctx, config: &RunConfig, corpus: Arc<Corpus>, mut from: Checkpoint) -> Result<Self, Error> {
        let mut trainer = Trainer::new(ctx, config, corpus)?;
        let saved = Saved::of(&from)?;
        trainer.take(&mut from)?;
        from.finish()?;
        trainer.data = loader(config, &trainer.corpus, Some(saved.data))?;
        trainer.state = saved.state;
        Ok(trainer)
    }

    pub(crate) fn take(&mut self, from: &mut Checkpoint) -> Result<(), Error> {
        for spec in self.params.table().params().to_vec() {
            let values = from.take(&format!("model.{}", spec.name), &spec.shape)?;
            let flat = &mut self.params.flats_mut()[spec.unit.index()];
            flat.write_at(spec.range().start, &values)?;
        }
        for spec in self.params.table().buffers().to_vec() {
            from.take_into(&format!("model.{}", spec.name), self.params.buffer_mut(&spec.name)?)?;
        }
        let mut state = Vec::new();
        for (name, tensor) in self.optimizer.tensors()? {
            let mut saved = tensor.copy(&Ctx::cpu())?;
            from.take_into(&name, &mut saved)?;
            state.push((name, saved));
        }
        self.optimizer.load(state.iter().map(|(name, tensor)| (name.as_str(), tensor)))?;
        if let Some(ema) = &mut self.ema {
            let mut flats = Vec::new();
            for (unit, flat) in ema.flats().iter().enumerate() {
                let mut saved = flat.copy(&self.ctx)?;
                from.take_into(&format!("ema.{unit}"), &mut saved)?;
                flats.push(saved);
            }
            ema.load(&self.ctx, &flats)?;
        }
        Ok(())
    }
}

/// The loader of a run, from a position or from the beginning.
fn loader(config: &RunConfig, corpus: &Arc<Corpus>, position: Option<Position>) -> Result<Prefetch, Error> {
    let TrainConfig { rows, micro_rows, .. } = config.train;
    let options = LoaderOptions {
        micro_rows,
        ..LoaderOptions::new(config.model.context_length, config.model.mtp.n_modules, rows)
    };
    Ok(Prefetch::new(Loader::new(Arc::clone(corpus), options, position)?, AHEAD)?)
}
