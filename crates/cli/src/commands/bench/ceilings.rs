//! What this machine can do at most: matrix products by the `gemm` crate, and memory traffic.

use hymo_ops::bench::{Form, Product};
use hymo_tensor::par;

use super::clock::Times;

/// Measured ceilings.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// FLOP/s of a large matrix product.
    pub flops: f64,
    /// Bytes a second, read and written, of a scaled copy much larger than the caches.
    pub bytes: f64,
}

impl Ceilings {
    /// Takes about a second.
    pub fn measure() -> Self {
        Ceilings { flops: products(), bytes: traffic() }
    }
}

fn products() -> f64 {
    let product = Product { form: Form::Nt, mnk: [1024; 3], times: 1 };
    let (a, b, mut c) = (vec![0.5; 1 << 20], vec![0.25; 1 << 20], vec![0.; 1 << 20]);
    let mut times = Times::default();
    for _ in 0..12 {
        times.add(|| product.run(&a, &b, &mut c));
    }
    product.flops() as f64 / (times.min() * 1e-3)
}

fn traffic() -> f64 {
    const N: usize = 32 << 20;
    const BLOCK: usize = 1 << 18;
    let (from, mut to) = (vec![1f32; N], vec![0f32; N]);
    let mut times = Times::default();
    for round in 0..6 {
        let factor = 1. + round as f32;
        times.add(|| {
            let tasks: Vec<_> = to.chunks_mut(BLOCK).zip(from.chunks(BLOCK)).collect();
            par::each(tasks, |_, (to, from)| to.iter_mut().zip(from).for_each(|(to, &x)| *to = factor * x));
        });
    }
    std::hint::black_box(&to);
    8. * N as f64 / (times.min() * 1e-3)
}
