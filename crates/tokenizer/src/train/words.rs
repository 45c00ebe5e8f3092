//! The table of distinct pre-tokens and how often each was seen.

use hashbrown::HashMap;

use crate::{SplitCache, Splitter};

/// Pre-tokens of more bytes are counted as long and not learned from.
pub const MAX_WORD: usize = 256;

/// Pre-tokens with their counts.
#[derive(Debug, Default)]
pub struct Words {
    counts: HashMap<Box<[u8]>, u64>,
    /// Pre-tokens counted, repetitions and dropped ones included.
    pub total: u64,
    /// Occurrences of those dropped to bound memory.
    pub dropped: u64,
    /// Occurrences of those longer than [`MAX_WORD`].
    pub long: u64,
}

impl Words {
    /// Counts the pre-tokens of documents. Bytes that are not UTF-8 are tokens of their own in use and teach nothing.
    pub fn of(splitter: &Splitter, cache: &mut SplitCache, documents: &[Vec<u8>]) -> Words {
        let mut words = Words::default();
        for text in documents.iter().flat_map(|bytes| bytes.utf8_chunks()).map(|chunk| chunk.valid()) {
            let done: Result<(), std::convert::Infallible> = splitter.each(cache, text, |piece| {
                words.see(piece.as_bytes());
                Ok(())
            });
            done.expect("invariant: counting does not fail");
        }
        words
    }

    fn see(&mut self, piece: &[u8]) {
        if piece.len() > MAX_WORD {
            self.long += 1;
            return;
        }
        self.total += 1;
        match self.counts.get_mut(piece) {
            Some(count) => *count += 1,
            None => drop(self.counts.insert(piece.into(), 1)),
        }
    }

    /// Adds another table and, when there are now more than `max` pre-tokens, drops the rarest.
    pub fn add(&mut self, other: Words, max: usize) {
        if self.counts.is_empty() {
            self.counts = other.counts;
        } else {
            for (word, count) in other.counts {
                *self.counts.entry(word).or_insert(0) += count;
            }
        }
        self.total += other.total;
        self.dropped += other.dropped;
        self.long += other.long;
        let mut least = 1;
        while self.counts.len() > max {
            // Three quarters, so that not every later chunk has to drop again.
            self.drop_below(least, max / 4 * 3);
            least += 1;
        }
    }

    /// Drops what was seen `count` times or less, and goes on with higher counts until at most `want` are left.
    fn drop_below(&mut self, count: u64, want: usize) {
        let mut count = count;
        while self.counts.len() > want {
            let dropped = &mut self.dropped;
            self.counts.retain(|_, &mut seen| {
                let stays = seen > count;
                *dropped += if stays { 0 } else { seen };
                stays
            });
            count += 1;
        }
    }

    /// The pre-tokens of two bytes and more, in order of their bytes.
    pub fn sorted(self) -> Vec<(Box<[u8]>, u64)> {
        let mut words: Vec<_> = self.counts.into_iter().filter(|(word, _)| word.len() > 1).collect();
        words.sort_unstable();
        words
    }

    /// How many distinct pre-tokens there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.counts.len()
    }
}
