//! What a person sees of a run: a line a step, and a bar where there is a terminal.

use std::io::{self, IsTerminal, Write};

use hymo_train::StepReport;
use hymo_train::record::{Evaluation, Record};
use hymo_train::run::Watch;
use indicatif::{ProgressBar, ProgressStyle};

use crate::decoding::plain;
use crate::numbers::{grouped, time};
use crate::stop::Stop;

/// How a run is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A line a step.
    Lines,
    /// A line every so many steps.
    Every(u64),
    /// The lines of the log.
    Json,
}

/// Prints what a run writes down.
pub struct Screen<'o> {
    style: Style,
    steps: u64,
    stop: Option<Stop>,
    bar: Option<ProgressBar>,
    out: &'o mut dyn Write,
    /// The first line that could not be printed: the run goes on, and the command says so at its end.
    failed: Option<io::Error>,
    /// Seconds of a step, lately.
    pace: f64,
}

impl<'o> Screen<'o> {
    /// Shows steps behind `step`.
    pub fn new(style: Style, step: u64, steps: u64, stop: Option<Stop>, out: &'o mut dyn Write) -> Self {
        let bar = (style != Style::Json && io::stderr().is_terminal()).then(|| {
            let template = "{wide_bar} {human_pos}/{human_len} steps, {msg}";
            let style = ProgressStyle::with_template(template).expect("invariant: a valid template");
            ProgressBar::new(steps).with_style(style).with_position(step)
        });
        Screen { style, steps, stop, bar, out, failed: None, pace: 0. }
    }

    /// Clears the bar; what could not be printed is an error now.
    pub fn finish(self) -> io::Result<()> {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
        self.failed.map_or(Ok(()), Err)
    }

    fn print(&mut self, line: &str) {
        let out = &mut *self.out;
        let mut write = || writeln!(out, "{line}").and_then(|()| out.flush());
        let done = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        if let (Err(error), None) = (done, &self.failed) {
            self.failed = Some(error);
        }
    }
}

impl Watch for Screen<'_> {
    fn record(&mut self, record: &Record) {
        if let Record::Step(step) = record {
            // The first steps warm up caches and pools.
            self.pace = if self.pace == 0. { step.seconds } else { 0.9 * self.pace + 0.1 * step.seconds };
            if let Some(bar) = &self.bar {
                bar.set_position(step.step);
                let left = self.steps.saturating_sub(step.step) as f64 * self.pace;
                bar.set_message(format!("{} left", time(left)));
            }
        }
        if self.style == Style::Json {
            return match serde_json::to_string(record) {
                Ok(line) => self.print(&line),
                Err(error) => self.failed = Some(error.into()),
            };
        }
        match record {
            Record::Start(_) => {}
            Record::Step(step) => {
                let every = if let Style::Every(n) = self.style { n } else { 1 };
                if step.step % every == 0 || step.step == self.steps || !step.stepped {
                    self.print(&line(step, self.steps));
                }
            }
            Record::Eval(evaluation) => self.print(&evaluated(evaluation)),
            Record::Note(note) => self.print(&format!("-- {}", note.text)),
        }
    }

    fn evaluating(&mut self, tokens: u64, of: u64) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("evaluating, {} of {} tokens", grouped(tokens), grouped(of)));
        }
    }

    fn stop(&mut self) -> bool {
        self.stop.as_ref().is_some_and(Stop::asked)
    }
}

/// A step in a line.
fn line(s: &StepReport, steps: u64) -> String {
    let [main, mtp @ ..] = s.losses.as_slice() else { return format!("step {}", s.step) };
    let width = steps.to_string().len();
    let mut line = format!("step {:>width$}/{steps}  loss {main:.4}", s.step);
    if !mtp.is_empty() {
        let mtp: Vec<String> = mtp.iter().map(|loss| format!("{loss:.3}")).collect();
        line += &format!("  mtp {}", mtp.join(" "));
    }
    line += &format!("  lr {:.2e}  grad {:.3}  {:>6} tok/s", s.lr, s.grad_norm, grouped(s.tokens_per_second() as u64));
    if let Some(mfu) = s.mfu {
        line += &format!("  mfu {:.0}%", 100. * mfu);
    }
    let worst = s.max_violation.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if worst.is_finite() {
        line += &format!("  maxvio {worst:.2}");
    }
    line += &format!("  {} tokens, epoch {}", grouped(s.total_tokens), s.epoch);
    if !s.stepped {
        line += "  REFUSED";
    }
    line
}

fn evaluated(e: &Evaluation) -> String {
    let best = if e.best { ", the best so far" } else { "" };
    let mut text = format!(
        "== step {}: held out {:.4} bits a byte, loss {:.4}, {} tokens in {:.1} s{best}",
        e.step,
        e.bits_per_byte,
        e.loss,
        grouped(e.tokens),
        e.seconds
    );
    for sample in &e.samples {
        for part in plain(&format!("{}|{}", sample.prompt, sample.text)).lines() {
            text += &format!("\n   | {part}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use hymo_train::record::Sample;

    fn report() -> StepReport {
        StepReport {
            step: 7,
            time: 0.,
            losses: vec![5.12341, 5.5, 5.75],
            total: 6.,
            balance: 0.,
            lr: 1.5e-3,
            grad_norm: 0.71,
            stepped: true,
            refused: None,
            max_violation: vec![0.5, 0.75],
            expert_load: Vec::new(),
            max_logits: Vec::new(),
            tokens: 2048,
            total_tokens: 14_336,
            epoch: 0,
            seconds: 0.5,
            data_seconds: 0.,
            mfu: Some(0.41),
        }
    }

    #[test]
    fn a_step_in_a_line() {
        let expected = "step    7/1000  loss 5.1234  mtp 5.500 5.750  lr 1.50e-3  grad 0.710   4,096 tok/s  mfu 41%  \
                        maxvio 0.75  14,336 tokens, epoch 0";
        assert_eq!(line(&report(), 1000), expected);
        let refused = StepReport { stepped: false, losses: vec![f64::NAN], mfu: None, ..report() };
        assert!(line(&refused, 10).starts_with("step  7/10  loss NaN  lr") && line(&refused, 10).ends_with("REFUSED"));
    }

    #[test]
    fn samples_cannot_move_the_cursor() {
        let sample = Sample { prompt: "a\x1b[2J".into(), text: "b\nc\rd".into() };
        let e = Evaluation {
            step: 1,
            time: 0.,
            loss: 1.,
            bits_per_byte: 2.,
            mtp_losses: Vec::new(),
            tokens: 1000,
            bytes: 1,
            best: true,
            samples: vec![sample],
            seconds: 1.,
        };
        let text = evaluated(&e);
        assert!(text.starts_with("== step 1: held out 2.0000 bits a byte, loss 1.0000, 1,000 tokens"), "{text}");
        assert!(text.ends_with("the best so far\n   | a?[2J|b\n   | c?d"), "{text}");
    }
}
