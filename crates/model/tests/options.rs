//! Every option of a configuration reaches the numbers, with the meaning that its documentation gives it.

mod small;

use hymo_model::config::{GdnFfn, MlaFfn, ModelConfig};
use hymo_model::{Batch, HyMo, Options, Params, init};
use hymo_ops::check::rms_error;
use hymo_tensor::{Ctx, DType};
use small::{config, packed, params, step, unit, values, variants};

fn oracle() -> Ctx {
    Ctx::cpu().oracle()
}

fn batch(config: &ModelConfig) -> Batch {
    packed(config, 29 - config.mtp.n_modules, &[&[13, 17]], 2)
}

/// Logits at every depth in double precision.
fn logits(config: &ModelConfig, params: &Params) -> Vec<Vec<f64>> {
    let params = params.to_f64(&oracle()).unwrap();
    let logits = HyMo::new(config).unwrap().logits(&oracle(), &params, &batch(config)).unwrap();
    logits.iter().map(values).collect()
}

/// `change` to every parameter whose name `which` accepts.
fn changed(params: &Params, which: impl Fn(&str) -> bool, change: impl Fn(f32) -> f32) -> Params {
    let (ctx, specs) = (Ctx::cpu(), params.table().params().to_vec());
    let flats: Vec<Vec<f32>> = params.flats().iter().map(|f| f.to_vec::<f32>().unwrap()).collect();
    let mut out = params.clone();
    for (flat, values) in out.flats_mut().iter_mut().zip(&flats) {
        *flat = hymo_tensor::Tensor::from_slice(&ctx, &[values.len()], values).unwrap();
    }
    for spec in specs.iter().filter(|s| which(&s.name)) {
        let flat = out.flats_mut()[unit(spec)].flat_mut::<f32>().unwrap();
        flat[spec.range()].iter_mut().for_each(|x| *x = change(*x));
    }
    out
}

/// Changing one option changes the loss: none is read and dropped on the way.
#[test]
fn no_option_is_without_effect() {
    type Edit = (&'static str, fn(&mut ModelConfig));
    let edits: &[Edit] = &[
        ("eps", |m| m.norm.eps = 1e-3),
        ("zero_centred", |m| m.norm.zero_centred ^= true),
        ("gate_act", |m| m.gdn.as_mut().unwrap().gate_act = hymo_model::config::GateAct::Silu),
        ("allow_neg_eigval", |m| m.gdn.as_mut().unwrap().allow_neg_eigval = true),
        ("rope", |m| m.mla.as_mut().unwrap().rope = hymo_model::config::Rope::None),
        ("rope_theta", |m| m.mla.as_mut().unwrap().rope_theta = 100.),
        ("yarn", |m| {
            m.mla.as_mut().unwrap().yarn = Some(hymo_model::config::YarnConfig { factor: 4., original_context: 64 });
        }),
        ("top_k", |m| m.moe.as_mut().unwrap().top_k = 1),
        ("routed_scale", |m| m.moe.as_mut().unwrap().routed_scale = 1.),
        ("balance_loss", |m| m.moe.as_mut().unwrap().balance_loss = 0.02),
        ("loss_weights", |m| m.mtp.loss_weights = vec![0.3, 0.2]),
        ("z_loss", |m| m.loss.z_loss = 0.),
        ("soft_cap", |m| m.loss.soft_cap = Some(4.)),
    ];
    let (ctx, base) = (Ctx::cpu(), config());
    let params = params(&ctx, &base, 1);
    let total = |config: &ModelConfig| step(&ctx, config, &params, &batch(config), &Options::default()).total;
    let before = total(&base);
    for (name, edit) in edits {
        let mut config = base.clone();
        edit(&mut config);
        config.validate().unwrap();
        assert!((total(&config) - before).abs() > 1e-6, "{name}");
    }
    // A chunk is how it is computed, not what.
    let mut config = base.clone();
    config.gdn.as_mut().unwrap().chunk_size = 64;
    assert!((total(&config) - before).abs() < 1e-5);
}

/// MATH 4: the capped logits are the logits. What `logits` gives is κ tanh(l / κ) of what it gives without a cap, and the
/// losses are those of its rows.
#[test]
fn the_loss_is_that_of_the_capped_logits() {
    for (name, mut config) in variants() {
        let params = params(&Ctx::cpu(), &config, 3);
        config.loss = hymo_model::config::LossConfig { z_loss: 0.01, soft_cap: None };
        let raw = logits(&config, &params);
        config.loss.soft_cap = Some(3.);
        let capped = logits(&config, &params);
        for (raw, capped) in raw.iter().zip(&capped) {
            let want: Vec<f64> = raw.iter().map(|l| 3. * (l / 3.).tanh()).collect();
            assert!(rms_error(capped, &want) < 1e-14, "{name}");
            assert!(rms_error(capped, raw) > 1e-3, "{name}: the cap moves nothing");
        }
        let (params, batch) = (params.to_f64(&oracle()).unwrap(), batch(&config));
        let got = step(&oracle(), &config, &params, &batch, &Options::default());
        for (k, logits) in capped.iter().enumerate() {
            let (targets, mut sum, mut valid) = (batch.ahead(k + 1), 0., 0.);
            for (row, &y) in logits.chunks(config.vocab_size).zip(&targets) {
                let lse = row.iter().map(|l| l.exp()).sum::<f64>().ln();
                if let Ok(y) = usize::try_from(y) {
                    (sum, valid) = (sum + lse - row[y] + 0.01 * lse * lse, valid + 1.);
                }
            }
            let want = sum / valid;
            assert!((got.depths[k] - want).abs() < 1e-12, "{name}, depth {k}: {} {want}", got.depths[k]);
        }
    }
}

/// Decoding gives the same capped logits.
#[test]
fn a_carried_sequence_is_capped_too() {
    let (ctx, mut config) = (Ctx::cpu(), config());
    config.loss.soft_cap = Some(0.5);
    let params = params(&ctx, &config, 4);
    let mut state = hymo_model::State::new(&config);
    let logits = HyMo::new(&config).unwrap().extend(&ctx, &params, &[1, 2, 3], &mut state).unwrap();
    let largest = values(&logits).into_iter().fold(0., |a: f64, b| a.max(b.abs()));
    assert!((0.4..=0.5).contains(&largest), "{largest}");
}

/// Gains stored minus one, or as they are: the same norms.
#[test]
fn zero_centred_gains_are_the_gains_minus_one() {
    for (name, mut config) in variants() {
        config.norm.zero_centred = true;
        let centred = params(&Ctx::cpu(), &config, 5);
        let residual = |n: &str| n.ends_with("norm.weight") && !n.contains("latent_norm") && !n.contains("gdn.norm");
        let plain = changed(&centred, residual, |w| 1. + w);
        let want = logits(&config, &centred);
        config.norm.zero_centred = false;
        for (got, want) in logits(&config, &plain).iter().zip(&want) {
            // 1 + w is rounded to f32 once.
            assert!(rms_error(got, want) < 1e-6, "{name}");
        }
    }
}

/// A feed-forward block adds to what the mixer left: one whose output is zero is not there, in prediction modules too.
#[test]
fn a_block_of_zeros_is_no_block() {
    let (_, with) = variants().remove(2);
    assert!(with.gdn.as_ref().unwrap().ffn == GdnFfn::Swiglu && with.mtp.n_modules > 0);
    let all = params(&Ctx::cpu(), &with, 6);
    let zeroed = changed(&all, |n| n.ends_with("ffn.w2.weight"), |_| 0.);
    let mut without = with.clone();
    if let (Some(gdn), Some(mla)) = (&mut without.gdn, &mut without.mla) {
        (gdn.ffn, gdn.d_ff, mla.ffn, mla.d_ff) = (GdnFfn::None, None, MlaFfn::None, None);
    }
    let rest = Params::from_fn(&Ctx::cpu(), &without, |spec| Ok(all.get(&spec.name)?.to_vec::<f32>()?)).unwrap();
    let want = logits(&without, &rest);
    assert_eq!(logits(&with, &zeroed), want);
    // And one that is not zero is.
    let full = logits(&with, &all);
    assert!(full.iter().zip(&want).all(|(a, b)| rms_error(a, b) > 1e-3));
}

/// HAZARD 5: dead heads are reported by the name of their mixer, in layers and in prediction modules.
#[test]
fn dead_heads_are_found_where_they_are() {
    let config = config();
    let fresh = Params::init(&Ctx::cpu(), &config, 1).unwrap();
    assert_eq!(fresh.scan().unwrap(), []);
    let dead = changed(&fresh, |n| n == "layers.2.gdn.A_log" || n == "mtp.1.gdn.dt_bias", |_| 60.);
    for params in [dead.to_f64(&Ctx::cpu()).unwrap(), dead] {
        let found = params.scan().unwrap();
        let names: Vec<(&str, usize)> = found.iter().map(|(name, head)| (name.as_str(), head.head)).collect();
        let both = |name| [(name, 0), (name, 1)];
        assert_eq!(names, [both("mtp.1.gdn"), both("layers.2.gdn")].concat());
        assert!(found.iter().all(|(_, head)| head.reason == init::DeadReason::Forgets));
    }
}

/// HAZARD 5: parameters are kept in f32, or in f64 for the oracle; there is no way to half precision, and a parameter
/// widened is the same number.
#[test]
fn parameters_are_never_kept_in_half_precision() {
    let config = config();
    let params = params(&Ctx::cpu(), &config, 8);
    let wide = params.to_f64(&Ctx::cpu()).unwrap();
    assert_eq!((params.dtype(), wide.dtype()), (DType::F32, DType::F64));
    for spec in params.table().params() {
        let (a, b) = (params.get(&spec.name).unwrap(), wide.get(&spec.name).unwrap());
        assert_eq!((a.dtype(), b.dtype()), (DType::F32, DType::F64), "{}", spec.name);
        assert_eq!(values(&a), values(&b), "{}", spec.name);
    }
    for buffer in params.table().buffers() {
        assert_eq!(wide.buffer(&buffer.name).unwrap().dtype(), DType::F32, "{}", buffer.name);
    }
    // Not even from outside: gradients and operations take the dtype that they find, which must not be narrow.
    let mut narrow = params.clone();
    let len = narrow.flats()[0].numel();
    narrow.flats_mut()[0] = Ctx::cpu().zeros::<hymo_tensor::bf16>(&[len]).unwrap();
    assert!(narrow.zero_grads(&Ctx::cpu()).is_err());
}
