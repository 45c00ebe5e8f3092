//! How a run's weights are moved: what `[optim]` and `[schedule]` of a run file hold. The arithmetic is `hymo-optim`'s;
//! sources and defaults are MATH's sections 6 to 8 and 12.

use serde::{Deserialize, Serialize};

/// The optimizers. A parameter's optimizer is declared in the parameter table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// Learning rate where the schedule's factor is 1; both optimizers share it. Above 0, up to 10.
    pub lr: f64,
    /// Weight decay of the parameters that decay: a step takes the part `lr * weight_decay` of a weight. 0 to 10.
    pub weight_decay: f64,
    /// Whether the embedding, which is also the head, decays. Off if logits shrink.
    pub decay_embedding: bool,
    /// Gradients whose norm over all parameters is larger are scaled down to it. 0 to 1e9; 0 does not clip.
    pub clip_norm: f64,
    /// Share that a moving average of the weights keeps in a step. 0 to 0.999999; 0 keeps no average.
    pub ema: f64,
    /// What moves the dense hidden matrices.
    pub matrices: Matrices,
    /// Dense hidden matrices, unless `matrices` says otherwise.
    pub normuon: NorMuonConfig,
    /// Embedding, experts, router, gates, convolutions, vectors.
    pub adamw: AdamWConfig,
}

/// The optimizer of the dense hidden matrices. Everything else is moved by AdamW.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matrices {
    /// NorMuon.
    #[default]
    NorMuon,
    /// AdamW, as all the rest: to compare with.
    AdamW,
}

/// NorMuon: orthogonalised momentum, normalised by row, of a fixed root mean square.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NorMuonConfig {
    /// Factor on the learning rate. 0 to 1,000.
    pub lr_mult: f64,
    /// What the momentum keeps in a step. 0 to 0.9999.
    pub beta1: f64,
    /// What the mean squares of rows keep in a step. 0 to 0.9999.
    pub beta2: f64,
    /// Whether the gradient is added to the momentum once more before it is orthogonalised.
    pub nesterov: bool,
    /// Polynomials of the orthogonalisation.
    pub orth: Orth,
    /// Whether heads are orthogonalised apart, where the parameter table declares them.
    pub split_heads: bool,
    /// Root mean square of an update before the learning rate. 0.0001 to 100.
    pub rms: f64,
    /// Added to the root of a row's mean square. 1e-15 to 0.001.
    pub eps: f64,
    /// Whether a weight decays only where the step already shrinks it.
    pub cautious_decay: bool,
}

/// Five steps of a polynomial iteration that sends singular values towards 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Orth {
    /// Polar Express: one polynomial a step, into [0.86, 1.14] from 0.01.
    #[default]
    PolarExpress,
    /// The same polynomial five times, into [0.68, 1.13] from 0.01.
    NewtonSchulz,
}

/// Cautious AdamW: coordinates whose momentum and gradient disagree wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Factor on the learning rate. 0 to 1,000.
    pub lr_mult: f64,
    /// What the momentum keeps in a step. 0 to 0.9999.
    pub beta1: f64,
    /// What the mean squares keep in a step. 0 to 0.99999.
    pub beta2: f64,
    /// Added to the root of the mean square. 1e-15 to 0.001.
    pub eps: f64,
    /// Whether the mask is on; without it this is AdamW.
    pub cautious: bool,
}

/// The learning rate over the steps of a run, as a factor on `optim.lr`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// Its form.
    pub kind: ScheduleKind,
    /// Steps of the run. 1 to 2,000,000,000.
    pub num_steps: u64,
    /// Share of the steps in which the factor rises from 0 to 1. 0 to 1.
    pub warmup: f64,
    /// Share of the steps in which `wsd` falls, at the end. 0 to 1, together with `warmup` at most 1.
    pub decay: f64,
    /// How `wsd` falls.
    pub decay_shape: DecayShape,
    /// Factor at the end of `wsd` and `cosine`. 0 to 1.
    pub final_factor: f64,
    /// Step after which `wsd` falls, in place of `decay`: a branch from a stable checkpoint. After the warm-up and before
    /// `num_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_from: Option<u64>,
}

/// Form of a schedule; each begins with the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Warm-up, stable, decay: a run can be cut at any stable step and finished from there.
    #[default]
    Wsd,
    /// Half a cosine from 1 to the final factor.
    Cosine,
    /// Stays at 1.
    Constant,
}

/// How the decay of `wsd` goes down, over x from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayShape {
    /// 1 - sqrt(x), which beats the line.
    #[default]
    OneMinusSqrt,
    /// 1 - x.
    Linear,
    /// 0.5^(5 x), which ends at 1/32.
    Exponential,
}

impl Default for OptimConfig {
    fn default() -> Self {
        OptimConfig {
            lr: 1.5e-3,
            weight_decay: 0.1,
            decay_embedding: true,
            clip_norm: 1.0,
            ema: 0.0,
            matrices: Matrices::default(),
            normuon: NorMuonConfig::default(),
            adamw: AdamWConfig::default(),
        }
    }
}

impl Default for NorMuonConfig {
    fn default() -> Self {
        NorMuonConfig {
            lr_mult: 1.0,
            beta1: 0.95,
            beta2: 0.95,
            nesterov: true,
            orth: Orth::PolarExpress,
            split_heads: false,
            rms: 0.2,
            eps: 1e-8,
            cautious_decay: true,
        }
    }
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig { lr_mult: 1.0, beta1: 0.9, beta2: 0.95, eps: 1e-8, cautious: true }
    }
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        ScheduleConfig {
            kind: ScheduleKind::Wsd,
            num_steps: 1000,
            warmup: 0.02,
            decay: 0.2,
            decay_shape: DecayShape::OneMinusSqrt,
            final_factor: 0.0,
            decay_from: None,
        }
    }
}

impl ScheduleConfig {
    /// Steps of the warm-up: the share, rounded, and at least one when it is not zero.
    #[must_use]
    pub fn warmup_steps(&self) -> u64 {
        steps(self.warmup, self.num_steps)
    }

    /// Last step before the decay of `wsd`.
    #[must_use]
    pub fn decay_start(&self) -> u64 {
        let by_share = self.num_steps - steps(self.decay, self.num_steps);
        // Both shares may round up.
        self.decay_from.unwrap_or(by_share.max(self.warmup_steps()))
    }
}

fn steps(share: f64, of: u64) -> u64 {
    let whole = (share * of as f64).round() as u64;
    whole.max(u64::from(share > 0.0)).min(of)
}
