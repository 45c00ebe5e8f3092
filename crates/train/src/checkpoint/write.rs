//! Writing: a folder of another name, made durable, then renamed.

use super::manifest::{Chunk, FileEntry, Manifest, Numbers, TensorEntry};
use super::{Error, FORMAT, MANIFEST, Result, folder};
use hymo_tensor::{DType, Element, Tensor};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Everything a run goes on from, in memory of its own: it may be written while the next step runs.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Steps taken.
    pub step: u64,
    /// The run's resolved configuration.
    pub config: Value,
    /// The loop's state beside the tensors.
    pub state: Value,
    tensors: Vec<Held>,
    /// What an earlier snapshot held, last tensor first: the memory is there already, and filling it is all that is left.
    spare: Vec<Values>,
}

/// A tensor's own copy.
#[derive(Debug, Clone)]
struct Held {
    name: String,
    shape: Vec<usize>,
    values: Values,
}

/// In the type that they had, so that taking them is one copy.
#[derive(Debug, Clone)]
enum Values {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// A tensor's elements over those of `spare`, where they are as many.
fn copied<T: Element>(tensor: &Tensor, spare: Option<Vec<T>>) -> Result<Vec<T>> {
    let mut to = spare.filter(|to| to.len() == tensor.numel()).unwrap_or_else(|| vec![T::default(); tensor.numel()]);
    tensor.read_into(&mut to)?;
    Ok(to)
}

impl Values {
    fn dtype(&self) -> Dtype {
        match self {
            Values::F32(_) => Dtype::F32,
            Values::I32(_) => Dtype::I32,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Values::F32(values) => bytemuck::cast_slice(values),
            Values::I32(values) => bytemuck::cast_slice(values),
        }
    }
}

impl Snapshot {
    /// Without tensors so far.
    #[must_use]
    pub fn new(step: u64, config: Value, state: Value) -> Self {
        Snapshot { step, config, state, tensors: Vec::new(), spare: Vec::new() }
    }

    /// The same, to be filled with tensors of the shapes that `old` held: into its memory, so that a run waits for the copy
    /// alone and not for new pages too.
    #[must_use]
    pub fn over(self, old: Snapshot) -> Self {
        Snapshot { spare: old.tensors.into_iter().rev().map(|held| held.values).collect(), ..self }
    }

    /// Copies an f32 or i32 tensor, and only its own elements where it is a view (HAZARD 14).
    ///
    /// # Errors
    /// Another dtype.
    pub fn add(&mut self, name: impl Into<String>, tensor: &Tensor) -> Result<()> {
        let values = match (tensor.dtype(), self.spare.pop()) {
            (DType::I32, Some(Values::I32(spare))) => Values::I32(copied(tensor, Some(spare))?),
            (DType::I32, _) => Values::I32(copied(tensor, None)?),
            (_, Some(Values::F32(spare))) => Values::F32(copied(tensor, Some(spare))?),
            (_, _) => Values::F32(copied(tensor, None)?),
        };
        self.tensors.push(Held { name: name.into(), shape: tensor.dims().to_vec(), values });
        Ok(())
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|held| held.values.bytes().len() as u64).sum()
    }
}

/// Writes `dir/step-N` and gives its path. When it returns, the checkpoint is on the disk and complete; on an error, and at
/// a kill at any moment, whatever was in `dir` before loads as it did.
///
/// # Errors
/// What the file system says; [`Error::NoSpace`] with the sizes when the disk is full.
pub fn write(dir: &Path, snapshot: &Snapshot) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io("make", dir, e))?;
    let (path, temporary) = (folder(dir, snapshot.step), dir.join(format!("step-{}.tmp", snapshot.step)));
    let written = fill(&temporary, snapshot).and_then(|()| replace(dir, &temporary, &path, snapshot.step));
    written.map_err(|error| {
        // What is half written only takes space, most of all on a full disk.
        let _ = std::fs::remove_dir_all(&temporary);
        if error.is_full() {
            return Error::NoSpace { path: path.clone(), needed: snapshot.bytes(), free: free(dir) };
        }
        error
    })?;
    Ok(path)
}

fn fill(to: &Path, snapshot: &Snapshot) -> Result<()> {
    remove(to)?;
    std::fs::create_dir(to).map_err(|e| Error::io("make", to, e))?;
    let name = "rank00000.safetensors".to_owned();
    let file = to.join(&name);
    let views = snapshot.tensors.iter().map(|held| {
        let view = TensorView::new(held.values.dtype(), held.shape.clone(), held.values.bytes());
        Ok((held.name.as_str(), view.map_err(|e| Error::unreadable(&file, e.to_string()))?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    safetensors::serialize_to_file(views, None, &file).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(e) => Error::io("write", &file, e),
        e => Error::unreadable(&file, e.to_string()),
    })?;
    sync(&file)?;
    let entry = |held: &Held| {
        let shape = held.shape.clone();
        let chunk = Chunk { file: name.clone(), offset: vec![0; shape.len()], shape: shape.clone() };
        let dtype = if held.values.dtype() == Dtype::I32 { Numbers::I32 } else { Numbers::F32 };
        (held.name.clone(), TensorEntry { dtype, shape, chunks: vec![chunk] })
    };
    let manifest = Manifest {
        format: FORMAT,
        step: snapshot.step,
        config: snapshot.config.clone(),
        state: snapshot.state.clone(),
        tensors: snapshot.tensors.iter().map(entry).collect(),
        files: BTreeMap::from([(name.clone(), measure(&file)?)]),
        xxh3: String::new(),
    };
    let manifest = manifest.sealed();
    let (path, text) = (to.join(MANIFEST), serde_json::to_string_pretty(&manifest).unwrap_or_default());
    let written = File::create(&path).and_then(|mut f| f.write_all(text.as_bytes()).and_then(|()| f.sync_all()));
    written.map_err(|e| Error::io("write", &path, e))?;
    sync(to)
}

/// A file's size and checksum, by reading it: what was written is what is measured.
fn measure(path: &Path) -> Result<FileEntry> {
    let mut file = File::open(path).map_err(|e| Error::io("read", path, e))?;
    let (mut hash, mut bytes, mut buffer) = (Xxh3::new(), 0, vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer).map_err(|e| Error::io("read", path, e))?;
        if n == 0 {
            return Ok(FileEntry { bytes, xxh3: format!("{:032x}", hash.digest128()) });
        }
        hash.update(&buffer[..n]);
        bytes += n as u64;
    }
}

/// Gives the finished folder its name. One of that name that is there already (a run gone back to an earlier step) stays
/// until the new one has it; `super::read::recover` gives it back if a kill falls between.
fn replace(dir: &Path, from: &Path, to: &Path, step: u64) -> Result<()> {
    let old = dir.join(format!("step-{step}.old"));
    if to.exists() {
        remove(&old)?;
        std::fs::rename(to, &old).map_err(|e| Error::io("rename", to, e))?;
    }
    std::fs::rename(from, to).map_err(|e| Error::io("rename", from, e))?;
    sync(dir)?;
    remove(&old)
}

/// Removes a folder, if it is there.
pub(super) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Makes a file, or a folder's list of names, durable.
pub(super) fn sync(path: &Path) -> Result<()> {
    if cfg!(windows) && path.is_dir() {
        return Ok(()); // There a folder cannot be opened, and needs not be.
    }
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync", path, e))
}

#[cfg(unix)]
fn free(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}
