use super::*;
use crate::presets;

fn cost(name: &str, context: usize) -> Cost {
    let model = presets::preset(name).unwrap().model();
    Cost::new(&model, CostOptions { context, batch: 8 }).unwrap()
}

fn part(cost: &Cost, part: Part) -> (u64, u64, u64) {
    let found = cost.params.parts.iter().find(|p| p.part == part).unwrap();
    (found.count, found.active, found.stored)
}

#[test]
fn the_headline_figures() {
    let cost = cost("hymo-434m", 4096);
    assert_eq!(cost.params.active, 433_708_992);
    assert_eq!(cost.params.stored, 1_127_342_016);
    assert_eq!(cost.params.normuon, 226_164_736);
    assert_eq!(cost.params.adamw, 1_127_342_016 - 226_164_736);
    assert_eq!(part(&cost, Part::Embedding), (1, 57_573_376, 57_573_376));
    assert_eq!(part(&cost, Part::Gdn), (24, 24 * 7_386_144, 24 * 7_386_144));
    assert_eq!(part(&cost, Part::Mla), (8, 8 * 4_015_104, 8 * 4_015_104));
    assert_eq!(part(&cost, Part::Moe), (8, 8 * 18_594_688, 8 * 105_298_816));
    assert_eq!(part(&cost, Part::FinalNorm), (1, 896, 896));
    assert_eq!(part(&cost, Part::Mtp), (2, 2 * 8_994_464, 2 * 8_994_464));
}

#[test]
fn parts_sum_to_the_whole() {
    for preset in presets::PRESETS {
        let params = cost(preset.name, 1024).params;
        assert_eq!(params.parts.iter().map(|p| p.active).sum::<u64>(), params.active);
        assert_eq!(params.parts.iter().map(|p| p.stored).sum::<u64>(), params.stored);
        assert_eq!(params.normuon + params.adamw, params.stored);
    }
}

#[test]
fn presets_have_the_sizes_their_names_say() {
    let active = |name: &str| cost(name, 1024).params.active as f64;
    for (name, millions) in [("hymo-434m", 434.0), ("hymo-120m", 120.0), ("hymo-30m", 30.0)] {
        assert!((active(name) / (1e6 * millions) - 1.0).abs() < 0.05, "{name}: {}", active(name));
    }
    let nano = active("hymo-nano") - 4096.0 * 192.0;
    assert!((2.0e6..2.5e6).contains(&nano), "{nano}");
    for size in ["434m", "120m", "30m", "nano"] {
        let ratio = active(&format!("gpt-{size}")) / active(&format!("hymo-{size}"));
        assert!((ratio - 1.0).abs() < 0.02, "{size}: {ratio}");
    }
}

/// The figures that the head of `flops.rs` compares.
#[test]
fn operations_of_the_full_model() {
    let flops = cost("hymo-434m", 4096).flops_per_token;
    let of = |op: &str| flops.ops.iter().find(|o| o.op == op).map(|o| (o.forward, o.backward)).unwrap();
    assert_eq!(of("head and its loss"), (2 * 3 * 57_573_376, 4 * 3 * 57_573_376));
    // 8 layers, 16 heads, 128 + 128, 2048.5 keys.
    assert_eq!(of("attention").0, 134_250_496);
    assert_eq!(of("attention").1, 134_250_496 * 5 / 2);
    assert_eq!(of("short convolution").0, 26 * 2 * 4096 * 4);
    // 26 layers, 16 heads, 28,672 + 24,576 + 682.67 multiply-adds.
    assert_eq!(of("delta rule").0, 26 * 1_725_781);
    let near = |found: u64, expected: f64| (found as f64 / 1e9 - expected).abs() < 0.005;
    assert!(near(flops.forward, 1.277), "{}", flops.forward);
    assert!(near(flops.training, 3.93), "{}", flops.training);
    // 2 of 26 GDN mixers belong to prediction modules, which are not run again.
    let modules = of("mtp projections").0 + (of("delta rule").0 + of("short convolution").0) * 2 / 26;
    let again = flops.forward - of("head and its loss").0 - modules;
    assert_eq!(flops.training_checkpointed - flops.training, again);
}

#[test]
fn caches_of_the_full_model() {
    let cache = cost("hymo-434m", 32_768).cache;
    assert_eq!(cache.numbers_per_token, 8 * 256);
    assert_eq!(cache.bytes_at_context, 128 << 20);
    assert_eq!(cache.mha_bytes_at_context, 8 << 30);
    assert_eq!(cache.gdn_state_bytes, 12 << 20);
    assert_eq!(cache.mtp_state_bytes, 1 << 20);
    assert_eq!(cache.conv_tail_bytes, 26 * 3 * 4096 * 2);
    // Without a latent the cache holds keys and values.
    assert_eq!(cost("gpt-434m", 1024).cache.numbers_per_token, 28 * 8 * 256);
}

/// What a run will need is known before it starts. One H200 is to train 8 x 4,096 tokens in at most 60 GiB: the operations
/// as they are keep a little more than that in bf16, and far less when layers are run again.
#[test]
fn training_of_the_full_model_is_planned() {
    let cost = cost("hymo-434m", 4096);
    let state = &cost.training_state;
    let rows = (state.normuon - 4 * cost.params.normuon) / 4;
    assert_eq!(state.adamw, 8 * cost.params.adamw);
    assert!((100_000..1_000_000).contains(&rows), "{rows}");
    assert_eq!(state.total, state.master + state.gradients + state.normuon + state.adamw + state.bf16_copy);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let planned = gib(state.total + cost.activations.batch_bf16);
    assert!((60.0..66.0).contains(&planned), "{planned}");
    let checkpointed = gib(state.total + cost.activations.batch_checkpointed_bf16);
    assert!(checkpointed < 30.0, "{checkpointed}");
}

#[test]
fn lengths_of_zero_or_beyond_sense_are_refused() {
    let model = presets::hymo_nano();
    let wrong = Cost::new(&model, CostOptions { context: 0, batch: usize::MAX }).unwrap_err();
    assert_eq!(wrong.as_slice().len(), 2);
}

/// The largest sizes, lengths and counts that are accepted: figures that do not fit stop at the largest number.
#[test]
fn figures_beyond_their_type_stop_at_its_end() {
    let most = CostOptions { context: u32::MAX as usize, batch: u32::MAX as usize };
    for preset in presets::PRESETS {
        assert!(Cost::new(&preset.model(), most).is_ok());
    }
    let mut model = presets::gpt_nano();
    (model.vocab_size, model.context_length, model.d_model, model.n_layers) = (2, 1 << 24, 1, 1024);
    let mla = model.mla.as_mut().unwrap();
    (mla.n_heads, mla.n_kv_groups, mla.d_nope, mla.d_rope, mla.d_v) = (1024, 1024, 1024, 1024, 1024);
    (mla.ffn, mla.d_ff) = (crate::config::MlaFfn::None, None);
    let cost = Cost::new(&model, most).unwrap();
    assert_eq!(cost.flops_per_token.training, u64::MAX);
    assert_eq!(cost.cache.bytes_at_context, u64::MAX);
    assert_eq!(cost.cache.batch_bytes, u64::MAX);
    let modest = Cost::new(&model, CostOptions { context: 1 << 20, batch: 1 }).unwrap();
    assert_eq!(modest.cache.bytes_at_context, (2 * 3) << 50);
}

mod any_size {
    use proptest::prelude::*;

    use super::*;
    use crate::config::{FIELDS, Kind, RunConfig};

    proptest! {
        /// Whole numbers anywhere in their ranges, most of them at an end: a cost without overflow, or problems.
        #[test]
        fn has_a_cost_or_a_problem(
            preset in 0..presets::PRESETS.len(),
            edits in prop::collection::vec((0..FIELDS.len(), 0.0f64..1.0, 0u8..3), 0..12),
            context in prop_oneof![Just(1), Just(u32::MAX as usize), 1usize..1 << 20],
            batch in prop_oneof![Just(1), Just(u32::MAX as usize)],
        ) {
            let mut tree = toml::Table::try_from(RunConfig::new(presets::PRESETS[preset].model())).unwrap();
            for (at, share, end) in edits {
                let Kind::Int(min, max) = FIELDS[at].kind else { continue };
                let value = match end {
                    0 => min,
                    1 => max,
                    _ => min + (share * (max - min) as f64) as i64,
                };
                let mut section = FIELDS[at].section().split('.');
                let table = section.try_fold(&mut tree, |t, k| t.get_mut(k).and_then(toml::Value::as_table_mut));
                if let Some(old) = table.and_then(|t| t.get_mut(FIELDS[at].name())) {
                    *old = toml::Value::Integer(value);
                }
            }
            let Ok(config) = RunConfig::from_toml(&toml::to_string(&tree).unwrap()) else { return Ok(()) };
            let cost = Cost::new(&config.model, CostOptions { context, batch }).unwrap();
            prop_assert!(cost.flops_per_token.training >= cost.flops_per_token.forward);
            prop_assert!(cost.activations.batch_bf16 >= cost.activations.per_token_bf16);
            prop_assert!(cost.cache.batch_bytes >= cost.cache.bytes_at_context);
        }
    }
}
