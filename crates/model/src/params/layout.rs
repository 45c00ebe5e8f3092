//! Which parameters there are and where they go.
//!
//! Initial values and optimizer groups: MATH sections 6.1, 7 and 8.

use super::{BufferSpec, OptimGroup, ParamSpec, ParamTable, Part, RUN_ALIGN, Unit, UnitEntry};
use crate::config::{GdnConfig, GdnFfn, LayerKind, MlaConfig, MlaFfn, ModelConfig, MoeConfig};
use crate::init::Init;

/// The table of a checked configuration.
pub(super) fn lay_out(model: &ModelConfig) -> ParamTable {
    let mut layout = Layout::new(model);
    layout.unit(Unit::Root, root);
    for (i, kind) in model.layers().enumerate() {
        layout.unit(Unit::Layer(i), |l| match kind {
            LayerKind::Gdn => gdn_layer(l, &format!("layers.{i}")),
            LayerKind::Mla => mla_layer(l, &format!("layers.{i}")),
        });
    }
    let by_name = layout.params.iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect();
    ParamTable { params: layout.params, buffers: layout.buffers, units: layout.units, by_name }
}

struct Layout<'m> {
    model: &'m ModelConfig,
    params: Vec<ParamSpec>,
    buffers: Vec<BufferSpec>,
    units: Vec<UnitEntry>,
    unit: Unit,
    part: Part,
    end: usize,
    /// Linear maps, and those that write into the residual stream.
    linear: Init,
    output: Init,
}

const HIDDEN: OptimGroup = OptimGroup::NorMuon;
const DECAYED: OptimGroup = OptimGroup::AdamW { decay: true };
const FREE: OptimGroup = OptimGroup::AdamW { decay: false };

impl<'m> Layout<'m> {
    fn new(model: &'m ModelConfig) -> Self {
        let normal = |std| match model.init.truncate {
            0.0 => Init::Normal { std },
            cut => Init::TruncNormal { std, cut },
        };
        let branches = model.num_residual_branches() as f64;
        Layout {
            model,
            params: Vec::new(),
            buffers: Vec::new(),
            units: Vec::new(),
            unit: Unit::Root,
            part: Part::Embedding,
            end: 0,
            linear: normal(model.init.std),
            output: normal(model.init.std / branches.sqrt()),
        }
    }

    fn unit(&mut self, unit: Unit, fill: impl FnOnce(&mut Self)) {
        let first = self.params.len();
        (self.unit, self.end) = (unit, 0);
        fill(self);
        self.run();
        self.units.push(UnitEntry { unit, len: self.end, params: first..self.params.len() });
    }

    /// Begins a run: what follows is adjacent until the next.
    fn run(&mut self) {
        self.end = self.end.next_multiple_of(RUN_ALIGN);
    }

    fn put(&mut self, name: String, shape: &[usize], init: Init, group: OptimGroup) -> &mut ParamSpec {
        let spec = ParamSpec {
            name,
            shape: shape.to_vec(),
            unit: self.unit,
            offset: self.end,
            init,
            group,
            part: self.part,
            head_blocks: None,
            shard_axis: 0,
            residual_output: false,
            routed_expert: None,
        };
        self.end += spec.numel();
        let index = self.params.len();
        self.params.push(spec);
        &mut self.params[index]
    }

    /// A hidden matrix, or nothing when it has no rows.
    fn hidden(&mut self, name: String, rows: usize, cols: usize, head_blocks: Option<usize>) {
        if rows > 0 {
            let init = self.linear;
            self.put(name, &[rows, cols], init, HIDDEN).head_blocks = head_blocks;
        }
    }

    /// A matrix that writes into the residual stream, a run of its own.
    fn output(&mut self, name: String, cols: usize, group: OptimGroup) {
        self.run();
        let (d, init) = (self.model.d_model, self.output);
        self.put(name, &[d, cols], init, group).residual_output = true;
    }

    /// A vector, a run of its own.
    fn vector(&mut self, name: String, len: usize, init: Init, group: OptimGroup) {
        self.run();
        self.put(name, &[len], init, group);
    }

    /// The gain of a norm over the residual stream. Decay pulls a zero-centred gain to one, a plain one to nothing.
    fn norm(&mut self, name: String) {
        let zero_centred = self.model.norm.zero_centred;
        let init = if zero_centred { Init::Zeros } else { Init::Ones };
        self.vector(name, self.model.d_model, init, OptimGroup::AdamW { decay: zero_centred });
    }
}

fn root(l: &mut Layout<'_>) {
    let (d, linear) = (l.model.d_model, l.linear);
    l.part = Part::Embedding;
    l.put("embed.weight".to_owned(), &[l.model.vocab_size, d], linear, DECAYED);
    l.part = Part::FinalNorm;
    l.norm("norm.weight".to_owned());
    l.part = Part::Mtp;
    for k in 0..l.model.mtp.n_modules {
        let prefix = format!("mtp.{k}");
        l.norm(format!("{prefix}.enorm.weight"));
        l.norm(format!("{prefix}.hnorm.weight"));
        l.run();
        l.hidden(format!("{prefix}.proj.weight"), d, 2 * d, None);
        gdn_layer(l, &prefix);
        l.norm(format!("{prefix}.out_norm.weight"));
    }
}

fn gdn_layer(l: &mut Layout<'_>, prefix: &str) {
    let Some(gdn) = &l.model.gdn else { return };
    // In the root it belongs to a prediction module, which is counted as a whole.
    let part = if l.unit == Unit::Root { |_| Part::Mtp } else { |own| own };
    l.part = part(Part::Gdn);
    l.norm(format!("{prefix}.norm.weight"));
    gdn_mixer(l, &format!("{prefix}.gdn"), gdn);
    if let (GdnFfn::Swiglu, Some(d_ff)) = (gdn.ffn, gdn.d_ff) {
        l.part = part(Part::Ffn);
        dense(l, prefix, d_ff);
    }
}

fn gdn_mixer(l: &mut Layout<'_>, prefix: &str, gdn: &GdnConfig) {
    let (d, heads, linear) = (l.model.d_model, gdn.n_heads, l.linear);
    let (keys, values) = (gdn.key_dim(), gdn.value_dim());
    l.run();
    for (name, rows) in [("q", keys), ("k", keys), ("v", values), ("z", values)] {
        l.hidden(format!("{prefix}.{name}.weight"), rows, d, Some(heads));
    }
    for name in ["a", "b"] {
        l.put(format!("{prefix}.{name}.weight"), &[heads, d], linear, FREE);
    }
    l.run();
    // A convolution of small weights would leave the output norm to its epsilon: MATH 1.8.
    let bound = 1.0 / (gdn.conv_kernel as f64).sqrt();
    let shape = [gdn.conv_channels(), gdn.conv_kernel];
    l.put(format!("{prefix}.conv.weight"), &shape, Init::Uniform { bound }, FREE);
    l.vector(format!("{prefix}.A_log"), heads, Init::ALog, FREE);
    l.vector(format!("{prefix}.dt_bias"), heads, Init::DtBias, FREE);
    l.vector(format!("{prefix}.norm.weight"), gdn.d_v, Init::Ones, FREE);
    l.output(format!("{prefix}.o.weight"), values, HIDDEN);
}

fn mla_layer(l: &mut Layout<'_>, prefix: &str) {
    let Some(mla) = &l.model.mla else { return };
    l.part = Part::Mla;
    l.norm(format!("{prefix}.norm.weight"));
    mla_mixer(l, &format!("{prefix}.mla"), mla);
    match (mla.ffn, mla.d_ff, &l.model.moe) {
        (MlaFfn::Moe, _, Some(moe)) => {
            l.part = Part::Moe;
            mixture(l, prefix, moe);
        }
        (MlaFfn::Swiglu, Some(d_ff), _) => {
            l.part = Part::Ffn;
            dense(l, prefix, d_ff);
        }
        _ => {}
    }
}

fn mla_mixer(l: &mut Layout<'_>, prefix: &str, mla: &MlaConfig) {
    let (d, heads, groups, latent) = (l.model.d_model, mla.n_heads, mla.n_kv_groups, mla.kv_latent);
    let name = |weight: &str| format!("{prefix}.{weight}.weight");
    l.run();
    l.hidden(name("q"), heads * mla.d_qk(), d, Some(heads));
    l.hidden(name("dkv"), latent, d, None);
    l.hidden(name("kr"), groups * mla.d_rope, d, Some(groups));
    // Without a latent, content keys and values read the input like the rest and belong to the same run.
    let cols = if latent == 0 { d } else { latent };
    if latent > 0 {
        l.vector(name("latent_norm"), latent, Init::Ones, FREE);
        l.run();
    }
    l.hidden(name("uk"), groups * mla.d_nope, cols, Some(groups));
    l.hidden(name("uv"), groups * mla.d_v, cols, Some(groups));
    l.output(name("o"), heads * mla.d_v, HIDDEN);
}

fn dense(l: &mut Layout<'_>, prefix: &str, d_ff: usize) {
    let d = l.model.d_model;
    l.norm(format!("{prefix}.ffn_norm.weight"));
    l.run();
    l.hidden(format!("{prefix}.ffn.w1.weight"), d_ff, d, None);
    l.hidden(format!("{prefix}.ffn.w3.weight"), d_ff, d, None);
    l.output(format!("{prefix}.ffn.w2.weight"), d_ff, HIDDEN);
}

fn mixture(l: &mut Layout<'_>, prefix: &str, moe: &MoeConfig) {
    let (d, unit, linear, output) = (l.model.d_model, l.unit, l.linear, l.output);
    l.norm(format!("{prefix}.ffn_norm.weight"));
    l.run();
    l.put(format!("{prefix}.moe.router.weight"), &[moe.n_routed, d], linear, DECAYED);
    l.buffers.push(BufferSpec { name: format!("{prefix}.moe.router.bias"), shape: vec![moe.n_routed], unit });
    l.run();
    for e in 0..moe.n_routed {
        for weight in ["w1", "w3"] {
            let name = format!("{prefix}.moe.experts.{e}.{weight}.weight");
            l.put(name, &[moe.d_ff, d], linear, DECAYED).routed_expert = Some(e);
        }
    }
    l.run();
    for e in 0..moe.n_routed {
        let name = format!("{prefix}.moe.experts.{e}.w2.weight");
        let spec = l.put(name, &[d, moe.d_ff], output, DECAYED);
        (spec.routed_expert, spec.residual_output) = (Some(e), true);
    }
    if moe.n_shared > 0 {
        let width = moe.n_shared * moe.d_ff;
        l.run();
        l.put(format!("{prefix}.moe.shared.w1.weight"), &[width, d], linear, DECAYED);
        l.put(format!("{prefix}.moe.shared.w3.weight"), &[width, d], linear, DECAYED);
        l.output(format!("{prefix}.moe.shared.w2.weight"), width, DECAYED);
    }
}

/// Numbers stored and tensors, from sizes that may still be absurd: floating point does not overflow, and a test holds this
/// to the table.
pub(crate) fn estimate(model: &ModelConfig) -> (f64, f64) {
    let f = |n: usize| n as f64;
    let (d, modules) = (f(model.d_model), f(model.mtp.n_modules));
    let gdn = model.gdn.as_ref().map_or((0.0, 0.0), |g| {
        let (h, keys, values) = (f(g.n_heads), f(g.n_heads) * f(g.d_k), f(g.n_heads) * f(g.d_v));
        let conv = (2.0 * keys + values) * f(g.conv_kernel);
        let mixer = d * (2.0 * keys + 3.0 * values + 2.0 * h + 1.0) + conv + 2.0 * h + f(g.d_v);
        let ffn = g.d_ff.map_or((0.0, 0.0), |d_ff| (3.0 * d * f(d_ff) + d, 4.0));
        (mixer + ffn.0, 12.0 + ffn.1)
    });
    let mla = model.mla.as_ref().map_or((0.0, 0.0), |m| {
        let (h, g, latent) = (f(m.n_heads), f(m.n_kv_groups), f(m.kv_latent));
        let from = if m.kv_latent == 0 { d } else { latent };
        let q_o = d * h * (f(m.d_nope) + f(m.d_rope) + f(m.d_v));
        let kv = d * (latent + g * f(m.d_rope)) + from * g * (f(m.d_nope) + f(m.d_v)) + latent;
        let ffn = m.d_ff.map_or((0.0, 0.0), |d_ff| (3.0 * d * f(d_ff) + d, 4.0));
        (q_o + kv + d + ffn.0, 8.0 + ffn.1)
    });
    let moe = model.moe.as_ref().map_or((0.0, 0.0), |m| {
        let experts = (f(m.n_routed) + f(m.n_shared)) * 3.0 * d * f(m.d_ff);
        (experts + f(m.n_routed) * d + d, 5.0 + 3.0 * f(m.n_routed))
    });
    // The pattern, not the layers, is counted: the depth may be absurd, and layers() would walk it.
    let share = |kind| f(model.pattern.iter().filter(|&&k| k == kind).count()) / f(model.pattern.len().max(1));
    let layers = |kind| (f(model.n_layers) * share(kind)).round();
    let (n_gdn, n_mla) = (layers(LayerKind::Gdn), layers(LayerKind::Mla));
    let total = |gdn: f64, block: f64, module: f64, root: f64| n_gdn * gdn + n_mla * block + modules * module + root;
    let numbers = total(gdn.0, mla.0 + moe.0, gdn.0 + d * (2.0 * d + 3.0), d * (f(model.vocab_size) + 1.0));
    (numbers, total(gdn.1, mla.1 + moe.1, gdn.1 + 4.0, 2.0))
}
