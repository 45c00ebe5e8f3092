//! What must hold of every kind of model: each test runs over `small::variants`.

mod small;

use hymo_model::{Batch, Cost, CostOptions, Counts, HyMo, ModelConfig, Options, Params, State, presets};
use hymo_ops::check::{Noise, rms_error};
use hymo_tape::Tape;
use hymo_tensor::Ctx;
use small::{bits, flat, packed, params, step, tokens_of, unit, values, variants};

/// Losses by depth, balance loss and gradients of a batch.
struct Sums {
    depths: Vec<f64>,
    balance: f64,
    grads: Vec<f64>,
}

/// The documents of a packed batch one by one, under the packed batch's counts.
fn one_by_one(ctx: &Ctx, config: &ModelConfig, params: &Params, rows: &[&[usize]], len: usize, seed: u64) -> Sums {
    let (tokens, ahead) = (tokens_of(config, rows, seed), config.mtp.n_modules + 1);
    let (width, counts) = (len + ahead, packed(config, len, rows, seed).counts());
    let mut sums: Option<Sums> = None;
    for (row, lengths) in rows.iter().enumerate() {
        let mut at = 0;
        for &n in lengths.iter() {
            // Positions of the row that this document has: the last tokens are targets only.
            let inside = n.min(len.saturating_sub(at));
            if inside > 0 {
                let mut own = tokens[row * width + at..row * width + at + n].to_vec();
                let mut seg = vec![0; n];
                own.resize(inside + ahead, 0);
                seg.resize(inside + ahead, -1);
                let batch = Batch::new(1, inside, ahead - 1, &own, &seg).unwrap();
                let one = step(ctx, config, params, &batch, &with_counts(&counts));
                let Sums { depths, balance, grads } = sums.get_or_insert_with(|| Sums {
                    depths: vec![0.; ahead],
                    balance: 0.,
                    grads: vec![0.; flat(&one.grads).len()],
                });
                depths.iter_mut().zip(&one.depths).for_each(|(a, b)| *a += b);
                *balance += one.balance;
                grads.iter_mut().zip(flat(&one.grads)).for_each(|(a, b)| *a += b);
            }
            at += n;
        }
    }
    sums.unwrap()
}

fn with_counts(counts: &Counts) -> Options {
    Options { counts: Some(counts.clone()), ..Options::default() }
}

/// HAZARD 9, 10: a packed row is its documents run one by one: losses at every depth, balance loss and all gradients.
/// In double precision, so that nothing hides behind rounding, and in single precision on the fast path, which is other
/// code.
#[test]
fn packed_equals_separate() {
    let lengths: [&[usize]; 2] = [&[17, 1, 2, 3, 20, 7], &[1, 1, 30, 18]];
    for (name, config) in variants() {
        // Every row carries a token for each depth beyond its length.
        let len = 50 - (config.mtp.n_modules + 1);
        let single = params(&Ctx::cpu(), &config, 3);
        let double = single.to_f64(&Ctx::cpu()).unwrap();
        for (ctx, params, loss_bound, grad_bound) in
            [(Ctx::cpu().oracle(), &double, 1e-13, 1e-11), (Ctx::cpu().poisoned(), &single, 5e-7, 1e-5)]
        {
            let want = one_by_one(&ctx, &config, params, &lengths, len, 5);
            let got = step(&ctx, &config, params, &packed(&config, len, &lengths, 5), &Options::default());
            let (losses, grads) = (rms_error(&got.depths, &want.depths), rms_error(&flat(&got.grads), &want.grads));
            assert!(losses < loss_bound && grads < grad_bound, "{name}: losses {losses:e}, gradients {grads:e}");
            assert!((got.balance - want.balance).abs() <= loss_bound * want.balance, "{name}");
        }
    }
}

/// HAZARD 4, 7: any split of a sequence with carried state gives the logits of the whole, down to one token at a time.
#[test]
fn any_split_gives_the_same_logits() {
    for (name, config) in variants() {
        split(name, &config, 5e-6);
    }
}

fn split(name: &str, config: &ModelConfig, bound: f64) {
    let ctx = Ctx::cpu().poisoned();
    let params = params(&ctx, config, 4);
    let model = HyMo::new(config).unwrap();
    let mut noise = Noise::new(6);
    let ahead = config.mtp.n_modules + 1;
    let mut row: Vec<i32> = (0..70).map(|_| noise.below(config.vocab_size) as i32).collect();
    row.resize(70 + ahead, 0);
    let whole = Batch::new(1, 70, ahead - 1, &row, &vec![0; 70 + ahead]).unwrap();
    let want = values(&model.logits(&ctx, &params, &whole).unwrap()[0]);
    let splits: [&[usize]; 6] = [&[70], &[1; 70], &[35, 35], &[64, 6], &[3, 1, 2, 60, 4], &[16, 16, 16, 16, 6]];
    for split in splits {
        let mut state = State::new(config);
        let (mut got, mut at) = (Vec::new(), 0);
        for n in split {
            let logits = model.extend(&ctx, &params, &row[at..at + n], &mut state).unwrap();
            got.extend(values(&logits));
            at += n;
        }
        assert_eq!(state.position(), 70);
        let error = rms_error(&got, &want);
        assert!(error < bound, "{name}: {split:?}: {error:e}");
    }
}

/// No token sees its future: changing token t leaves every bit of the logits before t, at every depth.
#[test]
fn no_token_sees_its_future() {
    let ctx = Ctx::cpu().poisoned();
    for (name, config) in variants() {
        let params = params(&ctx, &config, 7);
        let model = HyMo::new(&config).unwrap();
        let (v, width) = (config.vocab_size, 70 + config.mtp.n_modules + 1);
        let mut tokens: Vec<i32> = tokens_of(&config, &[&[width]], 8);
        let logits = |tokens: &[i32]| -> Vec<Vec<f64>> {
            let batch = Batch::new(1, 70, config.mtp.n_modules, tokens, &vec![0; width]).unwrap();
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
                assert_eq!(bits(&a[..unseen]), bits(&b[..unseen]), "{name}: token {t}, depth {k}");
                assert_ne!(bits(&a[unseen..]), bits(&b[unseen..]), "{name}: token {t} changed nothing at depth {k}");
            }
        }
    }
}

/// The total loss against central differences of one number in every parameter, in double precision.
#[test]
fn gradients_match_differences() {
    let ctx = Ctx::cpu().oracle();
    for (name, config) in variants() {
        let base = params(&ctx, &config, 22);
        let model = HyMo::new(&config).unwrap();
        let batch = packed(&config, 23 - config.mtp.n_modules, &[&[9, 15]], 23);
        let grads = {
            let p = base.to_f64(&ctx).unwrap();
            let s = step(&ctx, &config, &p, &batch, &Options::default());
            p.table().params().iter().map(|spec| values(&p.grad_of(&s.grads, &spec.name).unwrap())).collect::<Vec<_>>()
        };
        let total = |unit: usize, element: usize, delta: f64| {
            let mut p = base.to_f64(&ctx).unwrap();
            p.flats_mut()[unit].flat_mut::<f64>().unwrap()[element] += delta;
            model.loss(&mut Tape::off(&ctx), &p, &batch, &Options::default()).unwrap().read().unwrap().total
        };
        let mut noise = Noise::new(24);
        for (spec, grad) in base.table().params().iter().zip(&grads) {
            let i = noise.below(grad.len());
            let (unit, at, h) = (unit(spec), spec.offset + i, 1e-6);
            let slope = (total(unit, at, h) - total(unit, at, -h)) / (2. * h);
            let scale = (grad.iter().map(|g| g * g).sum::<f64>() / grad.len() as f64).sqrt();
            let error = (slope - grad[i]).abs();
            assert!(error < 1e-5 * (scale + slope.abs()) + 1e-8, "{name}: {}: {slope} {}", spec.name, grad[i]);
        }
    }
}

/// Bytes a token that the tensors of a forward pass hold until its backward pass, each buffer once.
fn held(config: &ModelConfig, len: usize, checkpoint: Vec<usize>) -> f64 {
    let ctx = Ctx::cpu();
    let params = Params::init(&ctx, config, 1).unwrap();
    let width = len + config.mtp.n_modules + 1;
    let batch = packed(config, len, &[&[len - 5, width - len + 5], &[width]], 2);
    let mut tape = Tape::training(&ctx, params.zero_grads(&ctx).unwrap());
    let before = ctx.pool().stats().asked;
    let options = Options { checkpoint, ..Options::default() };
    let losses = HyMo::new(config).unwrap().loss(&mut tape, &params, &batch, &options).unwrap();
    let held = ctx.pool().stats().asked - before;
    drop(losses);
    held as f64 / (2 * len) as f64
}

/// What `inspect` says a pass saves is what its tensors hold: no buffer forgotten, none counted twice.
#[test]
fn the_cost_of_saved_activations_is_what_is_saved() {
    let nano = [("hymo-nano", presets::hymo_nano()), ("gpt-nano", presets::gpt_nano())];
    for (name, config) in variants().into_iter().chain(nano) {
        let len = 256;
        let cost = Cost::new(&config, CostOptions { context: len, batch: 2 }).unwrap().activations;
        let close = |what: &str, held: f64, said: u64| {
            let ratio = held / said as f64;
            assert!((ratio - 1.).abs() < 0.02, "{name}, {what}: {held} bytes a token held, {said} said");
        };
        close("plain", held(&config, len, vec![]), cost.per_token_f32);
        // At the end of the forward pass: of each layer its input, of the rest everything.
        let rest = cost.blocks.iter().filter(|b| ["head", "mtp module"].contains(&b.block));
        let rest: u64 = rest.map(|b| 4 * b.count * (b.numbers + b.wide)).sum();
        let inputs = 4 * (config.n_layers * config.d_model) as u64;
        close("checkpointed", held(&config, len, (0..config.n_layers).collect()), inputs + rest);
        assert!(cost.checkpointed_per_token_f32 >= inputs + rest);
    }
}
