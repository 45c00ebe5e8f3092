//! Drafts by the prediction modules, and how their states follow the trunk (MATH 5.2, 5.4).
//!
//! Module k takes position i with the hidden row of the depth before and token i + k. Its state therefore ends where tokens
//! are known, k - 1 positions behind the trunk's; the rows in between wait. Drafting goes on from there with drafts in the
//! place of tokens, on states that it does not move.

use crate::cache::{ModuleCache, Sequence};
use crate::pass::ranges;
use crate::weights::{Mode, Weights};
use crate::{Error, Result};
use hymo_tensor::{Ctx, Tensor};

/// A sequence that asks for drafts.
pub(crate) struct Drafter<'a> {
    pub sequence: &'a mut Sequence,
    /// Most drafts that there is room for.
    pub most: usize,
    pub drafts: Vec<u32>,
    /// Rows of the module before that stand on drafts.
    rows: Vec<f32>,
}

impl<'a> Drafter<'a> {
    pub fn new(sequence: &'a mut Sequence, most: usize) -> Self {
        Drafter { sequence, most, drafts: Vec::new(), rows: Vec::new() }
    }
}

impl Weights {
    /// Takes every position whose tokens are known into the modules' states. `lot` are sequences with all their known
    /// tokens.
    pub(crate) fn catch_up(&self, ctx: &Ctx, lot: &mut [(&[u32], &mut Sequence)]) -> Result<()> {
        let d = self.config.d_model;
        for k in 0..self.modules.len() {
            let mut behind: Vec<(&[u32], &mut Sequence, usize)> = Vec::new();
            for (tokens, sequence) in lot.iter_mut() {
                let module = module(sequence, k)?;
                let known = tokens.len().saturating_sub(k + 1 + module.done);
                let n = known.min(module.waiting.len() / d);
                if n > 0 {
                    behind.push((&tokens[module.done + k + 1..][..n], sequence, n));
                }
            }
            if behind.is_empty() {
                continue;
            }
            let h: Vec<f32> = behind.iter().flat_map(|(_, s, n)| &s.modules[k].waiting[..n * d]).copied().collect();
            let tokens: Vec<u32> = behind.iter().flat_map(|(tokens, ..)| *tokens).copied().collect();
            let rows = ranges(behind.iter().map(|b| b.2));
            let mut runs: Vec<_> = behind
                .iter_mut()
                .zip(&rows)
                .map(|((_, s, _), rows)| (rows.clone(), &mut s.modules[k].gdn, Mode::Move))
                .collect();
            let h = Tensor::from_slice(ctx, &[tokens.len(), d], &h)?;
            let out = self.module(ctx, k, &h, tokens.into_iter(), &mut runs)?.to_vec::<f32>()?; // [N, D]
            for ((_, sequence, n), rows) in behind.iter_mut().zip(rows) {
                let new = &out[rows.start * d..rows.end * d];
                let module = &mut sequence.modules[k];
                module.waiting.drain(..*n * d);
                module.done += *n;
                module.last = new[new.len() - d..].to_vec();
                if let Some(next) = sequence.modules.get_mut(k + 1) {
                    next.waiting.extend_from_slice(new);
                }
            }
        }
        Ok(())
    }

    /// Drafts of sequences that have caught up: of each depth the likeliest token, as long as its probability is at least the
    /// depth's gate. The gate looks at the draft's own distribution alone, so that it changes no distribution of the output.
    pub(crate) fn draft(&self, ctx: &Ctx, lot: &mut [Drafter<'_>], gates: &[f32]) -> Result<()> {
        let d = self.config.d_model;
        for k in 0..self.modules.len() {
            let wants = |x: &&mut Drafter<'_>| x.drafts.len() == k && x.most > k;
            let mut asking: Vec<&mut Drafter<'_>> = lot.iter_mut().filter(wants).collect();
            asking.retain(|x| x.sequence.modules.first().is_some_and(|m| !m.last.is_empty()));
            if asking.is_empty() {
                return Ok(());
            }
            let last: Vec<f32> = if k == 0 {
                asking.iter().flat_map(|x| &x.sequence.modules[0].last).copied().collect()
            } else {
                self.ahead(ctx, k, &mut asking)?;
                asking.iter().flat_map(|x| &x.rows[x.rows.len() - d..]).copied().collect()
            };
            let h = Tensor::from_slice(ctx, &[asking.len(), d], &last)?;
            let logits = self.draft_logits(ctx, k, &h)?; // [asking, shortlist]
            let logits = logits.view::<f32>()?;
            let gate = gates.get(k).or(gates.last()).copied().unwrap_or(0.);
            for (i, x) in asking.into_iter().enumerate() {
                if let Some(id) = likeliest(logits.row(i), gate) {
                    x.drafts.push(id);
                }
            }
        }
        Ok(())
    }

    /// Module `k` over the rows that wait for it and those that stand on drafts.
    fn ahead(&self, ctx: &Ctx, k: usize, asking: &mut [&mut Drafter<'_>]) -> Result<()> {
        let d = self.config.d_model;
        let mut h = Vec::new();
        let (mut tokens, mut lens) = (Vec::new(), Vec::new());
        for x in asking.iter() {
            let before = h.len();
            h.extend_from_slice(&x.sequence.modules[k].waiting);
            h.extend_from_slice(&x.rows);
            let n = (h.len() - before) / d;
            // Fewer than k at a sequence's beginning.
            tokens.extend_from_slice(&x.drafts[k - n..k]);
            lens.push(n);
        }
        let rows = ranges(lens.into_iter());
        let caches = asking.iter_mut().map(|x| &mut x.sequence.modules[k].gdn);
        let mut runs: Vec<_> = rows.iter().cloned().zip(caches).map(|(rows, c)| (rows, c, Mode::Forget)).collect();
        let h = Tensor::from_slice(ctx, &[tokens.len(), d], &h)?;
        let out = self.module(ctx, k, &h, tokens.into_iter(), &mut runs)?.to_vec::<f32>()?;
        for (x, rows) in asking.iter_mut().zip(rows) {
            x.rows = out[rows.start * d..rows.end * d].to_vec();
        }
        Ok(())
    }
}

fn module(sequence: &Sequence, k: usize) -> Result<&ModuleCache> {
    sequence.modules.get(k).ok_or_else(|| Error::State {
        found: format!("{} prediction modules", sequence.modules.len()),
        want: format!("at least {}", k + 1),
    })
}

/// The largest logit's token if its probability is at least `gate`. Logits that are not finite draft nothing.
fn likeliest(logits: &[f32], gate: f32) -> Option<u32> {
    let id = crate::sample::largest(logits)?;
    let max = logits[id as usize];
    let sum: f32 = logits.iter().map(|&l| (l - max).exp()).sum();
    (sum.recip() >= gate).then_some(id)
}
