//! A run in memory: parameters, optimizer, place in the data; to and from a checkpoint.

use crate::Error;
use crate::checkpoint::{Checkpoint, Snapshot};
use hymo_data::corpus::Corpus;
use hymo_data::loader::{Loader, LoaderOptions, Prefetch};
use hymo_data::stream::Position;
use hymo_model::config::{RunConfig, TrainConfig};
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
    corpus: Arc<Corpus>,
}

/// What the loop goes on from, beside tensors and the place in the data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoopState {
    /// Steps taken, those without an update too.
    pub step: u64,
    /// Steps whose gradient was not finite.
    pub skipped: u64,
    /// Of these, the last ones in a row.
    pub in_a_row: u32,
    /// Tokens trained on.
    pub tokens: u64,
    /// The best evaluation: its step and its loss.
    pub best: Option<(u64, f64)>,
}

/// The state as it stands in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    #[serde(rename = "loop")]
    state: LoopState,
    data: Position,
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
            params,
            corpus,
        })
    }

    /// The run's configuration.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
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
        let json = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
        let saved = Saved { state: self.state, data: self.data.position().clone() };
        let config = json(serde_json::to_value(&self.config));
        let mut snapshot = Snapshot::new(self.state.step, config, json(serde_json::to_value(saved)));
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
        let path = from.path().to_owned();
        let saved: Saved = serde_json::from_value(from.state().clone())
            .map_err(|e| Error::State { path: path.clone(), problem: e.to_string() })?;
        trainer.take(&mut from)?;
        from.finish()?;
        trainer.data = loader(config, &trainer.corpus, Some(saved.data))?;
        trainer.state = saved.state;
        Ok(trainer)
    }

    fn take(&mut self, from: &mut Checkpoint) -> Result<(), Error> {
        for spec in self.params.table().params().to_vec() {
            let values = from.take(&format!("model.{}", spec.name), &spec.shape)?;
            let flat = &mut self.params.flats_mut()[spec.unit.index()];
            flat.flat_mut::<f32>()?[spec.range()].copy_from_slice(&values);
        }
        for spec in self.params.table().buffers().to_vec() {
            from.take_into(&format!("model.{}", spec.name), self.params.buffer_mut(&spec.name)?)?;
        }
        let mut state = Vec::new();
        for (name, tensor) in self.optimizer.tensors()? {
            let mut saved = tensor.copy(&self.ctx)?;
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
