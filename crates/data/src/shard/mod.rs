//! A shard: tokens of documents end to end, where each document ends, and checksums of both.
//!
//! All numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 128 | header: magic, version, counts, block size, vocabulary, SHA-256 of tokenizer.json, checksum of all these |
//! | 2 a token | tokens |
//! | 0 to 3 | zeros, up to a multiple of 4 |
//! | 4 a document | where the document ends, counted in tokens |
//! | 8 a block | XXH3-64 of every [`BLOCK_BYTES`] of tokens and ends |
//! | 8 | root: XXH3-64 of the header and the block checksums. The manifest has it too |
//!
//! The header gives the file's size, so that a shard cut short is known when it is opened. Blocks are small, so that a
//! flipped bit is found to within a quarter of a megabyte, and its documents can be named.

mod read;
mod write;

pub use read::{Damage, Shard};
pub use write::write_whole;
pub use write::{ShardWriter, Written};
pub(crate) use write::{failed, sync_folder};

use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, Result};

/// The first bytes of every shard.
pub const MAGIC: [u8; 8] = *b"HYMOSHRD";
/// The format's version.
pub const VERSION: u32 = 1;
/// Bytes that one checksum covers.
pub const BLOCK_BYTES: u64 = 1 << 18;
/// Bytes of the header.
pub const HEADER_BYTES: u64 = 128;
/// The most documents of a shard: their ends are kept in memory while it is written.
pub const MAX_DOCUMENTS: u64 = 1 << 22;
/// The most tokens of a shard: ends are 32 bits.
pub const MAX_TOKENS: u64 = 1 << 31;

/// What a shard says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Tokens.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// SHA-256 of the tokenizer's file.
    pub tokenizer: [u8; 32],
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.vocab_size.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.documents.to_le_bytes());
        bytes[32..40].copy_from_slice(&BLOCK_BYTES.to_le_bytes());
        bytes[40..72].copy_from_slice(&self.tokenizer);
        let sum = xxh3_64(&bytes[..120]);
        bytes[120..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES as usize], path: &Path) -> Result<Self> {
        let wrong = |why: String| Err(damaged(path, "header (bytes 0 to 127)".into(), why));
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC {
            return wrong("not a shard of HyMo".into());
        }
        if half(8) != VERSION {
            return wrong(format!("version {}; this program reads version {VERSION}", half(8)));
        }
        if word(120) != xxh3_64(&bytes[..120]) {
            return wrong("its checksum does not match".into());
        }
        let tokenizer = std::array::from_fn(|i| bytes[40 + i]);
        let header = Header { tokens: word(16), documents: word(24), vocab_size: half(12), tokenizer };
        if header.tokens > MAX_TOKENS || header.documents > header.tokens || word(32) != BLOCK_BYTES {
            return wrong("its numbers cannot be".into());
        }
        Ok(header)
    }

    fn ends_at(&self) -> u64 {
        HEADER_BYTES + (2 * self.tokens).next_multiple_of(4)
    }

    fn sums_at(&self) -> u64 {
        self.ends_at() + 4 * self.documents
    }

    fn blocks(&self) -> u64 {
        (self.sums_at() - HEADER_BYTES).div_ceil(BLOCK_BYTES)
    }

    /// Size of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.sums_at() + 8 * self.blocks() + 8
    }
}

fn damaged(path: &Path, place: String, why: String) -> Error {
    Error::Shard { path: path.to_owned(), place, why }
}

#[cfg(test)]
mod tests;
