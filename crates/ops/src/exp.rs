//! e^x for whole rows: without branches, tables or calls, so that loops over it become vector code.

use hymo_tensor::{DType, Real};

/// e^x: [`exp`] in `f32`, the library's in `f64`.
#[inline(always)]
pub fn exp_real<T: Real>(x: T) -> T {
    match T::DTYPE {
        // Conversions there and back, which the compiler drops.
        DType::F32 => T::of(f64::from(exp(x.f64() as f32))),
        _ => x.exp(),
    }
}

/// e^x for x <= 88, within 2 units in the last place; 0 below -87. NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r, and n written into the exponent.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.;
    // ln 2 in two parts, the first with few enough bits that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1., 1.] {
        p = p * r + c;
    }
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87. { 0. } else { p * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_two_units_of_double_precision() {
        let mut worst = 0f64;
        for i in 0..2_000_000 {
            let x = -87. + i as f32 * (175. / 2e6);
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / want - 1.).abs());
        }
        assert!(worst < 2. * f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn the_ends() {
        assert_eq!((exp(0.), exp(-0.), exp(-87.1), exp(-1e30)), (1., 1., 0., 0.));
        assert_eq!(exp(f32::NEG_INFINITY), 0.);
        assert!(exp(f32::NAN).is_nan());
    }
}
