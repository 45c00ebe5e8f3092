//! The parameters' memory: one flat buffer a unit, and every parameter a view into it.

use crate::init;
use crate::params::{ParamSpec, ParamTable};
use crate::{Error, ModelConfig};
use hymo_tape::{ParamGrads, Var};
use hymo_tensor::{Ctx, DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A parameter, or adjacent parameters read as one matrix: where it is, found once when the network is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParamRef {
    unit: usize,
    offset: usize,
    dims: Vec<usize>,
}

impl ParamRef {
    pub(crate) fn named(table: &ParamTable, name: &str) -> Result<Self, Error> {
        let spec = table.get(name).ok_or_else(|| Error::UnknownParam { name: name.to_owned() })?;
        Ok(ParamRef { unit: spec.unit.index(), offset: spec.offset, dims: spec.shape.clone() })
    }

    /// `prefix.{name}.weight` for each name, as one matrix.
    pub(crate) fn rows(table: &ParamTable, prefix: &str, names: &[&str]) -> Result<Self, Error> {
        let names: Vec<String> = names.iter().map(|n| format!("{prefix}.{n}.weight")).collect();
        let span = table.span(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(ParamRef { unit: span.unit.index(), offset: span.offset, dims: vec![span.rows, span.cols] })
    }

    /// `count` matrices of the same shape, one after the other, from the one that `span` names.
    pub(crate) fn stack(span: crate::Span, count: usize) -> Self {
        ParamRef { unit: span.unit.index(), offset: span.offset, dims: vec![count, span.rows, span.cols] }
    }

    /// Its elements of flat buffers, which may have been made for another model.
    fn of(&self, flats: &[Tensor]) -> hymo_tensor::Result<Tensor> {
        let flat = flats.get(self.unit).ok_or_else(|| {
            let want = format!("a buffer for unit {}, as in the model's own", self.unit);
            hymo_tensor::Error::value("params", "units", flats.len(), want)
        })?;
        flat.slice_flat(self.offset, &self.dims)
    }
}

/// All parameters of a model, and the buffers that go with them (router biases).
///
/// They are f32, or f64 for the oracle; nothing here narrows them. A file may keep matrices in fewer bits one day, but not
/// `A_log` and `dt_bias` (HAZARD 5).
///
/// Cloning shares the memory; writing ([`Params::flats_mut`]) needs the only handle, which is what is left when a
/// step's tape is gone.
#[derive(Debug, Clone)]
pub struct Params {
    table: Arc<ParamTable>,
    flats: Vec<Tensor>,
    buffers: BTreeMap<String, Tensor>,
}

impl Params {
    /// Initial values, which depend on the seed and each parameter's name only. Always `f32`.
    ///
    /// # Errors
    /// A configuration that [`ParamTable::new`] refuses.
    pub fn init(ctx: &Ctx, model: &ModelConfig, seed: u64) -> Result<Self, Error> {
        Params::from_fn(ctx, model, |spec| Ok(init::fill(spec, seed)))
    }

    /// Values by parameter; buffers start at zero.
    ///
    /// # Errors
    /// What `values` returns, and [`Error::Length`] when it gives too few or too many.
    pub fn from_fn(
        ctx: &Ctx,
        model: &ModelConfig,
        mut values: impl FnMut(&ParamSpec) -> Result<Vec<f32>, Error>,
    ) -> Result<Self, Error> {
        let table = Arc::new(ParamTable::new(model)?);
        let mut flats = Vec::new();
        for unit in table.units() {
            let mut data = vec![0f32; table.unit_len(unit)];
            for spec in table.unit_params(unit) {
                let found = values(spec)?;
                if found.len() != spec.numel() {
                    return Err(Error::Length { name: spec.name.clone(), found: found.len(), expected: spec.numel() });
                }
                data[spec.range()].copy_from_slice(&found);
            }
            flats.push(Tensor::from_slice(ctx, &[data.len()], &data)?);
        }
        let zeros = |b: &crate::params::BufferSpec| Ok((b.name.clone(), ctx.zeros::<f32>(&b.shape)?));
        let buffers = table.buffers().iter().map(zeros).collect::<Result<_, Error>>()?;
        Ok(Params { table, flats, buffers })
    }

    /// The same values in double precision, for checks against the oracle.
    ///
    /// # Errors
    /// None in practice: the tensors are this type's own.
    pub fn to_f64(&self, ctx: &Ctx) -> Result<Self, Error> {
        let widen = |t: &Tensor| -> Result<Tensor, Error> {
            let data: Vec<f64> = t.to_vec::<f32>()?.into_iter().map(f64::from).collect();
            Ok(Tensor::from_slice(ctx, t.dims(), &data)?)
        };
        let flats = self.flats.iter().map(widen).collect::<Result<_, _>>()?;
        Ok(Params { table: Arc::clone(&self.table), flats, buffers: self.buffers.clone() })
    }

    /// The same numbers in the memory of another context's device; shared where they lie there already.
    ///
    /// # Errors
    /// What goes wrong with that device's memory.
    pub fn on(&self, ctx: &Ctx) -> Result<Self, Error> {
        let here = |t: &Tensor| match ctx.device() {
            hymo_tensor::Device::Cpu if !t.is_on_gpu() => Ok(t.clone()),
            _ => t.copy(ctx),
        };
        let flats = self.flats.iter().map(here).collect::<hymo_tensor::Result<_>>()?;
        let buffers = self.buffers.iter().map(|(name, t)| Ok((name.clone(), here(t)?)));
        Ok(Params { table: Arc::clone(&self.table), flats, buffers: buffers.collect::<hymo_tensor::Result<_>>()? })
    }

    /// Other values of the same model, with these buffers: an average of the weights.
    ///
    /// # Errors
    /// Flat buffers of other lengths or dtype than these.
    pub fn with_flats(&self, flats: Vec<Tensor>) -> Result<Self, Error> {
        let layout = |flats: &[Tensor]| flats.iter().map(|t| (t.shape(), t.dtype())).collect::<Vec<_>>();
        if layout(&flats) != layout(&self.flats) {
            let got = format!("{} buffers of other lengths or dtype", flats.len());
            let want = format!("{} as in the model's own", self.flats.len());
            return Err(hymo_tensor::Error::value("params", "flats", got, want).into());
        }
        Ok(Params { table: Arc::clone(&self.table), flats, buffers: self.buffers.clone() })
    }

    /// The table of all parameters.
    #[must_use]
    pub fn table(&self) -> &ParamTable {
        &self.table
    }

    /// `f32`, or `f64` after [`Params::to_f64`].
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.flats[0].dtype()
    }

    /// The flat buffers: the root's, then each layer's.
    #[must_use]
    pub fn flats(&self) -> &[Tensor] {
        &self.flats
    }

    /// The flat buffers, writable; a write fails while another handle on these parameters is alive.
    #[must_use]
    pub fn flats_mut(&mut self) -> &mut [Tensor] {
        &mut self.flats
    }

    /// One parameter's values as a view.
    ///
    /// # Errors
    /// [`Error::UnknownParam`].
    pub fn get(&self, name: &str) -> Result<Tensor, Error> {
        Ok(ParamRef::named(&self.table, name)?.of(&self.flats)?)
    }

    /// A buffer's values.
    ///
    /// # Errors
    /// [`Error::UnknownParam`].
    pub fn buffer(&self, name: &str) -> Result<&Tensor, Error> {
        self.buffers.get(name).ok_or_else(|| Error::UnknownParam { name: name.to_owned() })
    }

    /// A buffer's values, writable.
    ///
    /// # Errors
    /// [`Error::UnknownParam`].
    pub fn buffer_mut(&mut self, name: &str) -> Result<&mut Tensor, Error> {
        self.buffers.get_mut(name).ok_or_else(|| Error::UnknownParam { name: name.to_owned() })
    }

    /// Flat gradients of zeros, laid out as the parameters are.
    ///
    /// # Errors
    /// None in practice: the shapes are this type's own.
    pub fn zero_grads(&self, ctx: &Ctx) -> Result<ParamGrads, Error> {
        let zeros = |t: &Tensor| ctx.zeros_real(t.dtype(), t.dims());
        Ok(ParamGrads::new(self.flats.iter().map(zeros).collect::<Result<_, _>>()?)?)
    }

    /// One parameter's part of flat gradients laid out as these parameters are.
    ///
    /// # Errors
    /// [`Error::UnknownParam`].
    pub fn grad_of(&self, grads: &ParamGrads, name: &str) -> Result<Tensor, Error> {
        let at = ParamRef::named(&self.table, name)?;
        Ok(at.of(grads.flats())?)
    }

    pub(crate) fn var(&self, at: &ParamRef) -> hymo_tensor::Result<Var> {
        Ok(Var::param(at.of(&self.flats)?, at.unit, at.offset))
    }

    /// Heads that cannot work from the start (HAZARD 5): non-finite decay parameters, heads that forget everything at
    /// once, heads that can never forget.
    ///
    /// # Errors
    /// None in practice: `A_log` and `dt_bias` are `f32` in memory whatever the compute dtype.
    pub fn scan(&self) -> Result<Vec<(String, init::DeadHead)>, Error> {
        let mut found = Vec::new();
        for spec in self.table.params() {
            let Some(prefix) = spec.name.strip_suffix(".A_log") else { continue };
            let values = |name: &str| -> Result<Vec<f32>, Error> {
                let t = self.get(name)?;
                Ok(match t.dtype() {
                    DType::F64 => t.to_vec::<f64>()?.into_iter().map(|x| x as f32).collect(),
                    _ => t.to_vec::<f32>()?,
                })
            };
            let (a_log, dt_bias) = (values(&spec.name)?, values(&format!("{prefix}.dt_bias"))?);
            found.extend(init::scan(&a_log, &dt_bias).into_iter().map(|head| (prefix.to_owned(), head)));
        }
        Ok(found)
    }
}
