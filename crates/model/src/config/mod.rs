//! The typed configuration of a run: what the sections of a run file hold.
//!
//! The structs say what there is; `schema` says what each value may be (one row a field: type, range, default, note), and
//! everything that has to know it reads that table: the check of a file, [`ModelConfig::validate`] and the comments of the
//! printed form. `relations` holds the rules between fields. All problems are reported at once.

mod check;
mod optim;
mod print;
mod problems;
mod read;
mod relations;
mod run;
mod schema;
#[cfg(test)]
mod tests;
mod train;

pub(crate) use check::nearest;
pub use optim::{AdamWConfig, DecayShape, Matrices, NorMuonConfig, OptimConfig, Orth, ScheduleConfig, ScheduleKind};
pub(crate) use problems::LONGEST;
pub use problems::{Problem, Problems, one_line};
pub use run::{CheckpointConfig, DataConfig, EvalConfig};
pub use schema::{FIELDS, Field, Kind};
pub use train::{OnNonFinite, TrainConfig};

use serde::{Deserialize, Serialize};

use crate::Error;

/// A run file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelConfig,
    /// The optimizers.
    #[serde(default)]
    pub optim: OptimConfig,
    /// The learning rate over the steps.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// The steps.
    #[serde(default)]
    pub train: TrainConfig,
    /// What they read.
    #[serde(default)]
    pub data: DataConfig,
    /// Evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// Everything that fixes the parameters, their shapes and the arithmetic of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Rows of the embedding, which is also the head. Entries, 2 to 65,536: token ids are `u16` in the shards.
    pub vocab_size: usize,
    /// Longest sequence in training. Tokens, 1 to 16,777,216.
    pub context_length: usize,
    /// Width of the residual stream. Numbers, 1 to 65,536.
    pub d_model: usize,
    /// Depth. Layers, 1 to 1,024, a multiple of the pattern's length.
    pub n_layers: usize,
    /// Kinds of the first layers, repeated until the depth is reached. At least one of `gdn`, `mla`.
    pub pattern: Vec<LayerKind>,
    /// Root-mean-square norms.
    #[serde(default)]
    pub norm: NormConfig,
    /// Gated DeltaNet layers. Present exactly when the pattern or the prediction modules use them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gdn: Option<GdnConfig>,
    /// Latent attention layers. Present exactly when the pattern has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mla: Option<MlaConfig>,
    /// Mixture of experts after each latent attention. Present exactly when `mla.ffn` is `moe`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeConfig>,
    /// Multi-token prediction.
    #[serde(default)]
    pub mtp: MtpConfig,
    /// The loss.
    #[serde(default)]
    pub loss: LossConfig,
    /// Initial values.
    #[serde(default)]
    pub init: InitConfig,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Gated DeltaNet: a recurrent state of fixed size.
    Gdn,
    /// Multi-head latent attention: a cache that grows by the token.
    Mla,
}

/// Root-mean-square norms: `y = (1 + w) x / sqrt(mean(x^2) + eps)`, or `w x / ..` when not zero-centred.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NormConfig {
    /// Added to the mean square under the root, here and in the per-head norms. 1e-12 to 0.01.
    pub eps: f64,
    /// Whether gains are stored minus one, so that weight decay pulls them to one. The gated and the latent norm are plain
    /// whatever this says, as in the references they are tested against.
    pub zero_centred: bool,
}

/// Gated DeltaNet layers. Shapes: queries and keys `[n_heads, d_k]`, values `[n_heads, d_v]`, state `[n_heads, d_k, d_v]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GdnConfig {
    /// Heads. 1 to 1,024.
    pub n_heads: usize,
    /// Numbers of a query or key of one head. 1 to 1,024.
    pub d_k: usize,
    /// Numbers of a value of one head. 1 to 1,024.
    pub d_v: usize,
    /// Taps of the causal convolution on q, k and v. Tokens, 2 to 8.
    #[serde(default = "schema::conv_kernel")]
    pub conv_kernel: usize,
    /// Activation of the output gate.
    #[serde(default)]
    pub gate_act: GateAct,
    /// Write strength `2 sigmoid(b)` in place of `sigmoid(b)`, so that `I - beta k k^T` may reach the eigenvalue -1.
    #[serde(default)]
    pub allow_neg_eigval: bool,
    /// Rows that the chunk form takes together. Tokens, a power of two from 16 to 256. It changes rounding and cost only.
    #[serde(default = "schema::chunk_size")]
    pub chunk_size: usize,
    /// Feed-forward block after the mixer.
    #[serde(default)]
    pub ffn: GdnFfn,
    /// Hidden width of that block. 1 to 1,048,576; present exactly when `ffn` is `swiglu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_ff: Option<usize>,
}

/// Activation of the output gate of a GDN head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GateAct {
    /// `sigmoid(z)`, which trains better.
    #[default]
    Sigmoid,
    /// `z sigmoid(z)`, which the public references use.
    Silu,
}

/// Feed-forward block of a GDN layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GdnFfn {
    /// No block: the mixer is the whole layer.
    #[default]
    None,
    /// A dense SwiGLU block.
    Swiglu,
}

/// Latent attention. A query or key has `d_nope + d_rope` numbers, of which the last `d_rope` turn with the position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaConfig {
    /// Query heads. 1 to 1,024.
    pub n_heads: usize,
    /// Key and value groups. 1 to 1,024, dividing `n_heads`; head h reads group `h / (n_heads / n_kv_groups)`.
    pub n_kv_groups: usize,
    /// Content numbers of a query or key. 1 to 1,024.
    pub d_nope: usize,
    /// Rotary numbers of a query or key, one rotary key a group. 0 to 1,024, even; 0 only with `rope = "none"`.
    pub d_rope: usize,
    /// Numbers of a value. 1 to 1,024.
    pub d_v: usize,
    /// Width of the latent from which content keys and values are made. 0 to 16,384; 0 makes them straight from the input,
    /// which is ordinary grouped attention.
    pub kv_latent: usize,
    /// How the rotary numbers turn.
    #[serde(default)]
    pub rope: Rope,
    /// Base of the rotary angles, `position * theta^(-2i / d_rope)`. Above 1, up to 1e9.
    #[serde(default = "schema::rope_theta")]
    pub rope_theta: f64,
    /// Feed-forward block after the attention.
    pub ffn: MlaFfn,
    /// Hidden width of a dense block. 1 to 1,048,576; present exactly when `ffn` is `swiglu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_ff: Option<usize>,
    /// Stretching of the rotary angles to a longer context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yarn: Option<YarnConfig>,
}

/// How rotary numbers turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rope {
    /// Neighbours (2i, 2i + 1) are a pair.
    #[default]
    Interleaved,
    /// They do not turn: attention without positions.
    None,
}

/// Feed-forward block of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MlaFfn {
    /// A mixture of experts.
    Moe,
    /// A dense SwiGLU block.
    Swiglu,
    /// No block.
    None,
}

/// YaRN: rotary angles for `factor` times the context they were trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnConfig {
    /// New context over original context. 1 to 1,024.
    pub factor: f64,
    /// Context that the unstretched angles were trained on. Tokens, 1 to 16,777,216.
    pub original_context: usize,
}

/// Mixture of experts: `n_shared` that see every token, `top_k` of `n_routed` that the router picks for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts to choose from. 1 to 4,096.
    pub n_routed: usize,
    /// Experts that see every token, stored as one of `n_shared * d_ff`. 0 to 64.
    pub n_shared: usize,
    /// Experts chosen for a token. 1 to 64, at most `n_routed`.
    pub top_k: usize,
    /// Hidden width of one expert. 1 to 1,048,576.
    pub d_ff: usize,
    /// Factor on the normalised gates. 0.001 to 100. `E[1 / |p|_2]` for random logits is 1.412 for 2 of 16.
    pub routed_scale: f64,
    /// Weight of the balance loss of each document. 0 to 1; 0 turns it off.
    #[serde(default = "schema::balance_loss")]
    pub balance_loss: f64,
    /// Step of the router bias after each optimizer step. 0 to 1; 0 freezes the bias.
    #[serde(default = "schema::bias_update_rate")]
    pub bias_update_rate: f64,
}

/// Multi-token prediction: module k predicts the token k + 1 places ahead. Each is one GDN layer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MtpConfig {
    /// Modules. 0 to 8.
    pub n_modules: usize,
    /// Weight of each module's loss beside the main loss of weight 1. 0 to 10 each, one a module.
    pub loss_weights: Vec<f64>,
}

/// The loss on the logits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// Weight of `lse^2`, which keeps the logits' normaliser near 1. 0 to 1; 0 turns it off.
    pub z_loss: f64,
    /// Logits become `cap * tanh(logit / cap)`. 0.001 to 1,000; absent turns it off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<f64>,
}

/// Initial values of the matrices. Output matrices of residual branches get `std / sqrt(number of branches)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InitConfig {
    /// Standard deviation before truncation. 0.000001 to 1.
    pub std: f64,
    /// Where the normal is cut, in standard deviations. 1 to 10; 0 does not cut.
    pub truncate: f64,
}

impl RunConfig {
    /// A run of this model with the defaults of everything else.
    #[must_use]
    pub fn new(model: ModelConfig) -> Self {
        RunConfig {
            model,
            optim: OptimConfig::default(),
            schedule: ScheduleConfig::default(),
            train: TrainConfig::default(),
            data: DataConfig::default(),
            eval: EvalConfig::default(),
            checkpoint: CheckpointConfig::default(),
        }
    }

    /// Reads a run file.
    ///
    /// # Errors
    /// [`Error::Toml`] when the text is not TOML, else [`Error::Config`] with every problem there is: unknown, missing and
    /// wrongly typed fields, values out of range, and fields that contradict each other.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        RunConfig::from_toml_with(text, &[])
    }

    /// Reads a run file and puts assignments `section.field=value` over it, the last of a field last.
    ///
    /// # Errors
    /// As [`RunConfig::from_toml`], and assignments that are none.
    ///
    /// ```
    /// use hymo_model::{RunConfig, presets};
    ///
    /// let text = presets::preset("hymo-nano")?.to_toml();
    /// let run = RunConfig::from_toml_with(&text, &["optim.lr=0.002", "schedule.kind=cosine", "data.shards=books"])?;
    /// assert_eq!((run.optim.lr, run.data.shards), (0.002, vec!["books".to_owned()]));
    /// # Ok::<(), hymo_model::Error>(())
    /// ```
    pub fn from_toml_with(text: &str, assignments: &[&str]) -> Result<Self, Error> {
        let (mut tree, mut beyond) = read::read(text)?;
        let set = |assignment: &&str| read::set(&mut tree, &mut beyond, assignment).err();
        Problems::unless_empty(assignments.iter().filter_map(set).collect())?;
        Ok(check::check(tree, beyond)?)
    }

    /// The whole configuration as TOML, defaults included, each line with its unit and range.
    #[must_use]
    pub fn to_toml(&self) -> String {
        print::annotated(self)
    }

    /// Checks every value and every rule between values.
    ///
    /// # Errors
    /// All problems found.
    pub fn validate(&self) -> Result<(), Problems> {
        let tree = toml::Table::try_from(self).map_err(|e| {
            Problems::from(Problem::new("model", format!("a value that TOML cannot hold ({e})"), "sizes below 2^63"))
        })?;
        check::check(tree, read::Beyond::new()).map(|_| ())
    }
}

impl ModelConfig {
    /// [`RunConfig::validate`] of a run with this model.
    ///
    /// # Errors
    /// All problems found.
    pub fn validate(&self) -> Result<(), Problems> {
        RunConfig::new(self.clone()).validate()
    }

    /// Kind of each layer, first to last.
    pub fn layers(&self) -> impl Iterator<Item = LayerKind> + '_ {
        self.pattern.iter().copied().cycle().take(self.n_layers)
    }

    /// Layers of one kind, prediction modules not counted.
    #[must_use]
    pub fn num_layers_of(&self, kind: LayerKind) -> usize {
        self.layers().filter(|&k| k == kind).count()
    }

    /// Additions to the residual stream from embedding to final norm: one a mixer, one a feed-forward block.
    #[must_use]
    pub fn num_residual_branches(&self) -> usize {
        let gdn_ffn = self.gdn.as_ref().is_some_and(|g| g.ffn != GdnFfn::None);
        let mla_ffn = self.mla.as_ref().is_some_and(|m| m.ffn != MlaFfn::None);
        let of = |kind| match kind {
            LayerKind::Gdn => 1 + usize::from(gdn_ffn),
            LayerKind::Mla => 1 + usize::from(mla_ffn),
        };
        self.layers().map(of).sum()
    }
}

impl GdnConfig {
    /// Numbers of all queries, or all keys, of a token: `n_heads * d_k`.
    #[must_use]
    pub fn key_dim(&self) -> usize {
        self.n_heads * self.d_k
    }

    /// Numbers of all values, or all gates, of a token: `n_heads * d_v`.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.n_heads * self.d_v
    }

    /// Channels of the convolution: q, k and v.
    #[must_use]
    pub fn conv_channels(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }
}

impl MlaConfig {
    /// Numbers of one query or key: content and rotary.
    #[must_use]
    pub fn d_qk(&self) -> usize {
        self.d_nope + self.d_rope
    }

    /// Numbers that the decoding cache keeps of a token in one layer: the latent and the rotary keys, or keys and values
    /// themselves when there is no latent.
    #[must_use]
    pub fn cache_numbers(&self) -> usize {
        match self.kv_latent {
            0 => self.n_kv_groups * (self.d_qk() + self.d_v),
            latent => latent + self.n_kv_groups * self.d_rope,
        }
    }
}
