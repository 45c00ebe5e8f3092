//! One pass over any number of requests: prompts in pieces, single tokens, drafts to verify, side by side.

use crate::cache::ModuleCache;
use crate::draft::Drafter;
use crate::output::Token;
use crate::pass::{Piece, ranges};
use crate::request::Active;
use crate::weights::{Mode, Weights};
use crate::{Gates, Result};
use hymo_tensor::{Ctx, Tensor};
use std::ops::Range;

/// Rows that may wait for a prediction module while nobody drafts.
pub(crate) const WAITING: usize = 256;

/// What a pass is run with.
pub(crate) struct Cycle<'a> {
    pub ctx: &'a Ctx,
    pub weights: &'a Weights,
    /// Prompt tokens in a pass, of all requests together.
    pub chunk: usize,
    /// Whether to draft, and from which probabilities on.
    pub gates: Option<&'a Gates>,
    /// Whether prediction modules take every position even while nobody drafts; if not, they begin anew when they are asked.
    pub follow: bool,
}

/// What one request does in a pass.
struct Part {
    /// Its place in the lot.
    of: usize,
    tokens: Vec<u32>,
    /// The last of them are drafts.
    drafts: usize,
    /// Whether a token is drawn from its last row, and from those before drafts.
    draws: bool,
}

impl Cycle<'_> {
    /// Moves requests on. Gives each one's new tokens, or the error that ends it alone; the error of the whole pass ends all.
    pub fn run(&self, lot: &mut [&mut Active]) -> Result<Vec<Result<Vec<Token>>>> {
        let drafts = self.drafts(lot)?;
        let parts = self.parts(lot, drafts);
        let rows = ranges(parts.iter().map(|p| p.tokens.len()));
        let mut pieces = Vec::with_capacity(parts.len());
        let mut next = parts.iter().peekable();
        for (of, active) in lot.iter_mut().enumerate() {
            if let Some(part) = next.next_if(|p| p.of == of) {
                let mode = if part.drafts > 0 { Mode::Keep } else { Mode::Move };
                pieces.push(Piece { tokens: &part.tokens, sequence: &mut active.sequence, mode });
            }
        }
        let h = self.weights.trunk(self.ctx, &mut pieces)?; // [N, D]
        let logits = self.logits(&h, &parts, &rows)?;
        let (h, mut at) = (h.view::<f32>()?, 0);
        let mut out: Vec<Result<Vec<Token>>> = lot.iter().map(|_| Ok(Vec::new())).collect();
        for (part, rows) in parts.iter().zip(&rows) {
            let active = &mut *lot[part.of];
            if part.draws {
                let own = at..at + part.drafts + 1;
                at = own.end;
                let logits = logits.as_ref().map(Tensor::view::<f32>).transpose()?;
                let logits: Vec<&[f32]> = logits.iter().flat_map(|l| own.clone().map(|i| l.row(i))).collect();
                out[part.of] = drawn(active, &logits, &part.tokens[part.tokens.len() - part.drafts..]);
            }
            let taken = match part.drafts {
                0 => part.tokens.len(),
                _ => {
                    let n = (active.tokens.len() - 1).saturating_sub(active.sequence.position()).max(1);
                    self.weights.commit(&mut active.sequence, n)?;
                    n
                }
            };
            if let Some(first) = active.sequence.modules.first_mut() {
                (rows.start..rows.start + taken).for_each(|i| first.waiting.extend_from_slice(h.row(i)));
            }
        }
        self.follow(lot)?;
        Ok(out)
    }

    /// Drafts for the requests that generate.
    fn drafts(&self, lot: &mut [&mut Active]) -> Result<Vec<Vec<u32>>> {
        let mut out = vec![Vec::new(); lot.len()];
        let Some(gates) = self.gates else { return Ok(out) };
        let may = |a: &Active| a.generated() > 0 && a.room() > 0 && !a.sequence.modules.is_empty();
        let mut ready: Vec<(usize, &mut &mut Active)> = lot.iter_mut().enumerate().filter(|(_, a)| may(a)).collect();
        let mut behind: Vec<_> = ready.iter_mut().map(|(_, a)| a.split()).collect();
        self.weights.catch_up(self.ctx, &mut behind)?;
        let mut drafters: Vec<_> = ready
            .iter_mut()
            .map(|(_, a)| {
                let most = a.room();
                Drafter::new(&mut a.sequence, most)
            })
            .collect();
        self.weights.draft(self.ctx, &mut drafters, gates.as_slice())?;
        let drafts: Vec<_> = drafters.into_iter().map(|d| d.drafts).collect();
        ready.iter().zip(drafts).for_each(|((i, _), drafts)| out[*i] = drafts);
        Ok(out)
    }

    /// Who feeds which tokens. Prompts share the chunk in the order of the lot; who gets none of it waits.
    fn parts(&self, lot: &[&mut Active], drafts: Vec<Vec<u32>>) -> Vec<Part> {
        let mut left = self.chunk;
        let part = |(of, (active, drafts)): (usize, (&&mut Active, Vec<u32>))| {
            let ahead = active.ahead();
            if ahead.len() == 1 {
                let tokens: Vec<u32> = ahead.iter().chain(&drafts).copied().collect();
                return Some(Part { of, tokens, drafts: drafts.len(), draws: true });
            }
            let n = ahead.len().min(active.piece()).min(left);
            left -= n;
            (n > 0).then(|| Part { of, tokens: ahead[..n].to_vec(), drafts: 0, draws: n == ahead.len() })
        };
        lot.iter().zip(drafts).enumerate().filter_map(part).collect()
    }

    /// Logits of all rows that tokens are drawn from.
    fn logits(&self, h: &Tensor, parts: &[Part], rows: &[Range<usize>]) -> Result<Option<Tensor>> {
        let from = |(part, rows): (&Part, &Range<usize>)| match part.draws {
            true => rows.end - part.drafts - 1..rows.end,
            false => 0..0,
        };
        let wanted: Vec<usize> = parts.iter().zip(rows).flat_map(from).collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let mut picked = self.ctx.empty::<f32>(&[wanted.len(), h.cols()])?;
        let (mut to, h) = (picked.view_mut::<f32>()?, h.view::<f32>()?);
        wanted.iter().enumerate().for_each(|(i, &row)| to.row_mut(i).copy_from_slice(h.row(row)));
        Ok(Some(self.weights.logits(self.ctx, &picked)?))
    }

    /// Keeps what waits for the prediction modules short.
    fn follow(&self, lot: &mut [&mut Active]) -> Result<()> {
        let most = WAITING * self.weights.config().d_model;
        let far = |a: &&mut &mut Active| a.sequence.modules.first().is_some_and(|m| m.waiting.len() > most);
        let far = lot.iter_mut().filter(far);
        if self.follow {
            return self.weights.catch_up(self.ctx, &mut far.map(|a| a.split()).collect::<Vec<_>>());
        }
        let config = self.weights.config();
        far.for_each(|a| ModuleCache::forget(&mut a.sequence.modules, config, WAITING / 2));
        Ok(())
    }
}

/// Draws from the row before each draft, as long as the draft is what comes.
fn drawn(active: &mut Active, logits: &[&[f32]], drafts: &[u32]) -> Result<Vec<Token>> {
    let mut out = Vec::new();
    for (i, logits) in logits.iter().enumerate() {
        let token = active.take(logits)?;
        let right = drafts.get(i) == Some(&token.id);
        out.push(token);
        if !right || active.finish.is_some() {
            break;
        }
    }
    active.count(&out, drafts);
    Ok(out)
}
