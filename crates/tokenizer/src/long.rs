//! Very long pre-tokens: a megabyte of one letter, of dashes, of spaces.
//!
//! The crate's merging takes n log n steps and some fifty bytes of memory for each byte of the pre-token. Here it is about
//! one step a token and one bit a byte, with the same result, by what is known of BPE: a sequence of tokens is the encoding
//! of its bytes exactly if every two neighbours are the encoding of theirs. (It needs that every token is what its own bytes
//! encode to, which is checked when the file is read.) So tokens are taken from left to right, the longest first, and taken
//! back where none can follow. A prefix has one encoding, so that a place found hopeless stays so, and each place is left at
//! most once.

use hashbrown::HashMap;

use crate::Tokenizer;
use crate::encode::merge;

/// Neighbours judged before their table is emptied.
const JUDGED: usize = 1 << 20;

/// The tokens by their first bytes.
#[derive(Debug)]
pub(crate) struct Prefixes {
    /// From a node and a byte to the next node; node 0 is the root.
    children: HashMap<(u32, u8), u32>,
    /// The token that a node ends.
    token: Vec<Option<u32>>,
}

impl Prefixes {
    pub fn new(tokens: &[Box<[u8]>]) -> Self {
        let mut prefixes = Prefixes { children: HashMap::new(), token: vec![None] };
        for (id, bytes) in tokens.iter().enumerate() {
            let mut node = 0;
            for &byte in bytes.iter() {
                let next = prefixes.token.len() as u32;
                node = *prefixes.children.entry((node, byte)).or_insert(next);
                if node == next {
                    prefixes.token.push(None);
                }
            }
            prefixes.token[node as usize] = Some(id as u32);
        }
        prefixes
    }

    /// The tokens that `bytes` begins with, shortest first, with their lengths.
    fn of<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = (u32, usize)> + 'a {
        let mut node = 0;
        let nodes = bytes.iter().map_while(move |&byte| {
            node = *self.children.get(&(node, byte))?;
            Some(node)
        });
        nodes.enumerate().filter_map(|(index, node)| Some((self.token[node as usize]?, index + 1)))
    }
}

/// Which tokens may stand side by side.
#[derive(Debug, Default)]
pub(crate) struct Validity(HashMap<(u32, u32), bool>);

impl Validity {
    fn check(&mut self, tokenizer: &Tokenizer, left: u32, right: u32) -> Result<bool, String> {
        if let Some(&known) = self.0.get(&(left, right)) {
            return Ok(known);
        }
        let bytes = [left, right].map(|id| tokenizer.bytes(id).unwrap_or_default()).concat();
        let valid = merge(tokenizer, &bytes)?.eq([left, right]);
        if self.0.len() >= JUDGED {
            self.0.clear();
        }
        self.0.insert((left, right), valid);
        Ok(valid)
    }
}

/// Appends the ids of one pre-token.
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    validity: &mut Validity,
    bytes: &[u8],
    ids: &mut Vec<u32>,
) -> Result<(), String> {
    let prefixes = tokenizer.prefixes();
    let first = ids.len();
    let mut hopeless = vec![0_u64; bytes.len() / 64 + 1];
    let mut candidates = Vec::new();
    let (mut at, mut shorter_than) = (0, usize::MAX);
    while at < bytes.len() {
        candidates.clear();
        candidates.extend(prefixes.of(&bytes[at..]));
        let last = (ids.len() > first).then(|| ids[ids.len() - 1]);
        let mut taken = None;
        for &(id, len) in candidates.iter().rev().filter(|&&(_, len)| len < shorter_than) {
            let end = at + len;
            let open = hopeless[end / 64] >> (end % 64) & 1 == 0;
            if open && last.map_or(Ok(true), |last| validity.check(tokenizer, last, id))? {
                taken = Some((id, len));
                break;
            }
        }
        if let Some((id, len)) = taken {
            ids.push(id);
            (at, shorter_than) = (at + len, usize::MAX);
            continue;
        }
        hopeless[at / 64] |= 1 << (at % 64);
        if ids.len() == first {
            return Err("no sequence of tokens encodes it".to_owned());
        }
        let back = ids.pop().and_then(|id| tokenizer.bytes(id)).map_or(0, <[u8]>::len);
        (at, shorter_than) = (at - back, back);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{TrainOptions, Trainer};
    use crate::{Error, Result};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// Learned from few letters and many runs, where merges get in each other's way.
    static RUNS: LazyLock<Tokenizer> = LazyLock::new(|| {
        let mut words = Vec::new();
        let mut state = 1_u32;
        for _ in 0..6000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let len = 2 + (state >> 27) as usize;
            words.push(b' ');
            words.extend((0..len).map(|i| b"aabaabba-"[(state as usize >> (3 + i % 9)) % 8]));
            if state >> 30 == 0 {
                words.extend(std::iter::repeat_n(b"a-="[(state >> 20) as usize % 3], (state >> 22) as usize % 60));
            }
        }
        let mut trainer = Trainer::new(TrainOptions { vocab_size: 1200, ..TrainOptions::default() }).unwrap();
        trainer.feed([Ok::<_, Error>(words)], &mut |_| ()).unwrap();
        Tokenizer::from_json(&trainer.finish(&mut |_, _| ()).unwrap().0).unwrap()
    });

    fn both(bytes: &[u8]) -> (Vec<u32>, Vec<u32>) {
        let (mut ours, mut validity) = (Vec::new(), Validity::default());
        encode(&RUNS, &mut validity, bytes, &mut ours).unwrap();
        (ours, merge(&RUNS, bytes).unwrap().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_result_is_that_of_merging(text in "[ab]{0,80}", run in "(a{0,70}|b{0,50}|-{0,70}|={0,40}| {0,40})", more in "[ab=-]{0,60}") {
            let (ours, theirs) = both(format!("{text}{run}{more}{text}").as_bytes());
            prop_assert_eq!(ours, theirs);
        }

        #[test]
        fn and_so_for_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let (ours, theirs) = both(&bytes);
            prop_assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn ten_megabytes_without_a_border() -> Result<()> {
        for byte in [b"a", b" ", b"="] {
            let text = byte.repeat(10 << 20);
            let ids = RUNS.encode(&text)?;
            assert_eq!(RUNS.decode(&ids)?, text);
            assert_eq!(ids[..100], RUNS.encode(&text[..1 << 20])?[..100]);
        }
        Ok(())
    }
}
