//! A seeded permutation of `0..n` that needs no table: any place of it is computed alone.
//!
//! A Feistel network is a permutation of a power of two whatever its round function is. The smallest power of two that is
//! not below n is at most twice as large; a number that lands outside `0..n` is sent through again until it lands inside
//! (cycle walking), which keeps it a permutation.

/// Rounds; the halves are mixed well after four, and more cost nothing beside a read.
const ROUNDS: u64 = 6;

/// A permutation of `0..n`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    /// Bits of the right half; the left one has as many or one more.
    right: u32,
    left: u32,
    keys: [u64; ROUNDS as usize],
}

impl Permutation {
    /// The permutation of `0..n` that belongs to these numbers.
    #[must_use]
    pub fn new(n: u64, seed: u64, stream: u64, epoch: u64) -> Self {
        // At least a bit each, so that a half is never empty.
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(2);
        let key = |round| mix(mix(mix(seed ^ mix(stream)) ^ epoch) ^ round);
        Permutation { n, right: bits / 2, left: bits - bits / 2, keys: std::array::from_fn(|round| key(round as u64)) }
    }

    /// What stands at place `index`, which must be below n.
    #[must_use]
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.n);
        let mut value = index;
        loop {
            value = self.network(value);
            if value < self.n {
                return value;
            }
        }
    }

    fn network(&self, value: u64) -> u64 {
        let low = |bits: u32| (1_u64 << bits) - 1;
        let (mut a, mut b) = (value >> self.right, value & low(self.right));
        for (round, key) in self.keys.iter().enumerate() {
            // Each half in turn is changed by the other, so that unequal halves keep their widths.
            if round % 2 == 0 {
                a ^= mix(b ^ key) & low(self.left);
            } else {
                b ^= mix(a ^ key) & low(self.right);
            }
        }
        a << self.right | b
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit given.
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_number_comes_once(n in 1..3000_u64, seed: u64, epoch in 0..5_u64) {
            let permutation = Permutation::new(n, seed, 0, epoch);
            let mut seen = vec![false; n as usize];
            for index in 0..n {
                let value = permutation.at(index) as usize;
                prop_assert!(!seen[value], "{value} comes twice");
                seen[value] = true;
            }
        }
    }

    #[test]
    fn seeds_epochs_and_sets_differ() {
        let n = 1_000_000;
        let first = |seed, stream, epoch| -> Vec<u64> {
            let p = Permutation::new(n, seed, stream, epoch);
            (0..20).map(|i| p.at(i)).collect()
        };
        let base = first(1, 0, 0);
        assert_eq!(base, first(1, 0, 0));
        for other in [first(2, 0, 0), first(1, 1, 0), first(1, 0, 1)] {
            assert!(base.iter().zip(&other).filter(|(a, b)| a == b).count() < 2);
        }
    }

    /// Where neighbours go is spread evenly: a chi-square over sixteen parts, for starts and for differences.
    #[test]
    fn places_and_steps_are_even() {
        let n = 100_003;
        for seed in 0..4 {
            let p = Permutation::new(n, seed, 0, 0);
            let (mut places, mut steps) = ([0_f64; 16], [0_f64; 16]);
            for index in 0..8000 {
                let (a, b) = (p.at(index), p.at(index + 1));
                places[(a * 16 / n) as usize] += 1.;
                steps[((b + n - a) % n * 16 / n) as usize] += 1.;
            }
            for counts in [places, steps] {
                let chi: f64 = counts.iter().map(|c| (c - 500.).powi(2) / 500.).sum();
                // 15 degrees of freedom: above 44 once in ten thousand.
                assert!(chi < 44., "{chi} with seed {seed}");
            }
        }
    }

    #[test]
    fn the_largest_sets() {
        for n in [1, 2, 3, (1 << 40) + 1, u64::MAX >> 1] {
            let p = Permutation::new(n, 7, 0, 0);
            assert!(p.at(0) < n && p.at(n - 1) < n);
        }
    }
}
