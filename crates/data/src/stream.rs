//! The one global stream of tokens, and places in it.
//!
//! Documents stand end to end, those of every data set in the order of its epoch. When a document ends, the next comes from
//! the data set that is furthest behind its weight, counted in tokens. So the stream is a function of the data, the seed and
//! the weights alone. Ranks, rows and micro-batches only cut it.

use serde::{Deserialize, Serialize};

use crate::corpus::Corpus;
use crate::shuffle::Permutation;
use crate::{Error, Result};

/// A place in the stream: all that a loader needs to go on, on any rank of any number of ranks, with rows of any length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Fingerprint of the stream, in hexadecimal.
    pub stream: String,
    /// Global token index: tokens before this place.
    pub token: u64,
    /// Which data set's document is open.
    pub set: usize,
    /// Tokens of the open document before this place.
    pub offset: u64,
    /// How far each data set has come.
    pub sets: Vec<SetPosition>,
}

/// How far a data set has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPosition {
    /// Times that all its documents have been read.
    pub epoch: u64,
    /// Documents of this epoch that are finished: the ordinal of the open or next one, in the epoch's order.
    pub document: u64,
    /// Tokens of finished documents, all epochs together.
    pub tokens: u64,
}

/// A piece of a document in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Data set.
    pub set: usize,
    /// Document, as the shards number it.
    pub document: u64,
    /// Its times read before.
    pub epoch: u64,
    /// First token of the piece in its document.
    pub start: u64,
    /// Tokens of the piece.
    pub len: u64,
}

impl Position {
    /// The beginning of a corpus.
    #[must_use]
    pub fn start(corpus: &Corpus) -> Self {
        Position {
            stream: format!("{:016x}", corpus.fingerprint()),
            token: 0,
            set: 0,
            offset: 0,
            sets: vec![SetPosition::default(); corpus.sets().len()],
        }
    }

    /// The fewest times that any data set has been read to its end.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.sets.iter().map(|set| set.epoch).min().unwrap_or(0)
    }
}

/// Walks the stream without reading its tokens.
#[derive(Debug, Clone)]
pub struct Walker {
    position: Position,
    orders: Vec<Option<Permutation>>,
    /// The open document as the shards number it, and its length.
    document: u64,
    len: u64,
}

impl Walker {
    /// Stands at a place.
    ///
    /// # Errors
    /// The place is one of another stream, or none.
    pub fn new(corpus: &Corpus, position: Position) -> Result<Self> {
        let wrong = |why: String| Err(Error::Position { why });
        let want = format!("{:016x}", corpus.fingerprint());
        if position.stream != want {
            return wrong(format!(
                "it was saved with other data, weights or seed (stream {}, this is {want})",
                position.stream
            ));
        }
        if position.sets.len() != corpus.sets().len() || position.set >= position.sets.len() {
            return wrong(format!("it has {} data sets, there are {}", position.sets.len(), corpus.sets().len()));
        }
        for (at, set) in position.sets.iter().zip(corpus.sets()) {
            if at.document >= set.dataset.documents() {
                return wrong(format!("document {} of {}", at.document, set.dataset.documents()));
            }
        }
        let orders = position.sets.iter().enumerate().map(|(set, at)| corpus.order(set, at.epoch)).collect();
        let mut walker = Walker { position, orders, document: 0, len: 0 };
        walker.open(corpus)?;
        if walker.position.offset >= walker.len {
            return wrong(format!("token {} of a document of {}", walker.position.offset, walker.len));
        }
        Ok(walker)
    }

    /// Where it stands.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Goes on by at most `most` tokens, inside one document, and says what it passed over.
    ///
    /// # Errors
    /// A shard cannot be read.
    pub fn step(&mut self, corpus: &Corpus, most: u64) -> Result<Span> {
        let start = self.position.offset;
        let len = most.min(self.len - start);
        let set = self.position.set;
        let span = Span { set, document: self.document, epoch: self.position.sets[set].epoch, start, len };
        self.position.token += len;
        self.position.offset += len;
        if self.position.offset == self.len {
            self.close(corpus)?;
        }
        Ok(span)
    }

    /// The open document is finished: the next one is chosen and opened.
    fn close(&mut self, corpus: &Corpus) -> Result<()> {
        let at = &mut self.position.sets[self.position.set];
        at.tokens += self.len;
        at.document += 1;
        if at.document == corpus.sets()[self.position.set].dataset.documents() {
            at.document = 0;
            at.epoch += 1;
            self.orders[self.position.set] = corpus.order(self.position.set, at.epoch);
        }
        let behind = |set: usize| self.position.sets[set].tokens as f64 / corpus.sets()[set].weight;
        let next = (0..self.position.sets.len()).min_by(|&a, &b| behind(a).total_cmp(&behind(b)));
        self.position.set = next.unwrap_or(0);
        self.position.offset = 0;
        self.open(corpus)
    }

    fn open(&mut self, corpus: &Corpus) -> Result<()> {
        let set = self.position.set;
        let ordinal = self.position.sets[set].document;
        self.document = self.orders[set].as_ref().map_or(ordinal, |order| order.at(ordinal));
        self.len = corpus.sets()[set].dataset.len_of(self.document)?;
        Ok(())
    }
}
