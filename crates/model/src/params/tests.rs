use std::collections::BTreeSet;

use super::*;
use crate::config::{GdnFfn, LayerKind, MlaFfn, Rope};
use crate::presets;

fn table(model: &ModelConfig) -> ParamTable {
    ParamTable::new(model).unwrap()
}

fn numel(table: &ParamTable, prefix: &str) -> usize {
    table.params().iter().filter(|p| p.name.starts_with(prefix)).map(ParamSpec::numel).sum()
}

#[test]
fn the_full_model_has_the_parameters_of_the_design() {
    let table = table(&presets::hymo_434m());
    assert_eq!(numel(&table, ""), 1_127_342_016);
    assert_eq!(numel(&table, "embed."), 57_573_376);
    assert_eq!(numel(&table, "norm."), 896);
    assert_eq!(numel(&table, "layers.0."), 7_386_144);
    assert_eq!(numel(&table, "layers.3.mla.") + numel(&table, "layers.3.norm."), 4_015_104);
    assert_eq!(numel(&table, "layers.3.moe.") + numel(&table, "layers.3.ffn_norm."), 105_298_816);
    assert_eq!(numel(&table, "mtp.0."), 8_994_464);
    assert_eq!(numel(&table, "mtp.1."), 8_994_464);
    let of_muon: usize = table.params().iter().filter(|p| p.group == OptimGroup::NorMuon).map(ParamSpec::numel).sum();
    assert_eq!(of_muon, 226_164_736);
    assert_eq!(table.units().len(), 33);
    assert_eq!(table.buffers().len(), 8);
    assert_eq!(table.buffers()[0].name, "layers.3.moe.router.bias");
}

/// MATH 6.1 and 7, written down a second time from the names.
fn expected_group(name: &str, zero_centred: bool) -> OptimGroup {
    let decay = |decay| OptimGroup::AdamW { decay };
    let is = |endings: &[&str]| endings.iter().any(|e| name.ends_with(&format!("{e}.weight")));
    let plain_norm = is(&["gdn.norm", "latent_norm"]);
    if name.contains(".moe.") || name == "embed.weight" {
        decay(true)
    } else if plain_norm || is(&["gdn.a", "gdn.b", "conv"]) || name.ends_with("A_log") || name.ends_with("dt_bias") {
        decay(false)
    } else if is(&["norm"]) {
        decay(zero_centred)
    } else {
        OptimGroup::NorMuon
    }
}

/// HAZARD 16: the group of a parameter is declared, not swept up by its number of dimensions, and every one has exactly one.
#[test]
fn every_parameter_is_in_the_group_its_name_asks_for() {
    for preset in presets::PRESETS {
        let mut model = preset.model();
        for zero_centred in [true, false] {
            model.norm.zero_centred = zero_centred;
            for p in table(&model).params() {
                assert_eq!(p.group, expected_group(&p.name, zero_centred), "{}", p.name);
                let matrix = p.shape.len() == 2;
                assert!(matrix || p.group != OptimGroup::NorMuon, "{}", p.name);
                assert!(p.head_blocks.is_none_or(|n| p.rows() % n == 0), "{}", p.name);
            }
        }
    }
}

#[test]
fn a_layer_is_laid_out_as_its_gemms_read_it() {
    let table = table(&presets::hymo_434m());
    let of = |layer: usize| -> Vec<String> {
        let name = |p: &ParamSpec| p.name.splitn(3, '.').nth(2).unwrap().to_owned();
        table.unit_params(Unit::Layer(layer)).iter().map(name).filter(|n| !n.contains("experts")).collect()
    };
    let gdn = "norm.weight gdn.q.weight gdn.k.weight gdn.v.weight gdn.z.weight gdn.a.weight gdn.b.weight gdn.conv.weight \
               gdn.A_log gdn.dt_bias gdn.norm.weight gdn.o.weight";
    assert_eq!(of(0), gdn.split_whitespace().collect::<Vec<_>>());
    let mla = "norm.weight mla.q.weight mla.dkv.weight mla.kr.weight mla.latent_norm.weight mla.uk.weight mla.uv.weight \
               mla.o.weight ffn_norm.weight moe.router.weight moe.shared.w1.weight moe.shared.w3.weight \
               moe.shared.w2.weight";
    assert_eq!(of(3), mla.split_whitespace().collect::<Vec<_>>());
    let span = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|n| format!("layers.3.{n}.weight")).collect();
        table.span(&names.iter().map(String::as_str).collect::<Vec<_>>()).map(|s| (s.rows, s.cols))
    };
    assert_eq!(span(&["mla.q", "mla.dkv", "mla.kr"]), Ok((2048 + 128 + 128, 896)));
    assert_eq!(span(&["mla.uk", "mla.uv"]), Ok((384 + 512, 128)));
    assert_eq!(span(&["moe.shared.w1", "moe.shared.w3"]), Ok((2 * 2304, 896)));
    assert!(matches!(span(&["mla.q", "mla.kr"]), Err(Error::NotAdjacent { .. })));
    assert!(matches!(span(&["mla.q", "mla.x"]), Err(Error::UnknownParam { .. })));
    assert!(matches!(table.span(&[]), Err(Error::UnknownParam { .. })));
}

#[test]
fn rows_of_different_lengths_are_no_matrix() {
    let table = table(&presets::hymo_434m());
    // Adjacent, as 128 elements end where the next run begins, and still not one matrix.
    let found = table.span(&["layers.3.mla.latent_norm.weight", "layers.3.mla.uk.weight"]);
    assert_eq!(found, Err(Error::UnequalRows { name: "layers.3.mla.uk.weight".into(), found: 128, expected: 1 }));
}

#[test]
fn without_a_latent_attention_reads_one_run() {
    let table = table(&presets::gpt_434m());
    let names = ["q", "kr", "uk", "uv"].map(|w| format!("layers.1.mla.{w}.weight"));
    let span = table.span(&names.each_ref().map(String::as_str)).unwrap();
    assert_eq!((span.rows, span.cols), (1024 + 256 + 768 + 1024, 1024));
    assert!(table.get("layers.1.mla.dkv.weight").is_none());
    assert!(table.get("layers.1.mla.latent_norm.weight").is_none());
}

#[test]
fn experts_have_a_constant_stride() {
    let table = table(&presets::hymo_nano());
    let experts = table.experts(3).unwrap();
    assert_eq!(experts.count, 8);
    for e in 0..8 {
        let name = |w: &str| format!("layers.3.moe.experts.{e}.{w}.weight");
        let w13 = table.span(&[&name("w1"), &name("w3")]).unwrap();
        assert_eq!(w13.offset, experts.w13.offset + e * experts.w13.range().len());
        let w2 = table.span(&[&name("w2")]).unwrap();
        assert_eq!(w2.offset, experts.w2.offset + e * experts.w2.range().len());
    }
    assert_eq!(table.experts(0), None);
    assert_eq!(table.experts(99), None);
}

#[test]
fn outputs_of_residual_branches_start_smaller() {
    let table = table(&presets::hymo_434m());
    let std = 0.02 / 40f64.sqrt();
    for p in table.params() {
        let writes = p.name.ends_with(".o.weight") || p.name.ends_with(".w2.weight");
        assert_eq!(p.residual_output, writes, "{}", p.name);
        if let Init::TruncNormal { std: found, cut } = p.init {
            assert_eq!((found, cut), (if writes { std } else { 0.02 }, 3.0), "{}", p.name);
        }
    }
}

mod any_config {
    use proptest::prelude::*;

    use super::*;
    use crate::config::{InitConfig, LossConfig, MtpConfig, NormConfig};

    prop_compose! {
        fn mla()(heads in 1usize..4, groups in 1usize..4, dims in (1usize..9, 0usize..4, 1usize..9), latent in 0usize..20,
                 kind in 0usize..3, d_ff in 1usize..20) -> crate::config::MlaConfig {
            let ffn = [MlaFfn::Moe, MlaFfn::Swiglu, MlaFfn::None][kind];
            crate::config::MlaConfig {
                n_heads: heads * groups, n_kv_groups: groups, d_nope: dims.0, d_rope: 2 * dims.1, d_v: dims.2,
                kv_latent: latent, rope: if dims.1 == 0 { Rope::None } else { Rope::Interleaved }, rope_theta: 1e4,
                ffn, d_ff: (ffn == MlaFfn::Swiglu).then_some(d_ff), yarn: None,
            }
        }
    }

    prop_compose! {
        fn gdn()(n_heads in 1usize..5, d_k in 1usize..9, d_v in 1usize..9, conv_kernel in 2usize..9,
                 d_ff in proptest::option::of(1usize..20)) -> crate::config::GdnConfig {
            crate::config::GdnConfig {
                n_heads, d_k, d_v, conv_kernel, d_ff, ffn: if d_ff.is_some() { GdnFfn::Swiglu } else { GdnFfn::None },
                gate_act: Default::default(), allow_neg_eigval: false, chunk_size: 64,
            }
        }
    }

    prop_compose! {
        fn model()(pattern in prop::collection::vec(prop_oneof![Just(LayerKind::Gdn), Just(LayerKind::Mla)], 1..5),
                   repeats in 1usize..3, mla in mla(), gdn in gdn(), d_model in 1usize..40, vocab_size in 2usize..99,
                   experts in (1usize..5, 0usize..3, 1usize..20), n_modules in 0usize..3) -> ModelConfig {
            let has = |kind| pattern.contains(&kind);
            let moe = crate::config::MoeConfig {
                n_routed: experts.0, n_shared: experts.1, top_k: 1, d_ff: experts.2, routed_scale: 1.0,
                balance_loss: 0.0, bias_update_rate: 0.0,
            };
            ModelConfig {
                vocab_size, context_length: 64, d_model, n_layers: repeats * pattern.len(),
                moe: (has(LayerKind::Mla) && mla.ffn == MlaFfn::Moe).then_some(moe),
                gdn: (has(LayerKind::Gdn) || n_modules > 0).then_some(gdn),
                mla: has(LayerKind::Mla).then_some(mla),
                pattern, norm: NormConfig::default(), loss: LossConfig::default(), init: InitConfig::default(),
                mtp: MtpConfig { n_modules, loss_weights: vec![0.1; n_modules] },
            }
        }
    }

    proptest! {
        /// Offsets of a unit are in order, disjoint, and leave nothing over but the padding between runs.
        #[test]
        fn lies_in_its_buffers_without_overlap_or_gap(model in model()) {
            let table = table(&model);
            let mut names = BTreeSet::new();
            let mut seen = 0;
            for unit in table.units() {
                let mut end = 0;
                for p in table.unit_params(unit) {
                    prop_assert_eq!(p.unit, unit);
                    prop_assert!(p.numel() > 0);
                    prop_assert!(p.offset == end || p.offset == end.next_multiple_of(RUN_ALIGN), "{}", p.name);
                    prop_assert!(names.insert(p.name.clone()), "{} twice", p.name);
                    prop_assert_eq!(table.get(&p.name), Some(p));
                    end = p.range().end;
                    seen += 1;
                }
                prop_assert_eq!(table.unit_len(unit), end.next_multiple_of(RUN_ALIGN));
            }
            prop_assert_eq!(seen, table.params().len());
            let (numbers, tensors) = estimate(&model);
            prop_assert_eq!(numbers, numel(&table, "") as f64);
            prop_assert!(tensors >= seen as f64);
        }
    }
}

#[test]
fn the_estimate_of_every_preset_is_its_count() {
    for preset in presets::PRESETS {
        let model = preset.model();
        let table = table(&model);
        assert_eq!(estimate(&model).0, numel(&table, "") as f64, "{}", preset.name);
    }
}
