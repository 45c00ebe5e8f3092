//! What a model writes at an evaluation.

use crate::Error;
use crate::record::Sample;
use hymo_data::corpus::Corpus;
use hymo_infer::{Generator, SampleOptions, WeightDtype};
use hymo_model::config::EvalConfig;
use hymo_model::{ModelConfig, Params};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Tokens of a held-out document that are given as its beginning.
const BEGINNING: usize = 16;
/// Held-out documents that are looked at for one that is long enough.
const LOOKED_AT: u64 = 1000;

/// The same beginnings and the same random numbers at each evaluation, so that texts can be compared.
pub(super) fn write(
    (model, params): (&ModelConfig, &Params),
    tokenizer: &Arc<Tokenizer>,
    held_out: &[Arc<Corpus>],
    options: &EvalConfig,
) -> Result<Vec<Sample>, Error> {
    let prompts = beginnings(tokenizer, held_out, options, model.context_length)?;
    if prompts.is_empty() {
        return Ok(Vec::new());
    }
    // Decoding is the processor's.
    let params = params.on(&Ctx::cpu())?;
    let generator = Generator::new(model, &params, WeightDtype::F32)?;
    let mut generator = generator.with_tokenizer(Arc::clone(tokenizer));
    let sample = |(n, prompt): (usize, &Vec<u32>)| {
        let options = SampleOptions {
            max_tokens: options.sample_tokens,
            temperature: options.temperature as f32,
            seed: n as u64,
            stop_tokens: vec![tokenizer.end_of_text()],
            ..SampleOptions::default()
        };
        let output = generator.generate(prompt, &options, |_| ControlFlow::Continue(()))?;
        Ok(Sample {
            prompt: text(&tokenizer.decode(prompt).map_err(hymo_data::Error::from)?),
            text: text(&output.text),
        })
    };
    prompts.iter().enumerate().map(sample).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What is continued, in tokens.
pub(super) fn beginnings(
    tokenizer: &Tokenizer,
    held_out: &[Arc<Corpus>],
    options: &EvalConfig,
    context: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    if !options.prompts.is_empty() {
        let of = |text: &String| {
            let mut ids = tokenizer.encode(text.as_bytes()).map_err(hymo_data::Error::from)?;
            if ids.is_empty() {
                ids.push(tokenizer.end_of_text());
            }
            ids.truncate(context);
            Ok(ids)
        };
        return options.prompts.iter().cycle().take(options.samples).map(of).collect();
    }
    let mut found = Vec::new();
    for set in held_out.iter().flat_map(|corpus| corpus.sets()) {
        let documents = 0..set.dataset.documents().min(LOOKED_AT);
        for document in documents {
            if found.len() == options.samples {
                return Ok(found);
            }
            let tokens = set.dataset.tokens_of(document)?;
            // More than the beginning: there is something to continue.
            if tokens.len() > 2 * BEGINNING {
                found.push(tokens.iter().take(BEGINNING.min(context)).map(|&id| u32::from(id)).collect());
            }
        }
    }
    Ok(found)
}
