//! Log-probabilities of the model's own distribution: before penalties, bias and temperature.

use super::first;

/// A token's log-probability and the likeliest tokens' beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// ln p of the token.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Of finite logits `[V]`, with the `n` likeliest.
    #[must_use]
    pub fn new(logits: &[f32], id: u32, n: usize) -> Self {
        let max = logits.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        let lse = f64::from(max) + sum.ln();
        let of = |l: f32| (f64::from(l) - lse) as f32;
        let mut top: Vec<_> = logits.iter().enumerate().map(|(id, &l)| (id as u32, l)).collect();
        first(&mut top, n.min(logits.len()));
        top.truncate(n);
        top.iter_mut().for_each(|t| t.1 = of(t.1));
        Logprobs { logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&l| of(l)), top }
    }
}
