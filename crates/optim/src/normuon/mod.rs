//! NorMuon (MATH, section 6): momentum, orthogonalised as a whole matrix, normalised by row, brought to a fixed root mean
//! square.
//!
//! For a matrix `W [m, n]` with gradient `G`, learning rate η, weight decay λ, all in the dtype of `W`, sums in f64:
//!
//! ```text
//! M <- β1 M + (1 - β1) G        X = (1 - β1) G + β1 M (nesterov) or M
//! O = orth(X)                   v_i <- β2 v_i + (1 - β2) mean_j O_ij²       Ô_ij = O_ij / (√v_i + eps)
//! U = rms √(m n) / ‖Ô‖ Ô        W <- W - ηλ [U W >= 0] W - η U
//! ```
//!
//! There are no bias corrections: the scales of X and v cancel in the renormalisation. A gradient of zeros gives U = 0.
//!
//! The work is cut into passes over rows, with sums kept by row and added in the order of rows, and [`orthogonalise`] alone
//! needs the whole matrix. So rows may be divided among ranks in any way: with the passes run on each rank's rows, the
//! matrix gathered for `orthogonalise` and the sums of all rows for [`Apply::scale`], the bits are those of one rank. What
//! must not be done is to orthogonalise a shard (HAZARD 16).

mod orth;

pub(crate) use orth::coefficients;
pub use orth::{Work, orthogonalise};

use crate::norm::sum_of_squares;
use hymo_model::config::NorMuonConfig;
use hymo_tensor::{Ctx, Real, each};

/// Rows of a block of work.
const ROWS: usize = 64;

/// Some rows of a matrix, or of a block of it that is orthogonalised apart.
pub(crate) struct Block<'a, T> {
    pub rows: usize,
    pub cols: usize,
    /// `[rows, cols]`, as are the next two.
    pub w: &'a mut [T],
    pub g: &'a [T],
    pub m: &'a mut [T],
    /// `[rows]`.
    pub v: &'a mut [T],
    /// Learning rate of this step, the group's factor included.
    pub lr: f64,
    pub weight_decay: f64,
}

/// One step of a whole matrix. `clip` is the factor on the gradient.
pub(crate) fn step<T: Real>(ctx: &Ctx, config: &NorMuonConfig, clip: f64, block: Block<'_, T>, work: Work<'_, T>) {
    let Block { rows, cols, w, g, m, v, lr, weight_decay } = block;
    let mut work = work;
    momentum(config, clip, cols, g, m, work.x, work.sums);
    orthogonalise(ctx, config.orth, rows, cols, &mut work);
    moments(config, cols, work.x, v, work.sums);
    let scale = Apply::scale(config, rows, cols, work.sums);
    apply(config, &Apply { lr, weight_decay, scale }, cols, work.x, v, w);
}

/// M and X of some rows; `sums[i]` becomes Σ_j X_ij². `g`, `m`, `x` `[rows, cols]`, `sums` `[rows]`.
pub fn momentum<T: Real>(
    config: &NorMuonConfig,
    clip: f64,
    cols: usize,
    g: &[T],
    m: &mut [T],
    x: &mut [T],
    sums: &mut [f64],
) {
    let (clip, keep, take) = (T::of(clip), T::of(config.beta1), T::of(1.0 - config.beta1));
    let nesterov = config.nesterov;
    let n = ROWS * cols;
    let tasks = g.chunks(n).zip(m.chunks_mut(n)).zip(x.chunks_mut(n)).zip(sums.chunks_mut(ROWS)).collect();
    each!(tasks, |_, (((g, m), x), sums)| {
        for ((&g, m), x) in g.iter().zip(m.iter_mut()).zip(x.iter_mut()) {
            let new = take * (g * clip);
            *m = keep * *m + new;
            *x = if nesterov { new + keep * *m } else { *m };
        }
        for (sum, x) in sums.iter_mut().zip(x.chunks(cols)) {
            *sum = sum_of_squares(x);
        }
    });
}

/// v of some rows; `sums[i]` becomes Σ_j Ô_ij². `o` `[rows, cols]`, `v` and `sums` `[rows]`.
pub fn moments<T: Real>(config: &NorMuonConfig, cols: usize, o: &[T], v: &mut [T], sums: &mut [f64]) {
    let (keep, take, n) = (config.beta2, 1.0 - config.beta2, ROWS * cols);
    let tasks = o.chunks(n).zip(v.chunks_mut(ROWS)).zip(sums.chunks_mut(ROWS)).collect();
    each!(tasks, |_, ((o, v), sums)| {
        for ((o, v), sum) in o.chunks(cols).zip(v.iter_mut()).zip(sums.iter_mut()) {
            let squares = sum_of_squares(o);
            *v = T::of(keep * v.f64() + take * squares / cols as f64);
            let root = v.f64().sqrt() + config.eps;
            *sum = squares / (root * root);
        }
    });
}

/// What moves some rows of a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Apply {
    /// Learning rate η.
    pub lr: f64,
    /// Weight decay λ.
    pub weight_decay: f64,
    /// rms √(m n) / ‖Ô‖, of the whole matrix.
    pub scale: f64,
}

impl Apply {
    /// The scale of a matrix `[rows, cols]`, from the sums by row that [`moments`] leaves, those of all rows in order.
    #[must_use]
    pub fn scale(config: &NorMuonConfig, rows: usize, cols: usize, sums: &[f64]) -> f64 {
        config.rms * ((rows * cols) as f64).sqrt() / (sums.iter().sum::<f64>().sqrt() + 1e-10)
    }
}

/// Moves some rows of W. `o` and `w` `[rows, cols]`, `v` `[rows]` as [`moments`] leaves it.
pub fn apply<T: Real>(config: &NorMuonConfig, step: &Apply, cols: usize, o: &[T], v: &[T], w: &mut [T]) {
    let (lr, decay) = (T::of(step.lr), T::of(step.lr * step.weight_decay));
    let (cautious, n) = (config.cautious_decay, ROWS * cols);
    let tasks = o.chunks(n).zip(v.chunks(ROWS)).zip(w.chunks_mut(n)).collect();
    each!(tasks, |_, ((o, v), w)| {
        for ((o, v), w) in o.chunks(cols).zip(v).zip(w.chunks_mut(cols)) {
            let scale = T::of(step.scale / (v.f64().sqrt() + config.eps));
            for (&o, w) in o.iter().zip(w) {
                let u = o * scale;
                // Signs and not the product, which may underflow to a zero that counts as agreement.
                let agree = (u >= T::zero() && *w >= T::zero()) || (u <= T::zero() && *w <= T::zero());
                let decay = if agree || !cautious { decay } else { T::zero() };
                *w = *w - decay * *w - lr * u;
            }
        }
    });
}
