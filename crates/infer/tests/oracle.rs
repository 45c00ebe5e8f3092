//! Decoding against the whole model's own forward pass.

#[path = "../../model/tests/small/mod.rs"]
mod small;

use hymo_infer::{CacheDtype, Generator, SampleOptions, Sequence, WeightDtype, Weights};
use hymo_model::{Batch, HyMo, ModelConfig, Params};
use hymo_ops::check::{Noise, rms_error};
use hymo_tensor::Ctx;
use small::{params, values, variants};
use std::ops::ControlFlow;

const LEN: usize = 150;

fn tokens(config: &ModelConfig) -> Vec<u32> {
    let mut noise = Noise::new(3);
    (0..LEN).map(|_| noise.below(config.vocab_size) as u32).collect()
}

fn oracle(config: &ModelConfig, params: &Params, tokens: &[u32]) -> Vec<f64> {
    let ahead = config.mtp.n_modules + 1;
    let mut row: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    row.resize(tokens.len() + ahead, 0);
    let batch = Batch::new(1, tokens.len(), ahead - 1, &row, &vec![0; row.len()]).unwrap();
    values(&HyMo::new(config).unwrap().logits(&Ctx::cpu(), params, &batch).unwrap()[0])
}

/// HAZARD 4, 6, 7, 17: token by token, in chunks and at once: the logits of the full forward pass, up to rounding.
#[test]
fn any_split_is_the_full_forward() {
    for (name, config) in variants() {
        let ctx = Ctx::cpu().poisoned();
        let params = params(&ctx, &config, 4);
        let weights = Weights::new(&ctx, &config, &params, WeightDtype::F32).unwrap();
        let tokens = tokens(&config);
        let want = oracle(&config, &params, &tokens);
        let splits: [&[usize]; 6] = [&[LEN], &[1; LEN], &[64, 64, 22], &[3, 1, 2, 60, 80, 4], &[8; 19], &[100, 50]];
        for split in splits {
            let mut sequence = Sequence::new(&config, CacheDtype::F32);
            let (mut got, mut at) = (Vec::new(), 0);
            for n in split {
                let n = (*n).min(LEN - at);
                if n > 0 {
                    got.extend(values(&weights.extend(&ctx, &tokens[at..at + n], &mut sequence).unwrap()));
                }
                at += n;
            }
            assert_eq!(sequence.position(), LEN);
            let error = rms_error(&got, &want);
            assert!(error < 1e-5, "{name}: {split:?}: {error:e}");
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0., f64::max);
            assert!(worst < 1e-4, "{name}: {worst:e}");
        }
    }
}

/// The first tokens of greedy text are the largest logits of the full forward pass, token by token.
#[test]
fn greedy_text_is_the_largest_logits() {
    let (_, config) = &variants()[0];
    let params = params(&Ctx::cpu(), config, 4);
    let mut generator = Generator::new(config, &params, WeightDtype::F32).unwrap();
    let options = SampleOptions { max_tokens: 12, ..SampleOptions::default() };
    let mut all = tokens(config)[..5].to_vec();
    let output = generator.generate(&all.clone(), &options, |_| ControlFlow::Continue(())).unwrap();
    for &token in &output.tokens {
        let logits = oracle(config, &params, &all);
        let last = &logits[(all.len() - 1) * config.vocab_size..];
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        assert_eq!(token as usize, best);
        all.push(token);
    }
}
