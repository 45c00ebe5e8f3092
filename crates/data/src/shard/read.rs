//! Reading a shard: by position, without mapping it, so that a file cut short while it is read is an error and no crash.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{BLOCK_BYTES, HEADER_BYTES, Header, damaged};
use crate::{Error, Result};

/// A shard opened for reading. Shared between threads.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    header: Header,
    /// The table of ends, where it is held in memory.
    ends: Option<Vec<u32>>,
}

/// A place of a shard that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Damage {
    /// The shard.
    pub path: PathBuf,
    /// Which part of it.
    pub part: &'static str,
    /// Bytes of the file among which the damage is.
    pub bytes: Range<u64>,
    /// Documents of the shard that may be touched.
    pub documents: Option<Range<u64>>,
}

impl Shard {
    /// Opens a shard and checks its header and its size.
    ///
    /// # Errors
    /// It is no shard, is cut short, or its header is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let size = file.metadata().map_err(Error::io("read", path))?.len();
        if size < HEADER_BYTES {
            return Err(damaged(path, format!("byte {size}"), "the file is cut short inside its header".into()));
        }
        let mut bytes = [0; HEADER_BYTES as usize];
        read_at(&file, &mut bytes, 0).map_err(Error::io("read", path))?;
        let header = Header::from_bytes(&bytes, path)?;
        let want = header.file_bytes();
        if size != want {
            let how = if size < want { "is cut short" } else { "has bytes behind its end" };
            let why = format!("the file {how}: it has {size} bytes, its header says {want}");
            return Err(damaged(path, format!("byte {}", size.min(want)), why));
        }
        Ok(Shard { path: path.to_owned(), file, header, ends: None })
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that [`Shard::load_ends`] takes.
    #[must_use]
    pub fn ends_bytes(&self) -> u64 {
        4 * self.header.documents
    }

    /// Reads the table of ends into memory. Without it every document costs one more read.
    ///
    /// # Errors
    /// The file cannot be read, or the table is no table.
    pub fn load_ends(&mut self) -> Result<()> {
        let ends = self.read_ends(0..self.header.documents)?;
        if let Some(at) = (0..ends.len()).find(|&i| ends[i] <= if i == 0 { 0 } else { ends[i - 1] }) {
            return Err(self.wrong_end(at as u64));
        }
        if ends.last().map_or(0, |&end| u64::from(end)) != self.header.tokens {
            return Err(self.wrong_end(self.header.documents.saturating_sub(1)));
        }
        self.ends = Some(ends);
        Ok(())
    }

    /// Where document `index` stands, in tokens. It is never empty.
    ///
    /// # Errors
    /// The file cannot be read or is damaged there.
    pub fn document(&self, index: u64) -> Result<Range<u64>> {
        debug_assert!(index < self.header.documents);
        let (start, end) = match &self.ends {
            Some(ends) => (if index == 0 { 0 } else { ends[index as usize - 1] }, ends[index as usize]),
            None => match *self.read_ends(index.saturating_sub(1)..index + 1)? {
                [end] => (0, end),
                [start, end] => (start, end),
                _ => return Err(self.wrong_end(index)),
            },
        };
        if start >= end || u64::from(end) > self.header.tokens {
            return Err(self.wrong_end(index));
        }
        Ok(start.into()..end.into())
    }

    fn wrong_end(&self, index: u64) -> Error {
        let place = format!("document offsets, number {index} (byte {})", self.header.ends_at() + 4 * index);
        damaged(&self.path, place, "they do not rise: the shard is damaged".into())
    }

    fn read_ends(&self, range: Range<u64>) -> Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * (range.end - range.start) as usize];
        self.read(&mut bytes, self.header.ends_at() + 4 * range.start)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Reads tokens `start..start + bytes.len() / 2` as they stand in the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_tokens(&self, start: u64, bytes: &mut [u8]) -> Result<()> {
        debug_assert!(2 * start + bytes.len() as u64 <= 2 * self.header.tokens);
        self.read(bytes, HEADER_BYTES + 2 * start)
    }

    /// The tokens of a document.
    ///
    /// # Errors
    /// The file cannot be read or is damaged there.
    pub fn tokens(&self, index: u64) -> Result<Vec<u16>> {
        let range = self.document(index)?;
        let mut bytes = vec![0; 2 * (range.end - range.start) as usize];
        self.read_tokens(range.start, &mut bytes)?;
        Ok(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        read_at(&self.file, bytes, at).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                damaged(&self.path, format!("byte {at}"), "the file was cut short while it was read".into())
            }
            _ => Error::io("read", &self.path)(e),
        })
    }

    /// The first document with an id that the vocabulary does not have.
    ///
    /// # Errors
    /// The file cannot be read or is damaged.
    pub fn foreign_token(&self) -> Result<Option<u64>> {
        for document in 0..self.header.documents {
            if self.tokens(document)?.iter().any(|&token| u32::from(token) >= self.header.vocab_size) {
                return Ok(Some(document));
            }
        }
        Ok(None)
    }

    /// Compares every byte with the checksums, and the root with the manifest's, and names the places that differ.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn verify(&self, root: Option<u64>, seen: &mut dyn FnMut(u64)) -> Result<Vec<Damage>> {
        let h = &self.header;
        let (body_end, sums_at) = (h.sums_at(), h.sums_at());
        let mut table = vec![0; 8 * h.blocks() as usize + 8];
        self.read(&mut table, sums_at)?;
        let (sums, stored_root) = table.split_at(table.len() - 8);
        let mut hash = Xxh3::new();
        hash.update(&h.to_bytes());
        hash.update(sums);
        let found_root = hash.digest();
        let mut damage = Vec::new();
        let root_at = sums_at + sums.len() as u64;
        let table_right = root.unwrap_or(found_root) == found_root;
        if stored_root != found_root.to_le_bytes() && table_right && root.is_some() {
            damage.push(self.damage("root checksum", root_at..root_at + 8));
        } else if stored_root != found_root.to_le_bytes() && root.is_none() {
            damage.push(self.damage("block checksums or root checksum", sums_at..root_at + 8));
        }
        let mut block = vec![0; BLOCK_BYTES as usize];
        for (index, sum) in sums.chunks_exact(8).enumerate() {
            let start = HEADER_BYTES + index as u64 * BLOCK_BYTES;
            let end = (start + BLOCK_BYTES).min(body_end);
            let bytes = &mut block[..(end - start) as usize];
            self.read(bytes, start)?;
            seen(end - start);
            if xxh3_64(bytes).to_le_bytes() != sum {
                let sum_at = sums_at + 8 * index as u64;
                // Where the checksums themselves are as the manifest has them, the block is at fault.
                damage.push(if table_right || stored_root == found_root.to_le_bytes() {
                    self.damage(self.part(start), start..end)
                } else {
                    self.damage("block checksums", sum_at..sum_at + 8)
                });
            }
        }
        if !table_right && damage.is_empty() {
            damage.push(self.damage("the whole shard: it is not the one of the manifest", 0..h.file_bytes()));
        }
        Ok(damage)
    }

    fn part(&self, start: u64) -> &'static str {
        if start < self.header.ends_at() { "tokens" } else { "document offsets" }
    }

    fn damage(&self, part: &'static str, bytes: Range<u64>) -> Damage {
        let documents = (part == "tokens").then(|| self.documents_of(&bytes)).flatten();
        Damage { path: self.path.clone(), part, bytes, documents }
    }

    /// The documents with tokens among these bytes, as far as the table of ends can be read.
    fn documents_of(&self, bytes: &Range<u64>) -> Option<Range<u64>> {
        let ends = self.read_ends(0..self.header.documents).ok()?;
        let token = |byte: u64| (byte.saturating_sub(HEADER_BYTES)) / 2;
        let first = ends.partition_point(|&end| u64::from(end) <= token(bytes.start));
        let last = ends.partition_point(|&end| u64::from(end) < token(bytes.end));
        Some(first as u64..(last as u64 + 1).min(self.header.documents))
    }
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, bytes, at)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[read..];
        at += read as u64;
    }
    Ok(())
}
