//! HyMo's data: text to token shards, and shards to the rows that a model trains on.
//!
//! ```text
//! source ──> prep ──> shards + manifest ──> corpus ──> stream ──> loader ──> steps
//! (files)   (encode,   (u16 tokens,         (splits    (one order (rows of a
//!            filter)    checksums)           mixed)     of tokens) rank)
//! ```
//!
//! - [`source`]: files, folders, patterns and standard input as one sequence of documents.
//! - [`prep`]: encodes them on all cores, in order, and writes [`shard`]s and a [`manifest`]. Killed at any moment, the same
//!   command comes to the same bytes.
//! - [`verify`]: names the place of any flipped bit.
//! - [`corpus`] and [`stream`]: the documents of one or more data sets, shuffled anew every epoch, laid end to end.
//!   [`stream::Position`] is a place in it, from which any rank of any number of ranks goes on.
//! - [`loader`]: cuts the stream into rows and steps; [`audit`] proves that the ranks' rows are the stream.
//!
//! Errors name the file and the place. Nothing here prints, reads a clock or draws a random number.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use hymo_data::corpus::{Corpus, Dataset};
//! use hymo_data::loader::{Loader, LoaderOptions};
//! use hymo_data::prep::{PrepOptions, prepare};
//! use hymo_data::source::{Format, Inputs};
//! # use hymo_tokenizer::{Tokenizer, train::{TrainOptions, Trainer}};
//! # let folder = std::env::temp_dir().join(format!("hymo-data-example-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # std::fs::write(folder.join("a.txt"), "some text, and more text")?;
//! # let mut trainer = Trainer::new(TrainOptions { vocab_size: 520, ..TrainOptions::default() })?;
//! # trainer.feed([Ok::<_, hymo_tokenizer::Error>(b"some text".to_vec())], &mut |_| ())?;
//! # let (json, _) = trainer.finish(&mut |_, _| ())?;
//!
//! let tokenizer = Tokenizer::from_json(&json)?;
//! let inputs = Inputs::find(&[folder.join("a.txt").display().to_string()], Format::Text)?;
//! let out = folder.join("data");
//! prepare(&inputs, (&tokenizer, &json), &out, &PrepOptions::default(), &mut |_| ())?;
//!
//! let corpus = Arc::new(Corpus::of(Dataset::open(&out, "train")?, Some(1))?);
//! let mut loader = Loader::new(corpus, LoaderOptions::new(8, 2, 4), None)?;
//! let step = loader.next_step()?.expect("a loader that goes round has a next step");
//! assert_eq!(step.micro[0].tokens.len(), 4 * (8 + 2 + 1));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod audit;
pub mod corpus;
mod error;
pub mod loader;
pub mod manifest;
pub mod prep;
pub mod shard;
pub mod shuffle;
pub mod source;
pub mod stream;
pub mod verify;

pub use error::{Error, Result};
pub use shard::write_whole;
