//! The merge loop, incremental: a merge visits only the words that hold its pair.
//!
//! A count is kept per pair, with the words that hold the pair, and a heap of pairs by count. Counts only fall, save for
//! pairs with the new token, which are pushed when they appear; an entry that promises more than its pair still has is
//! pushed again with what it has.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::{HashMap, HashSet};

use crate::alphabet;

/// When to stop, and what not to merge.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The most merges.
    pub merges: usize,
    /// The least count of a pair.
    pub min_count: u64,
    /// The longest token.
    pub token_bytes: usize,
}

/// Two ids, the first in the upper half: ordered like the pair.
type Pair = u64;

fn pair(left: u32, right: u32) -> Pair {
    u64::from(left) << 32 | u64::from(right)
}

fn ids(pair: Pair) -> (u32, u32) {
    ((pair >> 32) as u32, pair as u32)
}

/// The words as sequences of ids, one after another in one buffer; a word shrinks in its place.
struct Sequences {
    ids: Vec<u32>,
    /// First id, number of ids and count of each word.
    words: Vec<(usize, u16, u64)>,
}

impl Sequences {
    fn new(words: Vec<(Box<[u8]>, u64)>) -> Self {
        let mut sequences = Sequences { ids: Vec::new(), words: Vec::with_capacity(words.len()) };
        for (word, count) in words {
            // Words have at most MAX_WORD bytes.
            sequences.words.push((sequences.ids.len(), word.len() as u16, count));
            sequences.ids.extend(word.iter().map(|&byte| alphabet::ID[byte as usize]));
        }
        sequences
    }

    fn word(&self, index: u32) -> (&[u32], u64) {
        let (start, len, count) = self.words[index as usize];
        (&self.ids[start..start + len as usize], count)
    }

    /// Replaces the pair from left to right, never overlapping. False if the word no longer holds it.
    fn replace(&mut self, index: u32, (left, right): (u32, u32), new: u32) -> bool {
        let (start, len, _) = &mut self.words[index as usize];
        let word = &mut self.ids[*start..*start + *len as usize];
        let (mut read, mut write) = (0, 0);
        while read < word.len() {
            let hit = word[read] == left && word.get(read + 1) == Some(&right);
            word[write] = if hit { new } else { word[read] };
            read += if hit { 2 } else { 1 };
            write += 1;
        }
        let changed = write < word.len();
        *len = write as u16;
        changed
    }
}

/// Learns merges: for each, the two ids that become the next id (from 256 on).
pub fn learn(words: Vec<(Box<[u8]>, u64)>, limits: Limits, progress: &mut dyn FnMut(usize, usize)) -> Vec<(u32, u32)> {
    let mut sequences = Sequences::new(words);
    let mut tokens: Vec<Box<[u8]>> = alphabet::BY_ID.iter().map(|&byte| [byte].into()).collect();
    let mut known: HashSet<Box<[u8]>> = tokens.iter().cloned().collect();
    let mut pairs = Pairs::count(&sequences);
    let mut heap: BinaryHeap<(u64, Reverse<Pair>)> = BinaryHeap::new();
    heap.extend(pairs.counts.iter().map(|(&pair, &count)| (count, Reverse(pair))));
    let mut merges = Vec::with_capacity(limits.merges);
    progress(0, limits.merges);
    while merges.len() < limits.merges {
        let Some((count, Reverse(best))) = heap.pop() else { break };
        let left = pairs.counts.get(&best).copied().unwrap_or(0);
        if left != count {
            heap.extend((left > 0).then_some((left, Reverse(best))));
            continue;
        }
        if count < limits.min_count {
            break;
        }
        let (a, b) = ids(best);
        let joined: Box<[u8]> = [&*tokens[a as usize], &*tokens[b as usize]].concat().into();
        // Two tokens of the same bytes could not both be what these bytes encode to.
        if joined.len() > limits.token_bytes || known.contains(&joined) {
            continue;
        }
        let new = tokens.len() as u32;
        for pair in pairs.merge(&mut sequences, best, new) {
            heap.extend(pairs.counts.get(&pair).map(|&count| (count, Reverse(pair))));
        }
        known.insert(joined.clone());
        tokens.push(joined);
        merges.push((a, b));
        progress(merges.len(), limits.merges);
    }
    merges
}

/// How often each pair stands side by side, and in which words it may stand.
struct Pairs {
    counts: HashMap<Pair, u64>,
    places: HashMap<Pair, Vec<u32>>,
}

impl Pairs {
    fn count(sequences: &Sequences) -> Self {
        let mut pairs = Pairs { counts: HashMap::new(), places: HashMap::new() };
        for index in 0..sequences.words.len() as u32 {
            let (word, count) = sequences.word(index);
            for window in word.windows(2) {
                pairs.add(pair(window[0], window[1]), count, index);
            }
        }
        pairs
    }

    fn add(&mut self, pair: Pair, count: u64, word: u32) {
        *self.counts.entry(pair).or_insert(0) += count;
        let places = self.places.entry(pair).or_default();
        // A pair finds all its places in one pass, over all words or over those of the merge that made its newer token. A
        // pass goes in order, so that a pair's second place in a word follows its first.
        if places.last() != Some(&word) {
            places.push(word);
        }
    }

    /// Merges the pair everywhere and returns the pairs that have appeared.
    fn merge(&mut self, sequences: &mut Sequences, best: Pair, new: u32) -> Vec<Pair> {
        let places = self.places.remove(&best).unwrap_or_default();
        let (mut appeared, mut before) = (Vec::new(), Vec::new());
        for word in places {
            let (ids_before, count) = sequences.word(word);
            before.clear();
            before.extend_from_slice(ids_before);
            if !sequences.replace(word, ids(best), new) {
                continue;
            }
            for window in before.windows(2) {
                let old = pair(window[0], window[1]);
                if let Some(left) = self.counts.get_mut(&old) {
                    *left -= count;
                }
            }
            for window in sequences.word(word).0.windows(2) {
                let now = pair(window[0], window[1]);
                if window.contains(&new) {
                    appeared.push(now);
                    self.add(now, count, word);
                } else {
                    *self.counts.entry(now).or_insert(0) += count;
                }
            }
        }
        self.counts.remove(&best);
        appeared.sort_unstable();
        appeared.dedup();
        appeared
    }
}
