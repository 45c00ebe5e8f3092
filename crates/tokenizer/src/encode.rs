//! Bytes to ids.

use hashbrown::HashMap;
use tokenizers::Model;

use crate::long::{self, Validity};
use crate::{Error, Result, SplitCache, Tokenizer, alphabet};

/// Longer pre-tokens are not remembered and are encoded in linear time.
const LONG: usize = 256;
/// Pre-tokens that an encoder remembers; past it, it forgets all. Half a million take about 40 MB.
const REMEMBERED: usize = 1 << 19;
/// The longest key that is kept inside the table.
const SHORT: usize = 15;

/// Encodes texts on one thread. Remembers the pre-tokens it has met: most text repeats few of them.
#[derive(Debug)]
pub struct Encoder<'t> {
    tokenizer: &'t Tokenizer,
    split: SplitCache,
    memory: Memory,
    validity: Validity,
}

impl<'t> Encoder<'t> {
    pub(crate) fn new(tokenizer: &'t Tokenizer) -> Self {
        let split = tokenizer.splitter.cache();
        Encoder { tokenizer, split, memory: Memory::default(), validity: Validity::default() }
    }

    /// Appends the ids of a text. Its bytes need not be UTF-8: those that are not become one token each. Special tokens
    /// never come out, whatever the text spells.
    ///
    /// # Errors
    /// The `tokenizers` crate refuses a pre-token, which a tokenizer that has been read does not.
    pub fn encode(&mut self, text: &[u8], ids: &mut Vec<u32>) -> Result<()> {
        let mut start = 0;
        let Encoder { tokenizer, split, memory, validity } = self;
        for chunk in text.utf8_chunks() {
            let valid = chunk.valid();
            tokenizer.splitter.each(split, valid, |piece| {
                let encoded = match piece.len() {
                    1 => {
                        ids.push(alphabet::ID[piece.as_bytes()[0] as usize]);
                        Ok(())
                    }
                    2..=LONG => memory.encode(tokenizer, piece.as_bytes(), ids),
                    _ => long::encode(tokenizer, validity, piece.as_bytes(), ids),
                };
                // Pieces are parts of `text`, so that the difference of addresses is the place.
                encoded
                    .map_err(|why| Error::Encode { at: start + (piece.as_ptr().addr() - valid.as_ptr().addr()), why })
            })?;
            ids.extend(chunk.invalid().iter().map(|&byte| alphabet::ID[byte as usize]));
            start += valid.len() + chunk.invalid().len();
        }
        Ok(())
    }
}

/// The ids of one pre-token, by the `tokenizers` crate.
pub(crate) fn merge(tokenizer: &Tokenizer, bytes: &[u8]) -> Result<impl Iterator<Item = u32> + use<>, String> {
    let tokens = tokenizer.model.tokenize(&alphabet::to_text(bytes)).map_err(|e| e.to_string())?;
    Ok(tokens.into_iter().map(|token| token.id))
}

/// Pre-tokens and their ids.
#[derive(Debug, Default)]
struct Memory {
    /// Those of up to [`SHORT`] bytes, by bytes and length in one number.
    short: HashMap<u128, Ids>,
    other: HashMap<Box<[u8]>, Ids>,
    ids: Vec<u32>,
}

/// A range of [`Memory::ids`], or the only id.
#[derive(Debug, Clone, Copy)]
struct Ids {
    start: u32,
    len: u32,
}

impl Memory {
    fn encode(&mut self, tokenizer: &Tokenizer, piece: &[u8], ids: &mut Vec<u32>) -> Result<(), String> {
        let key = short_key(piece);
        let known = match key {
            Some(key) => self.short.get(&key),
            None => self.other.get(piece),
        };
        let found = match known {
            Some(&found) => found,
            None => self.learn(tokenizer, piece, key)?,
        };
        if found.len == 1 {
            ids.push(found.start);
        } else {
            ids.extend_from_slice(&self.ids[found.start as usize..(found.start + found.len) as usize]);
        }
        Ok(())
    }

    fn learn(&mut self, tokenizer: &Tokenizer, piece: &[u8], key: Option<u128>) -> Result<Ids, String> {
        if self.short.len() + self.other.len() >= REMEMBERED {
            self.short.clear();
            self.other.clear();
            self.ids.clear();
        }
        let start = self.ids.len();
        self.ids.extend(merge(tokenizer, piece)?);
        let mut found = Ids { start: start as u32, len: (self.ids.len() - start) as u32 };
        if found.len == 1 {
            found.start = self.ids[start];
            self.ids.truncate(start);
        }
        match key {
            Some(key) => self.short.insert(key, found),
            None => self.other.insert(piece.into(), found),
        };
        Ok(found)
    }
}

fn short_key(piece: &[u8]) -> Option<u128> {
    (piece.len() <= SHORT).then(|| {
        let mut key = [0; 16];
        key[..piece.len()].copy_from_slice(piece);
        key[SHORT] = piece.len() as u8;
        u128::from_le_bytes(key)
    })
}
