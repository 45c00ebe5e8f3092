//! The tied head: what training's loss, `logits` and decoding read the residual stream by (MATH 4).

use super::Pass;
use crate::config::LossConfig;
use crate::params::ParamTable;
use crate::store::ParamRef;
use crate::{Error, ModelConfig};
use hymo_ops::{cross_entropy, embedding, linear};
use hymo_tape::{Tape, Var};
use hymo_tensor::{Ctx, DType, Real, Result, Tensor};

/// The embedding, which is also the head, and how its logits are taken.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    embed: ParamRef,
    loss: LossConfig,
}

impl Head {
    pub(crate) fn new(table: &ParamTable, model: &ModelConfig) -> std::result::Result<Self, Error> {
        Ok(Head { embed: ParamRef::named(table, "embed.weight")?, loss: model.loss.clone() })
    }

    /// Rows of the embedding [N, D], zero where an id is -1.
    pub(crate) fn embed(&self, tape: &mut Tape, pass: &Pass, ids: Vec<i32>) -> Result<Var> {
        embedding::apply(tape, &ids.into(), &pass.var(&self.embed)?)
    }

    /// weight / count Σ (nll + ζ lse²) over the targets of n [N, D], and the same mean without its weight.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape,
        pass: &Pass,
        n: &Var,
        targets: &[i32],
        (weight, count): (f64, f64),
    ) -> Result<(Var, Mean)> {
        let LossConfig { z_loss, soft_cap } = self.loss;
        let args = cross_entropy::Args { weight, count, z_loss, soft_cap };
        let (loss, sums) = cross_entropy::apply(tape, n, &pass.var(&self.embed)?, targets, args)?;
        Ok((loss, Mean { sums, z_loss, count }))
    }

    /// The logits [N, V] that the loss is a function of, soft cap included.
    pub(crate) fn logits(&self, ctx: &Ctx, pass: &Pass, n: &Var) -> Result<Tensor> {
        let mut logits = linear::forward(ctx, n.value(), pass.var(&self.embed)?.value())?;
        match (self.loss.soft_cap, logits.dtype()) {
            (None, _) => {}
            (Some(cap), DType::F64) => soften::<f64>(&mut logits, cap)?,
            (Some(cap), _) => soften::<f32>(&mut logits, cap)?,
        }
        Ok(logits)
    }
}

/// A mean of the loss, before it is read. From the sums rather than the weighted loss, whose weight may be 0.
#[derive(Debug)]
pub(crate) struct Mean {
    sums: cross_entropy::Sums,
    z_loss: f64,
    count: f64,
}

impl Mean {
    pub(crate) fn read(&self) -> Result<f64> {
        let sums = self.sums.read()?;
        Ok(if self.count > 0. { (sums.nll + self.z_loss * sums.lse_squared) / self.count } else { 0. })
    }
}

/// l ← κ tanh(l / κ).
fn soften<T: Real>(logits: &mut Tensor, cap: f64) -> Result<()> {
    let cap = T::of(cap);
    logits.flat_mut::<T>()?.iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
    Ok(())
}
