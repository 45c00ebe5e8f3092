//! `report.html`: a run on one page, drawn again while it goes on.
//!
//! The page stands alone: style, program and data are in it, it loads nothing and works from a disk. It draws itself again
//! until the run is over. A run of any length takes bounded memory and a page of less than 2 MB: curves are means (for loss
//! and gradient norm also the least and the largest) of at most 2,000 buckets of consecutive steps.
//!
//! ```
//! use hymo_train::record::{Note, Record};
//! use hymo_train::report::Report;
//!
//! let mut report = Report::new("my run");
//! report.push(&Record::Note(Note { step: 0, time: 0., text: "began <here>".into() }));
//! assert!(report.render().starts_with("<!doctype html>"));
//! ```
//!
//! When to draw is the caller's: rendering takes milliseconds, and a page every ten seconds or so costs a run nothing.

mod clock;
mod evals;
mod log;
mod page;
mod table;
#[cfg(test)]
mod tests;
mod track;

use crate::Error;
use crate::record::{Record, Start, StepReport};
use clock::Clock;
use evals::{Evals, Notes};
use std::fs;
use std::path::Path;
use track::Track;

/// Points of a curve at most.
const POINTS: usize = 2000;
/// Numbers in the curves that there are one of a layer.
const LAYER_NUMBERS: usize = 24_000;
/// Points of such a curve at most.
const LAYER_POINTS: usize = 600;
/// Columns of an expert load map at most: about as many as a screen shows.
const LOAD_COLUMNS: usize = 256;
/// Fields of all expert load maps, a byte each in the page.
const LOAD_NUMBERS: usize = 200_000;
/// Steps without an update that are marked in the charts.
const REFUSED: usize = 500;

/// Everything that the page shows.
#[derive(Debug)]
pub struct Report {
    title: String,
    start: Option<Start>,
    starts: u64,
    last: Option<StepReport>,
    scalars: Track,
    violation: Track,
    logits: Track,
    load: Track,
    /// Experts of each layer that has them.
    experts: Vec<usize>,
    evals: Evals,
    notes: Notes,
    refused: Vec<u64>,
    clock: Clock,
    /// Lines of the log that could not be read.
    unread: u64,
    ended: bool,
}

impl Report {
    /// An empty report. The title stands until a [`Record::Start`] says what the run is called.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Report {
            title: title.into(),
            start: None,
            starts: 0,
            last: None,
            scalars: Track::new(POINTS, usize::MAX),
            violation: Track::new(LAYER_POINTS, LAYER_NUMBERS),
            logits: Track::new(LAYER_POINTS, LAYER_NUMBERS),
            load: Track::new(LOAD_COLUMNS, LOAD_NUMBERS),
            experts: Vec::new(),
            evals: Evals::default(),
            notes: Notes::default(),
            refused: Vec::new(),
            clock: Clock::default(),
            unread: 0,
            ended: false,
        }
    }

    /// Takes up a record. A step that was there before, or a start behind it, takes back what came after it.
    pub fn push(&mut self, record: &Record) {
        match record {
            Record::Start(start) => self.started(start),
            Record::Step(step) => self.stepped(step),
            Record::Eval(eval) => {
                self.clock.seen(eval.time);
                self.evals.push(eval, self.scalars.last_tokens());
            }
            Record::Note(note) => {
                self.clock.seen(note.time);
                self.notes.push(note.step, note.time, &note.text);
            }
        }
    }

    fn started(&mut self, start: &Start) {
        self.clock.start(start.step, start.time);
        self.back_to(start.step);
        self.ended = false;
        self.starts += 1;
        let from = if start.step == 0 { "began".to_owned() } else { format!("went on from step {}", start.step) };
        self.notes.push(start.step, start.time, &format!("{from}, {}, {}", start.device, start.version));
        self.start = Some(start.clone());
    }

    fn stepped(&mut self, step: &StepReport) {
        self.clock.seen(step.time);
        self.clock.step(step.step, step.time);
        if self.last.as_ref().is_some_and(|last| step.step <= last.step) {
            self.back_to(step.step.saturating_sub(1));
        }
        let (number, tokens) = (step.step, step.total_tokens);
        let mut row: Vec<f64> = page::SCALARS.iter().map(|(_, of)| of(step)).collect();
        row.extend(&step.losses);
        self.scalars.push(number, tokens, &row);
        self.violation.push(number, tokens, &step.max_violation);
        self.logits.push(number, tokens, &step.max_logits);
        let load: Vec<f64> = step.expert_load.iter().flatten().map(|share| f64::from(*share)).collect();
        self.load.push(number, tokens, &load);
        self.experts.clear();
        self.experts.extend(step.expert_load.iter().map(Vec::len));
        if !step.stepped {
            self.refused.push(number);
            if self.refused.len() > REFUSED {
                self.refused.remove(0);
            }
        }
        self.last = Some(step.clone());
    }

    fn back_to(&mut self, step: u64) {
        for track in [&mut self.scalars, &mut self.violation, &mut self.logits, &mut self.load] {
            track.back_to(step);
        }
        self.evals.back_to(step);
        self.refused.retain(|refused| *refused <= step);
        self.last = self.last.take().filter(|last| last.step <= step);
    }

    /// The run is over, however it ended: the page says so and stays as it is.
    pub fn finish(&mut self) {
        self.ended = true;
    }

    fn reached_the_end(&self) -> bool {
        let num_steps = self.start.as_ref().map_or(u64::MAX, |start| start.num_steps);
        self.step() >= num_steps
    }

    /// Steps taken.
    fn step(&self) -> u64 {
        let start = self.start.as_ref().map_or(0, |start| start.step);
        self.last.as_ref().map_or(start, |last| last.step)
    }

    /// The page.
    #[must_use]
    pub fn render(&self) -> String {
        page::render(self)
    }

    /// Renders into a file that is whole at every moment: under a temporary name first, then renamed. Nothing waits for the
    /// disk, since the page can be drawn again from the log.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".tmp");
        let failed = |source| Error::Io { doing: "write", path: path.to_owned(), source };
        fs::write(&temporary, self.render()).map_err(failed)?;
        fs::rename(&temporary, path).map_err(failed)
    }
}
