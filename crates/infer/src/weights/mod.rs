//! A model's numbers as decoding reads them: matrices packed, everything small in f32.

mod ffn;
mod mixer;

pub(crate) use ffn::Ffn;
pub(crate) use mixer::{Gdn, Mixer, Mode};

use crate::{Error, Result};
use hymo_model::config::{LayerKind, LossConfig, NormConfig};
use hymo_model::{ModelConfig, Params, args};
use hymo_ops::packed_linear::{self, Weights as Packed};
use hymo_ops::rms_norm;
use hymo_tensor::{Ctx, DType, Tensor};
use std::fmt;

/// What the large matrices are kept as. Activations, sums, gates, norms, router, states and the maps out of a latent are
/// f32 whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightDtype {
    /// As they were trained.
    #[default]
    F32,
    /// Half the bytes: 8 bits of each number's fraction.
    Bf16,
    /// A quarter of the bytes: weight-only, symmetric, a scale a row.
    Int8,
}

impl WeightDtype {
    fn dtype(self) -> DType {
        match self {
            WeightDtype::F32 => DType::F32,
            WeightDtype::Bf16 => DType::BF16,
            WeightDtype::Int8 => DType::I8,
        }
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightDtype::F32 => "f32",
            WeightDtype::Bf16 => "bf16",
            WeightDtype::Int8 => "int8",
        })
    }
}

/// Tokens that drafts are taken from: a quarter of a large vocabulary, most of any text.
const SHORTLIST: usize = 16_384;

/// A model ready to decode.
#[derive(Debug)]
pub struct Weights {
    pub(crate) config: ModelConfig,
    dtype: WeightDtype,
    pub(crate) head: Head,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Norm,
    pub(crate) modules: Vec<Module>,
}

/// The embedding, which is also the head.
#[derive(Debug)]
pub(crate) struct Head {
    pub embed: Packed,
    /// The head that drafts are taken from: int8, and of the most frequent tokens alone, whose ids come first. They are only
    /// proposals, so this changes no output.
    pub draft: Option<Packed>,
    pub loss: LossConfig,
}

/// A layer of the trunk.
#[derive(Debug)]
pub(crate) struct Layer {
    pub norm: Norm,
    pub mixer: Mixer,
    pub ffn: Option<(Norm, Ffn)>,
}

/// A prediction module.
#[derive(Debug)]
pub(crate) struct Module {
    pub enorm: Norm,
    pub hnorm: Norm,
    pub proj: Packed,
    pub norm: Norm,
    pub gdn: Gdn,
    pub ffn: Option<(Norm, Ffn)>,
    pub out_norm: Norm,
}

/// A norm over the residual stream.
#[derive(Debug)]
pub(crate) struct Norm {
    pub weight: Tensor,
    pub args: rms_norm::Args,
}

impl Norm {
    /// x [N, D] -> [N, D].
    pub fn forward(&self, ctx: &Ctx, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm::forward(ctx, x, &self.weight, self.args)?.0)
    }
}

impl Weights {
    /// Packs the parameters of a model. The context's pool holds what is made here and all that decoding needs.
    ///
    /// # Errors
    /// A configuration that [`ModelConfig::validate`] refuses, parameters of another model, parameters that are not f32, and
    /// for int8 a row that is not finite.
    pub fn new(ctx: &Ctx, config: &ModelConfig, params: &Params, dtype: WeightDtype) -> Result<Self> {
        config.validate().map_err(hymo_model::Error::from)?;
        let pack = Pack { ctx, config, params, dtype };
        let shortlist = config.vocab_size.min(SHORTLIST);
        let draft = || Ok(Packed::pack(ctx, &params.get("embed.weight")?.slice_rows(0..shortlist)?, DType::I8)?);
        let draft: Option<Result<_>> = (config.mtp.n_modules > 0).then(draft);
        let layer = |(i, kind): (usize, LayerKind)| pack.layer(&format!("layers.{i}"), kind);
        Ok(Weights {
            head: Head { embed: pack.packed("embed.weight")?, draft: draft.transpose()?, loss: config.loss.clone() },
            layers: config.layers().enumerate().map(layer).collect::<Result<_>>()?,
            norm: pack.norm("norm", args::norm)?,
            modules: (0..config.mtp.n_modules).map(|k| pack.module(&format!("mtp.{k}"))).collect::<Result<_>>()?,
            config: config.clone(),
            dtype,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the matrices are kept as.
    #[must_use]
    pub fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// Bytes that one token's pass reads of the matrices: of routed experts those that it is sent to, of the embedding all,
    /// as the head; without prediction modules.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let layer = |l: &Layer| l.mixer.bytes() + l.ffn.as_ref().map_or(0, |(_, f)| f.bytes(true));
        self.head.embed.bytes() + self.layers.iter().map(layer).sum::<usize>()
    }

    /// Bytes of all packed matrices, prediction modules and their draft head included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ffn = |f: &Option<(Norm, Ffn)>| f.as_ref().map_or(0, |(_, f)| f.bytes(false));
        let layers: usize = self.layers.iter().map(|l| l.mixer.bytes() + ffn(&l.ffn)).sum();
        let modules: usize = self.modules.iter().map(|m| m.proj.bytes() + m.gdn.bytes() + ffn(&m.ffn)).sum();
        let draft = self.head.draft.as_ref().map_or(0, Packed::bytes);
        self.head.embed.bytes() + draft + layers + modules
    }
}

impl Head {
    /// Rows of the embedding [N, D].
    pub fn embed(&self, ctx: &Ctx, ids: impl ExactSizeIterator<Item = u32>) -> Result<Tensor> {
        let mut out = ctx.empty::<f32>(&[ids.len(), self.embed.cols()])?;
        let mut rows = out.view_mut::<f32>()?;
        for (i, id) in ids.enumerate() {
            self.embed.widen_row(id as usize, rows.row_mut(i))?;
        }
        Ok(out)
    }

    /// Logits [N, V] of n [N, D], soft cap included.
    pub fn logits(&self, ctx: &Ctx, n: &Tensor) -> Result<Tensor> {
        self.through(ctx, n, &self.embed)
    }

    /// Logits [N, shortlist] for proposals only.
    pub fn draft(&self, ctx: &Ctx, n: &Tensor) -> Result<Tensor> {
        self.through(ctx, n, self.draft.as_ref().unwrap_or(&self.embed))
    }

    fn through(&self, ctx: &Ctx, n: &Tensor, w: &Packed) -> Result<Tensor> {
        let mut logits = packed_linear::forward(ctx, n, w)?;
        if let Some(cap) = self.loss.soft_cap {
            let cap = cap as f32;
            logits.flat_mut::<f32>()?.iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
        }
        Ok(logits)
    }
}

/// Parameters on their way into the packed form.
pub(crate) struct Pack<'a> {
    pub ctx: &'a Ctx,
    pub config: &'a ModelConfig,
    pub params: &'a Params,
    pub dtype: WeightDtype,
}

impl Pack<'_> {
    /// One parameter, f32.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        Ok(self.params.get(name)?)
    }

    /// One matrix, packed.
    pub fn packed(&self, name: &str) -> Result<Packed> {
        Ok(Packed::pack(self.ctx, &self.tensor(name)?, self.dtype.dtype())?)
    }

    /// Adjacent matrices `{prefix}.{name}.weight` as one, f32.
    pub fn rows(&self, prefix: &str, names: &[&str]) -> Result<Tensor> {
        let names: Vec<String> = names.iter().map(|n| format!("{prefix}.{n}.weight")).collect();
        let span = self.params.table().span(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let flat = self.params.flats().get(span.unit.index()).ok_or_else(|| Error::State {
            found: format!("{} units of parameters", self.params.flats().len()),
            want: format!("{}", span.unit),
        })?;
        Ok(flat.slice_flat(span.offset, &[span.rows, span.cols])?)
    }

    /// Adjacent matrices as one, packed.
    pub fn packed_rows(&self, prefix: &str, names: &[&str]) -> Result<Packed> {
        Ok(Packed::pack(self.ctx, &self.rows(prefix, names)?, self.dtype.dtype())?)
    }

    /// Adjacent matrices as one, kept in f32 whatever the rest is.
    pub fn exact_rows(&self, prefix: &str, names: &[&str]) -> Result<Packed> {
        Ok(Packed::pack(self.ctx, &self.rows(prefix, names)?, DType::F32)?)
    }

    pub fn norm(&self, name: &str, args: impl Fn(&NormConfig) -> rms_norm::Args) -> Result<Norm> {
        Ok(Norm { weight: self.tensor(&format!("{name}.weight"))?, args: args(&self.config.norm) })
    }

    fn layer(&self, prefix: &str, kind: LayerKind) -> Result<Layer> {
        Ok(Layer {
            norm: self.norm(&format!("{prefix}.norm"), args::norm)?,
            mixer: Mixer::new(self, prefix, kind)?,
            ffn: self.ffn(prefix, kind)?,
        })
    }

    fn ffn(&self, prefix: &str, kind: LayerKind) -> Result<Option<(Norm, Ffn)>> {
        let norm = || self.norm(&format!("{prefix}.ffn_norm"), args::norm);
        Ffn::new(self, prefix, kind)?.map(|ffn| Ok((norm()?, ffn))).transpose()
    }

    fn module(&self, prefix: &str) -> Result<Module> {
        let norm = |name: &str| self.norm(&format!("{prefix}.{name}"), args::norm);
        Ok(Module {
            enorm: norm("enorm")?,
            hnorm: norm("hnorm")?,
            proj: self.packed(&format!("{prefix}.proj.weight"))?,
            norm: norm("norm")?,
            gdn: Gdn::new(self, prefix)?,
            ffn: self.ffn(prefix, LayerKind::Gdn)?,
            out_norm: norm("out_norm")?,
        })
    }
}

/// The part of a configuration that its validation guarantees for this kind of layer.
pub(crate) fn section<'a, T>(found: &'a Option<T>, field: &'static str) -> Result<&'a T> {
    found.as_ref().ok_or_else(|| Error::option(field, "absent", "the section that the pattern asks for"))
}
