//! One sequence at a time.

use crate::cache::CacheDtype;
use crate::engine::{Clock, Engine, EngineOptions, What};
use crate::output::{Output, Token};
use crate::request::Request;
use crate::sample::SampleOptions;
use crate::weights::{WeightDtype, Weights};
use crate::{Error, Finish, Gates, Mtp, Result};
use hymo_model::{ModelConfig, Params};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Generates text from prompts, one request after the other: an [`Engine`] with one place.
#[derive(Debug)]
pub struct Generator {
    engine: Engine,
}

impl Generator {
    /// Packs a model's parameters for decoding. Sequences may be as long as the configuration's context.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub fn new(config: &ModelConfig, params: &Params, dtype: WeightDtype) -> Result<Self> {
        let ctx = Ctx::cpu();
        let weights = Weights::new(&ctx, config, params, dtype)?;
        Generator::over(&ctx, Arc::new(weights), EngineOptions::default())
    }

    /// Over weights that others may read too. Of the options, one request at a time is what `max_batch` becomes.
    ///
    /// # Errors
    /// Options out of range.
    pub fn over(ctx: &Ctx, weights: Arc<Weights>, options: EngineOptions) -> Result<Self> {
        Ok(Generator { engine: Engine::new(ctx, weights, EngineOptions { max_batch: 1, ..options })? })
    }

    /// Text beside tokens, stop strings, and an end where a document ends. Ids that no text has are never drawn. A tokenizer of
    /// another number of ids than the model's is an error of every request.
    #[must_use]
    pub fn with_tokenizer(self, tokenizer: Arc<Tokenizer>) -> Self {
        Generator { engine: self.engine.with_tokenizer(tokenizer) }
    }

    /// Under other options, by changing those that there are. Snapshots kept so far are gone.
    ///
    /// # Errors
    /// Options out of range.
    pub fn with_options(mut self, change: impl FnOnce(&mut EngineOptions)) -> Result<Self> {
        let mut options = self.engine.options().clone();
        change(&mut options);
        let most = self.weights().config().context_length;
        self.engine.under(EngineOptions { max_batch: 1, ..options }.checked(most)?);
        Ok(self)
    }

    /// How latents are kept.
    #[must_use]
    pub fn with_cache(mut self, cache: CacheDtype) -> Self {
        self.engine.under(EngineOptions { cache, ..self.engine.options().clone() });
        self
    }

    /// Tokens of a prompt in one pass; from 1. It changes no bit of the output.
    ///
    /// # Errors
    /// 0.
    pub fn with_prefill_chunk(self, tokens: usize) -> Result<Self> {
        self.with_options(|o| o.prefill_chunk = tokens)
    }

    /// Tokens that a sequence may have, prompt and output together: the configuration's context, or less.
    ///
    /// # Errors
    /// More than the configuration's context: positions beyond it were never trained (MATH 2.6 says how to extend it).
    pub fn with_context(self, tokens: usize) -> Result<Self> {
        self.with_options(|o| o.context = tokens)
    }

    /// Whether prediction modules draft, and from which probabilities on. It changes no bit of the output.
    #[must_use]
    pub fn with_mtp(mut self, mtp: Mtp, gates: Gates) -> Self {
        self.engine.under(EngineOptions { mtp, gates, ..self.engine.options().clone() });
        self
    }

    /// What passes are timed with.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.engine.under(EngineOptions { clock: Some(clock), ..self.engine.options().clone() });
        self
    }

    /// Bytes for snapshots, from which prompts begin that go on from earlier ones. It changes no bit of the output.
    #[must_use]
    pub fn with_snapshots(mut self, bytes: u64) -> Self {
        self.engine.under(EngineOptions { snapshots: bytes, ..self.engine.options().clone() });
        self
    }

    /// The weights, to share them.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        self.engine.weights()
    }

    /// Continues a prompt. `on_token` sees every token as it comes, and may end the output.
    ///
    /// # Errors
    /// An empty prompt or one beyond the context; a token that there is not; options out of range; logits that are not finite
    /// (HAZARD 18): what came before was given to `on_token`.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &SampleOptions,
        on_token: impl FnMut(&Token) -> ControlFlow<()>,
    ) -> Result<Output> {
        self.run(Request::new(prompt, options), on_token)
    }

    /// As [`Generator::generate`], with whatever else a request has.
    ///
    /// # Errors
    /// As there, and a constraint that cannot go on.
    pub fn run(&mut self, request: Request, mut on_token: impl FnMut(&Token) -> ControlFlow<()>) -> Result<Output> {
        let id = self.engine.submit(request)?;
        let (mut tokens, mut bytes, mut ended) = (0, 0, false);
        while !self.engine.idle() {
            for event in self.engine.step() {
                match event.what {
                    What::Token(_) if ended => {}
                    What::Token(token) => {
                        (tokens, bytes) = (tokens + 1, bytes + token.bytes.len());
                        ended = on_token(&token).is_break();
                    }
                    What::Finished(output) if ended => return Ok(output.cut(tokens, bytes)),
                    What::Finished(output) => return Ok(*output),
                    What::Failed(error) => return Err(error),
                }
            }
            if ended {
                let output = self.engine.cancel(id).map(|o| o.cut(tokens, bytes));
                return output.ok_or_else(|| unfinished("a request that runs"));
            }
        }
        Err(unfinished("an output"))
    }

    /// Continues a text. `on_text` sees every piece of the output as it becomes certain: whole characters, nothing of a stop
    /// string. Of an empty prompt a new document begins.
    ///
    /// # Errors
    /// No tokenizer; otherwise as [`Generator::generate`].
    pub fn generate_text(
        &mut self,
        prompt: &[u8],
        options: &SampleOptions,
        mut on_text: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<Output> {
        let codec = self.engine.codec()?.ok_or_else(|| Error::option("tokenizer", "absent", "one, for text"))?;
        let ids = codec.prompt(prompt)?;
        self.generate(&ids, options, |token| match token.bytes.is_empty() {
            true => ControlFlow::Continue(()),
            false => on_text(&token.bytes),
        })
    }
}

fn unfinished(want: &str) -> Error {
    Error::State { found: "an engine that has nothing to do".to_owned(), want: want.to_owned() }
}

impl Output {
    /// What whoever listened had seen when it asked for no more.
    fn cut(mut self, tokens: usize, bytes: usize) -> Self {
        self.tokens.truncate(tokens);
        self.text.truncate(bytes);
        self.logprobs.truncate(tokens);
        self.stats.generated = tokens;
        self.finish = Finish::Cancelled;
        self
    }
}
