//! Writing while the next step runs.

use super::{Error, Keep, Result, Snapshot, write};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Instant;

/// Writes one snapshot at a time on a thread of its own. A failure comes to light at the next call, and never costs an
/// earlier checkpoint: old ones are only removed after a new one is complete.
#[derive(Debug)]
pub struct Saver {
    dir: PathBuf,
    keep: Keep,
    running: Option<JoinHandle<Result<Saved>>>,
}

/// A checkpoint that is complete.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Seconds from the beginning of the write to its end.
    pub seconds: f64,
}

impl Saver {
    /// Into `dir`, keeping what `keep` says.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, keep: Keep) -> Self {
        Saver { dir: dir.into(), keep, running: None }
    }

    /// Waits for the snapshot before, then starts to write this one. `best` is the step of the best evaluation so far.
    /// Gives the one before.
    ///
    /// # Errors
    /// What went wrong with the snapshot before; this one is then not written.
    pub fn save(&mut self, snapshot: Snapshot, best: Option<u64>) -> Result<Option<Saved>> {
        let before = self.wait()?;
        let (dir, keep) = (self.dir.clone(), self.keep);
        let work = move || {
            let begun = Instant::now();
            let path = write(&dir, &snapshot)?;
            // The copy's memory is free again before anything else is done.
            drop(snapshot);
            keep.apply(&dir, best)?;
            Ok(Saved { path, seconds: begun.elapsed().as_secs_f64() })
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.running = Some(thread.map_err(|e| Error::io("start a thread for", &self.dir, e))?);
        Ok(before)
    }

    /// Waits until nothing is being written. Gives what was.
    ///
    /// # Errors
    /// What went wrong.
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        let Some(thread) = self.running.take() else { return Ok(None) };
        match thread.join() {
            Ok(done) => done.map(Some),
            Err(_) => Err(Error::unreadable(&self.dir, "the thread that wrote the checkpoint panicked")),
        }
    }
}

impl Drop for Saver {
    /// A run that ends waits for its last checkpoint; whoever wants to know whether it was written calls [`Saver::wait`].
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
