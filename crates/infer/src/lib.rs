//! Text out of a HyMo model: exact, stateful decoding.
//!
//! [`Weights`] are a model's parameters packed for decoding (f32, bf16 or int8); a [`Sequence`] is what one text carries from
//! token to token; a [`Generator`] continues a prompt.
//!
//! ```
//! use hymo_infer::{Generator, SampleOptions, WeightDtype};
//! use hymo_model::{Params, presets};
//! use hymo_tensor::Ctx;
//! use std::ops::ControlFlow;
//!
//! let config = presets::hymo_nano();
//! let params = Params::init(&Ctx::cpu(), &config, 1)?;
//! let mut generator = Generator::new(&config, &params, WeightDtype::Bf16)?;
//! let options = SampleOptions { max_tokens: 4, temperature: 0.8, top_p: 0.95, seed: 7, ..SampleOptions::default() };
//! let mut seen = Vec::new();
//! let output = generator.generate(&[1, 2, 3], &options, |token| {
//!     seen.push(token.id);
//!     ControlFlow::Continue(())
//! })?;
//! assert_eq!(output.tokens, seen);
//! # Ok::<(), hymo_infer::Error>(())
//! ```
//!
//! With a tokenizer there is text in and out:
//!
//! ```
//! # use hymo_infer::{Generator, SampleOptions, WeightDtype};
//! # use hymo_model::{Params, presets};
//! # use hymo_tensor::Ctx;
//! # use hymo_tokenizer::{Tokenizer, train::{TrainOptions, Trainer}};
//! # use std::{ops::ControlFlow, sync::Arc};
//! # let config = hymo_model::ModelConfig { vocab_size: 520, ..presets::hymo_nano() };
//! # let mut trainer = Trainer::new(TrainOptions { vocab_size: 520, ..TrainOptions::default() }).unwrap();
//! # trainer.feed([Ok::<_, hymo_tokenizer::Error>(b"low lower lowest low low".to_vec())], &mut |_| ()).unwrap();
//! # let tokenizer = Tokenizer::from_json(&trainer.finish(&mut |_, _| ()).unwrap().0).unwrap();
//! # let params = Params::init(&Ctx::cpu(), &config, 1)?;
//! let mut generator = Generator::new(&config, &params, WeightDtype::Int8)?.with_tokenizer(Arc::new(tokenizer));
//! let options = SampleOptions { max_tokens: 8, stop: vec![b"\n\n".to_vec()], ..SampleOptions::default() };
//! let mut text = Vec::new();
//! let output = generator.generate_text(b"low and", &options, |piece| {
//!     text.extend_from_slice(piece);
//!     ControlFlow::Continue(())
//! })?;
//! assert_eq!(output.text, text);
//! println!("{} ({:?})", output.text_lossy(), output.finish);
//! # Ok::<(), hymo_infer::Error>(())
//! ```
//!
//! # Exactness
//! Every operation computes a row of its output from that row's input and that sequence's state, in an order of sums that
//! depends on nothing else. Prefill in chunks of any size, plain decoding, verification of drafts and batches are therefore
//! the same numbers to the bit.
//!
//! Nothing here reads a file, a clock or the environment: the crate builds for WebAssembly as it is.

mod cache;
mod cycle;
mod draft;
mod engine;
mod error;
mod generate;
#[cfg(feature = "grammar")]
mod grammar;
mod mtp;
mod output;
mod pass;
mod request;
mod sample;
mod text;
mod weights;

pub use cache::{CacheDtype, Sequence};
pub use engine::{Clock, Engine, EngineOptions, Event, Memory, RequestId, What};
pub use error::{Error, Result};
pub use generate::Generator;
#[cfg(feature = "grammar")]
pub use grammar::Grammars;
pub use mtp::{Gates, Mtp};
pub use output::{Finish, Output, Speculation, Stats, Token};
pub use request::Request;
pub use sample::{Constraint, Logprobs, Picked, SampleOptions, Sampler};
pub use weights::{WeightDtype, Weights};
