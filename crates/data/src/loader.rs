//! Steps: the rows that a rank trains on, whole steps at a time.
//!
//! The stream is cut every T tokens: row i of the stream has the inputs at i T to (i + 1) T, and carries the next
//! `n_modules + 1` tokens too, so that its last positions have their targets and no token is lost to a cut. A document that
//! a cut divides goes on in the next row as a new document. Rows of a step are one after another in the stream; rank r of W
//! has the r-th W-th of them. Every rank walks the whole stream, which costs it a look at each document's length, and reads
//! the tokens of its own rows alone. So each knows the counts of the whole step before it computes anything, and nobody
//! has to be asked.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use crate::corpus::Corpus;
use crate::stream::{Position, Span, Walker};
use crate::{Error, Result};

/// How the stream is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Tokens of a row, T.
    pub len: usize,
    /// Prediction modules, which look that much further ahead.
    pub n_modules: usize,
    /// Rows of a step, all ranks together.
    pub rows: usize,
    /// Rows of a micro-batch.
    pub micro_rows: usize,
    /// This rank.
    pub rank: usize,
    /// How many ranks there are.
    pub world: usize,
    /// Whether to read every document once and then end, padding the last rows, or to go on with further epochs.
    pub once: bool,
}

impl LoaderOptions {
    /// Everything on one rank, in one micro-batch.
    #[must_use]
    pub fn new(len: usize, n_modules: usize, rows: usize) -> Self {
        LoaderOptions { len, n_modules, rows, micro_rows: rows, rank: 0, world: 1, once: false }
    }

    fn check(&self, corpus: &Corpus) -> Result<()> {
        for (option, value) in
            [("len", self.len), ("rows", self.rows), ("micro_rows", self.micro_rows), ("world", self.world)]
        {
            if value == 0 {
                return Err(Error::option(option, value, "1 or more"));
            }
        }
        if self.rank >= self.world {
            return Err(Error::option("rank", self.rank, format!("0 to {}", self.world - 1)));
        }
        if self.rows % (self.world * self.micro_rows) != 0 {
            let want = format!("a multiple of {} ranks x {} rows of a micro-batch", self.world, self.micro_rows);
            return Err(Error::option("rows", self.rows, want));
        }
        if self.once && corpus.sets().len() > 1 {
            return Err(Error::option("data sets", corpus.sets().len(), "1 to be read once"));
        }
        Ok(())
    }

    /// Tokens of a row with those it looks ahead to.
    fn width(&self) -> usize {
        self.len + self.n_modules + 1
    }

    /// The rows of this rank in a step.
    fn own_rows(&self) -> Range<usize> {
        let share = self.rows / self.world;
        self.rank * share..(self.rank + 1) * share
    }
}

/// The form that a model's batch is made from: `rows` rows of T + n_modules + 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatch {
    /// Its rows.
    pub rows: usize,
    /// Token ids, row after row.
    pub tokens: Vec<i32>,
    /// Document ids: within a row another one for each document, from 0; -1 is padding.
    pub documents: Vec<i32>,
}

/// A training step's share of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Its micro-batches.
    pub micro: Vec<MicroBatch>,
    /// Valid targets of the head and of each prediction module, over the whole step, all ranks together.
    pub valid: Vec<u64>,
    /// Positions that are not padding, over the whole step.
    pub tokens: u64,
    /// Global token indices that this rank's rows take as inputs.
    pub range: Range<u64>,
    /// Where the step begins and where the next one does.
    pub begins: Position,
    /// Where the next step begins: saved with a checkpoint, it resumes there.
    pub ends: Position,
}

/// What a step consists of, before any token is read.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The stream from the step's first token to the last that its last row looks ahead to.
    pub spans: Vec<Span>,
    pub begins: Position,
    pub ends: Position,
}

/// Cuts the stream into steps.
#[derive(Debug)]
pub struct Loader {
    corpus: Arc<Corpus>,
    options: LoaderOptions,
    walker: Walker,
    bytes: Vec<u8>,
}

impl Loader {
    /// From a position, or from the beginning.
    ///
    /// # Errors
    /// Options that cannot be, a position of another stream.
    pub fn new(corpus: Arc<Corpus>, options: LoaderOptions, position: Option<Position>) -> Result<Self> {
        options.check(&corpus)?;
        let walker = Walker::new(&corpus, position.unwrap_or_else(|| Position::start(&corpus)))?;
        Ok(Loader { corpus, options, walker, bytes: Vec::new() })
    }

    /// Where the next step begins.
    #[must_use]
    pub fn position(&self) -> &Position {
        self.walker.position()
    }

    /// The next step; `None` when everything was to be read once and has been.
    ///
    /// # Errors
    /// A shard cannot be read.
    pub fn next_step(&mut self) -> Result<Option<Step>> {
        let Some(plan) = self.plan()? else { return Ok(None) };
        let documents = number(&plan.spans);
        let (valid, tokens) = self.counts(&plan.spans, &documents);
        let own = self.options.own_rows();
        let micro = self.fill(&plan.spans, &documents)?;
        let at = |row: usize| plan.begins.token + (row * self.options.len) as u64;
        let range = at(own.start).min(plan.ends.token)..at(own.end).min(plan.ends.token);
        Ok(Some(Step { micro, valid, tokens, range, begins: plan.begins, ends: plan.ends }))
    }

    /// Walks over the next step.
    pub(crate) fn plan(&mut self) -> Result<Option<Plan>> {
        let begins = self.walker.position().clone();
        if self.options.once && begins.epoch() > 0 {
            return Ok(None);
        }
        let mut spans = Vec::new();
        self.walk(&mut spans, (self.options.rows * self.options.len) as u64, false)?;
        let ends = self.walker.position().clone();
        // The next step begins before what this one looks ahead to.
        let behind = self.walker.clone();
        self.walk(&mut spans, self.options.n_modules as u64 + 1, true)?;
        self.walker = behind;
        Ok(Some(Plan { spans, begins, ends }))
    }

    fn walk(&mut self, spans: &mut Vec<Span>, tokens: u64, goes_on: bool) -> Result<()> {
        let mut left = tokens;
        let mut goes_on = goes_on;
        while left > 0 && !(self.options.once && self.walker.position().epoch() > 0) {
            let span = self.walker.step(&self.corpus, left)?;
            left -= span.len;
            match spans.last_mut().filter(|last| goes_on && span.start > 0 && last.document == span.document) {
                // What is looked ahead to may be the rest of the last piece.
                Some(last) => last.len += span.len,
                None => spans.push(span),
            }
            goes_on = false;
        }
        Ok(())
    }

    /// Valid targets at every depth and positions, over all rows.
    fn counts(&self, spans: &[Span], documents: &[Range<u64>]) -> (Vec<u64>, u64) {
        let (len, width) = (self.options.len as u64, self.options.width() as u64);
        let (mut valid, mut tokens) = (vec![0; self.options.n_modules + 1], 0);
        debug_assert_eq!(spans.len(), documents.len());
        for piece in documents {
            // The rows whose inputs or look-ahead the piece touches.
            let first = (piece.start + len).saturating_sub(width) / len;
            for row in first..self.options.rows as u64 {
                let start = row * len;
                if start >= piece.end {
                    break;
                }
                let (a, b) = (piece.start.max(start) - start, piece.end.min(start + width).saturating_sub(start));
                if a >= b {
                    continue;
                }
                tokens += b.min(len).saturating_sub(a);
                for (ahead, count) in (1..).zip(&mut valid) {
                    *count += len.min(b.saturating_sub(ahead)).saturating_sub(a);
                }
            }
        }
        (valid, tokens)
    }

    /// Reads the tokens of this rank's rows.
    fn fill(&mut self, spans: &[Span], documents: &[Range<u64>]) -> Result<Vec<MicroBatch>> {
        let (len, width) = (self.options.len, self.options.width());
        let own = self.options.own_rows();
        let from = (own.start * len) as u64;
        let to = (own.end * len + width - len) as u64;
        let total = (to - from) as usize;
        let (mut tokens, mut pieces) = (vec![0_i32; total], vec![-1_i32; total]);
        for (index, (span, place)) in spans.iter().zip(documents).enumerate() {
            let (start, end) = (place.start.max(from), place.end.min(to));
            if start >= end {
                continue;
            }
            let part = span.start + (start - place.start)..span.start + (end - place.start);
            self.corpus.sets()[span.set].dataset.read(span.document, part, &mut self.bytes)?;
            let range = (start - from) as usize..(end - from) as usize;
            for (token, pair) in tokens[range.clone()].iter_mut().zip(self.bytes.chunks_exact(2)) {
                *token = i32::from(u16::from_le_bytes([pair[0], pair[1]]));
            }
            // A step has fewer pieces than tokens, and those fit in memory.
            pieces[range].fill(index as i32);
        }
        let rows = self.options.micro_rows;
        let micro = own.clone().step_by(rows).map(|first| {
            let mut batch = MicroBatch {
                rows,
                tokens: Vec::with_capacity(rows * width),
                documents: Vec::with_capacity(rows * width),
            };
            for row in first..first + rows {
                let at = (row - own.start) * len;
                batch.tokens.extend_from_slice(&tokens[at..at + width]);
                let first = pieces[at].max(0);
                batch.documents.extend(pieces[at..at + width].iter().map(|&p| if p < 0 { p } else { p - first }));
            }
            batch
        });
        Ok(micro.collect())
    }
}

/// Where each span stands, counted from the step's first token.
pub(crate) fn number(spans: &[Span]) -> Vec<Range<u64>> {
    let mut at = 0;
    let place = |span: &Span| {
        at += span.len;
        at - span.len..at
    };
    spans.iter().map(place).collect()
}

/// A loader on a thread of its own, which makes steps before they are asked for.
#[derive(Debug)]
pub struct Prefetch {
    steps: Option<Receiver<Result<Step>>>,
    thread: Option<thread::JoinHandle<()>>,
    position: Position,
}

impl Prefetch {
    /// Starts making steps, at most `ahead` of them before they are taken.
    ///
    /// # Errors
    /// The thread does not start.
    pub fn new(loader: Loader, ahead: usize) -> Result<Self> {
        let position = loader.position().clone();
        // One is being made while the others wait.
        let (sender, steps) = mpsc::sync_channel(ahead.saturating_sub(1));
        let thread = thread::Builder::new().name("hymo-loader".into()).spawn(move || make(loader, &sender));
        let thread = thread.map_err(|e| Error::Thread(format!("could not be started: {e}")))?;
        Ok(Prefetch { steps: Some(steps), thread: Some(thread), position })
    }

    /// The next step.
    ///
    /// # Errors
    /// What the loader met.
    pub fn next_step(&mut self) -> Result<Option<Step>> {
        let step = match self.steps.as_ref().map(Receiver::recv) {
            Some(Ok(step)) => step?,
            // The thread ends when nothing is left, or by a fault.
            _ => match self.thread.take().map(thread::JoinHandle::join) {
                Some(Err(_)) => return Err(Error::Thread("met a fault in this program".into())),
                _ => return Ok(None),
            },
        };
        self.position = step.ends.clone();
        Ok(Some(step))
    }

    /// Where the step after the last one taken begins: what has been made ahead does not count.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // The thread sees that nobody listens.
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn make(mut loader: Loader, steps: &SyncSender<Result<Step>>) {
    while let Some(step) = loader.next_step().transpose() {
        let failed = step.is_err();
        if steps.send(step).is_err() || failed {
            return;
        }
    }
}
