//! Reading: everything is verified before anything is used.

use super::manifest::{Chunk, Manifest, Numbers, TensorEntry, numel};
use super::write::remove;
use super::{Error, Result, folder, steps};
use hymo_tensor::{DType, Tensor};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// A verified checkpoint. Its tensors are taken one by one; [`Checkpoint::finish`] tells whether any was left over, so that
/// a load is all or an error.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Vec<u8>>,
    left: BTreeSet<String>,
}

/// The newest checkpoint of a folder that verifies, and what was wrong with newer ones.
#[derive(Debug)]
pub struct Found {
    /// None when there is none, or none verifies.
    pub checkpoint: Option<Checkpoint>,
    /// Newest first.
    pub refused: Vec<(PathBuf, Error)>,
}

/// Looks through `dir` from the newest step down for one that verifies. A `dir` that is not there has none.
///
/// # Errors
/// A folder that cannot be listed.
pub fn newest(dir: &Path) -> Result<Found> {
    recover(dir)?;
    let mut refused = Vec::new();
    for step in steps(dir)? {
        let path = folder(dir, step);
        match Checkpoint::open(&path) {
            Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), refused }),
            Err(error) => refused.push((path, error)),
        }
    }
    Ok(Found { checkpoint: None, refused })
}

/// Clears up after a kill: a checkpoint set aside for one that never came gets its name back, unfinished ones go.
pub(super) fn recover(dir: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_prefix("step-")) else { continue };
        if let Some(step) = name.strip_suffix(".old").and_then(|step| step.parse().ok()) {
            let to = folder(dir, step);
            if to.exists() {
                remove(&entry.path())?;
            } else {
                std::fs::rename(entry.path(), &to).map_err(|e| Error::io("rename", &entry.path(), e))?;
            }
        } else if name.strip_suffix(".tmp").is_some_and(|step| step.parse::<u64>().is_ok()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

impl Checkpoint {
    /// Opens and verifies the checkpoint folder `path`.
    ///
    /// # Errors
    /// What the file system says; a manifest that is missing, of another version or inconsistent; a file that is missing,
    /// cut short or changed.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let reason = if path.exists() { "not a folder" } else { "no such folder" };
            return Err(Error::unreadable(path, reason));
        }
        let manifest = Manifest::read(path)?;
        let mut files = BTreeMap::new();
        for (name, expected) in &manifest.files {
            let file = path.join(name);
            let size = std::fs::metadata(&file).map_err(|e| Error::io("read", &file, e))?.len();
            let corrupt = |what, found, expected| Error::Corrupt { path: file.clone(), what, found, expected };
            if size != expected.bytes {
                return Err(corrupt("size", format!("{size} bytes"), format!("{} bytes", expected.bytes)));
            }
            // Read once: what is verified is what is used.
            let bytes = std::fs::read(&file).map_err(|e| Error::io("read", &file, e))?;
            let found = format!("{:032x}", xxh3_128(&bytes));
            if found != expected.xxh3 {
                return Err(corrupt("checksum", found, expected.xxh3.clone()));
            }
            files.insert(name.clone(), bytes);
        }
        let left = manifest.tensors.keys().cloned().collect();
        let checkpoint = Checkpoint { path: path.to_owned(), manifest, files, left };
        checkpoint.pieces_are_there()?;
        Ok(checkpoint)
    }

    /// Every piece of the manifest is in its file, with its shape.
    fn pieces_are_there(&self) -> Result<()> {
        let parsed = self.parse()?;
        for (name, tensor) in &self.manifest.tensors {
            for chunk in &tensor.chunks {
                let found = parsed.get(chunk.file.as_str()).and_then(|file| file.tensor(name).ok());
                let dtype = if tensor.dtype == Numbers::I32 { Dtype::I32 } else { Dtype::F32 };
                let problem = match found {
                    Some(t) if t.dtype() != dtype => {
                        format!("{:?} in {}, the manifest says {dtype:?}", t.dtype(), chunk.file)
                    }
                    Some(t) if t.shape() != chunk.shape => {
                        format!("shape {:?} in {}, the manifest says {:?}", t.shape(), chunk.file, chunk.shape)
                    }
                    Some(_) => continue,
                    None => format!("not in {}", chunk.file),
                };
                return Err(self.wrong(name, problem));
            }
        }
        Ok(())
    }

    fn parse(&self) -> Result<BTreeMap<&str, SafeTensors<'_>>> {
        let mut out = BTreeMap::new();
        for (name, bytes) in &self.files {
            let parsed = SafeTensors::deserialize(bytes);
            let parsed = parsed.map_err(|e| Error::unreadable(&self.path.join(name), e.to_string()))?;
            out.insert(name.as_str(), parsed);
        }
        Ok(out)
    }

    fn wrong(&self, name: &str, problem: String) -> Error {
        Error::Tensor { path: self.path.clone(), name: name.to_owned(), problem }
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Steps taken.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The run's resolved configuration.
    #[must_use]
    pub fn config(&self) -> &Value {
        &self.manifest.config
    }

    /// The loop's state beside the tensors.
    #[must_use]
    pub fn state(&self) -> &Value {
        &self.manifest.state
    }

    /// Every tensor by name.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.manifest.tensors
    }

    /// An f32 tensor's values, its pieces put together. Marks it as taken.
    ///
    /// # Errors
    /// A name that is not there; a shape other than `dims`; a tensor that is not f32.
    pub fn take(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>> {
        self.take_of(name, dims, Numbers::F32)
    }

    fn take_of<T: bytemuck::Pod>(&mut self, name: &str, dims: &[usize], dtype: Numbers) -> Result<Vec<T>> {
        let entry = self.manifest.tensors.get(name).ok_or_else(|| self.wrong(name, "not in this checkpoint".into()))?;
        if entry.shape != dims {
            return Err(self.wrong(name, format!("shape {:?}, expected {dims:?}", entry.shape)));
        }
        if entry.dtype != dtype {
            return Err(self.wrong(name, format!("{:?}, expected {dtype:?}", entry.dtype)));
        }
        let values = self.assemble(name, entry)?;
        self.left.remove(name);
        Ok(values)
    }

    /// As [`Checkpoint::take`], into an f32 or i32 tensor of the shape wanted.
    ///
    /// # Errors
    /// As there; a tensor of another dtype or not the only handle on its memory.
    pub fn take_into(&mut self, name: &str, to: &mut Tensor) -> Result<()> {
        let dims = to.dims().to_vec();
        match to.dtype() {
            DType::I32 => {
                let values = self.take_of::<i32>(name, &dims, Numbers::I32)?;
                to.write(&values)?;
            }
            _ => to.write(&self.take(name, &dims)?)?,
        }
        Ok(())
    }

    fn assemble<T: bytemuck::Pod>(&self, name: &str, entry: &TensorEntry) -> Result<Vec<T>> {
        let parsed = self.parse()?;
        let mut out = vec![T::zeroed(); numel(&entry.shape).unwrap_or(0)];
        for chunk in &entry.chunks {
            let file = parsed.get(chunk.file.as_str());
            let view = file.and_then(|f| f.tensor(name).ok()).ok_or_else(|| self.wrong(name, "not there".into()))?;
            let numbers = view.data().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned);
            place(&mut out, &entry.shape, chunk, &numbers.collect::<Vec<T>>());
        }
        Ok(out)
    }

    /// Ends a load: every tensor has been taken.
    ///
    /// # Errors
    /// [`Error::Unexpected`] with those that have not.
    pub fn finish(self) -> Result<()> {
        if self.left.is_empty() {
            return Ok(());
        }
        Err(Error::Unexpected { path: self.path, names: self.left.into_iter().collect() })
    }
}

/// Copies a piece to its place, run of the last dimension by run.
fn place<T: Copy>(out: &mut [T], shape: &[usize], chunk: &Chunk, values: &[T]) {
    let Some(&run) = chunk.shape.last() else {
        return out.copy_from_slice(values);
    };
    for (i, values) in values.chunks_exact(run.max(1)).enumerate() {
        // The run's first element, from its coordinates in the piece.
        let (mut rest, mut at, mut stride) = (i, *chunk.offset.last().unwrap_or(&0), *shape.last().unwrap_or(&1));
        for d in (0..shape.len() - 1).rev() {
            at += (chunk.offset[d] + rest % chunk.shape[d]) * stride;
            rest /= chunk.shape[d];
            stride *= shape[d];
        }
        out[at..at + run].copy_from_slice(values);
    }
}
