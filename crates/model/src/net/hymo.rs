//! The whole model: trunk, head, prediction modules, loss.

use super::head::{Head, Mean};
use super::mtp::Mtp;
use super::state::LayerState;
use super::{Layer, LayerStats, Measured, Norm, Pass, State};
use crate::config::ModelConfig;
use crate::params::ParamTable;
use crate::store::Params;
use crate::{Batch, Counts, Error};
use hymo_ops::Docs;
use hymo_tape::{Tape, Var, checkpoint};
use hymo_tensor::{Ctx, Result, Tensor};
use std::sync::Arc;

/// The network of a configuration. It holds no numbers: every pass reads them from [`Params`].
///
/// ```
/// use hymo_model::{Batch, HyMo, Options, Params, presets};
/// use hymo_tape::Tape;
/// use hymo_tensor::Ctx;
///
/// let (ctx, config) = (Ctx::cpu(), presets::hymo_nano());
/// let (model, params) = (HyMo::new(&config)?, Params::init(&ctx, &config, 1)?);
/// // One row of 16 positions; it carries 2 more tokens for the prediction modules and 1 for the head's last target.
/// let tokens: Vec<i32> = (0..19).map(|i| 7 * i % 100).collect();
/// let batch = Batch::new(1, 16, config.mtp.n_modules, &tokens, &[0; 19])?;
/// let mut tape = Tape::training(&ctx, params.zero_grads(&ctx)?);
/// let losses = model.loss(&mut tape, &params, &batch, &Options::default())?;
/// assert!((losses.read()?.depths[0] - (config.vocab_size as f64).ln()).abs() < 1.0);
/// let grads = tape.backward(&losses.seeds())?;
/// # Ok::<(), hymo_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HyMo {
    config: ModelConfig,
    head: Head,
    layers: Vec<Arc<Layer>>,
    norm: Norm,
    mtp: Vec<Mtp>,
}

/// How a training pass runs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Layers whose activations are dropped and computed again in the backward pass, by index from 0. The result has the
    /// same bits either way.
    pub checkpoint: Vec<usize>,
    /// Denominators of the means, when the batch is part of a larger step: one for each depth.
    pub counts: Option<Counts>,
}

/// The losses of one pass. On a GPU their values stay there until they are read, so that a pass waits for nothing.
#[derive(Debug)]
pub struct Losses {
    /// weight_k L_k: the head's, then each prediction module's.
    weighted: Vec<Var>,
    depths: Vec<Mean>,
    /// Balance losses, by layer with experts.
    balance: Vec<Var>,
    measured: Vec<Measured>,
}

/// What [`Losses`] are, in numbers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LossValues {
    /// L_k: the head's, then each prediction module's; each with its z-loss, unweighted.
    pub depths: Vec<f64>,
    /// The sum of all layers' balance losses.
    pub balance: f64,
    /// L_0 + Σ weight_k L_k + balance.
    pub total: f64,
    /// What each layer measured.
    pub layers: Vec<LayerStats>,
}

impl Losses {
    /// The variables to run backwards from, each with seed 1: their sum is the total loss.
    #[must_use]
    pub fn seeds(&self) -> Vec<(&Var, f64)> {
        self.weighted.iter().chain(&self.balance).filter(|v| v.tracked()).map(|v| (v, 1.)).collect()
    }

    /// All values. On a GPU this waits until the pass is over.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn read(&self) -> Result<LossValues> {
        let sum = |vars: &[Var]| vars.iter().map(|v| v.value().item()).sum::<Result<f64>>();
        let balance = sum(&self.balance)?;
        Ok(LossValues {
            depths: self.depths.iter().map(Mean::read).collect::<Result<_>>()?,
            balance,
            total: sum(&self.weighted)? + balance,
            layers: self.measured.iter().map(Measured::read).collect::<Result<_>>()?,
        })
    }
}

impl HyMo {
    /// The network of a configuration.
    ///
    /// # Errors
    /// A configuration that [`ModelConfig::validate`] refuses.
    pub fn new(config: &ModelConfig) -> std::result::Result<Self, Error> {
        let table = ParamTable::new(config)?;
        let layers = config.layers().enumerate().map(|(i, kind)| Ok(Arc::new(Layer::new(&table, config, i, kind)?)));
        Ok(HyMo {
            config: config.clone(),
            head: Head::new(&table, config)?,
            layers: layers.collect::<std::result::Result<_, Error>>()?,
            norm: Norm::new(&table, "norm", &config.norm)?,
            mtp: (0..config.mtp.n_modules)
                .map(|k| Mtp::new(&table, config, k))
                .collect::<std::result::Result<_, _>>()?,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The losses of a batch. On a tape made by [`Tape::training`], run it backwards from [`Losses::seeds`].
    ///
    /// # Errors
    /// A token id outside the vocabulary; a batch or counts made for another number of prediction modules; counts that
    /// are no counts; a layer to checkpoint that there is not.
    pub fn loss(&self, tape: &mut Tape, params: &Params, batch: &Batch, options: &Options) -> Result<Losses> {
        self.check_batch(batch)?;
        self.check_options(options)?;
        let counts = options.counts.clone().unwrap_or_else(|| batch.counts());
        let pass = Pass::new(self, params, Arc::clone(batch.docs()), &batch.positions(), counts.tokens)?;
        let x = self.head.embed(tape, &pass, batch.inputs())?; // [N, D]
        let (mut h, balance) = self.trunk(tape, &pass, x, &options.checkpoint)?;
        let mut losses = Losses { weighted: Vec::new(), depths: Vec::new(), balance, measured: Vec::new() };
        let weights = std::iter::once(1.).chain(self.config.mtp.loss_weights.iter().copied());
        for (depth, (weight, &count)) in weights.zip(&counts.valid).enumerate() {
            let n;
            (h, n) = self.depth(tape, &pass, batch, h, depth)?;
            let (loss, mean) = self.head.loss(tape, &pass, &n, &batch.ahead(depth + 1), (weight, count))?;
            losses.weighted.push(loss);
            losses.depths.push(mean);
        }
        losses.measured = pass.take_measured();
        Ok(losses)
    }

    /// From the hidden state of the depth before (of the trunk, for the head's own): this depth's, and what the head
    /// reads of it.
    fn depth(&self, tape: &mut Tape, pass: &Pass, batch: &Batch, h: Var, depth: usize) -> Result<(Var, Var)> {
        let Some(module) = depth.checked_sub(1).map(|k| &self.mtp[k]) else {
            let n = self.norm.forward(tape, pass, &h)?;
            return Ok((h, n));
        };
        tape.enter(self.layers.len() + depth);
        let e = self.head.embed(tape, pass, batch.ahead(depth))?;
        let h = module.forward(tape, pass, &h, &e, None)?;
        let n = module.output(tape, pass, &h)?;
        tape.enter(0);
        Ok((h, n))
    }

    fn check_batch(&self, batch: &Batch) -> Result<()> {
        if batch.n_modules() == self.mtp.len() {
            return Ok(());
        }
        let got = format!("rows for {} prediction modules", batch.n_modules());
        Err(hymo_tensor::Error::value("loss", "batch", got, format!("rows for {}", self.mtp.len())))
    }

    fn check_options(&self, options: &Options) -> Result<()> {
        let (layers, depths) = (self.layers.len(), self.mtp.len() + 1);
        if let Some(&i) = options.checkpoint.iter().find(|&&i| i >= layers) {
            let want = format!("layers in 0..{layers}");
            return Err(hymo_tensor::Error::value("loss", "options.checkpoint", format!("layer {i}"), want));
        }
        let Some(Counts { valid, tokens }) = &options.counts else { return Ok(()) };
        if valid.len() != depths {
            let (got, want) = (format!("{} numbers", valid.len()), format!("{depths}, one a depth"));
            return Err(hymo_tensor::Error::value("loss", "options.counts.valid", got, want));
        }
        match valid.iter().chain([tokens]).find(|n| !(n.is_finite() && **n >= 0.)) {
            Some(n) => Err(hymo_tensor::Error::value("loss", "options.counts", n, "finite numbers from 0")),
            None => Ok(()),
        }
    }

    /// All layers: x [N, D] -> the residual stream before the final norm, and the balance losses.
    fn trunk(&self, tape: &mut Tape, pass: &Pass, mut x: Var, again: &[usize]) -> Result<(Var, Vec<Var>)> {
        let mut balance = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            tape.enter(i + 1);
            let aux;
            [x, aux] = if again.contains(&i) {
                let (layer, pass) = (Arc::clone(layer), pass.clone());
                checkpoint(tape, [&x], move |tape, [x]| layer.forward(tape, &pass, &x, None))?
            } else {
                layer.forward(tape, pass, &x, None)?
            };
            if layer.has_experts() {
                balance.push(aux);
            }
        }
        tape.enter(0);
        Ok((x, balance))
    }

    /// Logits [N, V] of every position at every depth, soft cap included: the head's, then each prediction module's. For
    /// tests and small evaluations: training never holds them.
    ///
    /// # Errors
    /// As [`HyMo::loss`].
    pub fn logits(&self, ctx: &Ctx, params: &Params, batch: &Batch) -> Result<Vec<Tensor>> {
        self.check_batch(batch)?;
        let tape = &mut Tape::off(ctx);
        let pass = Pass::new(self, params, Arc::clone(batch.docs()), &batch.positions(), batch.counts().tokens)?;
        let x = self.head.embed(tape, &pass, batch.inputs())?;
        let (mut h, _) = self.trunk(tape, &pass, x, &[])?;
        let mut out = Vec::new();
        for depth in 0..=self.mtp.len() {
            let n;
            (h, n) = self.depth(tape, &pass, batch, h, depth)?;
            out.push(self.head.logits(ctx, &pass, &n)?);
        }
        Ok(out)
    }

    /// Feeds tokens of one sequence to a state that goes on from the tokens before: the head's logits [tokens, V],
    /// soft cap included. Any split of a sequence into pieces gives the same logits, up to rounding.
    ///
    /// # Errors
    /// A token id outside the vocabulary; no tokens; a state of another model.
    pub fn extend(&self, ctx: &Ctx, params: &Params, tokens: &[i32], state: &mut State) -> Result<Tensor> {
        if tokens.is_empty() || state.layers.len() != self.layers.len() {
            let got = format!("{} tokens, a state of {} layers", tokens.len(), state.layers.len());
            return Err(hymo_tensor::Error::value(
                "extend",
                "input",
                got,
                format!("tokens and {} layers", self.layers.len()),
            ));
        }
        if let Some(at) = tokens.iter().position(|&t| t < 0) {
            let want = format!("ids in 0..{}", self.config.vocab_size);
            return Err(hymo_tensor::Error::value("extend", "tokens", format!("{} at {at}", tokens[at]), want));
        }
        let tape = &mut Tape::off(ctx);
        let n = tokens.len();
        let docs = Docs::continuing(1, n, &vec![0; n], &[state.position > 0])?;
        let positions: Vec<i32> = (state.position..state.position + n).map(|p| p as i32).collect();
        let pass = Pass::new(self, params, Arc::new(docs), &positions, n as f64)?;
        let mut x = self.head.embed(tape, &pass, tokens.to_vec())?;
        // The state is replaced as a whole, so that an error leaves it as it was.
        let mut layers: Vec<LayerState> = state.layers.clone();
        for (layer, state) in self.layers.iter().zip(&mut layers) {
            [x, _] = layer.forward(tape, &pass, &x, Some(state))?;
        }
        let n = self.norm.forward(tape, &pass, &x)?;
        let logits = self.head.logits(ctx, &pass, &n)?;
        *state = State { layers, position: state.position + tokens.len() };
        Ok(logits)
    }
}
