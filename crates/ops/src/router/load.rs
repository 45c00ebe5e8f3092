//! What follows from how many tokens each expert got: the controller of the bias, and the figures to watch.

use super::OP;
use hymo_tensor::{Error, Result};

/// Moves the bias towards even loads, once an optimizer step: bias += δ - mean(δ), δ_e = rate · sign(mean(c) - c_e).
///
/// `counts` c are sums over all micro-batches and ranks of the step, padding left out. They are compared as integers:
/// floats would round them, and near balance the sign with them. Subtracting the mean keeps the bias from drifting as a
/// whole. Source: MATH 3.4.
pub fn bias_update(bias: &mut [f32], counts: &[u64], rate: f64) -> Result<()> {
    if bias.len() != counts.len() {
        return Err(Error::value(OP, "counts", format!("{} experts", counts.len()), format!("{} of bias", bias.len())));
    }
    if !rate.is_finite() {
        return Err(Error::value(OP, "rate", rate, "a finite number"));
    }
    let total: u128 = counts.iter().map(|&c| u128::from(c)).sum();
    let sign = |c: u64| match total.cmp(&(u128::from(c) * counts.len() as u128)) {
        std::cmp::Ordering::Greater => 1.,
        std::cmp::Ordering::Equal => 0.,
        std::cmp::Ordering::Less => -1.,
    };
    let mean = counts.iter().map(|&c| sign(c)).sum::<f64>() / counts.len().max(1) as f64;
    for (b, &c) in bias.iter_mut().zip(counts) {
        *b = (f64::from(*b) + rate * (sign(c) - mean)) as f32;
    }
    Ok(())
}

/// How evenly the experts are used. Without any token all figures are 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// MaxVio: (max c - mean c) / mean c; 0 when even.
    pub max_violation: f64,
    /// Entropy of c / Σc in nats; ln E when even.
    pub entropy: f64,
    /// The least used expert's share min c / Σc; 1/E when even.
    pub min_share: f64,
}

impl Load {
    /// Of the tokens of each expert.
    pub fn of(counts: &[u64]) -> Self {
        let total = counts.iter().map(|&c| u128::from(c)).sum::<u128>() as f64;
        if total == 0. {
            return Load { max_violation: 0., entropy: 0., min_share: 0. };
        }
        let shares = || counts.iter().map(|&c| c as f64 / total);
        let entropy = shares().filter(|&p| p > 0.).map(|p| -p * p.ln()).sum();
        let max_violation = shares().fold(0., f64::max) * counts.len() as f64 - 1.;
        Load { max_violation, entropy, min_share: shares().fold(1., f64::min) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_underused_gain_and_the_overused_lose() {
        let mut bias = [0f32; 4];
        bias_update(&mut bias, &[10, 0, 4, 2], 1e-3).unwrap(); // mean 4: signs -1, 1, 0, 1, their mean 1/4
        assert_eq!(bias, [-1.25e-3, 0.75e-3, -0.25e-3, 0.75e-3]);
        assert!(bias_update(&mut bias, &[1, 2], 1e-3).unwrap_err().to_string().contains("2 experts, want 4"));
        assert!(bias_update(&mut bias, &[1; 4], f64::NAN).is_err());
        bias_update(&mut [], &[], 1e-3).unwrap();
    }

    /// HAZARD 15: thousands of lopsided updates leave the mean of the bias where it was.
    #[test]
    fn the_bias_stays_centred() {
        let mut bias = [0f32; 16];
        for step in 0..5000u64 {
            let counts: Vec<u64> = (0..16).map(|e| if e == step % 3 { 4000 } else { e % 5 }).collect();
            bias_update(&mut bias, &counts, 1e-3).unwrap();
        }
        let mean = bias.iter().map(|&b| f64::from(b)).sum::<f64>() / 16.;
        let largest = bias.iter().fold(0f32, |m, b| m.max(b.abs()));
        assert!(largest > 0.5 && mean.abs() < 1e-4, "mean {mean:e}, largest {largest}");
    }

    #[test]
    fn even_loads_change_nothing() {
        for counts in [[0u64; 3], [7; 3], [u64::MAX; 3]] {
            let mut bias = [0.25f32, -1.5, 3e-5];
            bias_update(&mut bias, &counts, 1e-3).unwrap();
            assert_eq!(bias, [0.25, -1.5, 3e-5]);
        }
    }

    /// One token among 2^40: beyond what f32 (2^24) tells apart, and a mean of f32 sums would miss its sign.
    #[test]
    fn large_counts_are_compared_exactly() {
        let mut bias = [0f32; 2];
        bias_update(&mut bias, &[(1 << 40) + 1, 1 << 40], 1e-3).unwrap();
        assert_eq!(bias, [-1e-3, 1e-3]);
        let mut bias = [0f32; 3];
        bias_update(&mut bias, &[1 << 24, (1 << 24) + 1, (1 << 24) + 2], 1e-3).unwrap();
        assert_eq!(bias, [1e-3, 0., -1e-3]);
    }

    #[test]
    fn load_figures() {
        let even = Load::of(&[5; 8]);
        assert!(even.max_violation.abs() < 1e-12 && (even.entropy - 8f64.ln()).abs() < 1e-12);
        assert_eq!(even.min_share, 0.125);
        assert_eq!(Load::of(&[12, 0, 0, 0]), Load { max_violation: 3., entropy: 0., min_share: 0. });
        for counts in [&[][..], &[0, 0]] {
            assert_eq!(Load::of(counts), Load { max_violation: 0., entropy: 0., min_share: 0. });
        }
    }
}
