//! Documents to tokens on all cores, in order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use hymo_tokenizer::{Encoder, Tokenizer};
use xxhash_rust::xxh3::xxh3_128;

use super::PrepOptions;
use crate::source::{Inputs, Raw, ReadOptions, Record, Records};
use crate::{Error, Result};

/// Bytes of documents that a thread encodes at once.
const BATCH_BYTES: u64 = 1 << 19;
/// Bytes of documents in flight for each thread. A longer document goes through alone.
const BYTES_IN_FLIGHT: u64 = 8 << 20;

/// What to encode.
pub struct Plan<'a> {
    pub inputs: &'a Inputs,
    pub tokenizer: &'a Tokenizer,
    pub options: &'a PrepOptions,
    /// For each split, the first document to encode.
    pub resume: Vec<u64>,
    /// Counts the bytes read from the inputs.
    pub read: &'a AtomicU64,
}

/// Documents in order, with the tokens of those that were encoded.
#[derive(Debug, Default)]
pub struct Batch {
    pub documents: Vec<Document>,
    pub tokens: Vec<u16>,
}

#[derive(Debug)]
pub struct Document {
    pub input: usize,
    pub fate: Fate,
}

/// What becomes of a document.
#[derive(Debug)]
pub enum Fate {
    Empty,
    Short,
    Long,
    /// `tokens` is a range of the batch's; `None` if finished shards hold the document.
    Kept {
        hash: u128,
        split: usize,
        bytes: u64,
        tokens: Option<Range<usize>>,
    },
}

/// Records on their way to a thread.
struct Work {
    sequence: u64,
    first: u64,
    bytes: u64,
    records: Vec<Record>,
}

/// A batch on its way back.
struct Done {
    sequence: u64,
    bytes: u64,
    batch: Batch,
    /// What was met behind the batch's documents.
    error: Option<Error>,
}

/// Hands `take` every batch, in the order of the input.
pub fn run(plan: &Plan, take: &mut dyn FnMut(Batch) -> Result<()>) -> Result<()> {
    let gate = Gate::new(BYTES_IN_FLIGHT * plan.options.threads as u64);
    let (to_threads, work) = mpsc::channel::<Work>();
    let (to_order, done) = mpsc::channel::<Done>();
    let work = Mutex::new(work);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..plan.options.threads {
            let (work, to_order) = (&work, to_order.clone());
            threads.push(scope.spawn(move || encode(plan, work, &to_order)));
        }
        let gate = &gate;
        threads.push(scope.spawn(move || read(plan, gate, to_threads, &to_order)));
        // However this ends, also by a panic of the caller's, whoever still reads finds the gate closed and stops.
        let closes = Closes(gate);
        let ordered = in_order(&done, gate, take);
        drop((closes, done));
        let panicked = threads.into_iter().map(thread::ScopedJoinHandle::join).filter(Result::is_err).count() > 0;
        match ordered {
            Err(Error::Thread(_)) if panicked => Err(Error::Thread("met a fault in this program".into())),
            other => other,
        }
    })
}

fn in_order(done: &Receiver<Done>, gate: &Gate, take: &mut dyn FnMut(Batch) -> Result<()>) -> Result<()> {
    let mut early = BTreeMap::new();
    let mut next = 0;
    for arrived in done {
        early.insert(arrived.sequence, arrived);
        while let Some(Done { bytes, batch, error, .. }) = early.remove(&next) {
            next += 1;
            // Without documents or an error, it is the reader's last word.
            let last = batch.documents.is_empty();
            take(batch)?;
            match error {
                Some(error) => return Err(error),
                None if last => return Ok(()),
                None => gate.leave(bytes),
            }
        }
    }
    Err(Error::Thread("ended before its time".into()))
}

/// The thread that reads.
fn read(plan: &Plan, gate: &Gate, to_threads: Sender<Work>, to_order: &Sender<Done>) {
    let options =
        ReadOptions { text_field: plan.options.shaping.text_field.clone(), max_bytes: plan.options.shaping.max_bytes };
    let mut records = Records::counting(plan.inputs, options, plan.read).peekable();
    let (mut sequence, mut first) = (0, 0);
    loop {
        let mut work = Work { sequence, first, bytes: 0, records: Vec::new() };
        while work.bytes < BATCH_BYTES && records.peek().is_some_and(|record| record.is_ok() || work.records.is_empty())
        {
            match records.next() {
                Some(Ok(record)) => {
                    // Small documents have a cost of their own.
                    work.bytes += 64 + weight(&record.raw);
                    work.records.push(record);
                }
                Some(Err(error)) => {
                    // Behind all that was read before it. Nobody listens where an earlier error ended the run.
                    let _ = to_order.send(Done { sequence, bytes: 0, batch: Batch::default(), error: Some(error) });
                    return;
                }
                None => break,
            }
        }
        if work.records.is_empty() {
            let _ = to_order.send(Done { sequence, bytes: 0, batch: Batch::default(), error: None });
            return;
        }
        sequence += 1;
        first += work.records.len() as u64;
        if !gate.enter(work.bytes) || to_threads.send(work).is_err() {
            return;
        }
    }
}

fn weight(raw: &Raw) -> u64 {
    match raw {
        Raw::Text(bytes) | Raw::Json(bytes) => bytes.len() as u64,
        Raw::TooLong => 0,
    }
}

/// A thread that encodes.
fn encode(plan: &Plan, work: &Mutex<Receiver<Work>>, to_order: &Sender<Done>) {
    let mut encoder = plan.tokenizer.encoder();
    let mut ids = Vec::new();
    loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Work { sequence, first, bytes, records }) = next else { return };
        let mut batch = Batch::default();
        let error = encode_batch(plan, &mut encoder, &mut ids, (first, records), &mut batch).err();
        if to_order.send(Done { sequence, bytes, batch, error }).is_err() {
            return;
        }
    }
}

fn encode_batch(
    plan: &Plan,
    encoder: &mut Encoder,
    ids: &mut Vec<u32>,
    (first, records): (u64, Vec<Record>),
    batch: &mut Batch,
) -> Result<()> {
    let shaping = &plan.options.shaping;
    let options = ReadOptions { text_field: shaping.text_field.clone(), max_bytes: shaping.max_bytes };
    for (record, ordinal) in records.into_iter().zip(first..) {
        let (input, number) = (record.input, record.number);
        let fate = match record.text(plan.inputs, &options)? {
            None => Fate::Long,
            Some(text) if text.is_empty() => Fate::Empty,
            Some(text) if (text.len() as u64) < shaping.min_bytes => Fate::Short,
            Some(text) => {
                let hash = xxh3_128(&text);
                let split = split(hash, shaping.val_fraction);
                let tokens = if ordinal < plan.resume[split] {
                    None
                } else {
                    ids.clear();
                    encoder.encode(&text, ids).map_err(|source| Error::Document {
                        input: format!("{}, document {number}", plan.inputs.name(input)),
                        source,
                    })?;
                    let start = batch.tokens.len();
                    // A vocabulary has at most 65,536 ids.
                    batch.tokens.extend(ids.iter().map(|&id| id as u16));
                    batch.tokens.push(plan.tokenizer.end_of_text() as u16);
                    Some(start..batch.tokens.len())
                };
                Fate::Kept { hash, split, bytes: text.len() as u64, tokens }
            }
        };
        batch.documents.push(Document { input, fate });
    }
    Ok(())
}

/// The split of a document, by its text alone: equal documents never stand on both sides.
fn split(hash: u128, val_fraction: f64) -> usize {
    let place = (hash as u64 >> 11) as f64 / (1_u64 << 53) as f64;
    usize::from(place < val_fraction)
}

/// Lets a number of bytes in at a time.
struct Gate {
    most: u64,
    /// Bytes inside; `None` when closed.
    inside: Mutex<Option<u64>>,
    left: Condvar,
}

impl Gate {
    fn new(most: u64) -> Self {
        Gate { most, inside: Mutex::new(Some(0)), left: Condvar::new() }
    }

    /// Waits for room. What is larger than the whole room goes in when nothing else is inside. False once it is closed.
    fn enter(&self, bytes: u64) -> bool {
        let full = |inside: &mut Option<u64>| inside.is_some_and(|n| n > 0 && n + bytes > self.most);
        let inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inside = self.left.wait_while(inside, full).unwrap_or_else(PoisonError::into_inner);
        if let Some(inside) = inside.as_mut() {
            *inside += bytes;
        }
        inside.is_some()
    }

    fn leave(&self, bytes: u64) {
        if let Some(inside) = self.inside.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *inside -= bytes;
        }
        self.left.notify_all();
    }

    fn close(&self) {
        *self.inside.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.left.notify_all();
    }
}

/// Closes a gate when it goes.
struct Closes<'a>(&'a Gate);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
