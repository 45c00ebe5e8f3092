//! Whatever a configuration is allowed to say can be built, trained and decoded.

mod small;

use hymo_model::config::{
    GateAct, GdnConfig, GdnFfn, InitConfig, LayerKind, LossConfig, MlaConfig, MlaFfn, ModelConfig, MoeConfig,
    MtpConfig, NormConfig, Rope, YarnConfig,
};
use hymo_model::{Batch, HyMo, Options, Params, State};
use hymo_ops::check::rms_error;
use hymo_tensor::Ctx;
use proptest::prelude::*;
use proptest::sample::select;
use small::{flat, packed, step, values};

/// Any of a few numbers, among them the ends of the range.
fn among(numbers: &'static [f64]) -> impl Strategy<Value = f64> {
    select(numbers)
}

prop_compose! {
    fn gdn()(n_heads in 1usize..4, d_k in 1usize..9, d_v in 1usize..9, conv_kernel in 2usize..9, silu: bool,
             allow_neg_eigval: bool, chunk in 4u32..9, d_ff in proptest::option::of(1usize..12)) -> GdnConfig {
        GdnConfig {
            n_heads, d_k, d_v, conv_kernel, allow_neg_eigval, chunk_size: 1 << chunk, d_ff,
            gate_act: if silu { GateAct::Silu } else { GateAct::Sigmoid },
            ffn: if d_ff.is_some() { GdnFfn::Swiglu } else { GdnFfn::None },
        }
    }
}

prop_compose! {
    fn mla()(heads in 1usize..4, groups in 1usize..4, [d_nope, d_v] in prop::array::uniform2(1usize..7), pairs in 0usize..3,
             kv_latent in 0usize..9, turns: bool, ffn in select(vec![MlaFfn::Moe, MlaFfn::Swiglu, MlaFfn::None]),
             d_ff in 1usize..12, rope_theta in among(&[1.0000001, 1.5, 1e4, 1e9]),
             yarn in proptest::option::of((among(&[1., 4., 1024.]), select(vec![1usize, 64, 1 << 24])))) -> MlaConfig {
        let rope = if turns && pairs > 0 { Rope::Interleaved } else { Rope::None };
        let yarn = yarn.map(|(factor, original_context)| YarnConfig { factor, original_context });
        MlaConfig {
            n_heads: heads * groups, n_kv_groups: groups, d_nope, d_rope: 2 * pairs, d_v, kv_latent, rope, rope_theta, ffn,
            d_ff: (ffn == MlaFfn::Swiglu).then_some(d_ff),
            yarn: yarn.filter(|y| rope != Rope::None && y.factor * y.original_context as f64 >= 64.),
        }
    }
}

prop_compose! {
    fn moe()(n_routed in 1usize..5, n_shared in 0usize..3, choices in 1usize..5, d_ff in 1usize..12,
             routed_scale in among(&[1e-3, 1., 100.]), balance_loss in among(&[0., 1e-300, 1e-4, 1.])) -> MoeConfig {
        let top_k = choices.min(n_routed);
        MoeConfig { n_routed, n_shared, top_k, d_ff, routed_scale, balance_loss, bias_update_rate: 1e-3 }
    }
}

prop_compose! {
    fn rest()(eps in among(&[1e-12, 1e-6, 1e-2]), zero_centred: bool, std in among(&[1e-6, 0.02, 1.]),
              truncate in among(&[0., 1., 3., 10.]), z_loss in among(&[0., 1e-300, 1e-4, 1.]),
              soft_cap in proptest::option::of(among(&[1e-3, 1., 30., 1000.]))) -> (NormConfig, InitConfig, LossConfig) {
        (NormConfig { eps, zero_centred }, InitConfig { std, truncate }, LossConfig { z_loss, soft_cap })
    }
}

prop_compose! {
    fn model()(pattern in prop::collection::vec(select(vec![LayerKind::Gdn, LayerKind::Mla]), 1..4), repeats in 1usize..3,
               vocab_size in 2usize..40, d_model in 1usize..12, mla in mla(), gdn in gdn(), moe in moe(),
               weights in prop::collection::vec(among(&[0., 1e-300, 0.3, 10.]), 0..3),
               (norm, init, loss) in rest()) -> ModelConfig {
        let has = |kind| pattern.contains(&kind);
        ModelConfig {
            vocab_size, context_length: 64, d_model, n_layers: repeats * pattern.len(),
            moe: (has(LayerKind::Mla) && mla.ffn == MlaFfn::Moe).then_some(moe),
            gdn: (has(LayerKind::Gdn) || !weights.is_empty()).then_some(gdn),
            mla: has(LayerKind::Mla).then_some(mla),
            mtp: MtpConfig { n_modules: weights.len(), loss_weights: weights },
            pattern, norm, init, loss,
        }
    }
}

/// One training pass on the fast path: every number finite.
fn trains(config: &ModelConfig, params: &Params) -> Result<(), TestCaseError> {
    let batch = packed(config, 37 - config.mtp.n_modules, &[&[1, 20, 17], &[38]], 1);
    let options = Options { checkpoint: vec![0], ..Options::default() };
    let got = step(&Ctx::cpu().poisoned(), config, params, &batch, &options);
    prop_assert!(got.total.is_finite(), "loss {}", got.total);
    prop_assert!(flat(&got.grads).iter().all(|g| g.is_finite()), "a gradient that is not finite");
    Ok(())
}

/// A sequence in two pieces, in double precision: the logits of the whole.
fn decodes(config: &ModelConfig, params: &Params) -> Result<(), TestCaseError> {
    let (ctx, model) = (Ctx::cpu().oracle(), HyMo::new(config).unwrap());
    let params = params.to_f64(&ctx).unwrap();
    let width = 9 + config.mtp.n_modules + 1;
    let tokens: Vec<i32> = (0..width).map(|i| (7 * i % config.vocab_size) as i32).collect();
    let batch = Batch::new(1, 9, config.mtp.n_modules, &tokens, &vec![0; width]).unwrap();
    let want = values(&model.logits(&ctx, &params, &batch).unwrap()[0]);
    let (mut state, mut got) = (State::new(config), Vec::new());
    for piece in [0..4, 4..5, 5..9] {
        got.extend(values(&model.extend(&ctx, &params, &tokens[piece], &mut state).unwrap()));
    }
    let error = rms_error(&got, &want);
    prop_assert!(error < 1e-8, "logits differ by {error:e}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn what_validates_builds_trains_and_decodes(config in model()) {
        prop_assert_eq!(config.validate(), Ok(()));
        prop_assert!(HyMo::new(&config).is_ok());
        let params = Params::init(&Ctx::cpu(), &config, 1).unwrap();
        trains(&config, &params)?;
        decodes(&config, &params)?;
    }
}
