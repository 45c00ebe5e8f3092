//! Text to shards.
//!
//! One thread reads documents in order; all cores encode batches of them; one thread takes the batches in order again,
//! drops repeated documents, and writes. So the result does not depend on the number of threads, and memory holds a fixed
//! number of bytes in flight beside the largest document.
//!
//! **Stopped at any moment, the same command goes on.** A shard is written under another name, flushed, renamed, and then
//! noted in a journal with the place in the input behind it. The next run reads the input again from the start (reading is
//! some ten times faster than encoding), passes over what finished shards hold, and goes on where they end. Since shards
//! are a function of the input and the options alone, they come out the same byte for byte.

mod encode;
mod journal;
mod output;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use hymo_tokenizer::Tokenizer;
use xxhash_rust::xxh3::Xxh3;

use crate::manifest::{Dropped, MANIFEST, Manifest, Shaping, Source, TokenizerId, hex};
use crate::shard::{MAX_TOKENS, write_whole};
use crate::source::{Inputs, MAX_DOCUMENT};
use crate::{Error, Result};
use encode::{Batch, Fate};
use journal::{Begun, Journal, Place};
use output::Output;

/// The copy of the tokenizer's file beside the shards.
pub const TOKENIZER: &str = "tokenizer.json";
const SPLITS: [&str; 2] = ["train", "val"];

/// How to prepare.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepOptions {
    /// What shapes the shards.
    pub shaping: Shaping,
    /// Threads that encode.
    pub threads: usize,
}

impl Default for PrepOptions {
    fn default() -> Self {
        let shaping = Shaping {
            text_field: "text".into(),
            val_fraction: 0.,
            dedup: false,
            min_bytes: 1,
            max_bytes: MAX_DOCUMENT,
            shard_tokens: 1 << 27,
        };
        PrepOptions { shaping, threads: std::thread::available_parallelism().map_or(1, usize::from) }
    }
}

impl PrepOptions {
    fn check(&self) -> Result<()> {
        let s = &self.shaping;
        if !(0. ..1.).contains(&s.val_fraction) {
            return Err(Error::option("val-fraction", s.val_fraction, "0 to less than 1"));
        }
        if s.max_bytes > MAX_DOCUMENT || s.min_bytes > s.max_bytes {
            let want = format!("min-bytes {} to {MAX_DOCUMENT}", s.min_bytes);
            return Err(Error::option("max-bytes", s.max_bytes, want));
        }
        if s.shard_tokens < 2 || s.shard_tokens > MAX_TOKENS {
            return Err(Error::option("shard-tokens", s.shard_tokens, format!("2 to {MAX_TOKENS}")));
        }
        if self.threads == 0 {
            return Err(Error::option("threads", 0, "1 or more"));
        }
        Ok(())
    }
}

/// How far a run has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the input files that were read.
    pub read_bytes: u64,
    /// Documents done.
    pub documents: u64,
    /// Bytes of text encoded in this run.
    pub text_bytes: u64,
    /// Tokens made in this run.
    pub tokens: u64,
    /// Documents that finished shards of an earlier run already hold.
    pub passed_over: u64,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What the folder holds now.
    pub manifest: Manifest,
    /// Shards that an earlier run had finished.
    pub resumed_shards: usize,
    /// There was nothing left to do.
    pub already_done: bool,
}

/// Reads inputs, encodes their documents and writes shards and a manifest into the folder `out`.
///
/// # Errors
/// Inputs that cannot be read, a folder with the output of another command, a full disk. Finished shards stay, and the same
/// command goes on behind them.
pub fn prepare(
    inputs: &Inputs,
    tokenizer: (&Tokenizer, &[u8]),
    out: &Path,
    options: &PrepOptions,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome> {
    options.check()?;
    std::fs::create_dir_all(out).map_err(Error::io("create", out))?;
    let (tokenizer, json) = tokenizer;
    let id = TokenizerId { sha256: hex(&tokenizer.sha256()), vocab_size: tokenizer.vocab_size() as u32 };
    let begun = Begun::new(id.clone(), options.shaping.clone(), inputs)?;
    if out.join(MANIFEST).exists() {
        let manifest = Manifest::read(out)?;
        begun.same_as_done(&manifest, out)?;
        // A kill may have come between the manifest and the end of the journal.
        journal::remove(out)?;
        let resumed_shards = manifest.splits.iter().map(|split| split.shards.len()).sum();
        return Ok(Outcome { manifest, resumed_shards, already_done: true });
    }
    let journal = Journal::open(out, &begun)?;
    write_whole(&out.join(TOKENIZER), json)?;
    let resumed_shards = journal.shards();
    let mut collector = Collector::new(inputs, tokenizer, out, &options.shaping, journal)?;
    let read = AtomicU64::new(0);
    let plan = encode::Plan { inputs, tokenizer, options, resume: collector.resume(), read: &read };
    encode::run(&plan, &mut |batch| {
        collector.take(batch)?;
        progress(&Progress { read_bytes: read.load(Ordering::Relaxed), ..collector.progress });
        Ok(())
    })?;
    let manifest = collector.finish(Manifest::new(id, options.shaping.clone()), out)?;
    Ok(Outcome { manifest, resumed_shards, already_done: false })
}

/// Takes documents in the order of the input.
struct Collector {
    outputs: Vec<Output>,
    journal: Journal,
    sources: Vec<Source>,
    dropped: Dropped,
    /// Hashes of the documents so far: 16 bytes each, and only where repeated ones are to be dropped.
    seen: Option<hashbrown::HashSet<u128>>,
    ordinal: u64,
    /// Of the documents so far.
    hash: Xxh3,
    /// What an earlier run has met.
    known: BTreeMap<u64, u64>,
    out: PathBuf,
    progress: Progress,
}

impl Collector {
    fn new(inputs: &Inputs, tokenizer: &Tokenizer, out: &Path, shaping: &Shaping, journal: Journal) -> Result<Self> {
        let splits = if shaping.val_fraction > 0. { 2 } else { 1 };
        let output = |name: &&'static str| Output::new(name, out, tokenizer, shaping, &journal);
        let outputs = SPLITS[..splits].iter().map(output).collect::<Result<_>>()?;
        let source = |input: &crate::source::Input| Source {
            path: input.name.clone(),
            format: input.format,
            compression: input.compression,
            bytes: input.bytes,
            documents: 0,
            kept: 0,
            text_bytes: 0,
        };
        Ok(Collector {
            outputs,
            sources: inputs.files.iter().map(source).collect(),
            dropped: Dropped::default(),
            seen: shaping.dedup.then(hashbrown::HashSet::new),
            ordinal: 0,
            hash: Xxh3::new(),
            known: journal.places().map(|place| (place.ordinal, place.before)).collect(),
            out: out.to_owned(),
            journal,
            progress: Progress::default(),
        })
    }

    /// The first document of each split that is not wholly in finished shards.
    fn resume(&self) -> Vec<u64> {
        self.outputs.iter().map(|output| output.resume().ordinal).collect()
    }

    fn take(&mut self, batch: Batch) -> Result<()> {
        for document in &batch.documents {
            let at = self.place(document.input)?;
            self.ordinal += 1;
            self.progress.documents += 1;
            self.sources[document.input].documents += 1;
            match document.fate {
                Fate::Empty => self.dropped.empty += 1,
                Fate::Short => self.dropped.short += 1,
                Fate::Long => self.dropped.long += 1,
                Fate::Kept { hash, split, bytes, ref tokens } => {
                    self.hash.update(&hash.to_le_bytes());
                    if self.seen.as_mut().is_some_and(|seen| !seen.insert(hash)) {
                        self.dropped.duplicate += 1;
                        continue;
                    }
                    self.sources[document.input].kept += 1;
                    self.sources[document.input].text_bytes += bytes;
                    let Some(tokens) = tokens.clone() else {
                        self.progress.passed_over += 1;
                        continue;
                    };
                    let tokens = &batch.tokens[tokens];
                    self.progress.text_bytes += bytes;
                    self.progress.tokens += tokens.len() as u64;
                    self.outputs[split].push(at, tokens, bytes, &mut self.journal)?;
                }
            }
        }
        Ok(())
    }

    /// Where the next document stands, which must be where an earlier run has met it.
    fn place(&mut self, input: usize) -> Result<Place> {
        let wanted = self.known.remove(&self.ordinal);
        let before = self.hash.digest();
        if wanted.is_some_and(|wanted| wanted != before) {
            let input = self.sources.get(input).map_or_else(String::new, |source| source.path.clone());
            return Err(Error::Changed { input, path: self.out.clone() });
        }
        Ok(Place { ordinal: self.ordinal, offset: 0, before })
    }

    fn finish(mut self, mut manifest: Manifest, out: &Path) -> Result<Manifest> {
        let end = self.place(self.sources.len() - 1)?;
        if !self.known.is_empty() {
            let input = self.sources.last().map_or_else(String::new, |source| source.path.clone());
            return Err(Error::Changed { input, path: self.out });
        }
        for output in self.outputs {
            let (split, cut) = output.finish(end, &mut self.journal)?;
            manifest.splits.push(split);
            manifest.cut += cut;
        }
        manifest.sources = self.sources;
        manifest.dropped = self.dropped;
        if manifest.splits.iter().all(|split| split.documents == 0) {
            return Err(Error::NoInput { input: "the inputs".into(), why: "no document is left to keep" });
        }
        write_whole(&out.join(MANIFEST), &manifest.to_json())?;
        drop(self.journal);
        journal::remove(out)?;
        Ok(manifest)
    }
}
