//! The shards of one split.

use std::path::{Path, PathBuf};

use hymo_tokenizer::Tokenizer;

use super::journal::{Finished, Journal, Place};
use crate::manifest::{Shaping, ShardEntry, Split};
use crate::shard::{MAX_DOCUMENTS, Shard, ShardWriter};
use crate::{Error, Result};

/// Fills shard after shard.
pub struct Output {
    name: &'static str,
    folder: PathBuf,
    vocab_size: u32,
    tokenizer: [u8; 32],
    most: u64,
    open: Option<ShardWriter>,
    /// Bytes of text, and cut documents, of the open shard.
    text_bytes: u64,
    cut: u64,
    finished: Vec<Finished>,
    resume: Place,
}

impl Output {
    /// Goes on behind the shards that the journal has, which must be there and whole.
    pub fn new(
        name: &'static str,
        folder: &Path,
        tokenizer: &Tokenizer,
        shaping: &Shaping,
        journal: &Journal,
    ) -> Result<Self> {
        let finished: Vec<Finished> = journal.of(name).cloned().collect();
        for entry in finished.iter().map(|finished| &finished.shard) {
            let path = folder.join(&entry.file);
            let header = *Shard::open(&path)?.header();
            if (header.tokens, header.documents, header.file_bytes()) != (entry.tokens, entry.documents, entry.bytes) {
                let why = "not the shard that the journal has; empty the folder and start again".to_owned();
                return Err(Error::Shard { path, place: "header".into(), why });
            }
        }
        Ok(Output {
            name,
            folder: folder.to_owned(),
            vocab_size: tokenizer.vocab_size() as u32,
            tokenizer: tokenizer.sha256(),
            most: shaping.shard_tokens,
            open: None,
            text_bytes: 0,
            cut: 0,
            resume: finished.last().map_or(Place::default(), |last| last.next),
            finished,
        })
    }

    /// Where the input goes on for this split.
    pub fn resume(&self) -> Place {
        self.resume
    }

    /// Adds the document that stands at a place. One that is longer than a shard fills several; its rest opens the next as a
    /// new document.
    pub fn push(&mut self, at: Place, tokens: &[u16], bytes: u64, journal: &mut Journal) -> Result<()> {
        let mut done = if at.ordinal == self.resume.ordinal { self.resume.offset } else { 0 };
        if done == 0 && tokens.len() as u64 > self.most {
            // Counted with its first piece.
            self.close_if(|_| true, at, journal)?;
            self.cut = 1;
        }
        let mut counted = if done == 0 { bytes } else { 0 };
        while done < tokens.len() as u64 {
            let piece = &tokens[done as usize..];
            let piece = &piece[..piece.len().min(self.most as usize)];
            let most = self.most;
            let full = |w: &ShardWriter| w.tokens() + piece.len() as u64 > most || w.documents() == MAX_DOCUMENTS;
            self.close_if(full, Place { offset: done, ..at }, journal)?;
            let writer = match &mut self.open {
                Some(writer) => writer,
                none => none.insert(ShardWriter::create(
                    &self.folder.join(file_name(self.name, self.finished.len())),
                    self.vocab_size,
                    self.tokenizer,
                    self.most,
                )?),
            };
            writer.push(piece)?;
            done += piece.len() as u64;
            self.text_bytes += std::mem::take(&mut counted);
        }
        Ok(())
    }

    /// Finishes the open shard where it is so.
    fn close_if(&mut self, when: impl FnOnce(&ShardWriter) -> bool, next: Place, journal: &mut Journal) -> Result<()> {
        if !self.open.as_ref().is_some_and(when) {
            return Ok(());
        }
        let Some(writer) = self.open.take() else { return Ok(()) };
        let written = writer.finish()?;
        let shard = ShardEntry {
            file: file_name(self.name, self.finished.len()),
            bytes: written.bytes,
            tokens: written.tokens,
            documents: written.documents,
            text_bytes: std::mem::take(&mut self.text_bytes),
            root: format!("{:016x}", written.root),
        };
        let finished = Finished { split: self.name.to_owned(), shard, cut: std::mem::take(&mut self.cut), next };
        journal.finish(&finished)?;
        self.finished.push(finished);
        Ok(())
    }

    /// Finishes the last shard. Returns the split and how many of its documents were cut.
    pub fn finish(mut self, end: Place, journal: &mut Journal) -> Result<(Split, u64)> {
        self.close_if(|_| true, end, journal)?;
        let cut = self.finished.iter().map(|finished| finished.cut).sum();
        let shards: Vec<ShardEntry> = self.finished.into_iter().map(|finished| finished.shard).collect();
        let split = Split {
            name: self.name.to_owned(),
            tokens: shards.iter().map(|shard| shard.tokens).sum(),
            documents: shards.iter().map(|shard| shard.documents).sum(),
            text_bytes: shards.iter().map(|shard| shard.text_bytes).sum(),
            shards,
        };
        Ok((split, cut))
    }
}

fn file_name(split: &str, index: usize) -> String {
    format!("{split}-{index:05}.shard")
}
