//! Decoding a model that has learned something, and a context of 32,768 tokens.

use hymo::infer::{CacheDtype, Clock, Engine, EngineOptions, Gates, Mtp, Output, Request, Sequence, Weights, What};
use hymo::optimizers::Outcome;
use hymo::{
    Batch, Ctx, HyMo, ModelConfig, Optimizer, Options, Params, RunConfig, SampleOptions, Tape, WeightDtype, optim,
    presets,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Prose that is there wherever the tests are: what this project says of itself, a byte a token.
const TEXT: &str = concat!(
    include_str!("../../../LOG.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../HAZARDS.md")
);
const LEN: usize = 256;

fn bytes(from: usize, n: usize) -> Vec<i32> {
    TEXT.bytes().cycle().skip(from % TEXT.len()).take(n).map(i32::from).collect()
}

/// hymo-nano after some steps over bytes: prediction modules that are right now and then, a router with opinions.
fn trained() -> (ModelConfig, Params) {
    let config = ModelConfig { vocab_size: 256, context_length: 512, ..presets::hymo_nano() };
    let ctx = Ctx::cpu();
    let (model, mut params) = (HyMo::new(&config).unwrap(), Params::init(&ctx, &config, 1).unwrap());
    let options = optim(4e-3);
    let mut optimizer = Optimizer::new(&ctx, &params, &options).unwrap();
    let row = LEN + config.mtp.n_modules + 1;
    let (mut first, mut last) = (0., 0.);
    for step in 0..80 {
        let tokens: Vec<i32> = (0..4).flat_map(|i| bytes((4 * step + i) * 1009, row)).collect();
        let batch = Batch::new(4, LEN, config.mtp.n_modules, &tokens, &vec![0; tokens.len()]).unwrap();
        let mut tape = Tape::training(&ctx, params.zero_grads(&ctx).unwrap());
        let losses = model.loss(&mut tape, &params, &batch, &Options::default()).unwrap();
        let grads = tape.backward(&losses.seeds()).unwrap().into_params().unwrap();
        let outcome = optimizer.step(&ctx, params.flats_mut(), grads.flats(), options.lr).unwrap();
        assert!(matches!(outcome, Outcome::Stepped { .. }), "{outcome:?}");
        last = losses.read().unwrap().depths[0];
        first = if step == 0 { last } else { first };
    }
    assert!(last < 0.6 * first, "{first} to {last}: nothing was learned");
    (config, params)
}

fn values(t: &hymo::tensor::Tensor) -> Vec<f32> {
    t.to_vec::<f32>().unwrap()
}

fn worst(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0., f32::max)
}

/// The model's own forward pass: logits [tokens, V].
fn forward(config: &ModelConfig, params: &Params, tokens: &[i32]) -> Vec<f32> {
    let (modules, mut row) = (config.mtp.n_modules, tokens.to_vec());
    row.resize(tokens.len() + modules + 1, 0);
    let batch = Batch::new(1, tokens.len(), modules, &row, &vec![0; row.len()]).unwrap();
    values(&HyMo::new(config).unwrap().logits(&Ctx::cpu(), params, &batch).unwrap()[0])
}

fn extended(weights: &Weights, tokens: &[u32], pieces: &[usize], sequence: &mut Sequence) -> Vec<f32> {
    let (mut out, mut at, mut next) = (Vec::new(), 0, pieces.iter().cycle());
    while at < tokens.len() {
        let n = (*next.next().unwrap()).min(tokens.len() - at);
        out.extend(values(&weights.extend(&Ctx::cpu(), &tokens[at..at + n], sequence).unwrap()));
        at += n;
    }
    out
}

fn written(weights: &Arc<Weights>, prompts: &[Vec<u32>], options: EngineOptions) -> Vec<Output> {
    let mut engine = Engine::new(&Ctx::cpu(), Arc::clone(weights), options).unwrap();
    let sample = SampleOptions { max_tokens: 64, ..SampleOptions::default() };
    let ids: Vec<_> = prompts.iter().map(|p| engine.submit(Request::new(p, &sample)).unwrap()).collect();
    let mut done = Vec::new();
    while !engine.idle() {
        for event in engine.step() {
            match event.what {
                What::Finished(output) => done.push((event.id, *output)),
                What::Failed(error) => panic!("{error}"),
                What::Token(_) => {}
            }
        }
    }
    ids.iter().map(|id| done.iter().find(|(of, _)| of == id).unwrap().1.clone()).collect()
}

/// HAZARD 4, 17, 20: token by token, in pieces and at once a trained model gives the logits of its forward pass, and greedy
/// text is the same to the byte whoever drafts, whatever runs beside it, from snapshots and in pieces of any size.
#[test]
fn a_trained_model_decodes_as_it_was_trained() {
    let (config, params) = trained();
    let weights = Arc::new(Weights::new(&Ctx::cpu(), &config, &params, WeightDtype::F32).unwrap());
    let (row, n) = (bytes(5_000, 400), 400);
    let tokens: Vec<u32> = row.iter().map(|&t| t as u32).collect();
    let want = forward(&config, &params, &row);
    let whole = extended(&weights, &tokens, &[n], &mut Sequence::new(&config, CacheDtype::F32));
    for pieces in [&[n][..], &[1], &[64], &[1, 7, 100, 3]] {
        let got = extended(&weights, &tokens, pieces, &mut Sequence::new(&config, CacheDtype::F32));
        assert!(got == whole, "{pieces:?}: other bits than at once");
        let worst = worst(&got, &want);
        assert!(worst < 1e-4, "{pieces:?}: {worst:e}");
    }

    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens[..1 + 45 * i].to_vec()).collect();
    let (mut accepted, mut later) = (0, 0);
    for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::Int8] {
        let weights = Arc::new(Weights::new(&Ctx::cpu(), &config, &params, dtype).unwrap());
        let mut want: Option<Vec<Vec<u32>>> = None;
        for mtp in [Mtp::Off, Mtp::On, Mtp::Auto] {
            for (max_batch, prefill_chunk, snapshots) in [(1, 512, 0), (3, 64, 1 << 24), (8, 1, 1 << 24), (8, 33, 0)] {
                // By this clock every pass takes as long: drafts pay.
                let readings = AtomicU64::new(0);
                let clock = Some(Clock::new(move || readings.fetch_add(1, Ordering::Relaxed) as f64));
                let options = EngineOptions {
                    mtp,
                    gates: Gates::new(&[0.3]).unwrap(),
                    max_batch,
                    prefill_chunk,
                    snapshots,
                    clock,
                    ..EngineOptions::default()
                };
                let got = written(&weights, &prompts, options);
                accepted += got.iter().flat_map(|o| &o.stats.speculation.accepted).sum::<usize>();
                // Modules that have forgotten most of a long prompt draft again.
                if mtp == Mtp::Auto {
                    later += got[7].stats.speculation.accepted.iter().sum::<usize>();
                }
                let got: Vec<Vec<u32>> = got.into_iter().map(|o| o.tokens).collect();
                let same = want.get_or_insert_with(|| got.clone()) == &got;
                assert!(same, "{dtype:?} {mtp:?} {max_batch} {prefill_chunk} {snapshots}");
            }
        }
    }
    assert!(accepted > 100 && later > 10, "{accepted} and {later} drafts came true");
}

/// MATH 2.6: a context of 4,096 stretched to 32,768 tokens. The forward pass, and prompts in pieces that agree to the bit; at
/// the end of the context single tokens, an error after the last.
#[test]
fn a_context_of_32_768_tokens() {
    const CONTEXT: usize = 32_768;
    let text = "[model]\nvocab_size = 64\ncontext_length = 32768\nd_model = 32\nn_layers = 2\npattern = [\"gdn\", \"mla\"]\n\
                [model.gdn]\nn_heads = 2\nd_k = 8\nd_v = 12\n\
                [model.mla]\nn_heads = 2\nn_kv_groups = 1\nd_nope = 8\nd_rope = 8\nd_v = 8\nkv_latent = 16\nffn = \"moe\"\n\
                [model.mla.yarn]\nfactor = 8.0\noriginal_context = 4096\n\
                [model.moe]\nn_routed = 4\nn_shared = 1\ntop_k = 2\nd_ff = 16\nrouted_scale = 1.4\nbalance_loss = 0.01\n[model.mtp]\nn_modules = 1\nloss_weights = [0.3]\n";
    let config = RunConfig::from_toml(text).unwrap().model;
    let params = Params::init(&Ctx::cpu(), &config, 3).unwrap();
    let weights = Weights::new(&Ctx::cpu(), &config, &params, WeightDtype::F32).unwrap();
    let row: Vec<i32> = bytes(0, CONTEXT).into_iter().map(|b| b % 64).collect();
    let tokens: Vec<u32> = row.iter().map(|&t| t as u32).collect();

    let mut sequence = Sequence::new(&config, CacheDtype::F32);
    let long = extended(&weights, &tokens, &[4096], &mut sequence);
    let worst = worst(&long, &forward(&config, &params, &row));
    assert!(worst < 1e-4, "{worst:e}");
    assert_eq!(sequence.position(), CONTEXT);
    let planned = Sequence::planned_bytes(&config, CacheDtype::F32, CONTEXT, false).unwrap();
    assert!(sequence.bytes() as u64 <= planned, "{} of {planned}", sequence.bytes());

    let mut again = Sequence::new(&config, CacheDtype::F32);
    let got = extended(&weights, &tokens[..CONTEXT - 40], &[1000, 24], &mut again);
    assert!(got == long[..got.len()], "other pieces, other bits");
    let end = extended(&weights, &tokens[CONTEXT - 40..], &[1], &mut again);
    assert!(end == long[got.len()..], "single tokens, other bits");

    // One token beyond what positions reach.
    let weights = Arc::new(weights);
    let mut engine = Engine::new(&Ctx::cpu(), Arc::clone(&weights), EngineOptions::default()).unwrap();
    let sample = SampleOptions { max_tokens: 8, ..SampleOptions::default() };
    let beyond = [&tokens[..], &[1]].concat();
    let error = engine.submit(Request::new(&beyond, &sample)).unwrap_err().to_string();
    assert!(error.contains("32769") && error.contains("32768"), "{error}");
}
