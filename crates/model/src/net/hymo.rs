//! The whole model: trunk, head, prediction modules, loss.

use super::mtp::Mtp;
use super::state::LayerState;
use super::{Layer, LayerStats, Norm, Pass, State};
use crate::config::{LossConfig, ModelConfig};
use crate::params::ParamTable;
use crate::store::{ParamRef, Params};
use crate::{Batch, Counts, Error};
use hymo_ops::{Docs, cross_entropy, embedding, linear};
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
/// assert!((losses.depths()[0] - (config.vocab_size as f64).ln()).abs() < 1.0);
/// let grads = tape.backward(&losses.seeds())?;
/// # Ok::<(), hymo_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HyMo {
    config: ModelConfig,
    embed: ParamRef,
    layers: Vec<Arc<Layer>>,
    norm: Norm,
    mtp: Vec<Mtp>,
}

/// How a training pass runs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Layers whose activations are dropped and computed again in the backward pass, by index. The result has the same
    /// bits either way.
    pub checkpoint: Vec<usize>,
    /// Denominators of the means, when the batch is part of a larger step.
    pub counts: Option<Counts>,
}

/// The losses of one pass.
#[derive(Debug)]
pub struct Losses {
    /// weight_k L_k: the head's, then each prediction module's.
    weighted: Vec<Var>,
    depths: Vec<f64>,
    /// Balance losses, by layer with experts.
    balance: Vec<Var>,
    /// What each layer measured.
    pub stats: Vec<LayerStats>,
}

impl Losses {
    /// The variables to run backwards from, each with seed 1: their sum is the total loss.
    #[must_use]
    pub fn seeds(&self) -> Vec<(&Var, f64)> {
        self.weighted.iter().chain(&self.balance).filter(|v| v.tracked()).map(|v| (v, 1.)).collect()
    }

    /// L_k: the head's, then each prediction module's; each with its z-loss, unweighted.
    #[must_use]
    pub fn depths(&self) -> &[f64] {
        &self.depths
    }

    /// The sum of all layers' balance losses.
    ///
    /// # Errors
    /// None in practice: each loss is one number.
    pub fn balance(&self) -> Result<f64> {
        self.balance.iter().map(|v| v.value().item()).sum()
    }

    /// L_0 + Σ weight_k L_k + balance.
    ///
    /// # Errors
    /// None in practice: each loss is one number.
    pub fn total(&self) -> Result<f64> {
        Ok(self.weighted.iter().map(|v| v.value().item()).sum::<Result<f64>>()? + self.balance()?)
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
            embed: ParamRef::named(&table, "embed.weight")?,
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
    /// A token id outside the vocabulary; a batch made for another number of prediction modules.
    pub fn loss(&self, tape: &mut Tape, params: &Params, batch: &Batch, options: &Options) -> Result<Losses> {
        self.check_batch(batch)?;
        let counts = options.counts.clone().unwrap_or_else(|| batch.counts());
        let pass = Pass::new(self, params, Arc::clone(batch.docs()), &batch.positions(), counts.tokens)?;
        let embed = pass.var(&self.embed)?;
        let x = embedding::apply(tape, &batch.inputs().into(), &embed)?; // [N, D]
        let (mut h, balance) = self.trunk(tape, &pass, x, &options.checkpoint)?;
        let mut losses = Losses { weighted: Vec::new(), depths: Vec::new(), balance, stats: Vec::new() };
        let n = self.norm.forward(tape, &pass, &h)?;
        self.head(tape, &n, &embed, (batch, 0, &counts), &mut losses)?;
        for (k, module) in self.mtp.iter().enumerate() {
            let e = embedding::apply(tape, &batch.ahead(k + 1).into(), &embed)?;
            h = module.forward(tape, &pass, &h, &e, None)?;
            let n = module.output(tape, &pass, &h)?;
            self.head(tape, &n, &embed, (batch, k + 1, &counts), &mut losses)?;
        }
        losses.stats = pass.take_stats();
        Ok(losses)
    }

    fn check_batch(&self, batch: &Batch) -> Result<()> {
        if batch.n_modules() == self.mtp.len() {
            return Ok(());
        }
        let got = format!("rows for {} prediction modules", batch.n_modules());
        Err(hymo_tensor::Error::value("loss", "batch", got, format!("rows for {}", self.mtp.len())))
    }

    /// All layers: x [N, D] -> the residual stream before the final norm, and the balance losses.
    fn trunk(&self, tape: &mut Tape, pass: &Pass, mut x: Var, again: &[usize]) -> Result<(Var, Vec<Var>)> {
        let mut balance = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
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
        Ok((x, balance))
    }

    /// Adds the loss of one depth to `losses`.
    fn head(
        &self,
        tape: &mut Tape,
        n: &Var,
        embed: &Var,
        (batch, depth, counts): (&Batch, usize, &Counts),
        losses: &mut Losses,
    ) -> Result<()> {
        let LossConfig { z_loss, soft_cap } = self.config.loss;
        let weight = depth.checked_sub(1).map_or(1., |k| self.config.mtp.loss_weights[k]);
        let args = cross_entropy::Args { weight, count: counts.valid[depth], z_loss, soft_cap };
        let targets = batch.ahead(depth + 1);
        let (loss, sums) = cross_entropy::apply(tape, n, embed, &targets, args)?;
        losses.weighted.push(loss);
        // From the sums rather than the weighted loss, whose weight may be 0.
        losses.depths.push(if args.count > 0. { (sums.nll + z_loss * sums.lse_squared) / args.count } else { 0. });
        Ok(())
    }

    /// Logits [N, V] of every position at every depth: the head's, then each prediction module's. For tests and small
    /// evaluations: training never holds them.
    ///
    /// # Errors
    /// As [`HyMo::loss`].
    pub fn logits(&self, ctx: &Ctx, params: &Params, batch: &Batch) -> Result<Vec<Tensor>> {
        self.check_batch(batch)?;
        let tape = &mut Tape::off(ctx);
        let pass = Pass::new(self, params, Arc::clone(batch.docs()), &batch.positions(), batch.counts().tokens)?;
        let embed = pass.var(&self.embed)?;
        let x = embedding::apply(tape, &batch.inputs().into(), &embed)?;
        let (mut h, _) = self.trunk(tape, &pass, x, &[])?;
        let n = self.norm.forward(tape, &pass, &h)?;
        let mut out = vec![linear::forward(ctx, n.value(), embed.value())?];
        for (k, module) in self.mtp.iter().enumerate() {
            let e = embedding::apply(tape, &batch.ahead(k + 1).into(), &embed)?;
            h = module.forward(tape, &pass, &h, &e, None)?;
            let n = module.output(tape, &pass, &h)?;
            out.push(linear::forward(ctx, n.value(), embed.value())?);
        }
        Ok(out)
    }

    /// Feeds tokens of one sequence to a state that goes on from the tokens before: the head's logits [tokens, V]. Any
    /// split of a sequence into pieces gives the same logits, up to rounding.
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
        let embed = pass.var(&self.embed)?;
        let mut x = embedding::apply(tape, &tokens.to_vec().into(), &embed)?;
        // The state is replaced as a whole, so that an error leaves it as it was.
        let mut layers: Vec<LayerState> = state.layers.clone();
        for (layer, state) in self.layers.iter().zip(&mut layers) {
            [x, _] = layer.forward(tape, &pass, &x, Some(state))?;
        }
        let n = self.norm.forward(tape, &pass, &x)?;
        let logits = linear::forward(ctx, n.value(), embed.value())?;
        *state = State { layers, position: state.position + tokens.len() };
        Ok(logits)
    }
}
