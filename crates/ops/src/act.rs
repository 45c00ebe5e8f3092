//! The scalar functions that several operations share, with their derivatives. One form of each, for every path: two
//! paths that round an activation differently are two models (HAZARD 7).

use crate::exp::exp_real;
use hymo_tensor::Real;

/// 1 / (1 + e^-x), without overflow on either side.
#[inline(always)]
pub fn sigmoid<T: Real>(x: T) -> T {
    let e = exp_real(-x.abs());
    let s = (T::one() + e).recip();
    if x >= T::zero() { s } else { e * s }
}

/// x sigmoid(x).
#[inline(always)]
pub fn silu<T: Real>(x: T) -> T {
    x * sigmoid(x)
}

/// The derivative of [`silu`].
#[inline(always)]
pub fn silu_grad<T: Real>(x: T) -> T {
    let s = sigmoid(x);
    s * (T::one() + x * (T::one() - s))
}

/// ln(1 + e^x); x itself above 20, where the two agree in f32. Its derivative is [`sigmoid`].
#[inline(always)]
pub fn softplus<T: Real>(x: T) -> T {
    if x > T::of(20.) { x } else { x.exp().ln_1p() }
}

/// The gate of the gated norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateAct {
    /// sigmoid(z): the default of the presets.
    Sigmoid,
    /// z sigmoid(z): what public references use.
    Silu,
}

impl GateAct {
    /// The gate's value.
    #[inline(always)]
    pub fn value<T: Real>(self, z: T) -> T {
        match self {
            GateAct::Sigmoid => sigmoid(z),
            GateAct::Silu => silu(z),
        }
    }

    /// The gate's derivative.
    #[inline(always)]
    pub fn grad<T: Real>(self, z: T) -> T {
        match self {
            GateAct::Sigmoid => {
                let s = sigmoid(z);
                s * (T::one() - s)
            }
            GateAct::Silu => silu_grad(z),
        }
    }

    /// Both from one exponential, the bits of [`GateAct::value`] and [`GateAct::grad`].
    #[inline(always)]
    pub fn value_and_grad<T: Real>(self, z: T) -> (T, T) {
        let s = sigmoid(z);
        match self {
            GateAct::Sigmoid => (s, s * (T::one() - s)),
            GateAct::Silu => (z * s, s * (T::one() + z * (T::one() - s))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_finite_and_derivatives_match_differences() {
        for x in [-1e4f32, -100., -0., 0., 30., 1e4] {
            assert!(
                sigmoid(x).is_finite() && silu(x).is_finite() && softplus(x).is_finite() && silu_grad(x).is_finite()
            );
        }
        for x in [-5f64, -0.3, 0., 0.7, 6., 25.] {
            let h = 1e-6;
            let slope = |f: &dyn Fn(f64) -> f64| (f(x + h) - f(x - h)) / (2. * h);
            assert!((slope(&softplus) - sigmoid(x)).abs() < 1e-8);
            for act in [GateAct::Sigmoid, GateAct::Silu] {
                assert!((slope(&|z| act.value(z)) - act.grad(x)).abs() < 1e-8);
                assert_eq!(act.value_and_grad(x), (act.value(x), act.grad(x)));
            }
        }
    }
}
