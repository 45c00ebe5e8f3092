//! From tokens to text, piece by piece: whole characters, nothing of a stop string, nothing lost.

use crate::{Error, Result};
use hymo_tokenizer::{Kind, StreamDecoder, Tokenizer, specials};
use std::ops::Range;
use std::sync::Arc;

/// A model's tokenizer, and what of its vocabulary no text has.
#[derive(Debug, Clone)]
pub(crate) struct Codec {
    pub tokenizer: Arc<Tokenizer>,
    /// Slots that training left unused, padding, reserved special tokens: in order, apart.
    pub never: Arc<[Range<u32>]>,
}

impl Codec {
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Result<Self> {
        if tokenizer.vocab_size() != vocab_size {
            let want = format!("the model's {vocab_size} ids");
            return Err(Error::option("tokenizer", format!("one of {} ids", tokenizer.vocab_size()), want));
        }
        let reserved = (specials::NAMED.len()..specials::N_SPECIAL).map(specials::name);
        let silent: Vec<String> = reserved.chain([specials::PAD.to_owned()]).collect();
        let silent: Vec<u32> = silent.iter().map(|name| Ok(tokenizer.special(name)?)).collect::<Result<_>>()?;
        let mut never: Vec<Range<u32>> = Vec::new();
        for id in 0..vocab_size as u32 {
            if !(tokenizer.kind(id) == Some(Kind::Unused) || silent.contains(&id)) {
                continue;
            }
            match never.last_mut() {
                Some(last) if last.end == id => last.end += 1,
                _ => never.push(id..id + 1),
            }
        }
        Ok(Codec { tokenizer, never: never.into() })
    }

    /// The ids of a prompt. A document begins after the end of another, so an empty prompt is that end.
    pub fn prompt(&self, text: &[u8]) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text)?;
        Ok(if ids.is_empty() { vec![self.tokenizer.end_of_text()] } else { ids })
    }
}

/// One request's text as it comes.
#[derive(Debug)]
pub(crate) struct Text {
    tokenizer: Arc<Tokenizer>,
    decoder: StreamDecoder,
    stops: Stops,
}

/// What a token adds to the text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes that are certain now.
    pub bytes: Vec<u8>,
    /// Whether a stop string was met; the bytes before it are the last.
    pub stopped: bool,
}

impl Text {
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Vec<Vec<u8>>) -> Self {
        Text { tokenizer, decoder: StreamDecoder::new(), stops: Stops { stops, held: Vec::new() } }
    }

    pub fn push(&mut self, id: u32) -> Result<Piece> {
        Ok(self.stops.push(self.decoder.push(&self.tokenizer, id)?))
    }

    /// What is left when no token follows.
    pub fn finish(&mut self) -> Vec<u8> {
        let Piece { mut bytes, stopped } = self.stops.push(self.decoder.finish());
        if !stopped {
            bytes.append(&mut self.stops.held);
        }
        bytes
    }
}

/// Looks for stop strings in a stream, and holds back what may be the beginning of one.
#[derive(Debug)]
struct Stops {
    stops: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Stops {
    /// The stop string that is complete first ends the text (of two at once the longer), so that no cut changes the outcome.
    fn push(&mut self, bytes: &[u8]) -> Piece {
        for &byte in bytes {
            self.held.push(byte);
            let met = self.stops.iter().filter(|stop| self.held.ends_with(stop)).map(Vec::len).max();
            if let Some(len) = met {
                self.held.truncate(self.held.len() - len);
                return Piece { bytes: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let begins = |from: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*from..]));
        let keep = (0..self.held.len()).find(begins).unwrap_or(self.held.len());
        Piece { bytes: self.held.drain(..keep).collect(), stopped: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(text: &[u8], cuts: &[usize], stops: &[&[u8]]) -> (Vec<u8>, bool) {
        let mut matcher = Stops { stops: stops.iter().map(|s| s.to_vec()).collect(), held: Vec::new() };
        let (mut out, mut at) = (Vec::new(), 0);
        for cut in cuts.iter().copied().chain([text.len()]) {
            let end = (at + cut).min(text.len());
            let piece = matcher.push(&text[at..end]);
            out.extend(piece.bytes);
            if piece.stopped {
                return (out, true);
            }
            at = end;
        }
        out.append(&mut matcher.held);
        (out, false)
    }

    proptest! {
        /// HAZARD 23: however the text is cut, it comes up to the first stop string and not a byte further.
        #[test]
        fn stops_do_not_depend_on_the_cuts(
            text in "[ab\u{e9}]{0,24}",
            cuts in prop::collection::vec(0usize..4, 0..30),
            stops in prop::collection::vec("[ab\u{e9}]{1,4}", 0..4),
        ) {
            let stops: Vec<&[u8]> = stops.iter().map(String::as_bytes).collect();
            let ends = |end: &usize| stops.iter().any(|s| text.as_bytes()[..*end].ends_with(s));
            let end = (1..=text.len()).find(ends);
            let want = match end {
                Some(end) => {
                    let longest = stops.iter().filter(|s| text.as_bytes()[..end].ends_with(s)).map(|s| s.len()).max();
                    &text.as_bytes()[..end - longest.unwrap()]
                }
                None => text.as_bytes(),
            };
            let (got, stopped) = stream(text.as_bytes(), &cuts, &stops);
            prop_assert_eq!((&*got, stopped), (want, end.is_some()));
        }
    }

    #[test]
    fn what_may_begin_a_stop_string_waits() {
        let mut stops = Stops { stops: vec![b"END".to_vec(), b"##".to_vec()], held: Vec::new() };
        let mut says = |bytes: &[u8]| stops.push(bytes).bytes;
        assert_eq!(says(b"a E"), b"a ");
        assert_eq!(says(b"N"), b"");
        assert_eq!(says(b"X"), b"ENX");
        assert_eq!(says(b"#"), b"");
        assert_eq!(stops.push(b"#tail"), Piece { bytes: Vec::new(), stopped: true });
    }
}
