//! What a model makes of held-out text: nats a token, bits a byte.

use crate::Error;
use hymo_data::corpus::Corpus;
use hymo_data::loader::{Loader, LoaderOptions, Prefetch};
use hymo_model::{Batch, HyMo, ModelConfig, Options, Params};
use hymo_tape::Tape;
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::sync::Arc;

/// Bytes of text that each token stands for; special tokens stand for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBytes(Vec<u32>);

impl TokenBytes {
    /// Of a tokenizer.
    #[must_use]
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let text = tokenizer.n_text() as u32;
        let len = |id| tokenizer.bytes(id).filter(|_| id < text).map_or(0, |bytes| bytes.len() as u32);
        TokenBytes((0..tokenizer.vocab_size() as u32).map(len).collect())
    }

    /// 0 for what is no target, -1.
    fn get(&self, id: i32) -> u64 {
        usize::try_from(id).ok().and_then(|id| self.0.get(id)).map_or(0, |&n| u64::from(n))
    }
}

/// How much is read at once, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// Rows of `model.context_length` tokens computed at once.
    pub rows: usize,
    /// Tokens after which no further rows are begun; 0 reads everything.
    pub tokens: u64,
}

/// Sums over held-out text. Two parts of a text add up.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Σ -ln p of the targets, at each depth, nats.
    pub nll: Vec<f64>,
    /// Targets, at each depth.
    pub targets: Vec<u64>,
    /// Bytes that the head's targets stand for.
    pub bytes: u64,
}

impl Scores {
    /// Mean loss of the head, nats a token.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.at(0)
    }

    /// Mean loss of each prediction module, nats a token.
    #[must_use]
    pub fn mtp_losses(&self) -> Vec<f64> {
        (1..self.nll.len()).map(|depth| self.at(depth)).collect()
    }

    fn at(&self, depth: usize) -> f64 {
        self.nll.get(depth).map_or(f64::NAN, |nll| nll / self.targets[depth] as f64)
    }

    /// exp of the loss: among how many equally likely tokens the model is in doubt.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// What the text costs in bits for each of its bytes, which does not depend on the tokenizer.
    #[must_use]
    pub fn bits_per_byte(&self) -> f64 {
        self.nll.first().map_or(f64::NAN, |nll| nll / std::f64::consts::LN_2 / self.bytes as f64)
    }

    /// Adds another text's.
    pub fn add(&mut self, other: &Scores) {
        self.nll.resize(self.nll.len().max(other.nll.len()), 0.);
        self.targets.resize(self.nll.len(), 0);
        self.nll.iter_mut().zip(&other.nll).for_each(|(a, b)| *a += b);
        self.targets.iter_mut().zip(&other.targets).for_each(|(a, b)| *a += b);
        self.bytes += other.bytes;
    }
}

/// Reads a corpus of one data set once, or its beginning, in its own order. Documents are cut to rows as in training, so the
/// first token of a row's first document is not predicted. `seen` is told the tokens read so far.
///
/// # Errors
/// Data that cannot be read, or of another vocabulary.
pub fn evaluate(
    ctx: &Ctx,
    model: &ModelConfig,
    params: &Params,
    (corpus, bytes): (&Arc<Corpus>, &TokenBytes),
    options: EvalOptions,
    seen: &mut dyn FnMut(u64),
) -> Result<Scores, Error> {
    let mut plain = model.clone();
    // What is reported is the text's cost, without the regulariser.
    plain.loss.z_loss = 0.;
    let net = HyMo::new(&plain)?;
    let (len, modules) = (model.context_length, model.mtp.n_modules);
    let loader = LoaderOptions { once: true, ..LoaderOptions::new(len, modules, options.rows) };
    let mut data = Prefetch::new(Loader::new(Arc::clone(corpus), loader, None)?, 2)?;
    let (mut scores, mut tokens) = (Scores::default(), 0);
    while let Some(step) = data.next_step()? {
        for micro in &step.micro {
            let batch = Batch::new(micro.rows, len, modules, &micro.tokens, &micro.documents)?;
            let losses = net.loss(&mut Tape::off(ctx), params, &batch, &Options::default())?;
            let targets: Vec<u64> = batch.counts().valid.iter().map(|&n| n as u64).collect();
            let nll = losses.read()?.depths.iter().zip(&targets).map(|(mean, &n)| mean * n as f64).collect();
            scores.add(&Scores { nll, targets, bytes: batch.ahead(1).into_iter().map(|id| bytes.get(id)).sum() });
        }
        tokens += step.tokens;
        seen(tokens);
        if options.tokens > 0 && tokens >= options.tokens {
            break;
        }
    }
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_costs_what_its_parts_cost() {
        let mut all = Scores { nll: vec![8f64.ln() * 2., 1.], targets: vec![2, 1], bytes: 3 };
        assert!((all.perplexity() - 8.).abs() < 1e-12 && (all.bits_per_byte() - 2.).abs() < 1e-12);
        all.add(&Scores { nll: vec![0., 2.], targets: vec![2, 2], bytes: 3 });
        assert_eq!((all.targets.clone(), all.bytes, all.mtp_losses()), (vec![4, 3], 6, vec![1.]));
        assert!(Scores::default().loss().is_nan() && Scores::default().bits_per_byte().is_nan());
    }
}
