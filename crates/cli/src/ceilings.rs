//! What this machine can do at most: matrix products by the `gemm` crate, and memory traffic.

use hymo_ops::bench::{Form, Product};
use hymo_tensor::{Ctx, par};

use crate::clock::Times;

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
        Ceilings { flops: on_processor(), bytes: traffic() }
    }
}

/// FLOP/s of a large matrix product on what computes, in a tenth of a second; on a GPU in bf16, of random numbers.
///
/// # Errors
/// What goes wrong on a GPU.
pub fn products(ctx: &Ctx) -> anyhow::Result<f64> {
    #[cfg(feature = "cuda")]
    if let hymo_tensor::Device::Cuda(gpu) = ctx.device() {
        return on_gpu(ctx, gpu);
    }
    let _ = ctx;
    Ok(on_processor())
}

#[cfg(feature = "cuda")]
fn on_gpu(ctx: &Ctx, gpu: &hymo_cuda::Gpu) -> anyhow::Result<f64> {
    const N: usize = 8192;
    let ctx = &ctx.clone().bf16();
    let mut noise = hymo_ops::check::Noise::new(1);
    let numbers: Vec<f32> = (0..N * N).map(|_| noise.uniform() as f32 - 0.5).collect();
    let a = hymo_tensor::Tensor::from_slice(ctx, &[N, N], &numbers)?.cast_on_gpu(ctx, hymo_tensor::DType::BF16)?;
    let c = ctx.empty_real(hymo_tensor::DType::BF16, &[N, N])?;
    let [a, c] = [a.gpu()?.matrix("ceiling")?, c.gpu()?.matrix("ceiling")?];
    let product = hymo_cuda::Product { mnk: [N; 3], batch: 1, transposed: [false, true], alpha: 1., beta: 0. };
    let mut times = Times::default();
    for _ in 0..4 {
        gpu.synchronize()?;
        times.add(|| (0..10).try_for_each(|_| gpu.product(&product, c, a, a)).and_then(|()| gpu.synchronize()))?;
    }
    Ok(20. * (N * N * N) as f64 / (times.min() * 1e-3))
}

fn on_processor() -> f64 {
    let product = Product { form: Form::Nt, mnk: [1024; 3], times: 1 };
    let (a, b, mut c) = (vec![0.5; 1 << 20], vec![0.25; 1 << 20], vec![0.; 1 << 20]);
    let mut times = Times::default();
    for _ in 0..12 {
        times.add(|| product.run(&a, &b, &mut c));
    }
    product.flops() as f64 / (times.min() * 1e-3)
}

/// Bytes a second read of memory much larger than the caches: what decoding one token after the other waits for.
pub fn reading() -> f64 {
    const N: usize = 64 << 20;
    const BLOCK: usize = 1 << 16;
    let from: Vec<u64> = (0..N as u64).collect();
    let mut times = Times::default();
    for _ in 0..6 {
        let mut found = vec![0; N / BLOCK];
        times.add(|| {
            let tasks: Vec<_> = found.iter_mut().zip(from.chunks(BLOCK)).collect();
            par::each(tasks, |_, (to, from)| *to = from.iter().fold(0, |a, &x| a ^ x));
        });
        std::hint::black_box(&found);
    }
    8. * N as f64 / (times.min() * 1e-3)
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
