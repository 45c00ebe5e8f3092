//! Evaluations and notes, as many as a page has room for.

use crate::record::{Evaluation, Note, Sample};
use serde::Serialize;
use std::collections::VecDeque;

/// Evaluations whose numbers are kept. Beyond that every second one goes, but never the best or the latest.
const POINTS: usize = 1000;
/// Evaluations whose samples are kept.
const SAMPLED: usize = 24;
/// Bytes of a prompt or a text, less where an evaluation has very many; and of all of them in a page, where a byte may
/// take six.
const SAMPLE: usize = 4_000;
const SAMPLES: usize = 64_000;
const NOTES: usize = 200;
const NOTE: usize = 400;

/// An evaluation's numbers.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Point {
    pub(super) step: u64,
    pub(super) tokens: u64,
    pub(super) loss: f64,
    pub(super) bits_per_byte: f64,
    pub(super) mtp: Vec<f64>,
    pub(super) best: bool,
}

/// What a model wrote at a step.
#[derive(Debug, Serialize)]
pub(super) struct Written {
    step: u64,
    samples: Vec<Sample>,
}

#[derive(Debug, Default)]
pub(super) struct Evals {
    pub(super) points: Vec<Point>,
    written: VecDeque<Written>,
}

impl Evals {
    pub(super) fn push(&mut self, eval: &Evaluation, tokens: u64) {
        if eval.step > 0 {
            self.back_to(eval.step - 1);
        } else {
            *self = Evals::default();
        }
        if eval.best {
            self.points.iter_mut().for_each(|point| point.best = false);
        }
        self.points.push(Point {
            step: eval.step,
            tokens,
            loss: eval.loss,
            bits_per_byte: eval.bits_per_byte,
            mtp: eval.mtp_losses.clone(),
            best: eval.best,
        });
        if self.points.len() > POINTS {
            let latest = self.points.len() - 1;
            let mut at = 0;
            self.points.retain(|point| {
                at += 1;
                at % 2 == 0 || at > latest || point.best
            });
        }
        if !eval.samples.is_empty() {
            let room = SAMPLE.min(SAMPLES / (2 * eval.samples.len()));
            let samples =
                eval.samples.iter().map(|s| Sample { prompt: cut(&s.prompt, room), text: cut(&s.text, room) });
            self.written.push_back(Written { step: eval.step, samples: samples.collect() });
            if self.written.len() > SAMPLED {
                self.written.pop_front();
            }
        }
    }

    pub(super) fn back_to(&mut self, step: u64) {
        self.points.retain(|point| point.step <= step);
        self.written.retain(|written| written.step <= step);
    }

    /// The latest first, as many as there is room for, at least one.
    pub(super) fn written(&self) -> Vec<&Written> {
        let mut bytes = 0;
        let fits = |written: &&Written| {
            let before = bytes;
            bytes += written.samples.iter().map(|s| s.prompt.len() + s.text.len()).sum::<usize>();
            before == 0 || bytes <= SAMPLES
        };
        self.written.iter().rev().take_while(fits).collect()
    }
}

/// What happened. Nothing of it is taken back when steps are: it did happen.
#[derive(Debug, Default)]
pub(super) struct Notes {
    latest: VecDeque<Note>,
    /// Earlier ones that are no longer kept.
    pub(super) dropped: u64,
}

impl Notes {
    pub(super) fn push(&mut self, step: u64, time: f64, text: &str) {
        self.latest.push_back(Note { step, time, text: cut(text, NOTE) });
        if self.latest.len() > NOTES {
            self.latest.pop_front();
            self.dropped += 1;
        }
    }

    /// The latest first.
    pub(super) fn latest(&self) -> Vec<&Note> {
        self.latest.iter().rev().collect()
    }
}

fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let end = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}\u{2026}", &text[..end])
}
