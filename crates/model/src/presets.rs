//! The models this project names. A run file usually starts as one of them: `hymo inspect PRESET --print-config`.
//!
//! Vocabularies shrink with the models, so that the embedding does not outgrow the layers (64,256 entries would be 25M of the
//! 30M). A `gpt-*` model has the vocabulary, the context and, within 2%, the active parameters of the `hymo-*` model beside
//! it; its attention is split 3:1 into content and rotary numbers like theirs, so that one thing differs at a time.

use crate::Error;
use crate::config::{
    GateAct, GdnConfig, GdnFfn, InitConfig, LayerKind, LossConfig, MlaConfig, MlaFfn, ModelConfig, MoeConfig,
    MtpConfig, NormConfig, Rope, RunConfig, nearest,
};

/// A named configuration.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// What it is for, in a line.
    pub about: &'static str,
    build: fn() -> ModelConfig,
}

impl Preset {
    /// The configuration.
    #[must_use]
    pub fn model(&self) -> ModelConfig {
        (self.build)()
    }

    /// The file `configs/<name>.toml`, byte for byte.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let Preset { name, about, .. } = self;
        let head = format!("# {name}: {about}\n# Printed by `hymo inspect {name} --print-config`.\n\n");
        head + &RunConfig::new(self.model()).to_toml()
    }
}

/// All presets.
pub const PRESETS: &[Preset] = &[
    Preset { name: "hymo-434m", about: "the full model, 434M active of 1.13B parameters", build: hymo_434m },
    Preset { name: "hymo-120m", about: "the full pattern at 120M active parameters", build: hymo_120m },
    Preset { name: "hymo-30m", about: "the full pattern at 30M active parameters", build: hymo_30m },
    Preset { name: "hymo-nano", about: "trains in minutes on a laptop's CPU", build: hymo_nano },
    Preset { name: "gpt-434m", about: "dense attention, as many active parameters as hymo-434m", build: gpt_434m },
    Preset { name: "gpt-120m", about: "dense attention, as many active parameters as hymo-120m", build: gpt_120m },
    Preset { name: "gpt-30m", about: "dense attention, as many active parameters as hymo-30m", build: gpt_30m },
    Preset { name: "gpt-nano", about: "dense attention, as many active parameters as hymo-nano", build: gpt_nano },
];

/// The preset of this name.
///
/// # Errors
/// [`Error::UnknownPreset`] with all names and the nearest.
pub fn preset(name: &str) -> Result<&'static Preset, Error> {
    let nearest = || nearest(name, PRESETS.iter().map(|p| p.name));
    let found = PRESETS.iter().find(|p| p.name == name);
    found.ok_or_else(|| Error::UnknownPreset { name: name.to_owned(), nearest: nearest() })
}

/// HyMo-434M: 24 GDN and 8 attention layers with 16 + 1 experts, two prediction modules.
#[must_use]
pub fn hymo_434m() -> ModelConfig {
    let gdn = gdn(16, 64, 128);
    let mla = mla(16, 4, [96, 32, 128], 128);
    hybrid(Size { vocab_size: 64_256, context_length: 4096, d_model: 896, n_layers: 32 }, gdn, mla, moe(16, 2304))
}

/// The full pattern at 120M: 15 GDN and 5 attention layers.
#[must_use]
pub fn hymo_120m() -> ModelConfig {
    let gdn = gdn(10, 64, 128);
    let mla = mla(10, 2, [48, 16, 64], 128);
    hybrid(Size { vocab_size: 32_768, context_length: 2048, d_model: 640, n_layers: 20 }, gdn, mla, moe(16, 1280))
}

/// The full pattern at 30M: 9 GDN and 3 attention layers.
#[must_use]
pub fn hymo_30m() -> ModelConfig {
    let gdn = gdn(6, 64, 128);
    let mla = mla(6, 2, [48, 16, 64], 64);
    hybrid(Size { vocab_size: 16_384, context_length: 1024, d_model: 384, n_layers: 12 }, gdn, mla, moe(16, 864))
}

/// Everything of the full model at 2.4M active parameters beside the embedding: 6 GDN and 2 attention layers, 8 + 1 experts.
#[must_use]
pub fn hymo_nano() -> ModelConfig {
    let gdn = gdn(4, 32, 64);
    let mla = mla(6, 2, [24, 8, 32], 64);
    hybrid(Size { vocab_size: 4096, context_length: 512, d_model: 192, n_layers: 8 }, gdn, mla, moe(8, 128))
}

/// Dense attention beside [`hymo_434m`].
#[must_use]
pub fn gpt_434m() -> ModelConfig {
    let size = Size { vocab_size: 64_256, context_length: 4096, d_model: 1024, n_layers: 28 };
    dense(size, 8, [96, 32, 128], 2880)
}

/// Dense attention beside [`hymo_120m`].
#[must_use]
pub fn gpt_120m() -> ModelConfig {
    dense(Size { vocab_size: 32_768, context_length: 2048, d_model: 768, n_layers: 12 }, 12, [48, 16, 64], 2432)
}

/// Dense attention beside [`hymo_30m`].
#[must_use]
pub fn gpt_30m() -> ModelConfig {
    dense(Size { vocab_size: 16_384, context_length: 1024, d_model: 384, n_layers: 12 }, 6, [48, 16, 64], 1216)
}

/// Dense attention beside [`hymo_nano`].
#[must_use]
pub fn gpt_nano() -> ModelConfig {
    dense(Size { vocab_size: 4096, context_length: 512, d_model: 192, n_layers: 6 }, 6, [24, 8, 32], 432)
}

struct Size {
    vocab_size: usize,
    context_length: usize,
    d_model: usize,
    n_layers: usize,
}

fn gdn(n_heads: usize, d_k: usize, d_v: usize) -> GdnConfig {
    GdnConfig {
        n_heads,
        d_k,
        d_v,
        conv_kernel: 4,
        gate_act: GateAct::Sigmoid,
        allow_neg_eigval: false,
        chunk_size: 64,
        ffn: GdnFfn::None,
        d_ff: None,
    }
}

fn mla(n_heads: usize, n_kv_groups: usize, [d_nope, d_rope, d_v]: [usize; 3], kv_latent: usize) -> MlaConfig {
    MlaConfig {
        n_heads,
        n_kv_groups,
        d_nope,
        d_rope,
        d_v,
        kv_latent,
        rope: Rope::Interleaved,
        rope_theta: 1e4,
        ffn: MlaFfn::Moe,
        d_ff: None,
        yarn: None,
    }
}

/// Two routed experts a token and one shared. `E[1 / |p|_2]` over random logits is 1.412 for 2 of 16 (MATH 3.1); it hardly
/// depends on how many there are to choose from.
fn moe(n_routed: usize, d_ff: usize) -> MoeConfig {
    MoeConfig { n_routed, n_shared: 1, top_k: 2, d_ff, routed_scale: 1.412, balance_loss: 1e-4, bias_update_rate: 1e-3 }
}

fn hybrid(size: Size, gdn: GdnConfig, mla: MlaConfig, moe: MoeConfig) -> ModelConfig {
    use LayerKind::{Gdn, Mla};
    let mtp = MtpConfig { n_modules: 2, loss_weights: vec![0.3, 0.1] };
    ModelConfig { gdn: Some(gdn), moe: Some(moe), mtp, ..bare(size, vec![Gdn, Gdn, Gdn, Mla], mla) }
}

fn dense(size: Size, n_heads: usize, head: [usize; 3], d_ff: usize) -> ModelConfig {
    let mla = MlaConfig { ffn: MlaFfn::Swiglu, d_ff: Some(d_ff), ..mla(n_heads, n_heads, head, 0) };
    bare(size, vec![LayerKind::Mla], mla)
}

fn bare(size: Size, pattern: Vec<LayerKind>, mla: MlaConfig) -> ModelConfig {
    let Size { vocab_size, context_length, d_model, n_layers } = size;
    ModelConfig {
        vocab_size,
        context_length,
        d_model,
        n_layers,
        pattern,
        norm: NormConfig::default(),
        gdn: None,
        mla: Some(mla),
        moe: None,
        mtp: MtpConfig::default(),
        loss: LossConfig::default(),
        init: InitConfig::default(),
    }
}
