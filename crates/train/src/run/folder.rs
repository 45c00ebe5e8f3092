//! A run's folder and what stands in it.
//!
//! ```text
//! run.toml           the resolved configuration, of the newest start
//! tokenizer.json     the data's
//! log.jsonl          a line for each start, step, evaluation and note
//! report.html        drawn from the log
//! events.out.tfev..  for TensorBoard, one file a start
//! checkpoints/       step-N/
//! run.lock           held while a process trains here
//! ```

use crate::Error;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The folder, held against other processes as long as this lives.
#[derive(Debug)]
pub(super) struct Folder {
    dir: PathBuf,
    _lock: Option<File>,
}

impl Folder {
    pub fn open(dir: &Path) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(|e| Error::io("make the folder", dir, e))?;
        let path = dir.join("run.lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(|e| Error::io("open", &path, e))?;
        hold(&lock, dir)?;
        Ok(Folder { dir: dir.to_owned(), _lock: Some(lock) })
    }

    /// The folder as it is, if it is there: nothing is made. One that is in use is refused all the same, since what is not
    /// finished in it would look like a kill's remains.
    pub fn look(dir: &Path) -> Result<Self, Error> {
        let lock = File::options().write(true).open(dir.join("run.lock")).ok();
        lock.iter().try_for_each(|lock| hold(lock, dir))?;
        Ok(Folder { dir: dir.to_owned(), _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.dir.join("checkpoints")
    }

    /// Writes a file of the folder, whole or not at all.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        Ok(hymo_data::shard::write_whole(&self.dir.join(name), bytes)?)
    }
}

#[cfg(unix)]
fn hold(lock: &File, dir: &Path) -> Result<(), Error> {
    use rustix::fs::{FlockOperation, flock};
    match flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Err(e) if e == rustix::io::Errno::WOULDBLOCK => Err(Error::InUse { dir: dir.to_owned() }),
        // A file system without locks is no reason not to train.
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn hold(_: &File, _: &Path) -> Result<(), Error> {
    Ok(())
}

/// `log.jsonl`, open at its end.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("log.jsonl");
        let open = || -> std::io::Result<File> {
            let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path)?;
            let end = file.seek(SeekFrom::End(0))?;
            let mut last = [b'\n'];
            if end > 0 {
                file.seek(SeekFrom::Start(end - 1))?;
                file.read_exact(&mut last)?;
            }
            // A kill in the middle of a line must not spoil the next one.
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
            Ok(file)
        };
        let file = open().map_err(|e| Error::io("open", &path, e))?;
        Ok(Log { path, file })
    }

    pub fn push(&mut self, record: &crate::record::Record) -> Result<(), Error> {
        let mut line = serde_json::to_vec(record).map_err(|e| Error::io("write", &self.path, e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|e| Error::io("write", &self.path, e))
    }
}
