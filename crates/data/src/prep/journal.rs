//! What a run has begun and which shards it has finished, a line of JSON each, so that another can go on.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::manifest::{Manifest, Shaping, ShardEntry, TokenizerId};
use crate::shard::{failed, sync_folder};
use crate::source::{Compression, Format, Inputs};
use crate::{Error, Result};

/// The journal's file name. It is removed when the manifest stands.
pub const JOURNAL: &str = "prep.journal";

/// What was begun: another command's output is not gone on with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begun {
    tokenizer: TokenizerId,
    options: Shaping,
    sources: Vec<BegunSource>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BegunSource {
    path: String,
    format: Format,
    compression: Compression,
    bytes: u64,
    /// Nanoseconds since 1970 of the last change; 0 where the system does not say.
    modified: u128,
}

/// A finished shard and where the input goes on behind it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finished {
    pub split: String,
    pub shard: ShardEntry,
    pub cut: u64,
    pub next: Place,
}

/// A place in the documents of the input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Number of the document, from 0, over all inputs.
    pub ordinal: u64,
    /// Tokens of it that are in shards.
    pub offset: u64,
    /// A hash of all documents before it: the input must be the same when it is read again.
    pub before: u64,
}

impl Begun {
    pub fn new(tokenizer: TokenizerId, options: Shaping, inputs: &Inputs) -> Result<Self> {
        let source = |input: &crate::source::Input| -> Result<BegunSource> {
            let modified = match &input.path {
                None => 0,
                Some(path) => {
                    let time = fs::metadata(path).map_err(Error::io("read", path))?.modified();
                    time.ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |t| t.as_nanos())
                }
            };
            let (path, bytes) = (input.name.clone(), input.bytes);
            Ok(BegunSource { path, format: input.format, compression: input.compression, bytes, modified })
        };
        let sources = inputs.files.iter().map(source).collect::<Result<_>>()?;
        Ok(Begun { tokenizer, options, sources })
    }

    /// A finished folder is that of this command.
    pub fn same_as_done(&self, manifest: &Manifest, out: &Path) -> Result<()> {
        let sources = self.sources.iter().map(|s| (&s.path, s.bytes));
        let same = sources.eq(manifest.sources.iter().map(|s| (&s.path, s.bytes)));
        self.compare(&manifest.tokenizer, &manifest.options, same, out)
    }

    fn compare(&self, tokenizer: &TokenizerId, options: &Shaping, sources: bool, out: &Path) -> Result<()> {
        let what = if self.tokenizer != *tokenizer {
            "another tokenizer".to_owned()
        } else if self.options != *options {
            format!("other options: {options:?}")
        } else if !sources {
            "other inputs".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::OtherRun { path: out.to_owned(), what })
    }

    /// What was begun before can be gone on with.
    fn same_as(&self, before: &Begun, out: &Path) -> Result<()> {
        let paths = |begun: &Begun| begun.sources.iter().map(|s| s.path.clone()).collect::<Vec<_>>();
        self.compare(&before.tokenizer, &before.options, paths(self) == paths(before), out)?;
        match self.sources.iter().zip(&before.sources).find(|(now, then)| now != then) {
            Some((now, _)) => Err(Error::Changed { input: now.path.clone(), path: out.to_owned() }),
            None => Ok(()),
        }
    }
}

/// The journal of a folder.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    finished: Vec<Finished>,
}

impl Journal {
    /// Goes on with the journal of a folder or begins it.
    pub fn open(out: &Path, begun: &Begun) -> Result<Self> {
        let path = out.join(JOURNAL);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(Error::io("open", &path))?;
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        // A kill may have cut the last line; what it said did not happen then.
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let wrong = |line: usize, e: serde_json::Error| Error::Manifest {
            path: path.clone(),
            why: format!("line {line}: {e}; empty the folder and start again"),
        };
        let mut journal = Journal { path: path.clone(), file, finished: Vec::new() };
        for (index, line) in text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate() {
            if index == 0 {
                let before: Begun = serde_json::from_slice(line).map_err(|e| wrong(1, e))?;
                begun.same_as(&before, out)?;
            } else {
                journal.finished.push(serde_json::from_slice(line).map_err(|e| wrong(index + 1, e))?);
            }
        }
        let io = Error::io("write", &path);
        journal.file.set_len(whole as u64).and_then(|()| journal.file.seek(SeekFrom::End(0))).map_err(io)?;
        if whole == 0 {
            journal.line(begun)?;
            sync_folder(&path)?;
        }
        Ok(journal)
    }

    /// Shards that were finished before this run.
    pub fn shards(&self) -> usize {
        self.finished.len()
    }

    /// The finished shards of a split, in order.
    pub fn of(&self, split: &str) -> impl Iterator<Item = &Finished> {
        self.finished.iter().filter(move |finished| finished.split == split)
    }

    /// Places that the input must come by again.
    pub fn places(&self) -> impl Iterator<Item = Place> {
        self.finished.iter().map(|finished| finished.next)
    }

    /// Notes a shard that is on the disk.
    pub fn finish(&mut self, finished: &Finished) -> Result<()> {
        self.line(finished)
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value).expect("invariant: journal lines have string keys only");
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        written.map_err(|e| failed(&self.path, line.len() as u64, true, e))
    }
}

/// The manifest stands: the journal of the folder has done its work.
pub fn remove(out: &Path) -> Result<()> {
    let path = out.join(JOURNAL);
    match fs::remove_file(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done.map_err(Error::io("remove", &path)).and_then(|()| sync_folder(&path)),
    }
}
