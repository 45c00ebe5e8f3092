//! Ids to bytes, whole or one by one.

use crate::{Error, Result, Tokenizer};

impl Tokenizer {
    /// The bytes of ids; special tokens give their names. What was encoded comes back byte for byte.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.known(id)?);
        }
        Ok(bytes)
    }

    fn known(&self, id: u32) -> Result<&[u8]> {
        self.bytes(id).ok_or_else(|| Error::Id { id, size: self.vocab_size() })
    }
}

/// Decodes ids as they come, and holds back a character until all its bytes are there.
///
/// What it hands out is cut between characters, so that each piece may be shown as text by itself: bytes that are not UTF-8
/// come out as they are, as soon as nothing that follows could make them a character.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    held: Vec<u8>,
    out: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        StreamDecoder::default()
    }

    /// Takes one id and returns the bytes that are now complete.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<&[u8]> {
        self.held.extend_from_slice(tokenizer.known(id)?);
        let keep = self.held.len() - unfinished(&self.held);
        self.out.clear();
        self.out.extend(self.held.drain(..keep));
        Ok(&self.out)
    }

    /// What is left when nothing follows: at most three bytes.
    pub fn finish(&mut self) -> &[u8] {
        self.out = std::mem::take(&mut self.held);
        &self.out
    }
}

/// How many bytes at the end begin a character whose rest may still come.
fn unfinished(bytes: &[u8]) -> usize {
    let tail = &bytes[bytes.len().saturating_sub(3)..];
    // The last byte that is not a continuation may begin a character.
    let Some(start) = tail.iter().rposition(|&byte| byte & 0xC0 != 0x80) else { return 0 };
    let begun = &tail[start..];
    match std::str::from_utf8(begun) {
        Err(e) if e.valid_up_to() == 0 && e.error_len().is_none() => begun.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_may_still_become_a_character_is_held_back() {
        for (bytes, held) in [
            (&b"abc"[..], 0),
            (b"", 0),
            ("\u{e9}".as_bytes(), 0),
            (b"a\xc3", 1),
            (b"a\xe2\x82", 2),
            (b"\xf0\x9f\x98", 3),
            ("\u{1F600}".as_bytes(), 0),
            (b"\xff", 0),
            (b"\xe0\x80", 0),
            (b"\x80\x80\x80", 0),
            (b"\xf5\x80", 0),
        ] {
            assert_eq!(unfinished(bytes), held, "{bytes:?}");
        }
    }

    proptest! {
        /// Pieces as text, one after another, are the whole as text: nothing is cut inside a character.
        #[test]
        fn pieces_of_text_are_the_text(text in "\\PC{0,20}", noise in proptest::collection::vec(any::<u8>(), 0..20), cuts in proptest::collection::vec(1..4_usize, 0..100)) {
            let bytes = [text.as_bytes(), &noise, text.as_bytes()].concat();
            let (mut held, mut said, mut at) = (Vec::new(), String::new(), 0);
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let end = at + cut.min(bytes.len() - at);
                held.extend_from_slice(&bytes[at..end]);
                let keep = held.len() - unfinished(&held);
                said += &String::from_utf8_lossy(&held[..keep]);
                held.drain(..keep);
                prop_assert!(held.len() <= 3);
                at = end;
            }
            said += &String::from_utf8_lossy(&held);
            prop_assert_eq!(said, String::from_utf8_lossy(&bytes));
        }
    }
}
