//! What a run shows of itself beside its log: the page and TensorBoard's files.

use crate::Error;
use crate::record::Record;
use crate::report::Report;
use crate::tensorboard::EventWriter;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two pages at least; more where drawing takes longer than a hundredth of it.
const PAUSE: Duration = Duration::from_secs(5);

/// Both are drawn from records, and neither stops a run: what cannot be written is said once and left out from then on.
#[derive(Debug)]
pub(super) struct Views {
    page: PathBuf,
    report: Report,
    drawn: Option<(Instant, Duration)>,
    events: Option<EventWriter>,
    dir: PathBuf,
    failed: bool,
}

impl Views {
    /// Takes up what stands in the folder's log.
    pub fn open(dir: &Path, name: &str) -> Result<Self, Error> {
        let log = dir.join("log.jsonl");
        let report = if log.is_file() { Report::from_log(&log)? } else { Report::new(name) };
        let page = dir.join("report.html");
        Ok(Views { page, report, drawn: None, events: None, dir: dir.to_owned(), failed: false })
    }

    /// Shows a record. Gives back what there is to say of a file that could not be written.
    pub fn push(&mut self, record: &Record) -> Option<String> {
        self.report.push(record);
        let events = self.event(record).err();
        let now = matches!(record, Record::Start(_) | Record::Eval(_)) || self.due();
        let page = if now { self.draw().err() } else { None };
        self.complain(events.or(page))
    }

    /// The run is over, for now.
    pub fn finish(&mut self) -> Option<String> {
        self.report.finish();
        let failed = self.draw().err();
        self.complain(failed)
    }

    fn event(&mut self, record: &Record) -> Result<(), Error> {
        // A file begins with a start: a run that is opened and not started leaves none.
        if matches!(record, Record::Start(_)) {
            self.events = Some(EventWriter::create(&self.dir)?);
        }
        let Some(events) = &mut self.events else { return Ok(()) };
        let done = events.write(record);
        if done.is_err() {
            self.events = None;
        }
        done
    }

    fn due(&self) -> bool {
        !self.failed && self.drawn.is_none_or(|(at, took)| at.elapsed() >= PAUSE.max(100 * took))
    }

    fn draw(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        let done = self.report.write(&self.page);
        self.drawn = Some((Instant::now(), begun.elapsed()));
        done
    }

    fn complain(&mut self, error: Option<Error>) -> Option<String> {
        let error = error?;
        (!std::mem::replace(&mut self.failed, true)).then(|| format!("the run goes on without its pictures: {error}"))
    }
}
