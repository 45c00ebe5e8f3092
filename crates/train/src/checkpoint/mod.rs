//! Checkpoints: folders `step-N` of safetensors files and a manifest, that load bit for bit or say what is wrong.
//!
//! ```text
//! checkpoints/
//!   step-1000/
//!     rank00000.safetensors   the tensors this rank wrote
//!     manifest.json           every tensor's global shape and pieces, every file's size and checksum, configuration,
//!                             the loop's state (step, position in the data, schedule, generators), and its own checksum
//! ```
//!
//! A folder is written under another name, its files and itself are made durable, the manifest comes last, and only then is
//! it renamed: a kill at any moment leaves either all of it or a name that nobody loads (HAZARD 14). Before anything of a
//! checkpoint is used, all its sizes and checksums are verified; one that fails is named with its fault and the one before
//! it is used. A tensor may lie in pieces in several files, as ranks that own parts of it write them; whoever loads sees the
//! whole. Source: MATH 9.2.

mod error;
mod keep;
mod manifest;
mod read;
mod save;
mod write;

pub use error::Error;
pub use keep::Keep;
pub use manifest::{Chunk, FileEntry, Manifest, Numbers, TensorEntry};
pub use read::{Checkpoint, Found, newest};
pub use save::{Saved, Saver};
pub use write::{Snapshot, write};

use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Error>;

/// The version of the format that this code writes and the only one that it reads.
pub const FORMAT: u32 = 2;

const MANIFEST: &str = "manifest.json";

/// `step-N` in `dir`.
fn folder(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step}"))
}

/// The steps whose folders are in `dir`, newest first; folders under any other name are not looked at. A `dir` that is not
/// there has none.
fn steps(dir: &Path) -> Result<Vec<u64>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("read", dir, e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| Error::io("read", dir, e))?.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")).and_then(|n| n.parse().ok());
        // `step-007` would be read back as `step-7`.
        steps.extend(step.filter(|step| folder(dir, *step).file_name() == Some(&name)));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}
