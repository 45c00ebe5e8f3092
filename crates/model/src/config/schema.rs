//! What each field of a run file may hold: one row a field.
//!
//! A test holds this table and the structs to each other, names, types and defaults.

use super::{InitConfig, LossConfig, NormConfig};

/// Type and range of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A whole number from the first to the second, both allowed.
    Int(i64, i64),
    /// A finite number from the first to the second, both allowed.
    Num(f64, f64),
    /// A finite number above the first, up to the second.
    Above(f64, f64),
    /// `true` or `false`.
    Bool,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of at least one of these words.
    Choices(&'static [&'static str]),
    /// A list of finite numbers, each from the first to the second.
    Nums(f64, f64),
    /// A list of texts that are not empty.
    Texts,
}

/// What happens when a field is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// It must be given (in a section that is given).
    Wrong,
    /// It takes this value, as TOML.
    Default(&'static str),
    /// It stays out: whatever it describes is off, or another field decides whether it is needed.
    Off,
}

/// One field of a run file.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Dotted path.
    pub path: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// What happens without it.
    pub absent: Absent,
    /// A few words with the unit; the struct's own documentation says more.
    pub note: &'static str,
}

const fn row(path: &'static str, kind: Kind, absent: Absent, note: &'static str) -> Field {
    Field { path, kind, absent, note }
}

use Absent::{Default, Off, Wrong};
use Kind::{Above, Bool, Choice, Choices, Int, Num, Nums, Texts};

const LAYERS: &[&str] = &["gdn", "mla"];
const HEAD: Kind = Int(1, 1024);
const TOKENS: Kind = Int(1, 1 << 24);
const HIDDEN: Kind = Int(1, 1 << 20);
const BETA: Kind = Num(0.0, 0.9999);
const EPS: Kind = Num(1e-15, 1e-3);
const STEPS: Kind = Int(0, 2_000_000_000);
const POLICIES: &[&str] = &["stop", "skip", "roll_back"];
const SHAPES: &[&str] = &["one_minus_sqrt", "linear", "exponential"];

/// Every field of a run file, in the order in which it is printed.
#[rustfmt::skip]
pub const FIELDS: &[Field] = &[
    row("model.vocab_size", Int(2, 65_536), Wrong, "entries; ids are u16 in the shards"),
    row("model.context_length", TOKENS, Wrong, "tokens"),
    row("model.d_model", Int(1, 65_536), Wrong, "width of the residual stream"),
    row("model.n_layers", Int(1, 1024), Wrong, "a multiple of the pattern's length"),
    row("model.pattern", Choices(LAYERS), Wrong, "repeated to n_layers"),
    row("model.norm.eps", Num(1e-12, 1e-2), Default("0.000001"), "under the root"),
    row("model.norm.zero_centred", Bool, Default("true"), "gains stored minus one"),
    row("model.gdn.n_heads", HEAD, Wrong, "heads"),
    row("model.gdn.d_k", HEAD, Wrong, "numbers of a query or key"),
    row("model.gdn.d_v", HEAD, Wrong, "numbers of a value"),
    row("model.gdn.conv_kernel", Int(2, 8), Default("4"), "tokens"),
    row("model.gdn.gate_act", Choice(&["sigmoid", "silu"]), Default("\"sigmoid\""), "output gate"),
    row("model.gdn.allow_neg_eigval", Bool, Default("false"), "write strength up to 2"),
    row("model.gdn.chunk_size", Int(16, 256), Default("64"), "tokens, a power of two"),
    row("model.gdn.ffn", Choice(&["none", "swiglu"]), Default("\"none\""), "block after the mixer"),
    row("model.gdn.d_ff", HIDDEN, Off, "hidden width, with ffn = \"swiglu\" only"),
    row("model.mla.n_heads", HEAD, Wrong, "query heads"),
    row("model.mla.n_kv_groups", HEAD, Wrong, "key and value groups, dividing n_heads"),
    row("model.mla.d_nope", HEAD, Wrong, "content numbers of a query or key"),
    row("model.mla.d_rope", Int(0, 1024), Wrong, "rotary numbers of a query or key, even"),
    row("model.mla.d_v", HEAD, Wrong, "numbers of a value"),
    row("model.mla.kv_latent", Int(0, 16_384), Wrong, "width of the latent; 0 is ordinary grouped attention"),
    row("model.mla.rope", Choice(&["interleaved", "none"]), Default("\"interleaved\""), "pairs that turn"),
    row("model.mla.rope_theta", Above(1.0, 1e9), Default("10000.0"), "base of the angles"),
    row("model.mla.ffn", Choice(&["moe", "swiglu", "none"]), Wrong, "block after the attention"),
    row("model.mla.d_ff", HIDDEN, Off, "hidden width, with ffn = \"swiglu\" only"),
    row("model.mla.yarn.factor", Num(1.0, 1024.0), Wrong, "new context over original context"),
    row("model.mla.yarn.original_context", TOKENS, Wrong, "tokens"),
    row("model.moe.n_routed", Int(1, 4096), Wrong, "experts to choose from"),
    row("model.moe.n_shared", Int(0, 64), Wrong, "experts that see every token"),
    row("model.moe.top_k", Int(1, 64), Wrong, "experts chosen for a token, at most n_routed"),
    row("model.moe.d_ff", HIDDEN, Wrong, "hidden width of one expert"),
    row("model.moe.routed_scale", Num(1e-3, 100.0), Wrong, "factor on the normalised gates"),
    row("model.moe.balance_loss", Num(0.0, 1.0), Default("0.0001"), "weight; 0 is off"),
    row("model.moe.bias_update_rate", Num(0.0, 1.0), Default("0.001"), "router bias, a step; 0 freezes it"),
    row("model.mtp.n_modules", Int(0, 8), Default("0"), "tokens predicted beyond the next"),
    row("model.mtp.loss_weights", Nums(0.0, 10.0), Default("[]"), "one a module"),
    row("model.loss.z_loss", Num(0.0, 1.0), Default("0.0001"), "weight of lse^2; 0 is off"),
    row("model.loss.soft_cap", Num(1e-3, 1000.0), Off, "on logits; absent is off"),
    row("model.init.std", Num(1e-6, 1.0), Default("0.02"), "of matrices, before truncation"),
    row("model.init.truncate", Num(0.0, 10.0), Default("3.0"), "in standard deviations; 0 does not cut"),
    row("optim.lr", Above(0.0, 10.0), Default("0.0015"), "where the schedule's factor is 1"),
    row("optim.weight_decay", Num(0.0, 10.0), Default("0.1"), "times lr, a step"),
    row("optim.decay_embedding", Bool, Default("true"), "whether the embedding decays too"),
    row("optim.clip_norm", Num(0.0, 1e9), Default("1.0"), "of the whole gradient; 0 does not clip"),
    row("optim.ema", Num(0.0, 0.999_999), Default("0.0"), "of the weights, kept in a step; 0 is off"),
    row("optim.matrices", Choice(&["normuon", "adamw"]), Default("\"normuon\""), "what moves the hidden matrices"),
    row("optim.normuon.lr_mult", Num(0.0, 1000.0), Default("1.0"), "factor on lr"),
    row("optim.normuon.beta1", BETA, Default("0.95"), "momentum kept in a step"),
    row("optim.normuon.beta2", BETA, Default("0.95"), "rows' mean squares kept in a step"),
    row("optim.normuon.nesterov", Bool, Default("true"), "the gradient once more"),
    row("optim.normuon.orth", Choice(&["polar_express", "newton_schulz"]), Default("\"polar_express\""), "five steps"),
    row("optim.normuon.split_heads", Bool, Default("false"), "heads orthogonalised apart"),
    row("optim.normuon.rms", Num(1e-4, 100.0), Default("0.2"), "of an update, before lr"),
    row("optim.normuon.eps", EPS, Default("0.00000001"), "on a row's root mean square"),
    row("optim.normuon.cautious_decay", Bool, Default("true"), "only where the step shrinks the weight"),
    row("optim.adamw.lr_mult", Num(0.0, 1000.0), Default("1.0"), "factor on lr"),
    row("optim.adamw.beta1", BETA, Default("0.9"), "momentum kept in a step"),
    row("optim.adamw.beta2", Num(0.0, 0.99999), Default("0.95"), "mean squares kept in a step"),
    row("optim.adamw.eps", EPS, Default("0.00000001"), "on the root mean square"),
    row("optim.adamw.cautious", Bool, Default("true"), "only where momentum and gradient agree"),
    row("schedule.kind", Choice(&["wsd", "cosine", "constant"]), Default("\"wsd\""), "after the warm-up"),
    row("schedule.num_steps", Int(1, 2_000_000_000), Default("1000"), "steps of the run"),
    row("schedule.warmup", Num(0.0, 1.0), Default("0.02"), "share of the steps"),
    row("schedule.decay", Num(0.0, 1.0), Default("0.2"), "share of the steps at the end, of wsd"),
    row("schedule.decay_shape", Choice(SHAPES), Default("\"one_minus_sqrt\""), "of wsd"),
    row("schedule.final_factor", Num(0.0, 1.0), Default("0.0"), "times lr, at the end of wsd and cosine"),
    row("schedule.decay_from", Int(0, 2_000_000_000), Off, "step after which wsd falls, in place of decay"),
    row("train.seed", Int(0, 1 << 62), Default("0"), "of the initial parameters"),
    row("train.rows", Int(1, 1 << 20), Default("16"), "of context_length tokens, a step; a multiple of micro_rows"),
    row("train.micro_rows", Int(1, 1 << 16), Default("4"), "computed at once"),
    row("train.recompute", Int(0, 1024), Default("0"), "every how many layers one runs again; 0 is none"),
    row("train.spike", Num(0.0, 1e6), Default("0.0"), "gradient norm over the recent median, as if not finite; 0 is off"),
    row("train.on_non_finite", Choice(POLICIES), Default("\"stop\""), "a step whose gradient is not finite"),
    row("train.qk_clip", Num(0.0, 1e6), Default("0.0"), "largest attention logit of a head; 0 does not clip"),
    row("data.shards", Texts, Default("[]"), "folders that `hymo data prep` wrote"),
    row("data.weights", Nums(0.0, 1e9), Default("[]"), "one a folder; none: by size"),
    row("data.shuffle", Bool, Default("true"), "documents, anew in every epoch"),
    row("data.seed", Int(0, 1 << 62), Default("0"), "of that order"),
    row("eval.every", STEPS, Default("250"), "steps; 0 is at the end only"),
    row("eval.tokens", Int(0, 1 << 40), Default("262144"), "held out; 0 is all of them"),
    row("eval.prompts", Texts, Default("[]"), "to continue; none: from held-out documents"),
    row("eval.samples", Int(0, 64), Default("2"), "texts written"),
    row("eval.sample_tokens", Int(1, 65_536), Default("96"), "tokens each"),
    row("eval.temperature", Num(0.0, 10.0), Default("0.8"), "of the samples; 0 is greedy"),
    row("checkpoint.every", STEPS, Default("250"), "steps; 0 is at the end only"),
    row("checkpoint.keep_last", Int(1, 1_000_000), Default("3"), "newest"),
    row("checkpoint.keep_every", STEPS, Default("0"), "steps that divide by this; 0 is none"),
    row("checkpoint.keep_best", Bool, Default("true"), "the one with the best evaluation"),
];

/// Longest pattern that is read, as [`super::ModelConfig::n_layers`] can be no longer.
pub(super) const LONGEST_LIST: usize = 1024;

pub(super) fn conv_kernel() -> usize {
    4
}

pub(super) fn chunk_size() -> usize {
    64
}

pub(super) fn rope_theta() -> f64 {
    1e4
}

pub(super) fn balance_loss() -> f64 {
    1e-4
}

pub(super) fn bias_update_rate() -> f64 {
    1e-3
}

impl std::default::Default for NormConfig {
    fn default() -> Self {
        NormConfig { eps: 1e-6, zero_centred: true }
    }
}

impl std::default::Default for LossConfig {
    fn default() -> Self {
        LossConfig { z_loss: 1e-4, soft_cap: None }
    }
}

impl std::default::Default for InitConfig {
    fn default() -> Self {
        InitConfig { std: 0.02, truncate: 3.0 }
    }
}

impl Field {
    /// The field's name without its section.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.path.rsplit('.').next().unwrap_or(self.path)
    }

    /// The dotted path of its section.
    #[must_use]
    pub fn section(&self) -> &'static str {
        self.path.rsplit_once('.').map_or("", |(section, _)| section)
    }
}

impl Kind {
    /// What is allowed, in words.
    #[must_use]
    pub fn allowed(&self) -> String {
        match self {
            Int(min, max) => format!("a whole number from {min} to {max}"),
            Num(min, max) => format!("a number from {min} to {max}"),
            Above(min, max) => format!("a number above {min}, up to {max}"),
            Bool => "true or false".to_owned(),
            Choice(words) => quoted(words),
            Choices(words) => format!("a list of {}", quoted(words)),
            Nums(min, max) => format!("a list of numbers from {min} to {max}"),
            Texts => "a list of texts".to_owned(),
        }
    }

    /// A value that passes, to stand in for one that does not while the rest is checked.
    pub(super) fn stand_in(&self) -> toml::Value {
        match self {
            Int(min, _) => toml::Value::Integer(*min),
            Num(_, max) | Above(_, max) => toml::Value::Float(*max),
            Bool => toml::Value::Boolean(false),
            Choice(words) => toml::Value::String(words[0].to_owned()),
            Choices(words) => toml::Value::Array(vec![toml::Value::String(words[0].to_owned())]),
            Nums(..) | Texts => toml::Value::Array(Vec::new()),
        }
    }
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(" or ")
}
