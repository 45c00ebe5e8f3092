//! How much memory a run takes: what is planned before it, and what it came to.

use std::fmt;

use hymo_model::Cost;
use hymo_tensor::Device;
use hymo_train::Trainer;

use crate::numbers::bytes;

/// The program, its threads, the tokenizer and what the measuring of the rate leaves behind.
const PROCESS: u64 = 78 << 20;
/// Share of the tensors that rounding of sizes and the allocator add.
const ROUNDING: f64 = 0.06;

/// Bytes by what they are for.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Weights, their average, gradients, moments; on a GPU the copy for the products too.
    state: u64,
    /// What a micro-batch keeps for the backward pass.
    activations: u64,
    /// The copy that is written while the next step runs.
    snapshot: u64,
    /// What comes and goes within a step: half of the largest block's gradients, two chunks of logits, the optimizer's.
    working: u64,
    on_gpu: bool,
    micro_rows: usize,
    recompute: usize,
}

impl Plan {
    /// From the same counts as `hymo inspect`. On the processor within 5% of what is measured (LOG.md, 2026-12-01).
    pub fn new(trainer: &Trainer, cost: &Cost) -> Self {
        let (model, train) = (&trainer.config().model, &trainer.config().train);
        let on_gpu = *trainer.ctx().device() != Device::Cpu;
        let wide = trainer.ctx().activations().size() == 4;
        let batch = (train.micro_rows * model.context_length) as u64;
        let a = &cost.activations;
        let (all, least) = match wide {
            true => (a.per_token_f32, a.checkpointed_per_token_f32),
            false => (a.per_token_bf16, a.checkpointed_per_token_bf16),
        };
        let spared = if train.recompute == 0 { 0 } else { all.saturating_sub(least) / train.recompute as u64 };
        let t = &cost.training_state;
        let average = if trainer.config().optim.ema > 0. { t.master } else { 0 };
        let snapshot = t.master + t.normuon + t.adamw + average;
        let width = if wide { 4 } else { 2 };
        let block = a.blocks.iter().map(|b| width * b.numbers + 4 * b.wide).max().unwrap_or(0);
        let logits = hymo_ops::cross_entropy::logits_bytes(batch as usize, model.vocab_size);
        Plan {
            state: snapshot + t.gradients + if wide { 0 } else { t.bf16_copy },
            activations: batch.saturating_mul(all - spared),
            snapshot,
            working: batch.saturating_mul(block) / 2 + 2 * logits + trainer.optimizer().scratch_bytes(),
            on_gpu,
            micro_rows: train.micro_rows,
            recompute: train.recompute,
        }
    }

    /// What to change where a GPU with `room` bytes left does not hold the run (HAZARD 24's rule for training).
    pub fn refusal(&self, room: u64) -> Option<String> {
        if self.total() <= room {
            return None;
        }
        let held = format!("this run holds {} on the GPU, which has {} for it", bytes(self.total()), bytes(room));
        let row = (self.activations + self.working).div_ceil(self.micro_rows.max(1) as u64).max(1);
        let rows = room.saturating_sub(self.state) / row;
        let again = if self.recompute == 1 { "" } else { ", or train.recompute = 1, which keeps less of each layer" };
        Some(match rows {
            0 => format!(
                "{held}: {} are weights, gradients and moments alone; take a smaller model{again}",
                bytes(self.state)
            ),
            _ => format!("{held}: set train.micro_rows = {rows} ({} now){again}", self.micro_rows),
        })
    }

    /// All of it where the tensors are: on a GPU without the process and the copy, which are in the host's memory.
    pub fn total(&self) -> u64 {
        let tensors = self.state + self.activations;
        if self.on_gpu {
            return tensors + self.working;
        }
        let rounded = (tensors + self.snapshot) as f64 * (1. + ROUNDING);
        PROCESS + rounded as u64 + self.working
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "about {}: {} weights, gradients and moments, {} activations of a micro-batch",
            bytes(self.total()),
            bytes(self.state),
            bytes(self.activations)
        )?;
        match self.on_gpu {
            true => write!(f, "; {} of the host's to write a checkpoint", bytes(self.snapshot)),
            false => write!(f, ", {} to write a checkpoint beside the steps", bytes(self.snapshot)),
        }
    }
}

/// The most memory that this process ever held, where the system tells.
pub fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that fits is let through; one that does not is told the number to change, and that number fits.
    #[test]
    fn a_run_that_does_not_fit_says_what_would() {
        let gib = 1u64 << 30;
        let plan = |micro_rows: usize, recompute| {
            let (activations, working) = (6 * gib * micro_rows as u64, gib / 4 * micro_rows as u64);
            Plan { state: 10 * gib, activations, snapshot: 0, working, on_gpu: true, micro_rows, recompute }
        };
        assert_eq!(plan(8, 0).refusal(60 * gib), None);
        let told = plan(8, 0).refusal(40 * gib).unwrap();
        assert!(told.contains("train.micro_rows = 4 (8 now), or train.recompute = 1"), "{told}");
        assert_eq!(plan(4, 0).refusal(40 * gib), None);
        let told = plan(1, 1).refusal(12 * gib).unwrap();
        assert!(told.contains("smaller model") && !told.contains("train.recompute"), "{told}");
    }
}
