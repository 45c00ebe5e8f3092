use super::*;
use crate::cache::LayerCache;
use crate::{SampleOptions, WeightDtype};
use hymo_model::{Params, presets};

/// HAZARD 18: numbers that are not finite end their own request with an error, and what it began from is dropped; others go
/// on as if they were alone.
#[test]
fn not_finite_ends_one_request_alone() {
    let (ctx, config) = (Ctx::cpu(), presets::hymo_nano());
    let params = Params::init(&ctx, &config, 1).unwrap();
    let weights = Arc::new(Weights::new(&ctx, &config, &params, WeightDtype::Bf16).unwrap());
    let told = EngineOptions { snapshots: 1 << 30, mtp: Mtp::On, ..EngineOptions::default() };
    let mut engine = Engine::new(&ctx, weights, told).unwrap();
    let options = SampleOptions { max_tokens: 6, ..SampleOptions::default() };
    let prompt: Vec<u32> = (0..30).collect();
    let mut run = |poisoned: bool| {
        let good = engine.submit(Request::new(&[7, 8, 9], &options)).unwrap();
        let bad = engine.submit(Request::new(&prompt, &options)).unwrap();
        let (mut outputs, mut steps) = (Vec::new(), 0);
        while !engine.idle() {
            for event in engine.step() {
                match event.what {
                    What::Token(_) => {}
                    What::Finished(output) => outputs.push((event.id, Ok(*output))),
                    What::Failed(error) => outputs.push((event.id, Err(error))),
                }
            }
            steps += 1;
            if let (true, 2, Some(slot)) = (poisoned, steps, engine.running.iter_mut().find(|s| s.id == bad)) {
                if let LayerCache::Gdn(cache) = &mut slot.active.sequence.layers[0] {
                    cache.state[5] = f32::NAN;
                }
            }
        }
        outputs.sort_by_key(|(id, _)| (*id == bad, *id));
        assert_eq!(outputs[0].0, good);
        (outputs.remove(0).1.unwrap(), outputs.remove(0).1)
    };
    // Where the second run's prompt parts from the first one's turn, a snapshot is kept; the third begins from it.
    let cached: Vec<usize> = (0..3).map(|_| run(false).1.unwrap().stats.cached_tokens).collect();
    assert_eq!(cached, [0, 0, 29]);
    let (good, failed) = run(true);
    assert!(matches!(failed, Err(Error::NotFinite { .. })), "{failed:?}");
    let (again, next) = run(false);
    assert_eq!((good.tokens, next.unwrap().stats.cached_tokens), (again.tokens, 0));
}

/// What passes work on stays within its plan, and the plan is no wild guess: chunks of prompts, tokens side by side, drafts
/// with all that waited for them, with experts and a latent or without either.
#[test]
fn passes_stay_within_their_plan() {
    for (preset, mtp) in
        [("hymo-nano", Mtp::Off), ("hymo-nano", Mtp::On), ("hymo-30m", Mtp::On), ("gpt-nano", Mtp::Off)]
    {
        let (ctx, config) = (Ctx::cpu(), presets::preset(preset).unwrap().model());
        let params = Params::init(&ctx, &config, 1).unwrap();
        let weights = Arc::new(Weights::new(&ctx, &config, &params, WeightDtype::Int8).unwrap());
        drop(params);
        for (prefill_chunk, max_batch) in [(300, 2), (64, 4), (1, 1)] {
            let gates = crate::Gates::new(&[0.]).unwrap();
            let told = EngineOptions { prefill_chunk, max_batch, mtp, gates, ..EngineOptions::default() };
            let mut engine = Engine::new(&ctx, Arc::clone(&weights), told).unwrap();
            let options = SampleOptions { max_tokens: 4, ..SampleOptions::default() };
            let prompt: Vec<u32> = (0..if prefill_chunk == 1 { 5 } else { 310 }).collect();
            for _ in 0..max_batch + 1 {
                engine.submit(Request::new(&prompt, &options)).unwrap();
            }
            let before = ctx.pool().stats().live;
            ctx.pool().reset_peak();
            while !engine.idle() {
                engine.step();
            }
            let (took, planned) = ((ctx.pool().stats().peak - before) as u64, engine.memory().working);
            let least = if prefill_chunk == 300 && mtp == Mtp::Off { planned / 4 } else { 0 };
            assert!((least..=planned).contains(&took), "{preset} {mtp:?} {prefill_chunk}: {took} of {planned}");
        }
    }
}
