//! Writing a shard: under a temporary name, flushed to the disk, then renamed, so that a shard is whole or not there.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{BLOCK_BYTES, HEADER_BYTES, Header};
use crate::{Error, Result};

/// A shard being written.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    vocab_size: u32,
    tokenizer: [u8; 32],
    tokens: u64,
    ends: Vec<u32>,
    block: Vec<u8>,
    sums: Vec<u8>,
    /// What the whole shard may need, for the message when the disk is full.
    most_bytes: u64,
    renamed: bool,
}

/// A finished shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Its tokens.
    pub tokens: u64,
    /// Its documents.
    pub documents: u64,
    /// Its size.
    pub bytes: u64,
    /// Its root checksum.
    pub root: u64,
}

impl ShardWriter {
    /// Begins the shard `path`, as `path` with `.tmp` behind its name. `most_tokens` is only for messages.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, vocab_size: u32, tokenizer: [u8; 32], most_tokens: u64) -> Result<Self> {
        let temporary = temporary(path);
        let file = File::create(&temporary).map_err(Error::io("create", &temporary))?;
        let mut writer = ShardWriter {
            path: path.to_owned(),
            temporary,
            file,
            vocab_size,
            tokenizer,
            tokens: 0,
            ends: Vec::new(),
            block: Vec::with_capacity(BLOCK_BYTES as usize),
            sums: Vec::new(),
            most_bytes: HEADER_BYTES + 3 * most_tokens,
            renamed: false,
        };
        // The counts are known at the end; until then the header is no header.
        writer.write(&[0; HEADER_BYTES as usize])?;
        Ok(writer)
    }

    /// Tokens so far.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Documents so far.
    #[must_use]
    pub fn documents(&self) -> u64 {
        self.ends.len() as u64
    }

    /// Adds one document.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn push(&mut self, tokens: &[u16]) -> Result<()> {
        let mut bytes = [0; 4096];
        for part in tokens.chunks(bytes.len() / 2) {
            for (place, token) in bytes.chunks_exact_mut(2).zip(part) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            self.body(&bytes[..2 * part.len()])?;
        }
        self.tokens += tokens.len() as u64;
        // The caller keeps shards below MAX_TOKENS.
        self.ends.push(u32::try_from(self.tokens).expect("invariant: at most MAX_TOKENS in a shard"));
        Ok(())
    }

    /// Finishes the shard: after this it is on the disk, whole.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(mut self) -> Result<Written> {
        let padding = (2 * self.tokens).next_multiple_of(4) - 2 * self.tokens;
        self.body(&[0; 4][..padding as usize])?;
        let ends = std::mem::take(&mut self.ends);
        for end in &ends {
            self.body(&end.to_le_bytes())?;
        }
        self.block()?;
        let documents = ends.len() as u64;
        let header = Header { tokens: self.tokens, documents, vocab_size: self.vocab_size, tokenizer: self.tokenizer };
        let header_bytes = header.to_bytes();
        let mut root = Xxh3::new();
        root.update(&header_bytes);
        root.update(&self.sums);
        let root = root.digest();
        let sums = std::mem::take(&mut self.sums);
        self.write(&sums)?;
        self.write(&root.to_le_bytes())?;
        self.file.seek(SeekFrom::Start(0)).map_err(|e| self.failed(e))?;
        self.write(&header_bytes)?;
        self.file.sync_all().map_err(|e| self.failed(e))?;
        fs::rename(&self.temporary, &self.path).map_err(|e| self.failed(e))?;
        self.renamed = true;
        sync_folder(&self.path)?;
        Ok(Written { tokens: self.tokens, documents, bytes: header.file_bytes(), root })
    }

    fn body(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let room = BLOCK_BYTES as usize - self.block.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.block.extend_from_slice(now);
            if self.block.len() == BLOCK_BYTES as usize {
                self.block()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes what has gathered as a block.
    fn block(&mut self) -> Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        self.sums.extend_from_slice(&xxh3_64(&self.block).to_le_bytes());
        let block = std::mem::take(&mut self.block);
        self.write(&block)?;
        self.block = block;
        self.block.clear();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| self.failed(e))
    }

    fn failed(&self, error: io::Error) -> Error {
        failed(&self.temporary, self.most_bytes, true, error)
    }
}

impl Drop for ShardWriter {
    /// What was not finished leaves no trace: a full disk has need of the room.
    fn drop(&mut self) {
        if !self.renamed {
            // What cannot be removed is overwritten by the next run.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// `goes_on`: the command that writes finds what it has finished when it runs again.
pub(crate) fn failed(path: &Path, needed: u64, goes_on: bool, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::Full { path: path.to_owned(), needed, goes_on }
        }
        _ => Error::Io { action: "write", path: path.to_owned(), source: error },
    }
}

/// The name under which a file is written until it is whole.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

/// A rename is on the disk when its folder is. Where folders cannot be opened as files, the system sees to it.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match File::open(folder) {
        Ok(open) if cfg!(unix) => open.sync_all().map_err(Error::io("flush", folder)),
        _ => Ok(()),
    }
}

/// Writes a small file so that it is whole or not there: under a temporary name, flushed, then renamed.
///
/// # Errors
/// The file cannot be written, or the disk is full. What stood there before stays.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    // Renaming over a device or a pipe would put a file in its place.
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let what = io::Error::new(io::ErrorKind::InvalidInput, "there is something else than a regular file");
        return Err(Error::io("write", path)(what));
    }
    let temporary = temporary(path);
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&temporary, path)).map_err(|e| {
        // What is half written only takes space.
        let _ = fs::remove_file(&temporary);
        failed(path, bytes.len() as u64, false, e)
    })?;
    sync_folder(path)
}
