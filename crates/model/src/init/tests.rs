use super::*;
use crate::params::{ParamTable, Unit};
use crate::presets;

const NORMAL: Init = Init::Normal { std: 1.0 };

fn spec(name: &str, len: usize, init: Init) -> ParamSpec {
    let table = ParamTable::new(&presets::hymo_nano()).unwrap();
    let norm = table.get("norm.weight").unwrap().clone();
    ParamSpec { name: name.to_owned(), shape: vec![len], init, ..norm }
}

fn sorted(init: Init) -> Vec<f64> {
    let mut values: Vec<f64> = fill(&spec("x", 400_000, init), 7).into_iter().map(f64::from).collect();
    values.sort_by(f64::total_cmp);
    values
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

#[test]
fn quantiles_invert_the_distribution_function() {
    let below = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    for x in [-9.0, -6.5, -5.2, -3.0, -1.5, -0.9, -0.1, 0.0, 0.2, 1.2, 2.5, 4.0, 5.5] {
        let back = normal_quantile(below(x));
        // Near one the probability itself has no more digits.
        let tolerance = if x > 4.5 { 1e-8 } else { 1e-12 };
        assert!((back - x).abs() <= tolerance * (1.0 + x.abs()), "{x} -> {back}");
    }
}

#[test]
fn uniform_numbers_stay_inside_the_unit_interval() {
    assert!(unit_open(0) > 0.0);
    assert!(unit_open(u64::MAX) < 1.0);
}

#[test]
fn moments() {
    let normal = sorted(NORMAL);
    assert!(mean(normal.iter().copied()).abs() < 6e-3);
    assert!((mean(normal.iter().map(|x| x * x)) - 1.0).abs() < 1e-2);
    assert!((mean(normal.iter().map(|x| x.powi(4))) - 3.0).abs() < 1e-1);
    assert!(normal[normal.len() - 1] > 3.5);

    let cut = sorted(Init::TruncNormal { std: 0.02, cut: 3.0 });
    assert!(cut[0] >= -0.06001 && cut[cut.len() - 1] <= 0.06001);
    assert!((mean(cut.iter().map(|x| x * x)).sqrt() / 0.02 - 0.98658).abs() < 3e-3);

    let uniform = sorted(Init::Uniform { bound: 0.5 });
    assert!(uniform[0] >= -0.5 && uniform[uniform.len() - 1] <= 0.5);
    assert!((mean(uniform.iter().map(|x| x * x)) - 1.0 / 12.0).abs() < 5e-4);

    assert!(sorted(Init::Zeros).iter().all(|&x| x == 0.0));
    assert!(sorted(Init::Ones).iter().all(|&x| x == 1.0));
}

#[test]
fn decay_starts_with_the_quantiles_of_the_specification() {
    let n = 400_000;
    let a_log = fill(&spec("layers.0.gdn.A_log", n, Init::ALog), 1);
    let dt_bias = fill(&spec("layers.0.gdn.dt_bias", n, Init::DtBias), 1);
    let mut alpha: Vec<f32> = a_log.iter().zip(&dt_bias).map(|(&a, &dt)| alpha_at_rest(a, dt)).collect();
    alpha.sort_by(f32::total_cmp);
    // The 1% quantile is exp(-1.6 r) with r - ln r = 1 + 0.01 ln 100: 0.313, which MATH 1.8 rounds to 0.32.
    for (quantile, expected) in [(0.01, 0.313), (0.1, 0.60), (0.5, 0.940), (0.9, 0.993), (0.99, 0.999)] {
        let found = alpha[(quantile * n as f64) as usize];
        assert!((found - expected).abs() < 6e-3, "{quantile}: {found}, expected {expected}");
    }
    assert!(alpha[0] > 0.2 && alpha[n - 1] < 0.999_991, "{} {}", alpha[0], alpha[n - 1]);
}

#[test]
fn every_preset_is_finite_and_alive_for_many_seeds() {
    for preset in [presets::hymo_nano(), presets::gpt_nano()] {
        let table = ParamTable::new(&preset).unwrap();
        for seed in 0..8 {
            for p in table.params() {
                assert!(fill(p, seed).iter().all(|x| x.is_finite()), "{} for seed {seed}", p.name);
            }
        }
    }
    let table = ParamTable::new(&presets::hymo_434m()).unwrap();
    for seed in 0..500 {
        for i in (0..32).filter(|i| i % 4 != 3) {
            let get = |name: &str| fill(table.get(&format!("layers.{i}.gdn.{name}")).unwrap(), seed);
            assert_eq!(scan(&get("A_log"), &get("dt_bias")), [], "layer {i}, seed {seed}");
        }
    }
}

#[test]
fn a_value_depends_on_seed_name_and_place_only() {
    let whole = fill(&spec("a", 1000, NORMAL), 5);
    let mut piece = [0.0; 300];
    fill_from(&spec("a", 1000, NORMAL), 5, 613, &mut piece);
    assert_eq!(piece, whole[613..913]);
    assert_ne!(fill(&spec("a", 1000, NORMAL), 6), whole);
    assert_ne!(fill(&spec("b", 1000, NORMAL), 5), whole);
    // The same layer of a deeper model.
    let mut deeper = presets::hymo_nano();
    deeper.n_layers += 4;
    let (one, other) = (ParamTable::new(&presets::hymo_nano()).unwrap(), ParamTable::new(&deeper).unwrap());
    let name = "layers.4.gdn.q.weight";
    assert_eq!(fill(one.get(name).unwrap(), 1), fill(other.get(name).unwrap(), 1));
}

/// The stream is part of what makes a run repeatable: these numbers may never change.
#[test]
fn the_stream_is_pinned() {
    let found: Vec<u32> = fill(&spec("embed.weight", 4, NORMAL), 0).iter().map(|x| x.to_bits()).collect();
    assert_eq!(found, PINNED, "{:?}", fill(&spec("embed.weight", 4, NORMAL), 0));
}

const PINNED: [u32; 4] = [1_063_735_535, 3_213_614_418, 3_194_423_511, 3_188_659_020];

#[test]
fn names_of_a_model_have_different_streams() {
    let table = ParamTable::new(&presets::hymo_434m()).unwrap();
    let hashes: std::collections::BTreeSet<u64> = table.params().iter().map(|p| fnv1a(p.name.as_bytes())).collect();
    assert_eq!(hashes.len(), table.params().len());
    assert!(table.unit_params(Unit::Root).len() > 2);
}

/// HAZARD 5: dead heads are reported at the start, each with its reason, and healthy ones are not.
#[test]
fn dead_heads_are_found() {
    let nan = f32::NAN;
    let cases: &[(f32, f32, Option<DeadReason>)] = &[
        (1.0, -4.0, None),
        (nan, -4.0, Some(DeadReason::NonFinite)),
        (f32::NEG_INFINITY, -4.0, Some(DeadReason::NonFinite)),
        (1.0, f32::INFINITY, Some(DeadReason::NonFinite)),
        // The bias that some implementations start from, with a large rate: exp(-16 * 1.31).
        (2.77, 1.0, Some(DeadReason::Forgets)),
        (100.0, 0.0, Some(DeadReason::Forgets)),
        (-30.0, -4.0, Some(DeadReason::Frozen)),
        (2.0, -100.0, Some(DeadReason::Frozen)),
    ];
    let (a_log, dt_bias): (Vec<f32>, Vec<f32>) = cases.iter().map(|c| (c.0, c.1)).unzip();
    let found = scan(&a_log, &dt_bias);
    let expected: Vec<(usize, DeadReason)> =
        cases.iter().enumerate().filter_map(|(i, c)| c.2.map(|reason| (i, reason))).collect();
    assert_eq!(found.iter().map(|d| (d.head, d.reason)).collect::<Vec<_>>(), expected);
}
