//! Small models and batches that the tests of this folder share, and the reference files.
#![allow(dead_code)] // each test binary uses its part

use hymo_model::{Batch, HyMo, LossValues, ModelConfig, Options, Params, RunConfig};
use hymo_ops::check::Noise;
use hymo_tape::{ParamGrads, Tape};
use hymo_tensor::{Ctx, Tensor};
use std::collections::BTreeMap;

/// A reference file: tensors by name as doubles with their shapes, integers included, and its metadata.
pub struct Reference {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    pub about: serde_json::Value,
}

impl Reference {
    pub fn load(name: &str) -> Self {
        let path = format!("{}/../../fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let about = header.metadata().as_ref().unwrap()["fixture"].parse().unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let read = |view: safetensors::tensor::TensorView<'_>| {
            let words = view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            let values = match view.dtype() {
                safetensors::Dtype::I32 => words.map(|b| f64::from(i32::from_le_bytes(b))).collect(),
                safetensors::Dtype::F32 => words.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
                other => panic!("{other:?}"),
            };
            (view.shape().to_vec(), values)
        };
        let tensors = file.tensors().into_iter().map(|(name, view)| (name, read(view))).collect();
        Reference { tensors, about }
    }

    pub fn values(&self, name: &str) -> &[f64] {
        &self.tensors.get(name).unwrap_or_else(|| panic!("no {name}")).1
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    fn ids(&self, name: &str) -> Vec<i32> {
        self.values(name).iter().map(|&x| x as i32).collect()
    }

    /// The configuration that the reference describes, as a run file would give it.
    pub fn config(&self) -> ModelConfig {
        let c = &self.about["config"];
        let [gdn, mla, moe] = ["gdn", "mla", "moe"].map(|k| &c[k]);
        let experts = c["ffn"]["mla"] == "moe";
        let d_ff = |kind: &str| match c["ffn"][kind] == "swiglu" {
            true => format!("d_ff = {}", c["d_ff"]),
            false => String::new(),
        };
        let moe = match experts {
            true => format!(
                "[model.moe]\nn_routed = {}\nn_shared = {}\ntop_k = {}\nd_ff = {}\nrouted_scale = {}\nbalance_loss = {}",
                moe["n_experts"], moe["n_shared"], moe["top_k"], c["d_ff"], moe["routed_scale"], c["balance_loss"]
            ),
            false => String::new(),
        };
        let text = format!(
            "[model]\nvocab_size = {}\ncontext_length = {}\nd_model = {}\nn_layers = {}\npattern = {}\n\
             [model.norm]\neps = {:?}\n\
             [model.gdn]\nn_heads = {}\nd_k = {}\nd_v = {}\nconv_kernel = {}\ngate_act = {}\nchunk_size = 64\nffn = {}\n{}\n\
             [model.mla]\nn_heads = {}\nn_kv_groups = {}\nd_nope = {}\nd_rope = {}\nd_v = {}\nkv_latent = {}\nrope_theta = {:?}\nffn = {}\n{}\n\
             [model.mtp]\nn_modules = {}\nloss_weights = {}\n[model.loss]\nz_loss = {:?}\n{moe}\n",
            c["vocab_size"],
            self.about["length"],
            c["d_model"],
            c["pattern"].as_array().unwrap().len(),
            c["pattern"],
            c["norm_eps"].as_f64().unwrap(),
            gdn["n_heads"],
            gdn["d_k"],
            gdn["d_v"],
            gdn["conv_size"],
            gdn["gate_act"],
            c["ffn"]["gdn"],
            d_ff("gdn"),
            mla["n_heads"],
            mla["n_kv_groups"],
            mla["d_nope"],
            mla["d_rope"],
            mla["d_v"],
            mla["d_latent"],
            mla["rope_theta"].as_f64().unwrap(),
            c["ffn"]["mla"],
            d_ff("mla"),
            c["n_mtp"],
            c["mtp_loss_weights"],
            c["z_loss"].as_f64().unwrap(),
        );
        RunConfig::from_toml(&text).unwrap_or_else(|e| panic!("{e}\n{text}")).model
    }

    pub fn params(&self, ctx: &Ctx, config: &ModelConfig) -> Params {
        let mut params = Params::from_fn(ctx, config, |spec| {
            Ok(self.values(&format!("param.{}", spec.name)).iter().map(|&x| x as f32).collect())
        })
        .unwrap();
        let named: Vec<String> = params.table().buffers().iter().map(|b| b.name.clone()).collect();
        for name in named {
            let values: Vec<f32> = self.values(&format!("buffer.{name}")).iter().map(|&x| x as f32).collect();
            params.buffer_mut(&name).unwrap().flat_mut::<f32>().unwrap().copy_from_slice(&values);
        }
        params
    }

    pub fn batch(&self, config: &ModelConfig) -> Batch {
        let len = self.about["length"].as_u64().unwrap() as usize;
        let (tokens, seg) = (self.ids("tokens"), self.ids("seg"));
        let rows = tokens.len() / (len + config.mtp.n_modules + 1);
        Batch::new(rows, len, config.mtp.n_modules, &tokens, &seg).unwrap()
    }
}

/// One GDN and one MLA layer with experts, twice; two prediction modules.
pub fn config() -> ModelConfig {
    parsed(&[
        "[model]\nvocab_size = 50\ncontext_length = 256\nd_model = 24\nn_layers = 4\npattern = [\"gdn\", \"mla\"]",
        "[model.gdn]\nn_heads = 2\nd_k = 8\nd_v = 12\nchunk_size = 16",
        "[model.mla]\nn_heads = 4\nn_kv_groups = 2\nd_nope = 6\nd_rope = 4\nd_v = 8\nkv_latent = 16\nffn = \"moe\"",
        "[model.moe]\nn_routed = 4\nn_shared = 1\ntop_k = 2\nd_ff = 20\nrouted_scale = 1.4\nbalance_loss = 0.01",
        "[model.mtp]\nn_modules = 2\nloss_weights = [0.3, 0.1]",
    ])
}

/// Models that between them take every way through the layers' code: beside [`config`], each has two layers.
pub fn variants() -> Vec<(&'static str, ModelConfig)> {
    let sizes = |pattern: &str| {
        format!("[model]\nvocab_size = 50\ncontext_length = 256\nd_model = 16\nn_layers = 2\npattern = [{pattern}]")
    };
    let hybrid = sizes("\"gdn\", \"mla\"");
    let gdn = "[model.gdn]\nn_heads = 2\nd_k = 8\nd_v = 12\nchunk_size = 16";
    let gdn_ffn = format!("{gdn}\nffn = \"swiglu\"\nd_ff = 20");
    let mla = "[model.mla]\nn_heads = 4\nn_kv_groups = 2\nd_nope = 6\nd_v = 8";
    let one_module = "[model.mtp]\nn_modules = 1\nloss_weights = [0.3]";
    let dense = "ffn = \"swiglu\"\nd_ff = 20";
    let yarn = "[model.mla.yarn]\nfactor = 4\noriginal_context = 64";
    vec![
        ("hybrid", config()),
        ("gpt", parsed(&[&sizes("\"mla\""), mla, "d_rope = 4\nkv_latent = 0", dense])),
        (
            "silu, dense blocks, negative eigenvalues, plain norms, soft cap",
            parsed(&[
                &hybrid,
                "[model.norm]\nzero_centred = false",
                &format!("{gdn_ffn}\ngate_act = \"silu\"\nallow_neg_eigval = true"),
                &format!("{mla}\nd_rope = 4\nkv_latent = 16\n{dense}"),
                "[model.loss]\nsoft_cap = 4",
                one_module,
            ]),
        ),
        ("yarn", parsed(&[&hybrid, gdn, mla, "d_rope = 4\nkv_latent = 16\nffn = \"none\"", yarn, one_module])),
        ("no rotary numbers", parsed(&[&hybrid, gdn, mla, "d_rope = 0\nrope = \"none\"\nkv_latent = 16", dense])),
        (
            "no latent, nothing turns, experts alone",
            parsed(&[
                &hybrid,
                &gdn_ffn,
                mla,
                "d_rope = 0\nrope = \"none\"\nkv_latent = 0\nffn = \"moe\"",
                "[model.moe]\nn_routed = 4\nn_shared = 0\ntop_k = 1\nd_ff = 20\nrouted_scale = 1",
                one_module,
            ]),
        ),
    ]
}

fn parsed(sections: &[&str]) -> ModelConfig {
    let text = sections.join("\n");
    RunConfig::from_toml(&text).unwrap_or_else(|e| panic!("{e}\n{text}")).model
}

/// Initial values with every matrix, norm and buffer moved, so that nothing is negligible.
pub fn params(ctx: &Ctx, config: &ModelConfig, seed: u64) -> Params {
    let mut params = Params::init(ctx, config, seed).unwrap();
    let mut noise = Noise::new(seed);
    let specs = params.table().params().to_vec();
    for spec in &specs {
        let scale = if spec.name.ends_with("A_log") || spec.name.ends_with("dt_bias") { 0.1 } else { 0.2 };
        let flat = params.flats_mut()[unit(spec)].flat_mut::<f32>().unwrap();
        flat[spec.range()].iter_mut().for_each(|x| *x += (scale * noise.normal()) as f32);
    }
    let names: Vec<String> = params.table().buffers().iter().map(|b| b.name.clone()).collect();
    for name in names {
        let bias = params.buffer_mut(&name).unwrap().flat_mut::<f32>().unwrap();
        bias.iter_mut().for_each(|x| *x = (0.05 * noise.normal()) as f32);
    }
    params
}

/// Rows of random tokens cut into documents of the given lengths, which sum to `len + n_modules + 1` for each row.
pub fn packed(config: &ModelConfig, len: usize, rows: &[&[usize]], seed: u64) -> Batch {
    let mut noise = Noise::new(seed);
    let (mut tokens, mut seg) = (Vec::new(), Vec::new());
    for lengths in rows {
        for (doc, &n) in lengths.iter().enumerate() {
            seg.extend(std::iter::repeat_n(doc as i32, n));
            tokens.extend((0..n).map(|_| noise.below(config.vocab_size) as i32));
        }
    }
    Batch::new(rows.len(), len, config.mtp.n_modules, &tokens, &seg).unwrap()
}

/// The tokens that [`packed`] draws for the same arguments.
pub fn tokens_of(config: &ModelConfig, rows: &[&[usize]], seed: u64) -> Vec<i32> {
    let mut noise = Noise::new(seed);
    let n: usize = rows.iter().map(|r| r.iter().sum::<usize>()).sum();
    (0..n).map(|_| noise.below(config.vocab_size) as i32).collect()
}

/// A parameter's unit as an index of [`Params::flats`].
pub fn unit(spec: &hymo_model::ParamSpec) -> usize {
    match spec.unit {
        hymo_model::Unit::Root => 0,
        hymo_model::Unit::Layer(i) => i + 1,
    }
}

/// Losses by depth, balance, total, and the flat gradients of one training pass.
pub struct Step {
    pub depths: Vec<f64>,
    pub balance: f64,
    pub total: f64,
    pub grads: ParamGrads,
    pub stats: Vec<hymo_model::LayerStats>,
}

pub fn step(ctx: &Ctx, config: &ModelConfig, params: &Params, batch: &Batch, options: &Options) -> Step {
    let mut tape = Tape::training(ctx, params.zero_grads(ctx).unwrap());
    let losses = HyMo::new(config).unwrap().loss(&mut tape, params, batch, options).unwrap();
    let grads = tape.backward(&losses.seeds()).unwrap().into_params().unwrap();
    let LossValues { depths, balance, total, layers } = losses.read().unwrap();
    Step { depths, balance, total, grads, stats: layers }
}

/// The bits of some numbers, to compare them exactly.
pub fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// All gradients in order, as doubles.
pub fn flat(grads: &ParamGrads) -> Vec<f64> {
    grads.flats().iter().flat_map(values).collect()
}

pub fn values(t: &Tensor) -> Vec<f64> {
    hymo_ops::check::values(t).unwrap()
}
