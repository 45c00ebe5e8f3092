//! Cautious AdamW (MATH, section 7): a coordinate whose momentum and gradient disagree waits, and the others go further.
//!
//! For a tensor `W` with gradient `g` at step t, all in the dtype of `W`:
//!
//! ```text
//! m <- β1 m + (1 - β1) g        v <- β2 v + (1 - β2) g²        û = (m / (1 - β1^t)) / (√(v / (1 - β2^t)) + eps)
//! φ = [m g > 0]                 φ̄ = max(mean φ, 0.001)         W <- W - ηλ W - η û φ / φ̄
//! ```
//!
//! The mean of φ is a tensor's own, of an expert's matrix the expert's: rows and experts that no token reached are masked
//! and would otherwise speed up all others. It is a count, so that any division of a tensor among threads or ranks gives the
//! same number. The decay is plain, outside the mask: one masking at a time.

use hymo_model::config::AdamWConfig;
use hymo_tensor::{Real, each};

/// Elements of a block of work.
pub(crate) const BLOCK: usize = 1 << 14;

/// A tensor, or a part of one.
pub(crate) struct Piece<'a, T> {
    /// Which tensor, for the count.
    pub tensor: usize,
    /// Elements of the whole tensor.
    pub numel: usize,
    pub w: &'a mut [T],
    pub g: &'a [T],
    pub m: &'a mut [T],
    pub v: &'a mut [T],
    /// Learning rate of this step, the group's factor included.
    pub lr: f64,
    pub weight_decay: f64,
}

/// One step of all pieces; `step` counts from 1, `clip` is the factor on the gradient, `tensors` one more than the largest
/// index of a tensor.
pub(crate) fn step<T: Real>(config: &AdamWConfig, step: u64, clip: f64, tensors: usize, pieces: Vec<Piece<'_, T>>) {
    let mut pieces: Vec<Piece<'_, T>> = pieces.into_iter().flat_map(Piece::blocks).collect();
    let mut counts = vec![0; pieces.len()];
    let tasks = pieces.iter_mut().zip(counts.iter_mut()).collect();
    each!(tasks, |_, (piece, count)| *count = moments(config, clip, piece.g, piece.m, piece.v));
    let mut totals = vec![0; tensors];
    for (piece, count) in pieces.iter().zip(counts) {
        totals[piece.tensor] += count;
    }
    each!(pieces, |_, piece| {
        let Piece { tensor, numel, w, g, m, v, lr, weight_decay } = piece;
        let how = Apply::new(config, step, clip, [lr, weight_decay], totals[tensor], numel);
        apply(&how, [g, m, v], w);
    });
}

impl<'a, T> Piece<'a, T> {
    fn blocks(self) -> impl Iterator<Item = Piece<'a, T>> {
        let Piece { tensor, numel, w, g, m, v, lr, weight_decay } = self;
        let parts = w.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
        parts.map(move |(((w, g), m), v)| Piece { tensor, numel, w, g, m, v, lr, weight_decay })
    }
}

/// m and v of some elements, and how many of them the mask lets through. All of one length.
#[inline(always)]
pub fn moments<T: Real>(config: &AdamWConfig, clip: f64, g: &[T], m: &mut [T], v: &mut [T]) -> u64 {
    let clip = T::of(clip);
    let [keep1, take1, keep2, take2] = [config.beta1, 1.0 - config.beta1, config.beta2, 1.0 - config.beta2].map(T::of);
    let mut count = 0;
    for ((&g, m), v) in g.iter().zip(m).zip(v) {
        let g = g * clip;
        *m = keep1 * *m + take1 * g;
        *v = keep2 * *v + take2 * (g * g);
        count += u64::from(agree(*m, g));
    }
    count
}

/// Whether m g > 0, by signs: the product of small numbers may underflow.
#[inline(always)]
fn agree<T: Real>(m: T, g: T) -> bool {
    let zero = T::zero();
    (m > zero) & (g > zero) | (m < zero) & (g < zero)
}

/// What moves some elements of a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Apply<T> {
    clip: T,
    /// η / φ̄.
    rate: T,
    /// η λ.
    decay: T,
    correct1: T,
    correct2: T,
    eps: T,
    cautious: bool,
}

impl<T: Real> Apply<T> {
    /// For step `step`, counted from 1, of a tensor of `numel` elements of which the mask lets `count` through.
    /// `[lr, weight_decay]` are η and λ.
    #[must_use]
    pub fn new(
        config: &AdamWConfig,
        step: u64,
        clip: f64,
        [lr, weight_decay]: [f64; 2],
        count: u64,
        numel: usize,
    ) -> Self {
        let mean = if config.cautious { (count as f64 / numel.max(1) as f64).max(1e-3) } else { 1.0 };
        let correct = |beta: f64| T::of(1.0 / (1.0 - libm::pow(beta, step as f64)));
        Apply {
            clip: T::of(clip),
            rate: T::of(lr / mean),
            decay: T::of(lr * weight_decay),
            correct1: correct(config.beta1),
            correct2: correct(config.beta2),
            eps: T::of(config.eps),
            cautious: config.cautious,
        }
    }
}

/// Moves some elements of W; m and v as [`moments`] leaves them.
#[inline(always)]
pub fn apply<T: Real>(step: &Apply<T>, [g, m, v]: [&[T]; 3], w: &mut [T]) {
    for (((w, &g), &m), &v) in w.iter_mut().zip(g).zip(m).zip(v) {
        let update = m * step.correct1 / ((v * step.correct2).sqrt() + step.eps);
        let update = if agree(m, g * step.clip) || !step.cautious { update } else { T::zero() };
        *w = *w - step.decay * *w - step.rate * update;
    }
}
