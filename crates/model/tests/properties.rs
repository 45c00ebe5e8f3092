//! What must hold of the whole model whatever its weights.

mod small;

use hymo_model::{Batch, Counts, HyMo, Options, Params, State};
use hymo_ops::check::{Noise, rms_error};
use hymo_tensor::Ctx;
use small::{config, flat, packed, params, step, values};

fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// HAZARD 9, 10: a packed row is its documents run one by one: losses at every depth, balance loss and all gradients.
/// In double precision, so that nothing hides behind rounding.
#[test]
fn packed_equals_separate() {
    let ctx = Ctx::cpu().oracle();
    let config = config();
    let params = params(&ctx, &config, 3).to_f64(&ctx).unwrap();
    let lengths: [&[usize]; 2] = [&[17, 1, 2, 3, 20, 7], &[1, 1, 30, 18]];
    let together = packed(&config, 47, &lengths, 5);
    let counts = together.counts();
    let packed = step(&ctx, &config, &params, &together, &Options::default());
    let (mut depths, mut balance, mut grads) = (vec![0.; 3], 0., vec![0.; flat(&packed.grads).len()]);
    let (tokens, width) = (tokens_of(&config, &lengths, 5), 50);
    for (row, lengths) in lengths.iter().enumerate() {
        let mut at = 0;
        for &n in lengths.iter() {
            // Positions of the row that this document has: the last three tokens are targets only.
            let inside = n.min(47usize.saturating_sub(at));
            if inside > 0 {
                let mut own = tokens[row * width + at..row * width + at + n].to_vec();
                let mut seg = vec![0; n];
                own.resize(inside + 3, 0);
                seg.resize(inside + 3, -1);
                let batch = Batch::new(1, inside, 2, &own, &seg).unwrap();
                let options = Options { counts: Some(counts.clone()), ..Options::default() };
                let one = step(&ctx, &config, &params, &batch, &options);
                depths.iter_mut().zip(&one.depths).for_each(|(a, b)| *a += b);
                balance += one.balance;
                grads.iter_mut().zip(flat(&one.grads)).for_each(|(a, b)| *a += b);
            }
            at += n;
        }
    }
    assert!(rms_error(&packed.depths, &depths) < 1e-13, "{:?} {depths:?}", packed.depths);
    assert!((packed.balance - balance).abs() < 1e-14);
    assert!(rms_error(&flat(&packed.grads), &grads) < 1e-11);
}

/// The tokens that [`packed`] draws for the same arguments.
fn tokens_of(config: &hymo_model::ModelConfig, rows: &[&[usize]], seed: u64) -> Vec<i32> {
    let mut noise = Noise::new(seed);
    let n: usize = rows.iter().map(|r| r.iter().sum::<usize>()).sum();
    (0..n).map(|_| noise.below(config.vocab_size) as i32).collect()
}

/// HAZARD 4, 7: any split of a sequence with carried state gives the logits of the whole, down to one token at a time.
#[test]
fn any_split_gives_the_same_logits() {
    let ctx = Ctx::cpu();
    let config = config();
    let params = params(&ctx, &config, 4);
    let model = HyMo::new(&config).unwrap();
    let mut noise = Noise::new(6);
    let tokens: Vec<i32> = (0..70).map(|_| noise.below(config.vocab_size) as i32).collect();
    let mut row = tokens.clone();
    row.extend([0; 3]);
    let whole = Batch::new(1, 70, 2, &row, &[0; 73]).unwrap();
    let want = values(&model.logits(&ctx, &params, &whole).unwrap()[0]);
    let splits: [&[usize]; 6] = [&[70], &[1; 70], &[35, 35], &[64, 6], &[3, 1, 2, 60, 4], &[16, 16, 16, 16, 6]];
    for split in splits {
        let mut state = State::new(&config);
        let (mut got, mut at) = (Vec::new(), 0);
        for n in split {
            let logits = model.extend(&ctx, &params, &tokens[at..at + n], &mut state).unwrap();
            got.extend(values(&logits));
            at += n;
        }
        assert_eq!(state.position(), 70);
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
        let error = rms_error(&got, &want);
        assert!(error < 5e-6, "{split:?}: {error:e}, largest {worst:e}");
    }
}

/// No token sees its future: changing token t leaves every bit of the logits before t, at every depth.
#[test]
fn no_token_sees_its_future() {
    let ctx = Ctx::cpu();
    let config = config();
    let params = params(&ctx, &config, 7);
    let model = HyMo::new(&config).unwrap();
    let v = config.vocab_size;
    let mut tokens: Vec<i32> = tokens_of(&config, &[&[73]], 8);
    let logits = |tokens: &[i32]| -> Vec<Vec<f64>> {
        let batch = Batch::new(1, 70, 2, tokens, &[0; 73]).unwrap();
        model.logits(&ctx, &params, &batch).unwrap().iter().map(values).collect()
    };
    let before = logits(&tokens);
    for t in [69, 64, 63, 40, 1] {
        let old = tokens[t];
        tokens[t] = (old + 1) % v as i32;
        let after = logits(&tokens);
        tokens[t] = old;
        for (k, (a, b)) in before.iter().zip(&after).enumerate() {
            // Depth k at position i reads tokens up to i + k.
            let unseen = (t - k.min(t)) * v;
            assert_eq!(bits(&a[..unseen]), bits(&b[..unseen]), "token {t}, depth {k}");
            assert_ne!(bits(&a[unseen..]), bits(&b[unseen..]), "token {t} changed nothing at depth {k}");
        }
    }
}

/// HAZARD 15: dropping activations and computing them again changes no bit of the gradients, and counts no token twice.
#[test]
fn checkpointed_equals_plain() {
    let ctx = Ctx::cpu().poisoned();
    let config = config();
    let params = params(&ctx, &config, 9);
    let batch = packed(&config, 47, &[&[17, 33], &[50]], 10);
    let plain = step(&ctx, &config, &params, &batch, &Options::default());
    for checkpoint in [vec![0, 1, 2, 3], vec![1], vec![2, 3]] {
        let options = Options { checkpoint, counts: None };
        let again = step(&ctx, &config, &params, &batch, &options);
        assert_eq!(bits(&flat(&plain.grads)), bits(&flat(&again.grads)));
        assert_eq!((plain.total.to_bits(), &plain.stats), (again.total.to_bits(), &again.stats));
    }
    let counted: u64 = plain.stats[1].expert_counts.iter().sum();
    assert_eq!(counted, 2 * 47 * 2, "two experts a token, each once");
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

/// A head's loss against central differences of one number in every parameter, in double precision.
#[test]
fn gradients_match_differences() {
    let ctx = Ctx::cpu().oracle();
    let config = config();
    let base = params(&ctx, &config, 22);
    let batch = packed(&config, 21, &[&[9, 15]], 23);
    let grads = {
        let p = base.to_f64(&ctx).unwrap();
        let s = step(&ctx, &config, &p, &batch, &Options::default());
        p.table().params().iter().map(|spec| values(&p.grad_of(&s.grads, &spec.name).unwrap())).collect::<Vec<_>>()
    };
    let total = |unit: usize, element: usize, delta: f64| {
        let mut p = base.to_f64(&ctx).unwrap();
        p.flats_mut()[unit].flat_mut::<f64>().unwrap()[element] += delta;
        let tape = &mut hymo_tape::Tape::off(&ctx);
        HyMo::new(&config).unwrap().loss(tape, &p, &batch, &Options::default()).unwrap().total().unwrap()
    };
    let mut noise = Noise::new(24);
    for (spec, grad) in base.table().params().iter().zip(&grads) {
        let i = noise.below(grad.len());
        let unit = match spec.unit {
            hymo_model::Unit::Root => 0,
            hymo_model::Unit::Layer(l) => l + 1,
        };
        let h = 1e-6;
        let slope = (total(unit, spec.offset + i, h) - total(unit, spec.offset + i, -h)) / (2. * h);
        let scale = (grad.iter().map(|g| g * g).sum::<f64>() / grad.len() as f64).sqrt();
        assert!((slope - grad[i]).abs() < 1e-5 * (scale + slope.abs()) + 1e-8, "{}: {slope} {}", spec.name, grad[i]);
    }
}

#[test]
fn bad_input_is_named() {
    let ctx = Ctx::cpu();
    let config = config();
    let params = params(&ctx, &config, 1);
    let model = HyMo::new(&config).unwrap();
    let says = |b: &Batch| {
        let tape = &mut hymo_tape::Tape::off(&ctx);
        model.loss(tape, &params, b, &Options::default()).unwrap_err().to_string()
    };
    let outside = says(&Batch::new(1, 2, 2, &[1, 50, 1, 1, 1], &[0; 5]).unwrap());
    assert!(outside.contains("50"), "{outside}");
    let depth = says(&Batch::new(1, 2, 0, &[1, 2, 3], &[0; 3]).unwrap());
    assert_eq!(depth, "loss: batch is rows for 0 prediction modules, want rows for 2");
    let mut state = State::new(&config);
    assert!(model.extend(&ctx, &params, &[], &mut state).is_err());
    assert!(model.extend(&ctx, &params, &[-1], &mut state).is_err() && state.position() == 0);
    let counts = Counts { valid: vec![1., 1., 1.], tokens: 1. };
    assert_eq!(counts.clone().plus(&counts), Counts { valid: vec![2., 2., 2.], tokens: 2. });
}
