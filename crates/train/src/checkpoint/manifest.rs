//! What `manifest.json` says, and whether it can be true.

use super::{Error, FORMAT, MANIFEST, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// A checkpoint's contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Steps taken.
    pub step: u64,
    /// The run's resolved configuration.
    pub config: Value,
    /// Everything else that the loop goes on from.
    pub state: Value,
    /// By name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// By name, inside the folder.
    pub files: BTreeMap<String, FileEntry>,
    /// XXH3, 128 bits, in hexadecimal, of all that is above: of its compact JSON with this field empty.
    pub xxh3: String,
}

/// What a tensor's elements are: never less than 32 bits, whatever a run computes in (HAZARD 5, 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Numbers {
    /// Single precision.
    F32,
    /// Whole numbers: counters.
    I32,
}

/// A tensor, whole or in pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its elements.
    pub dtype: Numbers,
    /// The whole tensor's dimensions.
    pub shape: Vec<usize>,
    /// Its pieces, which cover it exactly.
    pub chunks: Vec<Chunk>,
}

/// A piece of a tensor, under the tensor's name in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The file that holds it.
    pub file: String,
    /// Where it begins, in each dimension.
    pub offset: Vec<usize>,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

/// A file as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its size.
    pub bytes: u64,
    /// XXH3, 128 bits, in hexadecimal.
    pub xxh3: String,
}

impl Manifest {
    /// Reads and checks the manifest of the checkpoint at `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let file = path.join(MANIFEST);
        let bytes = std::fs::read(&file).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::unreadable(path, format!("no {MANIFEST}: it was not finished")),
            _ => Error::io("read", &file, e),
        })?;
        // The version first: what else a later version says is not ours to judge.
        let json: Value = serde_json::from_slice(&bytes).map_err(|e| Error::unreadable(&file, e.to_string()))?;
        if json["format"] != FORMAT {
            return Err(Error::unreadable(&file, format!("format {}, this program reads {FORMAT}", json["format"])));
        }
        let manifest: Manifest = serde_json::from_value(json).map_err(|e| Error::unreadable(&file, e.to_string()))?;
        let (found, expected) = (manifest.sum(), manifest.xxh3.clone());
        if found != expected {
            return Err(Error::Corrupt { path: file, what: "checksum", found, expected });
        }
        // Copied under another step's name, it would go before or behind what it should.
        let named = path.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
        if let Some(named) = named.filter(|&named: &u64| named != manifest.step) {
            let why = format!("it is of step {}, its folder is named for step {named}", manifest.step);
            return Err(Error::unreadable(&file, why));
        }
        manifest.check(&file)?;
        Ok(manifest)
    }

    /// The checksum of everything but the checksum. The numbers of a state read back as they were written (`float_roundtrip`),
    /// and maps are sorted, so that the same contents are the same text.
    fn sum(&self) -> String {
        let bare = Manifest { xxh3: String::new(), ..self.clone() };
        format!("{:032x}", xxh3_128(&serde_json::to_vec(&bare).unwrap_or_default()))
    }

    /// The same with its checksum, whatever stood there.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.xxh3 = self.sum();
        self
    }

    fn check(&self, path: &Path) -> Result<()> {
        for name in self.files.keys() {
            // A name with a folder in it could point anywhere.
            if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
                return Err(Error::unreadable(path, format!("{name:?} is not the name of a file in this folder")));
            }
        }
        for (name, tensor) in &self.tensors {
            let wrong = |problem: String| Error::Tensor { path: path.to_owned(), name: name.clone(), problem };
            tensor.check(&self.files).map_err(wrong)?;
        }
        Ok(())
    }
}

/// Elements of a shape; none when that overflows.
pub(super) fn numel(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
}

impl TensorEntry {
    /// The pieces lie inside the tensor, do not overlap, and their sizes add up to it: so they cover it exactly.
    fn check(&self, files: &BTreeMap<String, FileEntry>) -> std::result::Result<(), String> {
        let total = numel(&self.shape).ok_or_else(|| format!("shape {:?} overflows", self.shape))?;
        let mut sum = 0usize;
        for (i, chunk) in self.chunks.iter().enumerate() {
            if !files.contains_key(&chunk.file) {
                return Err(format!("a piece lies in \"{}\", which is no file of this checkpoint", chunk.file));
            }
            let inside = chunk.offset.len() == self.shape.len()
                && chunk.shape.len() == self.shape.len()
                && (0..self.shape.len())
                    .all(|d| chunk.offset[d].checked_add(chunk.shape[d]).is_some_and(|end| end <= self.shape[d]));
            if !inside {
                return Err(format!(
                    "a piece of shape {:?} at {:?} does not lie in {:?}",
                    chunk.shape, chunk.offset, self.shape
                ));
            }
            if let Some(other) = self.chunks[..i].iter().find(|other| chunk.overlaps(other)) {
                return Err(format!("the pieces at {:?} and {:?} overlap", other.offset, chunk.offset));
            }
            sum = numel(&chunk.shape).and_then(|n| sum.checked_add(n)).ok_or("the pieces' sizes overflow")?;
        }
        if sum == total { Ok(()) } else { Err(format!("its pieces have {sum} of {total} elements")) }
    }
}

impl Chunk {
    fn overlaps(&self, other: &Chunk) -> bool {
        (0..self.shape.len()).all(|d| {
            self.offset[d] < other.offset[d] + other.shape[d] && other.offset[d] < self.offset[d] + self.shape[d]
        })
    }
}
