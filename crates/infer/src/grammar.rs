//! Output that follows a JSON schema or a regular expression, by the `llguidance` crate.
//!
//! The grammar looks at bytes: any cut of the text into tokens is right. Drafts need nothing of their own, since a draft is
//! accepted exactly when it is the token drawn under the grammar.

use crate::{Constraint, Error, Result};
use hymo_tokenizer::{Kind, Tokenizer};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use std::fmt;
use std::sync::Arc;

/// Makes constraints for one tokenizer.
///
/// ```
/// # use hymo_infer::{Generator, Grammars, Request, SampleOptions, WeightDtype};
/// # use hymo_model::{Params, presets};
/// # use hymo_tensor::Ctx;
/// # use hymo_tokenizer::{Tokenizer, train::{TrainOptions, Trainer}};
/// # use std::{ops::ControlFlow, sync::Arc};
/// # let config = hymo_model::ModelConfig { vocab_size: 520, ..presets::hymo_nano() };
/// # let mut trainer = Trainer::new(TrainOptions { vocab_size: 520, ..TrainOptions::default() }).unwrap();
/// # trainer.feed([Ok::<_, hymo_tokenizer::Error>(b"low lower lowest low low".to_vec())], &mut |_| ()).unwrap();
/// # let tokenizer = Tokenizer::from_json(&trainer.finish(&mut |_, _| ()).unwrap().0).unwrap();
/// # let params = Params::init(&Ctx::cpu(), &config, 1)?;
/// let grammars = Grammars::new(&tokenizer)?;
/// let request = Request::new(&[1], &SampleOptions::default());
/// let request = Request { constraint: Some(grammars.regex("(yes|no), 1[0-9]{2}")?), ..request };
/// let generator = Generator::new(&config, &params, WeightDtype::F32)?;
/// let output = generator.with_tokenizer(Arc::new(tokenizer)).run(request, |_| ControlFlow::Continue(()))?;
/// assert!(output.text.starts_with(b"yes, 1") || output.text.starts_with(b"no, 1"));
/// # Ok::<(), hymo_infer::Error>(())
/// ```
pub struct Grammars {
    factory: ParserFactory,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammars")
    }
}

impl Grammars {
    /// Prepares a vocabulary: some milliseconds for a large one, so keep it.
    ///
    /// # Errors
    /// The crate refuses the vocabulary, which it does of none that a tokenizer has.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let n = tokenizer.vocab_size() as u32;
        let word = |id: u32| match (tokenizer.kind(id), tokenizer.bytes(id)) {
            (Some(Kind::Text), Some(bytes)) => bytes.to_vec(),
            (Some(Kind::Special), Some(name)) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
            // Nothing that could come.
            _ => Vec::new(),
        };
        let words: Vec<Vec<u8>> = (0..n).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(n, tokenizer.end_of_text()), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| refused(&e))?;
        factory.quiet();
        Ok(Grammars { factory })
    }

    /// JSON that fits a schema, given as JSON.
    ///
    /// # Errors
    /// What is no JSON, or a schema that the crate does not know.
    pub fn json_schema(&self, schema: &str) -> Result<Box<dyn Constraint>> {
        let schema = llguidance_json(schema)?;
        self.constraint(TopLevelGrammar::from_json_schema(schema))
    }

    /// Text that a regular expression matches as a whole.
    ///
    /// # Errors
    /// What is no regular expression of the `regex` crate's language.
    pub fn regex(&self, pattern: &str) -> Result<Box<dyn Constraint>> {
        self.constraint(TopLevelGrammar::from_regex(pattern))
    }

    fn constraint(&self, grammar: TopLevelGrammar) -> Result<Box<dyn Constraint>> {
        let parser = self.factory.create_parser(grammar).map_err(|e| refused(&e))?;
        Ok(Box::new(Grammar { matcher: Matcher::new(Ok(parser)) }))
    }
}

fn llguidance_json(text: &str) -> Result<serde_json::Value> {
    serde_json::from_str(text).map_err(|e| Error::Grammar { why: format!("the schema is no JSON: {e}") })
}

/// The crate's errors are several lines; the first says what it is.
fn refused(error: &impl fmt::Display) -> Error {
    let text = format!("{error:#}");
    Error::Grammar { why: text.lines().next().unwrap_or_default().to_owned() }
}

struct Grammar {
    matcher: Matcher,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl Constraint for Grammar {
    fn restrict(&mut self, logits: &mut [f32]) -> Result<()> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| refused(&e))?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if !allowed.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        self.matcher.consume_token(token).map_err(|e| refused(&e))
    }

    fn finished(&self) -> bool {
        self.matcher.is_stopped()
    }
}
