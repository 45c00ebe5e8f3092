//! The fast path: chunks of tokens by the whole vocabulary.
//!
//! A chunk's logits become its d_l in place while they are still in the cache, then feed two products. The other way
//! to bound memory, blocks of the vocabulary with an online lse, computes every logit twice (the softmax's sum is known
//! only after the last block): a third more products. Chunks of few tokens cost only more passes over E and d_E, and a
//! hundred rows hide most of those. Processor time of one thread, Sapphire Rapids: 2048 x 192, V 4096: 365, 337, 312, 320, 304 ms
//! for 64, 128, 256, 512, 1024 rows; 512 x 512, V 16384: 918, 860, 871, 821 ms for 64 to 512. Zen 4, whole training
//! steps of hymo-nano: 991 ms with 256 rows, 909 to 974 with 512. Ids are below 65,536 by
//! design, so 128 whole rows of logits never exceed 32 MiB.

use super::{Head, Sinks, Token};
use crate::exp::exp;
use crate::gemm;
use crate::lanes;
use hymo_tensor::{Ctx, Result, each};

/// Logits of a chunk, at most (32 MiB), unless 128 rows have more.
const LOGITS: usize = 8 << 20;
/// Rows of logits in a block of the softmax.
const ROWS: usize = 8;

/// Tokens of a chunk, by the vocabulary alone: chunks are part of d_E's sum, so they must not depend on threads.
pub(super) fn chunk_rows(v: usize) -> usize {
    (LOGITS / v.max(1)).clamp(128, 512)
}

pub(super) fn run(ctx: &Ctx, head: &Head<'_>, mut sinks: Sinks<'_, '_>, rows: usize) -> Result<Vec<Token>> {
    let (h, e) = (head.h.view::<f32>()?, head.e.view::<f32>()?);
    let (d_h, mut d_e) = sinks.open::<f32>(ctx)?;
    let want_grad = d_h.is_some() || d_e.is_some();
    let mut d_h = d_h.map(|d| d.row_blocks(rows).into_iter());
    let mut tokens = vec![Token::default(); h.rows()];
    let mut logits = ctx.empty::<f32>(&[rows.min(h.rows()), e.rows()])?;
    for (i, (targets, tokens)) in head.targets.chunks(rows).zip(tokens.chunks_mut(rows)).enumerate() {
        let d_h = d_h.as_mut().and_then(Iterator::next);
        if targets.iter().all(|&y| y < 0) {
            if let Some(mut d_h) = d_h {
                d_h.fill(0.);
            }
            continue;
        }
        let h = h.rows_at(i * rows, targets.len());
        let (mut l, _) = logits.view_mut::<f32>()?.split_rows(targets.len());
        gemm::nt(ctx, l.reborrow(), h, e, false);
        let tasks: Vec<_> =
            l.row_blocks(ROWS).into_iter().zip(targets.chunks(ROWS).zip(tokens.chunks_mut(ROWS))).collect();
        each!(tasks, |_, (mut l, (targets, tokens))| {
            for (i, (&y, token)) in targets.iter().zip(tokens).enumerate() {
                match usize::try_from(y) {
                    Ok(y) => *token = softmax(l.row_mut(i), y, head, want_grad),
                    Err(_) => l.row_mut(i).fill(0.),
                }
            }
        });
        let d_l = logits.view::<f32>()?.rows_at(0, targets.len());
        if let Some(d_h) = d_h {
            gemm::nn(ctx, d_h, d_l, e, false);
        }
        if let Some(d_e) = &mut d_e {
            gemm::tn(ctx, d_e.reborrow(), d_l, h, true);
        }
    }
    Ok(tokens)
}

/// One token's loss from its logits, which become d_l when gradients are wanted.
#[inline(always)]
fn softmax(l: &mut [f32], y: usize, head: &Head<'_>, want_grad: bool) -> Token {
    let cap = head.soft_cap.map(|cap| cap as f32);
    if let Some(cap) = cap {
        l.iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
    }
    // A NaN that the maximum passes over comes back through the exponentials.
    let (max, at_target) = (lanes::largest(l), l[y]);
    // The exponentials stay in place of the logits, unless the cap's slope needs those again.
    let keep = want_grad && cap.is_none();
    let mut sum = 0.;
    for l in l.chunks_mut(BLOCK) {
        // f32 within a block, f64 across: the error does not grow with the vocabulary.
        sum += f64::from(if keep {
            l.iter_mut().for_each(|l| *l = exp(*l - max));
            lanes::sum(l, |l| l)
        } else {
            lanes::sum(l, |l| exp(l - max))
        });
    }
    let lse = f64::from(max) + sum.ln();
    if want_grad {
        let to_grad = head.scale * (1. + 2. * head.z_loss * lse) / sum;
        let (to_grad, scale) = (to_grad as f32, head.scale as f32);
        match cap {
            None => {
                l.iter_mut().for_each(|l| *l *= to_grad);
                l[y] -= scale;
            }
            Some(cap) => {
                let slope = |l: f32| 1. - (l / cap) * (l / cap);
                l.iter_mut().for_each(|l| *l = to_grad * exp(*l - max) * slope(*l));
                l[y] -= scale * slope(at_target);
            }
        }
    }
    // Not lse - l̃_y, whose digits cancel when the logits are large.
    Token { nll: f64::from(max - at_target) + sum.ln(), lse, correct: at_target >= max }
}

/// Logits in a block of the sum: few enough to stay in the first-level cache between two loops over them.
const BLOCK: usize = 512;
