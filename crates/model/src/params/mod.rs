//! The parameter table: every parameter's name, shape, place, initial value, optimizer group and sharding.
//!
//! Parameters live in one flat buffer a unit (the root, or a layer), gradients and moments in buffers of the same layout.
//! Matrices that one GEMM reads together lie side by side, so that they are one matrix to it and several to everything
//! else: `q|k|v|z|a|b` of a GDN layer, `q|dkv|kr` and `uk|uv` of an attention layer, `w1|w3` of a feed-forward block or an
//! expert. Such a run begins at a multiple of [`RUN_ALIGN`] elements; elements between runs are padding, zero for ever.

mod layout;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::Error;
use crate::config::{ModelConfig, Problems};
use crate::init::Init;

pub(crate) use layout::estimate;

/// Elements to which each run is aligned: 128 bytes of bf16, which bulk copies and the widest loads of a GPU ask for.
pub const RUN_ALIGN: usize = 64;

/// Parameters that are gathered, freed and sharded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// Embedding, final norm, prediction modules: always present on every rank while a step runs.
    Root,
    /// One layer, counted from zero.
    Layer(usize),
}

impl Unit {
    /// Index of its flat buffer among a model's: the root's, then the layers'.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Unit::Root => 0,
            Unit::Layer(i) => i + 1,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unit::Root => f.write_str("root"),
            Unit::Layer(i) => write!(f, "layer {i}"),
        }
    }
}

/// Which optimizer moves a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OptimGroup {
    /// Orthogonalised updates: dense hidden matrices.
    NorMuon,
    /// Cautious AdamW: embedding, experts and router, gates, convolutions, vectors.
    AdamW {
        /// Whether weight decay applies.
        decay: bool,
    },
}

/// Part of the model a parameter is counted under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Embedding, which is also the head.
    Embedding,
    /// GDN mixers with their pre-norms.
    Gdn,
    /// Attention with its pre-norm.
    Mla,
    /// Routers and experts with their pre-norms.
    Moe,
    /// Dense feed-forward blocks with their pre-norms.
    Ffn,
    /// The norm before the head.
    FinalNorm,
    /// Prediction modules, all that is theirs.
    Mtp,
}

/// One parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Name in checkpoints and in messages.
    pub name: String,
    /// One or two sizes, rows (outputs) first.
    pub shape: Vec<usize>,
    /// Unit in whose buffer it lives.
    pub unit: Unit,
    /// First element in that buffer.
    pub offset: usize,
    /// Distribution of the initial values.
    pub init: Init,
    /// Optimizer.
    pub group: OptimGroup,
    /// Part it is counted under.
    pub part: Part,
    /// Equal blocks of rows, one a head or KV group, that the option `split_heads` orthogonalises apart. Without the option,
    /// and where this is `None`, the matrix is one block; a run of several matrices never is (HAZARD 16).
    pub head_blocks: Option<usize>,
    /// Axis along which ranks divide it. Rows, for every parameter.
    pub shard_axis: usize,
    /// Whether it writes into the residual stream, which makes its initial values smaller.
    pub residual_output: bool,
    /// The routed expert it belongs to; a token uses `top_k` of these.
    pub routed_expert: Option<usize>,
}

impl ParamSpec {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// First size.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of a row; 1 for a vector.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Its elements in the unit's buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel()
    }
}

/// State of the model that no gradient moves: f32, zero at first, in the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferSpec {
    /// Name in checkpoints.
    pub name: String,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Unit it goes with. It is whole on every rank.
    pub unit: Unit,
}

/// Adjacent parameters seen as one row-major matrix in a unit's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Unit of the buffer.
    pub unit: Unit,
    /// First element.
    pub offset: usize,
    /// Rows of all of them together.
    pub rows: usize,
    /// Elements of a row, which is also the row stride.
    pub cols: usize,
}

impl Span {
    /// The elements in the unit's buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }
}

/// Where the routed experts of a layer are: expert e's `w1|w3` is `w13` moved by `e` times its length, its `w2` likewise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSpans {
    /// Experts.
    pub count: usize,
    /// `[2 d_ff, d_model]` of expert 0.
    pub w13: Span,
    /// `[d_model, d_ff]` of expert 0.
    pub w2: Span,
}

#[derive(Debug, Clone, PartialEq)]
struct UnitEntry {
    unit: Unit,
    len: usize,
    params: Range<usize>,
}

/// All parameters of a model in the order of their places: the root's, then each layer's.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamTable {
    params: Vec<ParamSpec>,
    buffers: Vec<BufferSpec>,
    units: Vec<UnitEntry>,
    by_name: BTreeMap<String, usize>,
}

impl ParamTable {
    /// Lays out the parameters of a model.
    ///
    /// # Errors
    /// What [`ModelConfig::validate`] finds.
    pub fn new(model: &ModelConfig) -> Result<Self, Problems> {
        model.validate()?;
        Ok(layout::lay_out(model))
    }

    /// All parameters.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// All buffers that are not parameters.
    #[must_use]
    pub fn buffers(&self) -> &[BufferSpec] {
        &self.buffers
    }

    /// The root, then the layers.
    pub fn units(&self) -> impl ExactSizeIterator<Item = Unit> + '_ {
        self.units.iter().map(|u| u.unit)
    }

    /// Elements of a unit's flat buffer, padding included; 0 for a unit that is not there.
    #[must_use]
    pub fn unit_len(&self, unit: Unit) -> usize {
        self.entry(unit).map_or(0, |u| u.len)
    }

    /// Parameters of a unit in the order of their offsets; none for a unit that is not there.
    #[must_use]
    pub fn unit_params(&self, unit: Unit) -> &[ParamSpec] {
        self.entry(unit).map_or(&[], |u| &self.params[u.params.clone()])
    }

    /// The parameter of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ParamSpec> {
        self.by_name.get(name).map(|&i| &self.params[i])
    }

    /// Several parameters, named in order, as the one matrix they make.
    ///
    /// # Errors
    /// [`Error::UnknownParam`], [`Error::NotAdjacent`] when one does not begin where the last ended, and
    /// [`Error::UnequalRows`] when their rows differ in length. An empty list is an unknown parameter.
    pub fn span(&self, names: &[&str]) -> Result<Span, Error> {
        let find = |name: &str| self.get(name).ok_or_else(|| Error::UnknownParam { name: name.to_owned() });
        let first = find(names.first().unwrap_or(&""))?;
        let mut span = Span { unit: first.unit, offset: first.offset, rows: first.rows(), cols: first.cols() };
        let mut last = first;
        for name in &names[1..] {
            let next = find(name)?;
            if next.unit != span.unit || next.offset != span.range().end {
                return Err(Error::NotAdjacent {
                    name: last.name.clone(),
                    unit: span.unit,
                    end: span.range().end,
                    next: next.name.clone(),
                    next_unit: next.unit,
                    next_offset: next.offset,
                });
            }
            if next.cols() != span.cols {
                let (found, expected) = (next.cols(), span.cols);
                return Err(Error::UnequalRows { name: next.name.clone(), found, expected });
            }
            span.rows += next.rows();
            last = next;
        }
        Ok(span)
    }

    /// The routed experts of a layer, if it has any.
    #[must_use]
    pub fn experts(&self, layer: usize) -> Option<ExpertSpans> {
        let expert = |weight: &str| format!("layers.{layer}.moe.experts.0.{weight}.weight");
        let count = self.unit_params(Unit::Layer(layer)).iter().filter_map(|p| p.routed_expert).max()? + 1;
        let w13 = self.span(&[&expert("w1"), &expert("w3")]).ok()?;
        let w2 = self.span(&[&expert("w2")]).ok()?;
        Some(ExpertSpans { count, w13, w2 })
    }

    fn entry(&self, unit: Unit) -> Option<&UnitEntry> {
        // Units are in the order root, layer 0, layer 1, ..
        self.units.get(match unit {
            Unit::Root => 0,
            Unit::Layer(i) => i.checked_add(1)?,
        })
    }
}
