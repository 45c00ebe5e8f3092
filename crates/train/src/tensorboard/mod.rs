//! Event files that TensorBoard reads, also while they grow.
//!
//! | record | tags |
//! |---|---|
//! | step | `loss/main` `loss/mtp1`.. `loss/total` `loss/balance`, `optim/lr` `optim/grad_norm`, `speed/tokens_per_second` `speed/mfu`, `moe/max_violation/layer_k`, `attention/max_logit/layer_k` |
//! | evaluation | `eval/loss` `eval/bits_per_byte` `eval/mtp1`.., and as text `eval/sample_k` |
//! | start, note | as text `run`, `notes` |
//!
//! A layer's k counts from 0 among the layers that have experts, or attention. Values are f32, which is what the format has
//! for scalars.
//!
//! A run that goes on opens a further file in the same folder. Its start says from which step on earlier files are void, so
//! that steps which are taken twice are shown once. (TensorBoard's fast loader, the default, takes no notice of that and voids a
//! tag's later values when the tag's next one comes: an evaluation that was not made again yet still shows there.)
//!
//! ```
//! use hymo_train::record::{Note, Record};
//! use hymo_train::tensorboard::EventWriter;
//!
//! let dir = tempfile::tempdir()?;
//! let mut events = EventWriter::create(dir.path())?;
//! events.write(&Record::Note(Note { step: 10, time: 0., text: "checkpoint".into() }))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod tags;
#[cfg(test)]
mod tests;
mod wire;

use crate::Error;
use crate::record::{Record, now};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use wire::{What, event};

/// TensorBoard takes a file whose name holds `tfevents`, and reads the files of a folder in the order of their names.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".hymo";

/// Writes one event file. Every record is in the file when [`EventWriter::write`] returns.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
    /// Bytes of whole events.
    len: u64,
}

impl EventWriter {
    /// Opens a new file in `dir`, which is made if it is not there, named so that it comes after those already in it.
    ///
    /// # Errors
    /// The folder cannot be read or written.
    pub fn create(dir: &Path) -> Result<Self, Error> {
        EventWriter::create_at(dir, now())
    }

    /// As [`EventWriter::create`], with the time given as seconds since 1970.
    ///
    /// # Errors
    /// As [`EventWriter::create`].
    pub fn create_at(dir: &Path, time: f64) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(failed("make", dir))?;
        // A clock may have been set back, and a run may be started twice in a second.
        let last = newest(dir).map_err(failed("read", dir))?;
        let seconds = last.map_or(0, |last| last.saturating_add(1)).max(time as u64);
        let path = dir.join(format!("{PREFIX}{seconds:010}{SUFFIX}"));
        let file = OpenOptions::new().append(true).create_new(true).open(&path).map_err(failed("make", &path))?;
        let mut writer = EventWriter { file, path, len: 0 };
        writer.event(time, 0, &What::Version)?;
        Ok(writer)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a record.
    ///
    /// # Errors
    /// The file cannot be written. It then ends with the last whole record, and a later one may be written.
    pub fn write(&mut self, record: &Record) -> Result<(), Error> {
        match record {
            Record::Start(start) => {
                // What was seen after the last step that still counts; of a run at its beginning, everything.
                let first = if start.step == 0 { 0 } else { start.step + 1 };
                self.event(start.time, first, &What::Begin)?;
                self.event(start.time, start.step, &What::Values(tags::start(start)))
            }
            Record::Step(step) => self.event(step.time, step.step, &What::Values(tags::step(step))),
            Record::Eval(eval) => self.event(eval.time, eval.step, &What::Values(tags::evaluation(eval))),
            Record::Note(note) => self.event(note.time, note.step, &What::Values(tags::note(note))),
        }
    }

    /// One write, so that a reader never waits long for the rest of an event.
    fn event(&mut self, time: f64, step: u64, what: &What) -> Result<(), Error> {
        let bytes = event(time, step, what).framed();
        if let Err(source) = self.file.write_all(&bytes) {
            // A reader gives up a file at the first broken frame: half a one must not stay in front of the next. If this
            // fails as well there is nothing left to do, and the first failure is the one to tell.
            let _ = self.file.set_len(self.len);
            return Err(failed("write", &self.path)(source));
        }
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// The largest time in the names of a folder's event files, whoever wrote them.
fn newest(dir: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let seconds = rest.and_then(|rest| rest.split('.').next()?.parse().ok());
        newest = newest.max(seconds);
    }
    Ok(newest)
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { doing, path, source }
}
