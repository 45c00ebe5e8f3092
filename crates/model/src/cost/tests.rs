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
    assert_eq!(flops.training_checkpointed - flops.training, flops.forward - of("head and its loss").0);
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

/// What a run will need is known before it starts. One H200 is to train 8 x 4,096 tokens in at most 60 GiB.
#[test]
fn training_of_the_full_model_is_planned_below_its_bar() {
    let cost = cost("hymo-434m", 4096);
    let state = &cost.training_state;
    let rows = (state.normuon - 4 * cost.params.normuon) / 4;
    assert_eq!(state.adamw, 8 * cost.params.adamw);
    assert!((100_000..1_000_000).contains(&rows), "{rows}");
    assert_eq!(state.total, state.master + state.gradients + state.normuon + state.adamw + state.bf16_copy);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let planned = gib(state.total + cost.activations.batch_bf16);
    assert!((40.0..60.0).contains(&planned), "{planned}");
    let checkpointed = gib(state.total + cost.activations.batch_checkpointed_bf16);
    assert!(checkpointed < planned - 20.0, "{checkpointed}");
}

#[test]
fn lengths_of_zero_or_beyond_sense_are_refused() {
    let model = presets::hymo_nano();
    let wrong = Cost::new(&model, CostOptions { context: 0, batch: usize::MAX }).unwrap_err();
    assert_eq!(wrong.as_slice().len(), 2);
    // The largest that is accepted does not overflow.
    let most = u32::MAX as usize;
    for preset in presets::PRESETS {
        assert!(Cost::new(&preset.model(), CostOptions { context: most, batch: most }).is_ok());
    }
}
