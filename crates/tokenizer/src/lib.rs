//! HyMo's tokenizer: byte-level BPE from any bytes to ids and back.
//!
//! One file, `tokenizer.json` of the [`tokenizers`] crate, says everything: vocabulary, merges, special tokens and the
//! pattern that cuts text into pre-tokens. The pattern is written when a tokenizer is trained and read from the file ever
//! after, so that training and use cannot differ. Python's `tokenizers` and `transformers` load the same file and give the
//! same ids.
//!
//! # Ids
//! A vocabulary of size V has the 256 bytes first (in the order of the crate's byte alphabet), then the merges in the order
//! in which they were learned, then slots that a small corpus left unused, which nothing encodes to. The last
//! [`N_SPECIAL`] ids are special tokens, whatever V is. Ids fit in 16 bits.
//!
//! # What is whose
//! The crate reads the file and merges the bytes of a pre-token. Around it stand, each for a reason:
//! - [`Splitter`] runs the file's pattern on a lazy DFA: the crate's backtracking engine takes most of the time of encoding,
//!   because of one look-ahead whose meaning a DFA can give too.
//! - [`Encoder`] remembers pre-tokens, one memory a thread, and takes bytes that are not UTF-8 as single-byte tokens.
//! - `long` encodes very long pre-tokens in linear time and little memory, with the same result.
//! - [`train`] learns the merges. The crate's trainer counts pairs in 32 bits, which overflow (tokenizers #1681), and holds
//!   every distinct pre-token of the corpus (#994).
//!
//! # Example
//! ```
//! use hymo_tokenizer::{Tokenizer, train::{TrainOptions, Trainer}};
//!
//! let mut trainer = Trainer::new(TrainOptions { vocab_size: 520, ..TrainOptions::default() })?;
//! trainer.feed([Ok::<_, hymo_tokenizer::Error>(b"low lower lowest low low".to_vec())], &mut |_| ())?;
//! let (json, _) = trainer.finish(&mut |_, _| ())?;
//!
//! let tokenizer = Tokenizer::from_json(&json)?;
//! let ids = tokenizer.encode(b"lowest \xff bytes")?;
//! assert_eq!(tokenizer.decode(&ids)?, b"lowest \xff bytes");
//! assert_eq!(tokenizer.end_of_text(), 520 - 256);
//! # Ok::<(), hymo_tokenizer::Error>(())
//! ```

mod alphabet;
mod decode;
mod encode;
mod error;
mod file;
mod long;
pub mod specials;
mod split;
pub mod train;

pub use decode::StreamDecoder;
pub use encode::Encoder;
pub use error::{Error, Result};
pub use file::{Kind, Tokenizer};
pub use specials::N_SPECIAL;
pub use split::{SplitCache, Splitter};

/// The smallest vocabulary: the bytes and the special tokens.
pub const MIN_VOCAB: usize = 256 + N_SPECIAL;
/// The largest vocabulary: ids are stored in 16 bits.
pub const MAX_VOCAB: usize = 1 << 16;
