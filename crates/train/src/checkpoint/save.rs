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
    running: Option<JoinHandle<(Result<Saved>, Snapshot)>>,
    /// What was written last, for its memory.
    spare: Option<Snapshot>,
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
        Saver { dir: dir.into(), keep, running: None, spare: None }
    }

    /// Takes a snapshot whose memory the next one may have.
    pub fn lend(&mut self, spare: Snapshot) {
        self.spare = Some(spare);
    }

    /// Waits for what is being written, and gives the memory of a snapshot that is no longer needed, for
    /// [`Snapshot::over`], if there is one.
    ///
    /// # Errors
    /// What went wrong with the snapshot before.
    pub fn spare(&mut self) -> Result<(Option<Saved>, Option<Snapshot>)> {
        Ok((self.wait()?, self.spare.take()))
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
            let written = write(&dir, &snapshot).and_then(|path| {
                keep.apply(&dir, best)?;
                Ok(Saved { path, seconds: begun.elapsed().as_secs_f64() })
            });
            (written, snapshot)
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
            Ok((written, snapshot)) => {
                self.spare = Some(snapshot);
                written.map(Some)
            }
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
