//! What must hold of the whole model whatever its weights.

mod small;

use hymo_model::{Batch, Counts, HyMo, Options, Params, State};
use hymo_ops::check::{Noise, rms_error};
use hymo_tape::Tape;
use hymo_tensor::Ctx;
use small::{bits, config, flat, packed, params, step, tokens_of, values};

/// HAZARD 15: dropping activations and computing them again changes no bit of the gradients, and counts no token twice.
#[test]
fn checkpointed_equals_plain() {
    let ctx = Ctx::cpu().poisoned();
    let config = config();
    let params = params(&ctx, &config, 9);
    let batch = packed(&config, 47, &[&[17, 33], &[50]], 10);
    let plain = step(&ctx, &config, &params, &batch, &Options::default());
    let held = |checkpoint: &[usize]| {
        let options = Options { checkpoint: checkpoint.to_vec(), counts: None };
        let mut tape = Tape::training(&ctx, params.zero_grads(&ctx).unwrap());
        let before = ctx.pool().stats().live;
        let losses = HyMo::new(&config).unwrap().loss(&mut tape, &params, &batch, &options).unwrap();
        assert!(losses.read().unwrap().total.is_finite());
        ctx.pool().stats().live - before
    };
    let (all, some, none) = (held(&[]), held(&[1]), held(&[0, 1, 2, 3]));
    assert!(none < some && some < all && 2 * none < all, "bytes held: {all}, {some}, {none}");
    for checkpoint in [vec![0, 1, 2, 3], vec![1], vec![2, 3]] {
        let options = Options { checkpoint, counts: None };
        let again = step(&ctx, &config, &params, &batch, &options);
        assert_eq!(bits(&flat(&plain.grads)), bits(&flat(&again.grads)));
        assert_eq!((plain.total.to_bits(), &plain.stats), (again.total.to_bits(), &again.stats));
    }
    let counted: u64 = plain.stats[1].expert_counts.iter().sum();
    assert_eq!(counted, 2 * 47 * 2, "two experts a token, each once");
}

/// After the first steps the pool hands out what it got back: a steady run asks the system for no more tensors.
#[test]
fn a_steady_run_takes_no_new_memory() {
    let (ctx, config) = (Ctx::cpu(), config());
    let params = params(&ctx, &config, 3);
    let batch = packed(&config, 197, &[&[117, 83], &[200]], 4);
    let fresh = |_| {
        step(&ctx, &config, &params, &batch, &Options::default());
        ctx.pool().stats().fresh
    };
    let taken: Vec<usize> = (0..6).map(fresh).collect();
    // How threads overlap decides how much scratch is out at once, so the first steps may differ.
    // Threads' small work buffers may first meet in a late step: a hundredth, and not more step after step.
    assert!(taken[5] * 100 <= taken[4] * 101, "{taken:?}");
}

/// Two runs, and any number of threads, give the same bits.
#[test]
fn runs_and_threads_change_no_bit() {
    let config = config();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let ctx = Ctx::cpu().poisoned();
            let params = params(&ctx, &config, 11);
            let batch = packed(&config, 197, &[&[117, 83], &[200]], 12);
            let s = step(&ctx, &config, &params, &batch, &Options::default());
            (s.total.to_bits(), bits(&flat(&s.grads)))
        })
    };
    let one = run(1);
    for threads in [1, 2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

/// Two micro-batches with the step's counts add up to the batch they came from.
#[test]
fn accumulation_equals_one_batch() {
    let ctx = Ctx::cpu().oracle();
    let config = config();
    let params = params(&ctx, &config, 13).to_f64(&ctx).unwrap();
    let whole = packed(&config, 27, &[&[10, 20], &[30]], 14);
    let tokens = tokens_of(&config, &[&[10, 20], &[30]], 14);
    let row = |r: usize, seg: Vec<i32>| Batch::new(1, 27, 2, &tokens[30 * r..30 * r + 30], &seg).unwrap();
    let first: Vec<i32> = (0..30).map(|i| i32::from(i >= 10)).collect();
    let rows = [row(0, first), row(1, vec![0; 30])];
    let counts = rows[0].counts().plus(&rows[1].counts());
    assert_eq!(counts, whole.counts());
    let want = flat(&step(&ctx, &config, &params, &whole, &Options::default()).grads);
    let mut got = vec![0.; want.len()];
    for batch in &rows {
        let options = Options { counts: Some(counts.clone()), ..Options::default() };
        let one = step(&ctx, &config, &params, batch, &options);
        got.iter_mut().zip(flat(&one.grads)).for_each(|(a, b)| *a += b);
    }
    assert!(rms_error(&got, &want) < 1e-12);
}

/// HAZARD 15: padding moves no loss, no gradient, no expert count.
#[test]
fn padding_changes_nothing() {
    let ctx = Ctx::cpu().oracle();
    let config = config();
    let params = params(&ctx, &config, 15).to_f64(&ctx).unwrap();
    let tokens = tokens_of(&config, &[&[40]], 16);
    let short = Batch::new(1, 20, 2, &tokens[..23], &{
        let mut s = vec![0; 20];
        s.extend([-1; 3]);
        s
    })
    .unwrap();
    let long = Batch::new(1, 37, 2, &tokens, &{
        let mut s = vec![0; 20];
        s.extend([-1; 20]);
        s
    })
    .unwrap();
    let (a, b) = (
        step(&ctx, &config, &params, &short, &Options::default()),
        step(&ctx, &config, &params, &long, &Options::default()),
    );
    assert_eq!(short.counts(), long.counts());
    assert!((a.total - b.total).abs() < 1e-14);
    assert!(rms_error(&flat(&b.grads), &flat(&a.grads)) < 1e-13);
    assert_eq!(a.stats[1].expert_counts, b.stats[1].expert_counts);
}

/// Prediction modules whose losses have weight 0 leave the main loss and the trunk's gradients as without modules.
#[test]
fn mtp_with_weight_zero_equals_off() {
    let ctx = Ctx::cpu().oracle();
    let mut with = config();
    with.mtp.loss_weights = vec![0., 0.];
    let mut without = config();
    without.mtp = Default::default();
    let all = params(&ctx, &with, 17);
    let trunk = Params::from_fn(&ctx, &without, |spec| Ok(all.get(&spec.name)?.to_vec::<f32>()?)).unwrap();
    let tokens = tokens_of(&with, &[&[33]], 18);
    let a = step(
        &ctx,
        &with,
        &with_buffers(&all, &all),
        &Batch::new(1, 30, 2, &tokens, &[0; 33]).unwrap(),
        &Options::default(),
    );
    let trunk = with_buffers(&trunk, &all);
    let b = step(&ctx, &without, &trunk, &Batch::new(1, 30, 0, &tokens[..31], &[0; 31]).unwrap(), &Options::default());
    assert_eq!(a.depths[0].to_bits(), b.depths[0].to_bits());
    for spec in trunk.table().params() {
        let of = |p: &Params, s: &small::Step| values(&p.grad_of(&s.grads, &spec.name).unwrap());
        assert!(rms_error(&of(&all, &a), &of(&trunk, &b)) < 1e-5, "{}", spec.name);
    }
}

fn with_buffers(to: &Params, from: &Params) -> Params {
    let mut to = to.clone();
    let names: Vec<String> = to.table().buffers().iter().map(|b| b.name.clone()).collect();
    for name in names {
        let copy = from.buffer(&name).unwrap().copy(&Ctx::cpu()).unwrap();
        *to.buffer_mut(&name).unwrap() = copy;
    }
    to
}

/// HAZARD 8: thousands of documents of one to three tokens in a row.
#[test]
fn thousands_of_tiny_documents() {
    let ctx = Ctx::cpu().poisoned();
    let config = config();
    let params = params(&ctx, &config, 19);
    let mut noise = Noise::new(20);
    let mut lengths: Vec<usize> = (0..5000).map(|_| 1 + noise.below(3)).collect();
    let n: usize = lengths.iter().sum();
    lengths.push(3);
    let batch = packed(&config, n, &[&lengths], 21);
    let s = step(&ctx, &config, &params, &batch, &Options::default());
    assert!(s.total.is_finite() && flat(&s.grads).iter().all(|g| g.is_finite()));
    assert_eq!(s.stats[1].expert_counts.iter().sum::<u64>(), 2 * n as u64);
}

#[test]
fn bad_input_is_named() {
    let ctx = Ctx::cpu();
    let config = config();
    let params = params(&ctx, &config, 1);
    let model = HyMo::new(&config).unwrap();
    let says = |b: &Batch, params: &Params, options: Options| {
        let tape = &mut Tape::off(&ctx);
        model.loss(tape, params, b, &options).unwrap_err().to_string()
    };
    let outside = Batch::new(1, 2, 2, &[1, 50, 1, 1, 1], &[0; 5]).unwrap();
    let outside = says(&outside, &params, Options::default());
    assert!(outside.contains("50"), "{outside}");
    let depth = says(&Batch::new(1, 2, 0, &[1, 2, 3], &[0; 3]).unwrap(), &params, Options::default());
    assert_eq!(depth, "loss: batch is rows for 0 prediction modules, want rows for 2");
    let batch = Batch::new(1, 2, 2, &[1; 5], &[0; 5]).unwrap();
    let counts = |valid: &[f64], tokens| {
        let options = Options { counts: Some(Counts { valid: valid.to_vec(), tokens }), ..Options::default() };
        says(&batch, &params, options)
    };
    assert_eq!(counts(&[2., 2.], 2.), "loss: options.counts.valid is 2 numbers, want 3, one a depth");
    assert_eq!(counts(&[2.; 4], 2.), "loss: options.counts.valid is 4 numbers, want 3, one a depth");
    assert_eq!(counts(&[2., -1., 2.], 2.), "loss: options.counts is -1, want finite numbers from 0");
    assert_eq!(counts(&[2.; 3], f64::NAN), "loss: options.counts is NaN, want finite numbers from 0");
    let options = Options { checkpoint: vec![0, 4], ..Options::default() };
    assert_eq!(says(&batch, &params, options), "loss: options.checkpoint is layer 4, want layers in 0..4");
    let shallow = hymo_model::ModelConfig { n_layers: 2, ..config.clone() };
    let other = says(&batch, &small::params(&ctx, &shallow, 1), Options::default());
    assert_eq!(other, "params: units is 3, want a buffer for unit 3, as in the model's own");
    let mut state = State::new(&config);
    assert!(model.extend(&ctx, &params, &[], &mut state).is_err());
    assert!(model.extend(&ctx, &params, &[-1], &mut state).is_err() && state.position() == 0);
    let counts = Counts { valid: vec![1., 1., 1.], tokens: 1. };
    assert_eq!(counts.clone().plus(&counts), Counts { valid: vec![2., 2., 2.], tokens: 2. });
}

/// A state that a model with other kinds of layers left is an error, not a sequence that begins anew.
#[test]
fn a_state_of_another_model_is_refused() {
    use hymo_model::config::LayerKind;
    let ctx = Ctx::cpu();
    let config = config();
    let turned = hymo_model::ModelConfig { pattern: vec![LayerKind::Mla, LayerKind::Gdn], ..config.clone() };
    for (from, to) in [(&config, &turned), (&turned, &config)] {
        let mut state = State::new(from);
        HyMo::new(from).unwrap().extend(&ctx, &params(&ctx, from, 1), &[1, 2], &mut state).unwrap();
        let before = state.position();
        let error = HyMo::new(to).unwrap().extend(&ctx, &params(&ctx, to, 1), &[3], &mut state).unwrap_err();
        assert!(error.to_string().contains("where the model has another kind of layer"), "{error}");
        assert_eq!(state.position(), before);
    }
}
