//! What holds for every step: bits that depend on nothing else, exact resumption, refusal of what is not finite, the
//! invariances of the specification, and that it optimizes.

mod small;

use hymo_model::config::{OptimConfig, ScheduleConfig, ScheduleKind};
use hymo_model::{Cost, CostOptions, ParamSpec, Params, Unit, presets};
use hymo_ops::check::Noise;
use hymo_optim::{Ema, Error, GradNorm, Optimizer, Outcome, Schedule};
use hymo_tensor::{Ctx, Tensor};
use small::{DECAYED, FREE, HIDDEN, Small, bits, gap, numbers, spec};

/// Two units; shapes below, at and above the blocks of the work.
fn specs() -> Vec<ParamSpec> {
    let mut specs = vec![
        spec("root.q", &[130, 65], HIDDEN),
        spec("root.experts", &[150, 130], DECAYED),
        spec("root.gain", &[63], DECAYED),
        spec("root.tall", &[200, 40], HIDDEN),
        spec("layer.wide", &[64, 192], HIDDEN),
        spec("layer.conv", &[70, 4], FREE),
        spec("layer.one", &[1], FREE),
        spec("layer.row", &[1, 33], HIDDEN),
    ];
    specs.iter_mut().filter(|s| s.name.starts_with("layer")).for_each(|s| s.unit = Unit::Layer(0));
    specs
}

fn noise(seed: u64) -> impl Fn(&ParamSpec) -> Vec<f64> {
    move |s| Noise::new(seed + s.name.len() as u64 * 1000 + s.numel() as u64).normals(s.numel())
}

fn run(small: &mut Small, steps: std::ops::Range<u64>) {
    for step in steps {
        let grads = small.grads(noise(step));
        let outcome = small.optim.step(&small.ctx, &mut small.flats, &grads, 1e-3).unwrap();
        assert!(matches!(outcome, Outcome::Stepped { clip, .. } if clip < 1.0));
    }
}

fn start() -> Small {
    Small::new::<f32>(specs(), &OptimConfig::default(), noise(9))
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut small = start();
            run(&mut small, 0..3);
            bits(&small)
        })
    };
    let one = on(1);
    for threads in [2, 3, 8] {
        assert!(on(threads) == one, "{threads} threads");
    }
}

#[test]
fn fast_path_and_plain_loops_agree() {
    let (mut fast, mut oracle) = (start(), start());
    oracle.ctx = Ctx::cpu().oracle();
    let mut double = Small::new::<f64>(specs(), &OptimConfig::default(), noise(9));
    for small in [&mut fast, &mut oracle, &mut double] {
        run(small, 0..5);
    }
    for spec in specs() {
        let exact = double.values(&spec.name);
        for (path, small) in [("fast", &fast), ("oracle", &oracle)] {
            let gap = gap(&small.values(&spec.name), &exact);
            assert!(gap < 1e-6, "{} on the {path} path: {gap:e}", spec.name);
        }
    }
}

/// 4 steps, saved, loaded into a new optimizer, 4 more: the bits of 8.
#[test]
fn a_resumed_run_has_the_same_bits() {
    let mut whole = start();
    run(&mut whole, 0..8);
    let mut first = start();
    run(&mut first, 0..4);
    let copy = |t: &Tensor| t.copy(&first.ctx).unwrap();
    let saved: Vec<(String, Tensor)> =
        first.optim.tensors().unwrap().iter().map(|(n, t)| (n.clone(), copy(t))).collect();
    let mut second = start();
    second.flats = first.flats.iter().map(copy).collect();
    // In any order.
    second.optim.load(saved.iter().rev().map(|(n, t)| (n.as_str(), t))).unwrap();
    assert_eq!(second.optim.steps(), 4);
    run(&mut second, 4..8);
    assert!(bits(&second) == bits(&whole));
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let mut small = start();
    run(&mut small, 0..2);
    let saved: Vec<(String, Tensor)> =
        small.optim.tensors().unwrap().into_iter().map(|(name, t)| (name, t.copy(&small.ctx).unwrap())).collect();
    run(&mut small, 2..3);
    let before = bits(&small);
    let mut wrong = saved.clone();
    wrong.retain(|(name, _)| name != "optim.momentum.root.q");
    let set = |wrong: &mut Vec<(String, Tensor)>, name: &str, t: Tensor| {
        wrong.iter_mut().find(|(n, _)| n == name).unwrap().1 = t;
    };
    set(&mut wrong, "optim.step", Tensor::from_vec(&[1], vec![-1]).unwrap());
    set(&mut wrong, "optim.row_moment.root.q", Tensor::from_vec(&[2], vec![0f32; 2]).unwrap());
    set(&mut wrong, "optim.first_moment.layer.one", Tensor::from_vec(&[1], vec![f32::NAN]).unwrap());
    set(&mut wrong, "optim.second_moment.layer.one", Tensor::from_vec(&[1], vec![-1f32]).unwrap());
    set(&mut wrong, "optim.second_moment.root.gain", Tensor::from_vec(&[63], vec![0f64; 63]).unwrap());
    wrong.push(("optim.momentum.other".to_owned(), saved[1].1.clone()));
    wrong.push(saved[1].clone());
    wrong.push(saved[1].clone());
    let Err(Error::State { problems }) = small.optim.load(wrong.iter().map(|(n, t)| (n.as_str(), t))) else {
        panic!("loaded")
    };
    let text = problems.join("\n");
    for what in [
        "optim.step is -1",
        "row_moment.root.q is [2] of f32, this model's is [130] of f32",
        "first_moment.layer.one has numbers that are not finite",
        "second_moment.layer.one has numbers that are not finite and not negative",
        "second_moment.root.gain is [63] of f64",
        "optim.momentum.other belongs to no parameter",
        "is there twice",
    ] {
        assert!(text.contains(what), "{what}\nin {text}");
    }
    assert!(bits(&small) == before && small.optim.steps() == 3);
    // Whoever holds the state keeps it from being written, and says so before anything is.
    let held = small.optim.tensors().unwrap();
    assert!(small.optim.load(saved.iter().map(|(n, t)| (n.as_str(), t))).is_err());
    let grads = small.grads(noise(5));
    assert!(small.optim.step(&small.ctx, &mut small.flats, &grads, 1e-3).is_err());
    drop(held);
    assert!(bits(&small) == before);
    small.optim.load(saved.iter().map(|(n, t)| (n.as_str(), t))).unwrap();
    assert_eq!(small.optim.steps(), 2);
}

#[test]
fn a_gradient_that_is_not_finite_is_refused_by_name() {
    let mut small = start();
    run(&mut small, 0..1);
    let before = bits(&small);
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let grads = small.grads(|s| {
            let mut g = noise(1)(s);
            if ["root.q", "layer.one"].contains(&s.name.as_str()) {
                *g.last_mut().unwrap() = bad;
            }
            g
        });
        let outcome = small.optim.step(&small.ctx, &mut small.flats, &grads, 1e-3).unwrap();
        let Outcome::Refused { grad_norm, params } = outcome else { panic!("{outcome:?}") };
        assert!(!grad_norm.is_finite());
        assert_eq!(params, ["root.q", "layer.one"]);
        assert!(bits(&small) == before && small.optim.steps() == 1);
    }
    // Another rank's gradient: no parameter here is at fault.
    let grads = small.grads(noise(1));
    let norm = GradNorm::from_sum(f64::INFINITY);
    let outcome = small.optim.step_with(&small.ctx, &mut small.flats, &grads, 1e-3, norm).unwrap();
    assert!(matches!(outcome, Outcome::Refused { params, .. } if params.is_empty()));
    // The largest finite numbers are a finite norm, and are clipped.
    let grads = small.grads(|s| vec![f64::from(f32::MAX); s.numel()]);
    run(&mut small, 1..2);
    let outcome = small.optim.step(&small.ctx, &mut small.flats, &grads, 1e-3).unwrap();
    assert!(matches!(outcome, Outcome::Stepped { clip, .. } if clip > 0.0));
    assert!(small.flats.iter().flat_map(numbers).all(f64::is_finite));
    for lr in [f64::NAN, -1e-3, f64::INFINITY] {
        assert!(small.optim.step(&small.ctx, &mut small.flats, &grads, lr).is_err());
    }
}

/// MATH 11: RMS(U) = 0.2 whatever the gradient, the first step the same for every scale of it, and zeros move nothing.
#[test]
fn updates_have_one_size_whatever_the_gradient() {
    let mut config = OptimConfig { weight_decay: 0.0, clip_norm: 0.0, ..OptimConfig::default() };
    config.adamw.cautious = false;
    let hidden = || specs().into_iter().filter(|s| s.group == HIDDEN).collect::<Vec<_>>();
    let update = |scale: f64| {
        let mut small = Small::new::<f32>(hidden(), &config, |s| vec![0.0; s.numel()]);
        let grads = small.grads(|s| noise(3)(s).into_iter().map(|g| g * scale).collect());
        let _ = small.optim.step(&small.ctx, &mut small.flats, &grads, 1.0).unwrap();
        small
    };
    let one = update(1.0);
    for spec in hidden() {
        let u = one.values(&spec.name);
        let rms = (u.iter().map(|u| u * u).sum::<f64>() / u.len() as f64).sqrt();
        assert!((rms - 0.2).abs() < 1e-6, "{}: {rms}", spec.name);
        for scale in [1e-2, 1e3, 1e8] {
            let gap = gap(&update(scale).values(&spec.name), &u);
            assert!(gap < 3e-5, "{} with gradients of {scale:e}: {gap:e}", spec.name);
        }
        assert!(update(0.0).values(&spec.name).iter().all(|&u| u == 0.0));
    }
}

/// Orth(Q X R) = Q Orth(X) R for orthogonal Q and R: here permutations with signs, of rows and columns.
#[test]
fn turning_the_gradient_turns_the_update() {
    let (m, n) = (24, 40);
    let config = OptimConfig { weight_decay: 0.0, clip_norm: 0.0, ..OptimConfig::default() };
    let g = Noise::new(4).normals(m * n);
    let turn = |x: &[f64]| -> Vec<f64> {
        let sign = |i: usize| if i % 3 == 0 { -1.0 } else { 1.0 };
        let at = |i: usize, j: usize| sign(i) * sign(j + 1) * x[((i * 7) % m) * n + (j * 11) % n];
        (0..m * n).map(|k| at(k / n, k % n)).collect()
    };
    let update = |g: &[f64]| {
        let mut small = Small::new::<f32>(vec![spec("w", &[m, n], HIDDEN)], &config, |s| vec![0.0; s.numel()]);
        let grads = small.grads(|_| g.to_vec());
        let _ = small.optim.step(&small.ctx, &mut small.flats, &grads, 1.0).unwrap();
        small.values("w")
    };
    let gap = gap(&update(&turn(&g)), &turn(&update(&g)));
    assert!(gap < 1e-5, "{gap:e}");
}

/// Steady state takes nothing from the system: working memory comes from the pool and goes back.
#[test]
fn later_steps_allocate_nothing() {
    let ctx = Ctx::cpu();
    let mut params = Params::init(&ctx, &presets::hymo_nano(), 1).unwrap();
    let mut optim = Optimizer::new(&ctx, &params, &OptimConfig::default()).unwrap();
    let mut grads = params.zero_grads(&ctx).unwrap();
    for flat in grads.flats_mut() {
        let len = flat.numel();
        let values: Vec<f32> = Noise::new(len as u64).normals(len).into_iter().map(|x| x as f32).collect();
        flat.flat_mut::<f32>().unwrap().copy_from_slice(&values);
    }
    let mut fresh = 0;
    for step in 0..3 {
        let _ = optim.step(&ctx, params.flats_mut(), grads.flats(), 1e-3).unwrap();
        let now = ctx.pool().stats().fresh;
        assert!(step == 0 || now == fresh, "step {step}: {now} bytes, before {fresh}");
        fresh = now;
    }
}

/// What `hymo inspect` says an optimizer keeps is what its state holds.
#[test]
fn the_state_has_the_size_that_was_counted() {
    let (ctx, model) = (Ctx::cpu(), presets::hymo_nano());
    let params = Params::init(&ctx, &model, 1).unwrap();
    let optim = Optimizer::new(&ctx, &params, &OptimConfig::default()).unwrap();
    let counted = Cost::new(&model, CostOptions { context: 512, batch: 1 }).unwrap().training_state;
    let held: usize = optim.tensors().unwrap().iter().filter(|(n, _)| n != "optim.step").map(|(_, t)| t.bytes()).sum();
    assert_eq!(held as u64, counted.normuon + counted.adamw);
}

#[test]
fn the_norm_does_not_depend_on_threads_and_clips_exactly() {
    let values: Vec<f32> = Noise::new(1).normals(200_001).into_iter().map(|x| x as f32).collect();
    let flats = [Tensor::from_vec(&[values.len()], values.clone()).unwrap()];
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| GradNorm::of(&flats).unwrap().sum())
    };
    let exact: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
    assert!((on(1) - exact).abs() < 1e-9 * exact);
    assert!([2, 3, 8].iter().all(|&t| on(t).to_bits() == on(1).to_bits()));
    let norm = GradNorm::from_sum(25.0);
    assert_eq!([1.0, 5.0, 6.0, 0.0].map(|limit| norm.clip(limit)), [0.2, 1.0, 1.0, 1.0]);
}

#[test]
fn an_average_of_weights_follows_them() {
    let mut small = start();
    let mut ema = Ema::new(&small.ctx, &small.flats, 0.75).unwrap();
    let mut want: Vec<f64> = small.flats.iter().flat_map(numbers).collect();
    for step in 0..4 {
        run(&mut small, step..step + 1);
        ema.update(&small.flats).unwrap();
        let now = small.flats.iter().flat_map(numbers);
        want.iter_mut().zip(now).for_each(|(e, w)| *e = 0.75 * *e + 0.25 * w);
    }
    let got: Vec<f64> = ema.flats().iter().flat_map(numbers).collect();
    assert!(gap(&got, &want) < 1e-7);
    let mut other = Ema::new(&small.ctx, &small.flats, 0.75).unwrap();
    other.load(&small.ctx, ema.flats()).unwrap();
    assert_eq!(other.flats().iter().flat_map(numbers).collect::<Vec<_>>(), got);
    assert!(ema.update(&small.flats[..1]).is_err() && Ema::new(&small.ctx, &[], 1.0).is_err());
}

#[test]
fn a_branch_decays_from_a_stable_step_only() {
    let base = ScheduleConfig { num_steps: 1000, ..ScheduleConfig::default() };
    let wsd = Schedule::new(&base).unwrap();
    assert_eq!(wsd.stable(), Some((20, 800)));
    for step in [20, 500, 800] {
        let branch = wsd.branch(step, 50).unwrap();
        assert!((1..=step).all(|s| branch.factor(s) == wsd.factor(s)), "the past is the same");
        assert_eq!((branch.factor(step + 50), branch.num_steps()), (0.0, step + 50));
        // A file says the same.
        let file = ScheduleConfig { num_steps: step + 50, decay_from: Some(step), ..base.clone() };
        assert!((step..step + 60).all(|s| Schedule::new(&file).unwrap().factor(s) == branch.factor(s)));
    }
    for step in [19, 801] {
        assert_eq!(wsd.branch(step, 50), Err(Error::NotStable { step, from: 20, to: 800 }));
    }
    let of = |kind| Schedule::new(&ScheduleConfig { kind, ..base.clone() }).unwrap();
    assert!(of(ScheduleKind::Cosine).branch(500, 50).is_err());
    assert_eq!(of(ScheduleKind::Constant).branch(1000, 50).unwrap().factor(1050), 0.0);
    assert!(wsd.branch(500, 0).is_err() && wsd.branch(500, u64::MAX).is_err());
    let problems = Schedule::new(&ScheduleConfig { num_steps: 0, warmup: 2.0, ..base }).unwrap_err();
    assert_eq!(problems.as_slice().len(), 2, "{problems}");
}

mod any_schedule {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Between 0 and 1, up in the warm-up, then never up again, whatever the shares.
        #[test]
        fn goes_up_then_down(num_steps in 1u64..300, warmup in 0.0f64..1.0, share in 0.0f64..1.0, kind in 0usize..3, shape in 0usize..3, final_factor in 0.0f64..1.0) {
            use hymo_model::config::DecayShape::{Exponential, Linear, OneMinusSqrt};
            let kind = [ScheduleKind::Wsd, ScheduleKind::Cosine, ScheduleKind::Constant][kind];
            let decay_shape = [OneMinusSqrt, Linear, Exponential][shape];
            let decay = share * (1.0 - warmup) * 0.999;
            let config = ScheduleConfig { kind, num_steps, warmup, decay, decay_shape, final_factor, decay_from: None };
            let (schedule, warm) = (Schedule::new(&config).unwrap(), config.warmup_steps());
            for s in 0..=num_steps + 5 {
                let (now, next) = (schedule.factor(s), schedule.factor(s + 1));
                prop_assert!((0.0..=1.0).contains(&now), "{now} at {s}");
                prop_assert!(if s < warm { next >= now } else { next <= now }, "{now}, {next} at {s} of {config:?}");
            }
        }
    }
}

/// Least squares with features of very different scale (MATH 11): every optimizer gets there with a falling rate.
#[test]
fn a_small_problem_is_solved() {
    let (rows, cols, n) = (16, 24, 96);
    let noise = Noise::new(2).normals(rows * cols + n * cols);
    let (truth, x) = noise.split_at(rows * cols);
    let x: Vec<f64> =
        x.iter().enumerate().map(|(i, x)| x * f64::powf(10.0, -1.5 * (i % cols) as f64 / cols as f64)).collect();
    for (group, cautious) in [(HIDDEN, true), (DECAYED, true), (DECAYED, false)] {
        let mut config = OptimConfig { weight_decay: 0.0, lr: 0.1, ..OptimConfig::default() };
        config.adamw.cautious = cautious;
        let mut small = Small::new::<f32>(vec![spec("w", &[rows, cols], group)], &config, |s| vec![0.0; s.numel()]);
        let mut loss = f64::NAN;
        let first: f64 = 400.0;
        for step in 0..400 {
            let w = small.values("w");
            let mut grad = vec![0.0; rows * cols];
            loss = 0.0;
            for x in x.chunks(cols) {
                for i in 0..rows {
                    let dot = |w: &[f64]| w[i * cols..(i + 1) * cols].iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
                    let error = dot(&w) - dot(truth);
                    loss += error * error / n as f64;
                    grad[i * cols..(i + 1) * cols]
                        .iter_mut()
                        .zip(x)
                        .for_each(|(g, x)| *g += 2.0 * error * x / n as f64);
                }
            }
            let grads = small.grads(|_| grad.clone());
            let lr = config.lr * (1.0 - f64::from(step) / first);
            let _ = small.optim.step(&small.ctx, &mut small.flats, &grads, lr).unwrap();
        }
        assert!(loss < 1e-3, "{group:?}, cautious {cautious}: {loss:e}");
    }
}
