//! Whatever runs beside a request, however its prompt is fed and whoever drafts: the same bytes.

#[path = "../../model/tests/small/mod.rs"]
mod small;

use hymo_infer::{
    CacheDtype, Clock, Engine, EngineOptions, Error, Finish, Gates, Mtp, Output, Request, RequestId, SampleOptions,
    Sequence, WeightDtype, Weights, What,
};
use hymo_model::ModelConfig;
use hymo_ops::check::Noise;
use hymo_tensor::Ctx;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// So few tokens that drafts of an untrained model come true now and then.
const VOCAB: usize = 5;

fn config() -> ModelConfig {
    ModelConfig { vocab_size: VOCAB, context_length: 160, ..small::config() }
}

fn weights(config: &ModelConfig, dtype: WeightDtype) -> Arc<Weights> {
    let ctx = Ctx::cpu().poisoned();
    Arc::new(Weights::new(&ctx, config, &small::params(&ctx, config, 4), dtype).unwrap())
}

/// A clock on which every reading takes a second.
fn clock() -> Clock {
    let seconds = AtomicU64::new(0);
    Clock::new(move || seconds.fetch_add(1, Ordering::Relaxed) as f64)
}

fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Result<Output, Error>> {
    let (mut done, mut ids): (BTreeMap<RequestId, _>, Vec<RequestId>) = (BTreeMap::new(), Vec::new());
    let mut requests = requests.into_iter();
    loop {
        // They join one after the other, while others are under way.
        if let Some(request) = requests.next() {
            ids.push(engine.submit(request).unwrap());
        } else if engine.idle() {
            break;
        }
        for event in engine.step() {
            match event.what {
                What::Token(_) => {}
                What::Finished(output) => drop(done.insert(event.id, Ok(*output))),
                What::Failed(error) => drop(done.insert(event.id, Err(error))),
            }
        }
        let memory = engine.memory();
        assert!(memory.held <= memory.planned, "{memory:?}");
    }
    ids.iter().map(|id| done.remove(id).unwrap()).collect()
}

/// Prompts of many lengths, some of which begin alike.
fn prompts() -> Vec<Vec<u32>> {
    let mut noise = Noise::new(9);
    let mut some = |n: usize| (0..n).map(|_| noise.below(VOCAB) as u32).collect::<Vec<u32>>();
    let shared = some(70);
    let mut all: Vec<Vec<u32>> = [1, 2, 64, 65, 33].map(&mut some).into();
    all.extend([3, 30, 1].map(|n| [shared.clone(), some(n)].concat()));
    all
}

fn requests(options: impl Fn(usize) -> SampleOptions) -> Vec<Request> {
    prompts().iter().enumerate().map(|(i, prompt)| Request::new(prompt, &options(i))).collect()
}

/// HAZARD 17, 20: prediction on, off and by the clock, snapshots on and off, 1 to 8 requests at once, prompts in pieces of
/// any size: greedy and sampled output is the same to the byte.
#[test]
fn nothing_beside_a_request_changes_its_bytes() {
    // Small products: threads would wait for each other most of the time.
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(matrix);
}

fn matrix() {
    let greedy = |i: usize| SampleOptions { max_tokens: 20 + i, ..SampleOptions::default() };
    let drawn = |i: usize| SampleOptions {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: i as u64,
        logprobs: Some(2),
        ..greedy(i)
    };
    let all: [&dyn Fn(usize) -> SampleOptions; 2] = [&greedy, &drawn];
    for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::Int8] {
        let weights = weights(&config(), dtype);
        let batches: &[usize] = if dtype == WeightDtype::F32 { &[1, 2, 3, 5, 8] } else { &[1, 4] };
        for options in all {
            let (mut accepted, mut cached) = (0, 0);
            let mut want = Vec::new();
            for mtp in [Mtp::Off, Mtp::On, Mtp::Auto] {
                for (snapshots, chunk) in [(0, 512), (0, 1), (1 << 20, 7), (1 << 20, 64)] {
                    for &max_batch in batches {
                        let cache = if dtype == WeightDtype::Bf16 { CacheDtype::Bf16 } else { CacheDtype::F32 };
                        let gates = Gates::new(&[0.]).unwrap();
                        let clock = Some(clock());
                        let told = EngineOptions {
                            mtp,
                            gates,
                            snapshots,
                            prefill_chunk: chunk,
                            max_batch,
                            cache,
                            clock,
                            ..EngineOptions::default()
                        };
                        let ctx = Ctx::cpu().poisoned();
                        let mut engine = Engine::new(&ctx, Arc::clone(&weights), told).unwrap();
                        // Twice, so that the second time begins from snapshots.
                        for _ in 0..1 + usize::from(snapshots > 0) {
                            let got = run(&mut engine, requests(options));
                            let got: Vec<Output> = got.into_iter().map(Result::unwrap).collect();
                            accepted += got.iter().flat_map(|o| &o.stats.speculation.accepted).sum::<usize>();
                            cached += got.iter().map(|o| o.stats.cached_tokens).sum::<usize>();
                            let got: Vec<_> = got.into_iter().map(|o| (o.tokens, o.logprobs, o.finish)).collect();
                            if want.is_empty() {
                                want = got;
                            } else {
                                assert!(want == got, "{dtype}, {mtp:?}, chunk {chunk}, batch {max_batch}, {snapshots}");
                            }
                        }
                    }
                }
            }
            assert!(accepted > 200 && cached > 500, "{accepted} drafts, {cached} tokens");
        }
    }
}

/// The modules' states follow the trunk's exactly, whatever the number of modules: drafting token by token is drafting after
/// a prefill.
#[test]
fn any_number_of_modules() {
    for n_modules in [1, 3] {
        let mut config = config();
        config.mtp.n_modules = n_modules;
        config.mtp.loss_weights = vec![0.1; n_modules];
        let weights = weights(&config, WeightDtype::F32);
        let run = |mtp: Mtp, chunk: usize| {
            let gates = Gates::new(&[0.]).unwrap();
            let told = EngineOptions { mtp, gates, prefill_chunk: chunk, ..EngineOptions::default() };
            let mut engine = Engine::new(&Ctx::cpu(), Arc::clone(&weights), told).unwrap();
            let options = SampleOptions { max_tokens: 90, ..SampleOptions::default() };
            let got = run(&mut engine, prompts().iter().map(|p| Request::new(p, &options)).collect());
            got.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        let (off, whole, cut) = (run(Mtp::Off, 512), run(Mtp::On, 512), run(Mtp::On, 3));
        for ((off, whole), cut) in off.iter().zip(&whole).zip(&cut) {
            assert_eq!((&off.tokens, off.finish), (&whole.tokens, whole.finish));
            assert_eq!(off.tokens, cut.tokens);
            let (a, b) = (&whole.stats.speculation, &cut.stats.speculation);
            assert_eq!((&a.drafted, &a.accepted, a.cycles), (&b.drafted, &b.accepted, b.cycles));
            assert_eq!(a.drafted.len(), n_modules);
            assert!(a.tokens + a.cycles > 0 && off.stats.passes >= whole.stats.passes);
        }
        let deepest: usize = whole.iter().map(|o| o.stats.speculation.accepted[n_modules - 1]).sum();
        assert!(deepest > 0, "{n_modules}");
    }
}

/// HAZARD 4, 17: a snapshot at any token goes on as the sequence itself would, and changes nothing of it.
#[test]
fn snapshots_at_any_token() {
    let (config, ctx) = (config(), Ctx::cpu().poisoned());
    let weights = weights(&config, WeightDtype::F32);
    let tokens = &prompts()[6];
    let rows = |sequence: &mut Sequence, tokens: &[u32]| {
        weights.extend(&ctx, tokens, sequence).unwrap().to_vec::<f32>().unwrap()
    };
    for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
        let want = rows(&mut Sequence::new(&config, dtype), tokens);
        let mut sequence = Sequence::new(&config, dtype);
        for at in 0..tokens.len() {
            let mut fork = sequence.fork();
            assert_eq!(rows(&mut fork, &tokens[at..]), want[at * VOCAB..], "{at}");
            assert_eq!(rows(&mut sequence, &tokens[at..=at]), want[at * VOCAB..(at + 1) * VOCAB], "{at}");
        }
    }
}

/// What `hymo inspect` says of caches and states is what a sequence holds.
#[test]
fn bytes_are_as_planned() {
    let ctx = Ctx::cpu();
    for (name, config) in small::variants() {
        let weights = Weights::new(&ctx, &config, &small::params(&ctx, &config, 4), WeightDtype::F32).unwrap();
        for dtype in [CacheDtype::F32, CacheDtype::Bf16] {
            let mut sequence = Sequence::new(&config, dtype);
            for n in [1, 63, 1, 64] {
                weights.extend(&ctx, &vec![1; n], &mut sequence).unwrap();
                let planned = Sequence::planned_bytes(&config, dtype, sequence.position(), false).unwrap();
                assert_eq!(sequence.bytes() as u64, planned, "{name} {}", sequence.position());
            }
        }
    }
}

/// Requests wait while memory is full, begin in order, and none is ever over its plan; one too large is refused at once.
#[test]
fn memory_is_planned_and_kept() {
    let weights = weights(&config(), WeightDtype::F32);
    let options = SampleOptions { max_tokens: 40, ..SampleOptions::default() };
    let need = Sequence::planned_bytes(&config(), CacheDtype::F32, 60, false).unwrap();
    let engine = |memory| {
        let told = EngineOptions { memory, snapshots: u64::MAX, ..EngineOptions::default() };
        Engine::new(&Ctx::cpu(), Arc::clone(&weights), told).unwrap()
    };
    let working = engine(0).memory().working;
    let (mut small, mut engine) = (engine(working + need), engine(working + 2 * need + need / 2));
    for i in 0..5 {
        engine.submit(Request::new(&[i % 5; 20], &options)).unwrap();
    }
    let (mut most, mut order) = (0, Vec::new());
    while !engine.idle() {
        for event in engine.step() {
            if let What::Finished(output) = event.what {
                assert_eq!((output.tokens.len(), output.finish), (40, Finish::Length));
                order.push(event.id);
            }
        }
        let memory = engine.memory();
        assert!(memory.working + memory.planned + memory.snapshots <= memory.budget, "{memory:?}");
        assert!(memory.held <= memory.planned, "{memory:?}");
        most = most.max(engine.load().0);
    }
    assert_eq!((most, order.len()), (2, 5));
    assert!(order.is_sorted() && engine.memory().snapshots > 0);
    let large = Request::new(&[1; 20], &SampleOptions { max_tokens: 140, ..SampleOptions::default() });
    let refused = small.submit(large);
    assert!(matches!(refused, Err(Error::Memory { raise: "memory", .. })), "{refused:?}");
}

/// Drafts change no distribution: three tokens of many seeds against the model's exact joint probabilities.
#[test]
fn drafts_keep_the_distribution() {
    let (config, ctx) = (config(), Ctx::cpu());
    let weights = weights(&config, WeightDtype::F32);
    let prompt = [2, 0, 4, 1];
    let mut sequence = Sequence::new(&config, CacheDtype::F32);
    weights.extend(&ctx, &prompt[..3], &mut sequence).unwrap();
    let softmax = |row: &[f32]| {
        let e: Vec<f64> = row.iter().map(|&l| (f64::from(l) / 0.7).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|e| e / sum).collect::<Vec<f64>>()
    };
    let mut want = vec![0.; VOCAB * VOCAB * VOCAB];
    for a in 0..VOCAB {
        for b in 0..VOCAB {
            let all = [prompt[3], a as u32, b as u32];
            let rows = weights.extend(&ctx, &all, &mut sequence.fork()).unwrap();
            let rows = rows.view::<f32>().unwrap();
            let [p, q, r] = [0, 1, 2].map(|i| softmax(rows.row(i)));
            (0..VOCAB).for_each(|c| want[(a * VOCAB + b) * VOCAB + c] = p[a] * q[b] * r[c]);
        }
    }
    const SEEDS: usize = 6_000;
    let gates = Gates::new(&[0.]).unwrap();
    let told = EngineOptions { mtp: Mtp::On, gates, max_batch: 64, ..EngineOptions::default() };
    let mut engine = Engine::new(&ctx, weights, told).unwrap();
    let options = |seed| SampleOptions { temperature: 0.7, max_tokens: 3, seed, ..SampleOptions::default() };
    let all = (0..SEEDS as u64).map(|seed| Request::new(&prompt, &options(seed))).collect();
    let (mut seen, mut accepted) = (vec![0.; want.len()], 0);
    for output in run(&mut engine, all) {
        let output = output.unwrap();
        let at = output.tokens.iter().fold(0, |at, &t| at * VOCAB + t as usize);
        seen[at] += 1.;
        accepted += output.stats.speculation.accepted.iter().sum::<usize>();
    }
    assert!(accepted > SEEDS / 50, "{accepted}");
    let expected = want.iter().map(|p| p * SEEDS as f64);
    let (mut chi, mut cells, mut rare) = (0., 0, [0.; 2]);
    for (seen, want) in seen.iter().zip(expected) {
        if want < 5. {
            rare = [rare[0] + seen, rare[1] + want];
        } else {
            (chi, cells) = (chi + (seen - want) * (seen - want) / want, cells + 1);
        }
    }
    if rare[1] >= 5. {
        (chi, cells) = (chi + (rare[0] - rare[1]).powi(2) / rare[1], cells + 1);
    }
    // Mean cells - 1, deviation sqrt(2 (cells - 1)): four of them.
    let free = f64::from(cells - 1);
    assert!(chi < free + 4. * (2. * free).sqrt(), "{chi} over {cells} cells");
}
