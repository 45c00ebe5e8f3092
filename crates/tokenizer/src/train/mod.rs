//! Learning a vocabulary: count pre-tokens, then merge the most frequent pair of tokens, over and over.
//!
//! **Deterministic.** The text is counted in chunks whose borders depend on the documents alone, and chunks are added up in
//! order. Counts are 64 bits. Of pairs with equal counts the smallest pair of ids is merged first, as in the `tokenizers`
//! crate. Neither the number of threads nor the order of a hash table is seen in the result.
//!
//! **Bounded memory.** The table of distinct pre-tokens holds at most [`TrainOptions::max_words`]. When a chunk makes it
//! larger, pre-tokens seen once are dropped, then those seen twice, and so on until it is at most three quarters full (lossy
//! counting: what is frequent stays, and [`Report`] says how much was dropped). Pre-tokens of more than [`MAX_WORD`] bytes
//! (base64, runs of spaces) are not learned from.
//!
//! **Every token is what its bytes encode to.** A pair whose bytes are a token already is never merged, so that no two
//! tokens have the same bytes. Tokens have at most [`TrainOptions::max_token_bytes`] bytes.

mod merge;
mod words;

use crate::specials::N_SPECIAL;
use crate::{Error, MAX_VOCAB, MIN_VOCAB, Result, SplitCache, Splitter, file};

pub use words::MAX_WORD;
use words::Words;

/// The splitting pattern of new tokenizers: that of o200k, published with tiktoken. Words with one leading mark or space,
/// upper case before lower case, English contractions with their word, up to three digits, marks with what ends their line,
/// white space up to the last character. This is its only place in the code; whoever splits reads it from the file.
pub const PATTERN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Bytes of text that are counted as one piece of work. Part of the result where the table overflows, so not an option.
const CHUNK_BYTES: usize = 4 << 20;

/// What to learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainOptions {
    /// Size of the vocabulary, special tokens included.
    pub vocab_size: usize,
    /// A pair seen less often is not merged.
    pub min_count: u64,
    /// The longest token, in bytes.
    pub max_token_bytes: usize,
    /// The most distinct pre-tokens to remember: about 250 bytes of memory each.
    pub max_words: usize,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions { vocab_size: 64_256, min_count: 2, max_token_bytes: 32, max_words: 6_000_000 }
    }
}

/// What training saw and made.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Documents read.
    pub documents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Pre-tokens counted, repetitions included.
    pub words: u64,
    /// Distinct pre-tokens at the end.
    pub distinct_words: usize,
    /// Occurrences of rare pre-tokens that were dropped to bound memory.
    pub dropped_words: u64,
    /// Occurrences of pre-tokens too long to learn from.
    pub long_words: u64,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Merges learned.
    pub merges: usize,
    /// Slots of the vocabulary that the text was too small to fill.
    pub unused: usize,
}

/// Learns a vocabulary from documents handed in one after another.
#[derive(Debug)]
pub struct Trainer {
    options: TrainOptions,
    splitter: Splitter,
    words: Words,
    documents: u64,
    bytes: u64,
}

impl Trainer {
    /// A trainer that has seen nothing.
    ///
    /// # Errors
    /// Options that cannot be.
    pub fn new(options: TrainOptions) -> Result<Self> {
        if !(MIN_VOCAB..=MAX_VOCAB).contains(&options.vocab_size) {
            return Err(Error::VocabSize { size: options.vocab_size });
        }
        if options.max_token_bytes < 2 || options.max_token_bytes > MAX_WORD {
            let got = options.max_token_bytes;
            return Err(Error::Option { option: "max_token_bytes", got, want: "2 to 256" });
        }
        if options.max_words < 1000 {
            return Err(Error::Option { option: "max_words", got: options.max_words, want: "1000 or more" });
        }
        let splitter = Splitter::new(PATTERN)?;
        Ok(Trainer { options, splitter, words: Words::default(), documents: 0, bytes: 0 })
    }

    /// Counts the pre-tokens of documents. `seen` is told the bytes of every piece of work when it is done.
    ///
    /// # Errors
    /// The first error among the documents.
    pub fn feed<E>(
        &mut self,
        documents: impl IntoIterator<Item = Result<Vec<u8>, E>>,
        seen: &mut dyn FnMut(u64),
    ) -> Result<(), E> {
        let mut documents = documents.into_iter().peekable();
        let at_once = threads();
        while documents.peek().is_some() {
            let mut chunks = Vec::with_capacity(at_once);
            while chunks.len() < at_once && documents.peek().is_some() {
                chunks.push(chunk(&mut documents)?);
            }
            for (chunk, counted) in chunks.iter().zip(self.count(&chunks)) {
                let bytes = chunk.iter().map(|document| document.len() as u64).sum();
                self.documents += chunk.len() as u64;
                self.bytes += bytes;
                self.words.add(counted, self.options.max_words);
                seen(bytes);
            }
        }
        Ok(())
    }

    /// The counts of each chunk.
    fn count(&self, chunks: &[Vec<Vec<u8>>]) -> Vec<Words> {
        let one = |chunk: &Vec<Vec<u8>>| {
            let mut cache: SplitCache = self.splitter.cache();
            Words::of(&self.splitter, &mut cache, chunk)
        };
        #[cfg(feature = "rayon")]
        {
            use rayon::prelude::*;
            chunks.par_iter().map(one).collect()
        }
        #[cfg(not(feature = "rayon"))]
        chunks.iter().map(one).collect()
    }

    /// Learns the merges and writes tokenizer.json. `progress` is told how many merges are done of how many.
    ///
    /// # Errors
    /// There was no text.
    pub fn finish(self, progress: &mut dyn FnMut(usize, usize)) -> Result<(Vec<u8>, Report)> {
        if self.words.total == 0 {
            return Err(Error::NoText);
        }
        let (words, dropped_words, long_words) = (self.words.total, self.words.dropped, self.words.long);
        let wanted = self.options.vocab_size - N_SPECIAL - 256;
        let counted = self.words.sorted();
        let distinct_words = counted.len();
        let limits = merge::Limits {
            merges: wanted,
            min_count: self.options.min_count.max(1),
            token_bytes: self.options.max_token_bytes,
        };
        let merges = merge::learn(counted, limits, progress);
        let vocab_size = self.options.vocab_size;
        let json = file::write(PATTERN, &merges, vocab_size);
        let report = Report {
            documents: self.documents,
            bytes: self.bytes,
            words,
            distinct_words,
            dropped_words,
            long_words,
            vocab_size,
            merges: merges.len(),
            unused: wanted - merges.len(),
        };
        Ok((json, report))
    }
}

fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    return 1;
}

/// Documents until they are [`CHUNK_BYTES`] or the input ends.
fn chunk<E>(documents: &mut impl Iterator<Item = Result<Vec<u8>, E>>) -> Result<Vec<Vec<u8>>, E> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while bytes < CHUNK_BYTES {
        let Some(document) = documents.next().transpose()? else { break };
        bytes += document.len();
        chunk.push(document);
    }
    Ok(chunk)
}

#[cfg(test)]
mod tests;
