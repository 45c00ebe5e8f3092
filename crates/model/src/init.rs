//! Initial values, and a look at the decay parameters that a run starts from.
//!
//! An element depends on the seed, the parameter's name and its place in the parameter, on nothing else: one more layer, or
//! another number of ranks, changes no other value. Element i takes word pair i of a ChaCha8 stream keyed by seed and name,
//! so that any piece is filled without the rest. Values are computed in f64 with `libm`, whose results are the same on
//! every platform, and stored as f32.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::params::ParamSpec;

/// Distribution of a parameter's initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal around zero.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Normal around zero, conditioned on `|x| <= cut * std`. Its own deviation is a little smaller than `std` (0.987 of it
    /// for a cut at 3), as in the implementations it is compared with.
    TruncNormal {
        /// Standard deviation before the cut.
        std: f64,
        /// Cut in standard deviations.
        cut: f64,
    },
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// Largest absolute value.
        bound: f64,
    },
    /// `ln A`, A uniform between 0.01 and 16: the logarithm of a head's decay rate. From 0 the logarithm could be infinite.
    ALog,
    /// The inverse softplus of a time step log-uniform between 0.001 and 0.1.
    DtBias,
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
}

/// All initial values of a parameter, row-major.
#[must_use]
pub fn fill(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    let mut out = vec![0.0; spec.numel()];
    fill_from(spec, seed, 0, &mut out);
    out
}

/// The initial values of elements `start..start + out.len()`, the same as [`fill`] gives there.
pub fn fill_from(spec: &ParamSpec, seed: u64, start: usize, out: &mut [f32]) {
    let sample = Sampler::new(spec.init);
    let mut rng = stream(&spec.name, seed);
    // A 64-bit draw is two of the stream's 32-bit words.
    rng.set_word_pos(2 * start as u128);
    for value in out {
        *value = sample.at(unit_open(rng.next_u64())) as f32;
    }
}

fn stream(name: &str, seed: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&fnv1a(name.as_bytes()).to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// 64-bit FNV-1a: a hash that will be the same in every version of everything, unlike the standard library's.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A number strictly between 0 and 1, from the high 52 bits: with one bit more the largest would round to 1.
fn unit_open(word: u64) -> f64 {
    ((word >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

/// Turns a uniform number into a sample, by inverse distribution functions: one draw an element, whatever its value.
struct Sampler {
    init: Init,
    /// Probability below the lower cut.
    below: f64,
}

impl Sampler {
    fn new(init: Init) -> Self {
        let below = match init {
            Init::TruncNormal { cut, .. } => 0.5 * libm::erfc(cut * std::f64::consts::FRAC_1_SQRT_2),
            _ => 0.0,
        };
        Sampler { init, below }
    }

    fn at(&self, u: f64) -> f64 {
        match self.init {
            Init::Normal { std } => std * normal_quantile(u),
            Init::TruncNormal { std, cut } => {
                let p = self.below + u * (1.0 - 2.0 * self.below);
                std * normal_quantile(p).clamp(-cut, cut)
            }
            Init::Uniform { bound } => bound * (2.0 * u - 1.0),
            Init::ALog => libm::log(0.01 + u * (16.0 - 0.01)),
            Init::DtBias => {
                let (low, high) = (libm::log(1e-3), libm::log(1e-1));
                let dt = libm::exp(low + u * (high - low)).max(1e-4);
                dt + libm::log(-libm::expm1(-dt))
            }
            Init::Zeros => 0.0,
            Init::Ones => 1.0,
        }
    }
}

/// Inverse of the standard normal distribution function, 0 < p < 1, to about 1e-16: Wichura, algorithm AS 241 (1988).
fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        return q * ratio(r, &CENTRE);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = libm::sqrt(-libm::log(tail));
    let x = if r <= 5.0 { ratio(r - 1.6, &TAIL) } else { ratio(r - 5.0, &FAR_TAIL) };
    x.copysign(q)
}

type Ratio = ([f64; 8], [f64; 8]);

/// A polynomial over another, coefficients from the highest power down.
fn ratio(x: f64, (above, below): &Ratio) -> f64 {
    let value = |coefficients: &[f64; 8]| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    value(above) / value(below)
}

/// p within 0.425 of one half.
const CENTRE: Ratio = (
    [
        2509.0809287301227,
        33430.57558358813,
        67265.7709270087,
        45921.95393154987,
        13731.69376550946,
        1971.5909503065513,
        133.14166789178438,
        3.3871328727963665,
    ],
    [
        5226.495278852854,
        28729.085735721943,
        39307.89580009271,
        21213.794301586597,
        5394.196021424751,
        687.1870074920579,
        42.31333070160091,
        1.0,
    ],
);

/// Between that and exp(-25) of the ends.
const TAIL: Ratio = (
    [
        0.0007745450142783414,
        0.022723844989269184,
        0.2417807251774506,
        1.2704582524523684,
        3.6478483247632045,
        5.769497221460691,
        4.630337846156546,
        1.4234371107496835,
    ],
    [
        1.0507500716444169e-09,
        0.0005475938084995345,
        0.015198666563616457,
        0.14810397642748008,
        0.6897673349851,
        1.6763848301838038,
        2.053191626637759,
        1.0,
    ],
);

/// Nearer the ends.
const FAR_TAIL: Ratio = (
    [
        2.0103343992922881e-07,
        2.7115555687434876e-05,
        0.0012426609473880784,
        0.026532189526576124,
        0.29656057182850487,
        1.7848265399172913,
        5.463784911164114,
        6.657904643501103,
    ],
    [
        2.0442631033899397e-15,
        1.421511758316446e-07,
        1.8463183175100548e-05,
        0.0007868691311456133,
        0.014875361290850615,
        0.1369298809227358,
        0.599832206555888,
        1.0,
    ],
);

/// Why a head's decay can't serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeadReason {
    /// `A_log` or `dt_bias` is NaN or infinite, or the decay made of them is NaN.
    NonFinite,
    /// The decay factor is below [`FORGETS_BELOW`]: nothing lasts to the next token.
    Forgets,
    /// The decay factor is 1 in f32: nothing is ever forgotten, and the gradient of the decay is zero.
    Frozen,
}

/// A head that can't carry state, as [`scan`] reports it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeadHead {
    /// The head.
    pub head: usize,
    /// Its decay factor for a gate input of zero.
    pub alpha: f32,
    /// What is wrong with it.
    pub reason: DeadReason,
}

/// Decay factors below this leave less than one part in a million of the state after a single token.
pub const FORGETS_BELOW: f32 = 1e-6;

/// Heads of one GDN layer that are dead before any input: `alpha = exp(-exp(A_log) softplus(dt_bias))` is not a number,
/// below [`FORGETS_BELOW`], or exactly 1. The initial distribution stays well inside (0.20 to 0.99999).
///
/// # Panics
/// When the two slices differ in length.
#[must_use]
pub fn scan(a_log: &[f32], dt_bias: &[f32]) -> Vec<DeadHead> {
    assert_eq!(a_log.len(), dt_bias.len(), "A_log and dt_bias have one number a head");
    let judge = |(head, (&a_log, &dt_bias)): (usize, (&f32, &f32))| {
        let alpha = alpha_at_rest(a_log, dt_bias);
        let reason = match alpha {
            _ if !a_log.is_finite() || !dt_bias.is_finite() || alpha.is_nan() => DeadReason::NonFinite,
            alpha if alpha < FORGETS_BELOW => DeadReason::Forgets,
            1.0 => DeadReason::Frozen,
            _ => return None,
        };
        Some(DeadHead { head, alpha, reason })
    };
    a_log.iter().zip(dt_bias).enumerate().filter_map(judge).collect()
}

/// The decay factor for a gate input of zero, in the f32 arithmetic of the model.
fn alpha_at_rest(a_log: f32, dt_bias: f32) -> f32 {
    let softplus = if dt_bias > 20.0 { dt_bias } else { libm::log1pf(libm::expf(dt_bias)) };
    libm::expf(-libm::expf(a_log) * softplus)
}

#[cfg(test)]
mod tests;
