//! What a run prints before its first step: everything that would be a surprise later.

use std::fmt::Write;

use hymo_data::corpus::Corpus;
use hymo_model::{Cost, CostOptions, RunConfig};
use hymo_tensor::{Device, par};
use hymo_train::run::Run;

use super::memory;
use crate::numbers::{grouped, short, time};
use crate::threads::threads;

/// Share of the measured matrix rate that training reaches about; the bar corrects it from the first step on.
const USUAL_MFU: f64 = 0.4;

pub fn start(run: &Run, peak: f64) -> anyhow::Result<String> {
    let (trainer, mut text) = (run.trainer(), String::new());
    let config = trainer.config();
    let RunConfig { model, schedule, train, .. } = config;
    let cost = Cost::new(model, CostOptions { context: model.context_length, batch: train.micro_rows })?;
    let (active, stored) = trainer.params_count();
    let tokens = (train.rows * model.context_length) as u64;
    let left = schedule.num_steps - trainer.state().step.min(schedule.num_steps);
    let seconds = left as f64 * tokens as f64 * trainer.flops_per_token() / (peak * USUAL_MFU);
    let mut line = |name: &str, value: String| writeln!(text, "{name:<14} {value}");
    line("folder", run.dir().display().to_string())?;
    let (device, rate) = (run.ctx().describe(), format!("{:.0} GFLOP/s in matrix products", peak * 1e-9));
    line(
        "device",
        match run.ctx().device() {
            Device::Cpu => format!("{device}: {}, {} threads, {rate}", par::instructions(), threads()),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => format!("{device}, {rate}"),
        },
    )?;
    line("model", format!("{} active of {} parameters", short(active), short(stored)))?;
    line(
        "step",
        format!(
            "{} tokens: {} rows of {}, {} at a time; {} FLOP a token",
            grouped(tokens),
            train.rows,
            grouped(model.context_length as u64),
            train.micro_rows,
            short(trainer.flops_per_token() as u64)
        ),
    )?;
    line("memory", memory::Plan::new(trainer, &cost).to_string())?;
    line("data", data(trainer.corpus(), schedule.num_steps * tokens))?;
    line(
        "held out",
        match run.held_out_tokens() {
            0 => "nothing: no evaluation".to_owned(),
            n => format!(
                "{} tokens, {} of them at an evaluation",
                grouped(n),
                match config.eval.tokens {
                    0 => "all".to_owned(),
                    most => grouped(most.min(n)),
                }
            ),
        },
    )?;
    line(
        "schedule",
        format!("{} steps, {} to go: about {}", grouped(schedule.num_steps), grouped(left), time(seconds)),
    )?;
    text.push('\n');
    write!(text, "{}", trainer.optimizer().groups())?;
    text.push('\n');
    Ok(text)
}

fn data(corpus: &Corpus, wanted: u64) -> String {
    let sets = corpus.sets();
    let tokens: u64 = sets.iter().map(|set| set.dataset.tokens()).sum();
    let documents: u64 = sets.iter().map(|set| set.dataset.documents()).sum();
    let epochs = wanted as f64 / tokens as f64;
    let folders = if sets.len() == 1 { String::new() } else { format!(" in {} folders", sets.len()) };
    format!("{} tokens, {} documents{folders}: {epochs:.2} epochs", grouped(tokens), grouped(documents))
}
