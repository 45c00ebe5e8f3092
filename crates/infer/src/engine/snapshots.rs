//! States kept for prompts that begin as an earlier one did: turns of a chat, shared instructions.
//!
//! A state has the same bits however its tokens were fed, so that a snapshot may be taken and used at any position
//! (HAZARD 17).

use crate::cache::Sequence;

#[derive(Debug)]
struct Entry {
    id: u64,
    tokens: Vec<u32>,
    sequence: Sequence,
    bytes: u64,
    used: u64,
}

/// Snapshots, of which the least recently used give way.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    entries: Vec<Entry>,
    budget: u64,
    time: u64,
}

impl Snapshots {
    pub fn new(budget: u64) -> Self {
        Snapshots { budget, ..Snapshots::default() }
    }

    /// Whether any are kept at all.
    pub fn any(&self) -> bool {
        self.budget > 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    /// A sequence that goes on after the longest snapshot of a beginning of `prompt`, which leaves at least one token.
    pub fn find(&mut self, prompt: &[u32]) -> Option<(u64, Sequence)> {
        let begins = |e: &&mut Entry| e.tokens.len() < prompt.len() && prompt.starts_with(&e.tokens);
        let best = self.entries.iter_mut().filter(begins).max_by_key(|e| e.tokens.len())?;
        self.time += 1;
        best.used = self.time;
        Some((best.id, best.sequence.fork()))
    }

    /// Tokens that `prompt` has in common with a snapshot's at most.
    pub fn shared(&self, prompt: &[u32]) -> usize {
        let common = |e: &Entry| e.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.entries.iter().map(common).max().unwrap_or(0)
    }

    /// Keeps a state, of `bytes`, after `tokens`. `free` bytes are there beside the budget's bound.
    pub fn keep(&mut self, tokens: &[u32], sequence: &Sequence, bytes: u64, free: u64) {
        self.entries.retain(|e| e.tokens != tokens);
        let most = self.budget.min(self.bytes().saturating_add(free));
        if tokens.is_empty() || bytes > most {
            return;
        }
        self.shrink(most - bytes);
        self.time += 1;
        let (id, tokens, sequence) = (self.time, tokens.to_vec(), sequence.fork());
        self.entries.push(Entry { id, tokens, sequence, bytes, used: id });
    }

    /// Lets the least recently used go until at most `bytes` are held.
    pub fn shrink(&mut self, bytes: u64) {
        while self.bytes() > bytes {
            let oldest = (0..self.entries.len()).min_by_key(|&i| self.entries[i].used);
            oldest.map(|i| self.entries.swap_remove(i));
        }
    }

    /// HAZARD 18: what a request that failed began with is not to be trusted.
    pub fn drop(&mut self, id: u64) {
        self.entries.retain(|e| e.id != id);
    }
}
