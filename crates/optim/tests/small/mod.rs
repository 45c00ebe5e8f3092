//! Parameters of any shapes in flat buffers, and the reference file.
#![allow(dead_code)] // each test binary uses its part

use hymo_model::config::OptimConfig;
use hymo_model::init::Init;
use hymo_model::params::{Part, RUN_ALIGN};
use hymo_model::{OptimGroup, ParamSpec, Unit};
use hymo_optim::{Groups, Optimizer};
use hymo_tensor::{Ctx, DType, Real, Tensor};
use std::collections::BTreeMap;

/// A parameter of the root, to be placed by [`place`].
pub fn spec(name: &str, shape: &[usize], group: OptimGroup) -> ParamSpec {
    ParamSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        unit: Unit::Root,
        offset: 0,
        init: Init::Zeros,
        group,
        part: Part::Gdn,
        head_blocks: None,
        shard_axis: 0,
        residual_output: false,
        routed_expert: None,
    }
}

pub const HIDDEN: OptimGroup = OptimGroup::NorMuon;
pub const DECAYED: OptimGroup = OptimGroup::AdamW { decay: true };
pub const FREE: OptimGroup = OptimGroup::AdamW { decay: false };

/// Gives every parameter its place in its unit's buffer; returns the buffers' lengths.
pub fn place(specs: &mut [ParamSpec]) -> Vec<usize> {
    let mut ends = vec![0; specs.iter().map(|s| s.unit.index() + 1).max().unwrap_or(0)];
    for spec in specs {
        let end: &mut usize = &mut ends[spec.unit.index()];
        spec.offset = *end;
        *end = (*end + spec.numel()).next_multiple_of(RUN_ALIGN);
    }
    ends
}

/// Weights in flat buffers, and their optimizer.
pub struct Small {
    pub ctx: Ctx,
    pub specs: Vec<ParamSpec>,
    pub flats: Vec<Tensor>,
    pub optim: Optimizer,
}

impl Small {
    pub fn new<T: Real>(
        mut specs: Vec<ParamSpec>,
        config: &OptimConfig,
        values: impl Fn(&ParamSpec) -> Vec<f64>,
    ) -> Self {
        let ctx = Ctx::cpu().poisoned();
        let lens = place(&mut specs);
        let flats = flats::<T>(&ctx, &specs, &lens, values);
        let groups = Groups::declared(&specs, config).unwrap();
        let optim = Optimizer::with_groups(&ctx, &flats, groups, config).unwrap();
        Small { ctx, specs, flats, optim }
    }

    /// Gradients by parameter.
    pub fn grads(&self, values: impl Fn(&ParamSpec) -> Vec<f64>) -> Vec<Tensor> {
        let lens: Vec<usize> = self.flats.iter().map(Tensor::numel).collect();
        match self.flats[0].dtype() {
            DType::F64 => flats::<f64>(&self.ctx, &self.specs, &lens, values),
            _ => flats::<f32>(&self.ctx, &self.specs, &lens, values),
        }
    }

    pub fn values(&self, name: &str) -> Vec<f64> {
        let spec = self.specs.iter().find(|s| s.name == name).unwrap();
        numbers(&self.flats[spec.unit.index()].slice_flat(spec.offset, &spec.shape).unwrap())
    }

    pub fn state(&self, name: &str) -> Vec<f64> {
        let tensors = self.optim.tensors().unwrap();
        numbers(&tensors.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1)
    }
}

fn flats<T: Real>(
    ctx: &Ctx,
    specs: &[ParamSpec],
    lens: &[usize],
    values: impl Fn(&ParamSpec) -> Vec<f64>,
) -> Vec<Tensor> {
    let mut flats: Vec<Tensor> = lens.iter().map(|&len| ctx.zeros::<T>(&[len]).unwrap()).collect();
    for spec in specs {
        let to = &mut flats[spec.unit.index()].flat_mut::<T>().unwrap()[spec.range()];
        let from = values(spec);
        assert_eq!(to.len(), from.len(), "{}", spec.name);
        to.iter_mut().zip(from).for_each(|(t, f)| *t = T::of(f));
    }
    flats
}

pub fn numbers(t: &Tensor) -> Vec<f64> {
    match t.dtype() {
        DType::F64 => t.to_vec::<f64>().unwrap(),
        _ => t.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect(),
    }
}

/// All bits of weights and state.
pub fn bits(small: &Small) -> Vec<u64> {
    let state = small.optim.tensors().unwrap();
    let state = state.iter().filter(|(_, t)| t.dtype() != DType::I32).flat_map(|(_, t)| numbers(t));
    small.flats.iter().flat_map(numbers).chain(state).map(f64::to_bits).collect()
}

/// RMS of the difference over RMS of the reference.
pub fn gap(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let errors: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    (errors / want.iter().map(|w| w * w).sum::<f64>().max(1e-300)).sqrt()
}

pub fn assert_close(name: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let gap = gap(got, want);
    assert!(gap <= tolerance, "{name}: {gap:.2e}, allowed {tolerance:e}");
}

/// `fixtures/optim.safetensors` as doubles.
pub fn reference() -> BTreeMap<String, Vec<f64>> {
    let path = format!("{}/../../fixtures/optim.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |view: safetensors::tensor::TensorView<'_>| {
        assert_eq!(view.dtype(), safetensors::Dtype::F32);
        view.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
    };
    file.tensors().into_iter().map(|(name, view)| (name, words(view))).collect()
}
