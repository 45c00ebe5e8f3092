//! One pass of the network over tokens of any number of sequences.
//!
//! Every operation computes a row from that row and its sequence alone, in an order of sums that depends on nothing else. So
//! prefill, plain decoding, verification of drafts and batches are this one pass, and agree to the bit.

use crate::cache::{GdnCache, Latents, LayerCache, Sequence};
use crate::weights::{Mixer, Mode, Weights};
use crate::{Error, Result};
use hymo_model::args;
use hymo_ops::{packed_linear, rotary};
use hymo_tensor::{Ctx, Tensor};
use std::ops::Range;

/// Consecutive tokens of one sequence.
pub(crate) struct Piece<'a> {
    pub tokens: &'a [u32],
    pub sequence: &'a mut Sequence,
    /// [`Mode::Forget`] is not for the trunk, whose latents are always appended.
    pub mode: Mode,
}

/// The rows of each piece in a pass over all of them.
pub(crate) fn ranges(lens: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut at = 0;
    let next = |n: usize| {
        at += n;
        at - n..at
    };
    lens.map(next).collect()
}

impl Weights {
    /// The residual stream [N, D] after the last layer, before the final norm, of all pieces' tokens in order. Their
    /// sequences move on, or keep the tokens for [`Weights::commit`].
    pub(crate) fn trunk(&self, ctx: &Ctx, pieces: &mut [Piece<'_>]) -> Result<Tensor> {
        for piece in &*pieces {
            piece.sequence.check(self.layers.len())?;
            self.check_tokens(piece.tokens, piece.sequence.position())?;
        }
        let rows = ranges(pieces.iter().map(|p| p.tokens.len()));
        let ids: Vec<u32> = pieces.iter().flat_map(|p| p.tokens).copied().collect();
        let angles = self.angles(pieces)?;
        let mut x = self.head.embed(ctx, ids.into_iter())?; // [N, D]
        for (i, layer) in self.layers.iter().enumerate() {
            let n = layer.norm.forward(ctx, &x)?;
            let caches = pieces.iter_mut().map(|p| (&mut p.sequence.layers[i], p.mode)).zip(&rows);
            let mixed = match &layer.mixer {
                Mixer::Gdn(gdn) => {
                    let runs = caches.map(|((c, mode), rows)| Ok((rows.clone(), recurrent(c)?, mode)));
                    gdn.forward(ctx, &n, &mut runs.collect::<Result<Vec<_>>>()?)?
                }
                Mixer::Mla(mla) => {
                    let runs = caches.map(|((c, _), rows)| Ok((rows.clone(), latents(c)?)));
                    mla.forward(ctx, &n, angles.as_ref(), &mut runs.collect::<Result<Vec<_>>>()?)?
                }
            };
            x.add_assign(&mixed)?;
            if let Some((norm, ffn)) = &layer.ffn {
                let n = norm.forward(ctx, &x)?;
                x.add_assign(&ffn.forward(ctx, &n)?)?;
            }
        }
        for piece in pieces {
            match piece.mode {
                Mode::Move => piece.sequence.moved(piece.tokens.len()),
                _ => piece.sequence.keeps(piece.tokens.len()),
            }
        }
        Ok(x)
    }

    /// Feeds tokens to a sequence: the logits [tokens, V] after each of them, soft cap included. Any split of the tokens into
    /// pieces gives the same bits.
    ///
    /// # Errors
    /// No tokens; a token outside the vocabulary; a sequence of another model.
    pub fn extend(&self, ctx: &Ctx, tokens: &[u32], sequence: &mut Sequence) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let h = self.trunk(ctx, &mut [Piece { tokens, sequence, mode: Mode::Move }])?;
        self.logits(ctx, &h)
    }

    fn angles(&self, pieces: &[Piece<'_>]) -> Result<Option<rotary::Angles>> {
        let Some(rope) = self.config.mla.as_ref().and_then(args::rope) else { return Ok(None) };
        let of = |p: &Piece<'_>| p.sequence.position() as i32..(p.sequence.position() + p.tokens.len()) as i32;
        let positions: Vec<i32> = pieces.iter().flat_map(of).collect();
        Ok(Some(rotary::Angles::new(&positions, rope)?))
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32], from: usize) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().position(|&t| t as usize >= vocab_size) {
            Some(at) => Err(Error::Token { id: tokens[at], at: from + at, vocab_size }),
            None => Ok(()),
        }
    }

    /// Moves a sequence on past the first `n` of the tokens that its last pass kept; the others are taken back.
    pub(crate) fn commit(&self, sequence: &mut Sequence, n: usize) -> Result<()> {
        if n > sequence.kept() {
            return Err(Error::State {
                found: format!("{} tokens kept", sequence.kept()),
                want: format!("at least the {n} to commit"),
            });
        }
        let len = sequence.position() + n;
        for (layer, cache) in self.layers.iter().zip(&mut sequence.layers) {
            match (&layer.mixer, cache) {
                (Mixer::Gdn(gdn), LayerCache::Gdn(cache)) => gdn.commit(cache, n)?,
                (_, LayerCache::Mla(latents)) => latents.truncate(len),
                (Mixer::Mla(_), LayerCache::Gdn(_)) => return Err(other("a delta rule's", "an attention layer's")),
            }
        }
        sequence.moved(n);
        Ok(())
    }

    /// Logits [N, V] of residual rows [N, D].
    pub(crate) fn logits(&self, ctx: &Ctx, h: &Tensor) -> Result<Tensor> {
        self.head.logits(ctx, &self.norm.forward(ctx, h)?)
    }

    /// The hidden rows [N, D] of prediction module `k` from those of the depth before, h [N, D], and the tokens ahead.
    pub(crate) fn module(
        &self,
        ctx: &Ctx,
        k: usize,
        h: &Tensor,
        tokens: impl ExactSizeIterator<Item = u32>,
        runs: &mut [(Range<usize>, &mut GdnCache, Mode)],
    ) -> Result<Tensor> {
        let module = &self.modules[k];
        let e = module.enorm.forward(ctx, &self.head.embed(ctx, tokens)?)?; // [N, D]
        let h = module.hnorm.forward(ctx, h)?;
        let mut both = ctx.empty::<f32>(&[h.rows(), 2 * h.cols()])?;
        let (mut to, e, h) = (both.view_mut::<f32>()?, e.view::<f32>()?, h.view::<f32>()?);
        for i in 0..h.rows() {
            let (left, right) = to.row_mut(i).split_at_mut(e.cols());
            left.copy_from_slice(e.row(i));
            right.copy_from_slice(h.row(i));
        }
        let mut x = packed_linear::forward(ctx, &both, &module.proj)?; // [N, D]
        let n = module.norm.forward(ctx, &x)?;
        x.add_assign(&module.gdn.forward(ctx, &n, runs)?)?;
        if let Some((norm, ffn)) = &module.ffn {
            let n = norm.forward(ctx, &x)?;
            x.add_assign(&ffn.forward(ctx, &n)?)?;
        }
        Ok(x)
    }

    /// Draft logits [N, V] of rows that module `k` gave.
    pub(crate) fn draft_logits(&self, ctx: &Ctx, k: usize, h: &Tensor) -> Result<Tensor> {
        self.head.draft(ctx, &self.modules[k].out_norm.forward(ctx, h)?)
    }
}

fn recurrent(cache: &mut LayerCache) -> Result<&mut GdnCache> {
    match cache {
        LayerCache::Gdn(c) => Ok(c),
        LayerCache::Mla(_) => Err(other("an attention layer's", "a delta rule's")),
    }
}

fn latents(cache: &mut LayerCache) -> Result<&mut Latents> {
    match cache {
        LayerCache::Mla(c) => Ok(c),
        LayerCache::Gdn(_) => Err(other("a delta rule's", "an attention layer's")),
    }
}

fn other(found: &str, want: &str) -> Error {
    Error::State { found: found.to_owned(), want: want.to_owned() }
}
