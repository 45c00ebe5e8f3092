//! Which checkpoints stay.

use super::write::{remove, sync};
use super::{Error, MANIFEST, Result, folder, steps};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What is kept: a checkpoint stays if any of these says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Keep {
    /// The newest this many; at least one stays whatever this says.
    pub last: usize,
    /// Those whose step is a multiple of this; 0 is none.
    pub every: u64,
    /// The one with the best evaluation.
    pub best: bool,
}

impl Default for Keep {
    fn default() -> Self {
        Keep { last: 3, every: 0, best: true }
    }
}

impl Keep {
    /// Whether the checkpoint of `step` stays, `newer` others being newer.
    fn keeps(self, step: u64, newer: usize, best: Option<u64>) -> bool {
        newer < self.last.max(1) || (self.every > 0 && step % self.every == 0) || (self.best && best == Some(step))
    }

    /// Removes from `dir` what need not stay, and gives what it removed. `best` is the step of the best evaluation.
    ///
    /// # Errors
    /// What the file system says.
    pub fn apply(self, dir: &Path, best: Option<u64>) -> Result<Vec<PathBuf>> {
        let mut removed = Vec::new();
        for (newer, step) in steps(dir)?.into_iter().enumerate() {
            if self.keeps(step, newer, best) {
                continue;
            }
            let path = folder(dir, step);
            // The manifest first: from there on it is unfinished, not broken, whenever a kill falls.
            match std::fs::remove_file(path.join(MANIFEST)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &path, e)),
                _ => sync(&path)?,
            }
            remove(&path)?;
            removed.push(path);
        }
        Ok(removed)
    }
}
