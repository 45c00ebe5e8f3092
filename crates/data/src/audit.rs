//! Which tokens each rank would read, and the proof that together they are the stream, each token once.

use std::ops::Range;
use std::sync::Arc;

use crate::corpus::Corpus;
use crate::loader::{Loader, LoaderOptions, number};
use crate::stream::{Position, Span, Walker};
use crate::{Error, Result};

/// What an audit found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Audit {
    /// Global token indices of every step and rank: `ranges[step][rank]`.
    pub ranges: Vec<Vec<Range<u64>>>,
    /// Steps walked.
    pub steps: u64,
    /// Tokens that the ranks read as inputs in these steps.
    pub tokens: u64,
    /// Documents of one epoch, each met once.
    pub documents: u64,
    /// Tokens of one epoch, each met once.
    pub epoch_tokens: u64,
}

/// Walks `steps` steps on every rank by itself, from the beginning, and compares what they would read with one walk over the
/// stream; then walks one epoch of every data set and checks that it meets every document once and every token.
/// `seen` is told the tokens walked.
///
/// # Errors
/// Options that cannot be, a shard that cannot be read, or ranks that overlap or leave tokens out.
pub fn audit(corpus: &Arc<Corpus>, options: &LoaderOptions, steps: u64, seen: &mut dyn FnMut(u64)) -> Result<Audit> {
    let rank = |rank| LoaderOptions { rank, ..options.clone() };
    let loader = |r| Loader::new(Arc::clone(corpus), rank(r), None);
    let mut loaders = (0..options.world).map(loader).collect::<Result<Vec<_>>>()?;
    let mut whole = Walker::new(corpus, Position::start(corpus))?;
    let mut ranges = Vec::new();
    let mut tokens = 0;
    for step in 0..steps {
        let mut of_step = Vec::new();
        for (rank, loader) in loaders.iter_mut().enumerate() {
            let Some(plan) = loader.plan()? else { break };
            let share = options.rows / options.world * options.len;
            let (from, to) = ((rank * share) as u64, ((rank + 1) * share) as u64);
            let own = inside(&plan.spans, from..to);
            let start = plan.begins.token + from;
            let read: u64 = own.iter().map(|span| span.len).sum();
            same(corpus, &mut whole, &own).map_err(|why| broken(step, rank, &why))?;
            if read > 0 && start != tokens {
                return Err(broken(
                    step,
                    rank,
                    &format!("it begins at token {start}, the one before ends at {tokens}"),
                ));
            }
            tokens += read;
            of_step.push(start..start + read);
        }
        if of_step.is_empty() {
            break;
        }
        ranges.push(of_step);
        seen(tokens);
    }
    let (documents, epoch_tokens) = epoch(corpus, seen)?;
    Ok(Audit { steps: ranges.len() as u64, ranges, tokens, documents, epoch_tokens })
}

fn broken(step: u64, rank: usize, why: &str) -> Error {
    Error::Position { why: format!("step {step}, rank {rank}: {why}") }
}

/// The parts of spans among these tokens of the step.
fn inside(spans: &[Span], range: Range<u64>) -> Vec<Span> {
    let cut = |(span, place): (&Span, Range<u64>)| {
        let (start, end) = (place.start.max(range.start), place.end.min(range.end));
        let moved = span.start + start.saturating_sub(place.start);
        (start < end).then(|| Span { start: moved, len: end - start, ..*span })
    };
    spans.iter().zip(number(spans)).filter_map(cut).collect()
}

/// What a rank reads is what comes next in the stream.
fn same(corpus: &Corpus, whole: &mut Walker, own: &[Span]) -> Result<(), String> {
    for span in own {
        let mut at = *span;
        while at.len > 0 {
            let next = whole.step(corpus, at.len).map_err(|e| e.to_string())?;
            if (next.set, next.document, next.epoch, next.start) != (at.set, at.document, at.epoch, at.start) {
                return Err(format!("it reads {at:?}, the stream goes on with {next:?}"));
            }
            at.start += next.len;
            at.len -= next.len;
        }
    }
    Ok(())
}

/// One epoch of every data set: documents met, a bit each, and their tokens.
fn epoch(corpus: &Corpus, seen: &mut dyn FnMut(u64)) -> Result<(u64, u64)> {
    let (mut documents, mut tokens) = (0, 0);
    for (set, weighted) in corpus.sets().iter().enumerate() {
        let dataset = &weighted.dataset;
        let n = dataset.documents();
        let mut met = vec![0_u64; n.div_ceil(64) as usize];
        let order = corpus.order(set, 0);
        let mut of_set = 0;
        for index in 0..n {
            let document = order.as_ref().map_or(index, |order| order.at(index));
            let (word, bit) = ((document / 64) as usize, document % 64);
            if met[word] >> bit & 1 == 1 {
                let why = format!("data set {set}: document {document} comes twice in an epoch");
                return Err(Error::Position { why });
            }
            met[word] |= 1 << bit;
            of_set += dataset.len_of(document)?;
            if index % 65_536 == 0 {
                seen(tokens + of_set);
            }
        }
        if of_set != dataset.tokens() {
            let why = format!("data set {set}: an epoch has {of_set} tokens, the manifest says {}", dataset.tokens());
            return Err(Error::Position { why });
        }
        documents += n;
        tokens += of_set;
    }
    Ok((documents, tokens))
}
