//! Both optimizers, clipping and schedules against PyTorch in double precision, written from the formulas alone
//! (fixtures/make_optim.py): 20 steps, tall, wide, square and split matrices, vectors, convolutions.

mod small;

use hymo_model::config::{DecayShape, OptimConfig, Orth, ScheduleConfig, ScheduleKind};
use hymo_optim::{Outcome, Schedule};
use hymo_tensor::Real;
use small::{DECAYED, FREE, HIDDEN, Small, assert_close, reference, spec};
use std::collections::BTreeMap;

type Tensors = BTreeMap<String, Vec<f64>>;

fn joint_specs() -> Vec<hymo_model::ParamSpec> {
    let mut split = spec("split", &[32, 20], HIDDEN);
    split.head_blocks = Some(4);
    vec![
        spec("tall", &[40, 24], HIDDEN),
        spec("vector", &[37], DECAYED),
        spec("wide", &[16, 56], HIDDEN),
        spec("conv", &[24, 4], FREE),
        spec("square", &[24, 24], HIDDEN),
        split,
        spec("matrix", &[18, 30], DECAYED),
    ]
}

/// 20 steps of all tensors together: weights, state, norm and factor of each step.
fn joint<T: Real>(file: &Tensors, tolerance: f64) {
    let mut config = OptimConfig { clip_norm: 7.1, ..OptimConfig::default() };
    config.normuon.split_heads = true;
    let mut small = Small::new::<T>(joint_specs(), &config, |s| file[&format!("joint.{}.w0", s.name)].clone());
    let schedule = ScheduleConfig { num_steps: 20, warmup: 0.2, decay: 0.4, ..ScheduleConfig::default() };
    let schedule = Schedule::new(&schedule).unwrap();
    for step in 1..=20 {
        let grads = small.grads(|s| {
            let n = s.numel();
            file[&format!("joint.{}.g", s.name)][(step - 1) * n..step * n].to_vec()
        });
        let lr = config.lr * schedule.factor(step as u64);
        let Outcome::Stepped { grad_norm, clip } = small.optim.step(&small.ctx, &mut small.flats, &grads, lr).unwrap()
        else {
            panic!("refused")
        };
        assert_close("norm", &[grad_norm], &file["joint.norm"][step - 1..step], 1e-7);
        assert_close("clip", &[clip], &file["joint.clip"][step - 1..step], 1e-7);
        for name in small.specs.iter().map(|s| s.name.clone()).filter(|_| [1, 5, 20].contains(&step)) {
            let want = &file[&format!("joint.{name}.w{step}")];
            assert_close(&format!("{name} after {step}"), &small.values(&name), want, tolerance);
        }
    }
    for spec in &small.specs {
        let kinds = if spec.group == HIDDEN { ["momentum", "row_moment"] } else { ["first_moment", "second_moment"] };
        for (kind, short) in kinds.into_iter().zip(["m", "v"]) {
            let got = small.state(&format!("optim.{kind}.{}", spec.name));
            let want = &file[&format!("joint.{}.{short}", spec.name)];
            // Mean squares of O carry its rounding in full, and twice; in a weight it is a small part of a step.
            assert_close(&format!("{kind} of {}", spec.name), &got, want, 3.0 * tolerance);
        }
    }
}

#[test]
fn twenty_steps_agree_in_single_precision() {
    joint::<f32>(&reference(), 1e-6);
}

/// To the rounding of the stored numbers.
#[test]
fn twenty_steps_agree_in_double_precision() {
    joint::<f64>(&reference(), 1e-7);
}

/// One option changed at a time.
#[test]
fn every_option_agrees() {
    type Edit = fn(&mut OptimConfig);
    let cases: [(&str, &str, Edit); 6] = [
        ("newton_schulz", "wide", |c| c.normuon.orth = Orth::NewtonSchulz),
        ("no_nesterov", "tall", |c| c.normuon.nesterov = false),
        ("plain_decay", "square", |c| c.normuon.cautious_decay = false),
        ("betas", "square", |c| {
            let n = &mut c.normuon;
            (n.beta1, n.beta2, n.rms, n.eps) = (0.9, 0.8, 0.3, 1e-4);
        }),
        ("not_cautious", "matrix", |c| c.adamw.cautious = false),
        ("adamw_betas", "vector", |c| (c.adamw.beta1, c.adamw.beta2, c.adamw.eps) = (0.8, 0.99, 1e-4)),
    ];
    let file = reference();
    for (case, tensor, edit) in cases {
        let mut config = OptimConfig { clip_norm: 0.0, ..OptimConfig::default() };
        edit(&mut config);
        let run = |mut small: Small, tolerance| {
            for step in 0..20 {
                let grads = small
                    .grads(|s| file[&format!("joint.{tensor}.g")][step * s.numel()..(step + 1) * s.numel()].to_vec());
                let outcome = small.optim.step(&small.ctx, &mut small.flats, &grads, config.lr).unwrap();
                assert!(matches!(outcome, Outcome::Stepped { clip: 1.0, .. }));
            }
            assert_close(case, &small.values(tensor), &file[&format!("{case}.w20")], tolerance);
        };
        let specs = || joint_specs().into_iter().filter(|s| s.name == tensor).collect::<Vec<_>>();
        let start = |_: &hymo_model::ParamSpec| file[&format!("joint.{tensor}.w0")].clone();
        run(Small::new::<f32>(specs(), &config, start), 1e-6);
        run(Small::new::<f64>(specs(), &config, start), 1e-7);
    }
}

#[test]
fn schedules_agree() {
    let base = ScheduleConfig { num_steps: 250, ..ScheduleConfig::default() };
    let file = reference();
    for (name, config) in [
        ("wsd", base.clone()),
        ("wsd_linear", ScheduleConfig { decay_shape: DecayShape::Linear, final_factor: 0.1, ..base.clone() }),
        ("wsd_exponential", ScheduleConfig { decay_shape: DecayShape::Exponential, ..base.clone() }),
        ("cosine", ScheduleConfig { kind: ScheduleKind::Cosine, final_factor: 0.1, ..base.clone() }),
        ("constant", ScheduleConfig { kind: ScheduleKind::Constant, ..base.clone() }),
    ] {
        let schedule = Schedule::new(&config).unwrap();
        let got: Vec<f64> = (1..=250).map(|s| schedule.factor(s)).collect();
        assert_close(name, &got, &file[&format!("schedule.{name}")], 1e-7);
    }
}
