//! The oracle: all logits, row by row.
#![allow(clippy::needless_range_loop)] // oracles index as the formulas do

use super::{Head, Sinks, Token};
use hymo_tensor::{Ctx, Real, Result};

pub(super) fn oracle<T: Real>(ctx: &Ctx, head: &Head<'_>, mut sinks: Sinks<'_, '_>) -> Result<Vec<Token>> {
    let (h, e) = (head.h.view::<T>()?, head.e.view::<T>()?);
    let (mut d_h, mut d_e) = sinks.open::<T>(ctx)?;
    let (v, d) = (e.rows(), e.cols());
    let (scale, zeta) = (T::of(head.scale), T::of(head.z_loss));
    let mut tokens = vec![Token::default(); h.rows()];
    for i in 0..h.rows() {
        if let Some(d_h) = &mut d_h {
            d_h.row_mut(i).fill(T::zero());
        }
        let Ok(y) = usize::try_from(head.targets[i]) else { continue };
        let raw = |v: usize| (0..d).map(|j| h.row(i)[j] * e.row(v)[j]).sum::<T>();
        let capped = |l: T| head.soft_cap.map_or(l, |cap| T::of(cap) * (l / T::of(cap)).tanh());
        let logits: Vec<T> = (0..v).map(|v| capped(raw(v))).collect();
        let max = logits.iter().copied().fold(T::neg_infinity(), T::max);
        let lse = max + logits.iter().map(|&l| (l - max).exp()).sum::<T>().ln();
        tokens[i] = Token { nll: (lse - logits[y]).f64(), lse: lse.f64(), correct: logits[y] >= max };
        for v in 0..v {
            let p = (logits[v] - lse).exp();
            let hit = if v == y { T::one() } else { T::zero() };
            let slope = head.soft_cap.map_or(T::one(), |cap| T::one() - (logits[v] / T::of(cap)).powi(2));
            let d_l = scale * (p * (T::one() + T::of(2.) * zeta * lse) - hit) * slope;
            for j in 0..d {
                if let Some(d_h) = &mut d_h {
                    d_h.row_mut(i)[j] += d_l * e.row(v)[j];
                }
                if let Some(d_e) = &mut d_e {
                    d_e.row_mut(v)[j] += d_l * h.row(i)[j];
                }
            }
        }
    }
    Ok(tokens)
}
