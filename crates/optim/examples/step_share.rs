//! What the optimizer takes of a training step: `cargo run --release -p hymo-optim --example step_share [PRESET]`.
//!
//! Forward and backward of 2,048 tokens and one optimizer step by turns, on random tokens; the ratio is the optimizer's
//! time over that of a step of 8,192 tokens, four of those and one of these. Medians, and the extremes.
#![allow(clippy::print_stdout)] // a program of its own

use hymo_model::config::OptimConfig;
use hymo_model::{Batch, HyMo, Options, Params, presets};
use hymo_ops::check::Noise;
use hymo_optim::{Optimizer, Outcome};
use hymo_tape::Tape;
use hymo_tensor::Ctx;
use std::time::Instant;

const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let preset = presets::preset(&std::env::args().nth(1).unwrap_or_else(|| "hymo-nano".to_owned()))?;
    let (ctx, model) = (Ctx::cpu(), preset.model());
    let (net, mut params) = (HyMo::new(&model)?, Params::init(&ctx, &model, 1)?);
    let config = OptimConfig::default();
    let mut optim = Optimizer::new(&ctx, &params, &config)?;
    let rows = 4;
    let len = 512.min(model.context_length);
    let noise = Noise::new(1).normals(rows * (len + model.mtp.n_modules + 1));
    let tokens: Vec<i32> = noise.iter().map(|x| (x.abs() * 1e6) as i32 % model.vocab_size as i32).collect();
    let batch = Batch::new(rows, len, model.mtp.n_modules, &tokens, &vec![0; tokens.len()])?;
    let (mut passes, mut steps) = (Vec::new(), Vec::new());
    let mut grads = Some(params.zero_grads(&ctx)?);
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let mut tape = Tape::training(&ctx, grads.take().ok_or("no gradients")?);
        let losses = net.loss(&mut tape, &params, &batch, &Options::default())?;
        let own = tape.backward(&losses.seeds())?.into_params().ok_or("no gradients")?;
        drop(losses);
        let pass = start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        let Outcome::Stepped { .. } = optim.step(&ctx, params.flats_mut(), own.flats(), config.lr)? else {
            return Err("a gradient is not finite".into());
        };
        let step = start.elapsed().as_secs_f64() * 1e3;
        if round > 0 {
            passes.push(pass);
            steps.push(step);
        }
        let mut own = own;
        own.flats_mut().iter_mut().try_for_each(|flat| flat.flat_mut::<f32>().map(|g| g.fill(0.0)))?;
        grads = Some(own);
    }
    println!(
        "{}: {} numbers, {}",
        preset.name,
        params.table().params().iter().map(|p| p.numel()).sum::<usize>(),
        hymo_ops::gemm::kernels()
    );
    let [pass, step] = [passes, steps].map(|mut t| {
        t.sort_by(f64::total_cmp);
        println!("median {:.1} ms ({:.1} to {:.1})", t[t.len() / 2], t[0], t[t.len() - 1]);
        t[t.len() / 2]
    });
    let whole = pass * 8192.0 / (rows * len) as f64;
    println!("optimizer: {:.1}% of a step of 8,192 tokens", 100.0 * step / (step + whole));
    Ok(())
}
