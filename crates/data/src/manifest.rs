//! `manifest.json`: what a folder of shards holds, and how it came to be. The same input and options give the same bytes.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::source::{Compression, Format};
use crate::{Error, Result};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "hymo-data";
const VERSION: u32 = 1;
/// The last field: XXH3-64 of the others as they are printed.
const CHECKSUM: &str = "checksum";

/// What a folder of shards holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `hymo-data`.
    pub format: String,
    /// The format's version.
    pub version: u32,
    /// The tokenizer whose ids the shards hold.
    pub tokenizer: TokenizerId,
    /// The options that shape the shards.
    pub options: Shaping,
    /// What was read, in order.
    pub sources: Vec<Source>,
    /// What was read and not kept.
    pub dropped: Dropped,
    /// Documents longer than a shard, which were cut: the rest opens the next shard as a new document.
    pub cut: u64,
    /// The splits, `train` and perhaps `val`.
    pub splits: Vec<Split>,
}

/// A tokenizer by its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerId {
    /// SHA-256 of tokenizer.json, in hexadecimal.
    pub sha256: String,
    /// Size of its vocabulary.
    pub vocab_size: u32,
}

/// The options that shape the shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shaping {
    /// Field or column of the text.
    pub text_field: String,
    /// Share of documents that go into the split `val`, chosen by their hash.
    pub val_fraction: f64,
    /// Whether only the first of equal documents is kept.
    pub dedup: bool,
    /// Shorter documents are dropped.
    pub min_bytes: u64,
    /// Longer documents are dropped.
    pub max_bytes: u64,
    /// The most tokens of a shard.
    pub shard_tokens: u64,
}

/// One input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Its path as given, or `-`.
    pub path: String,
    /// How documents stand in it.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// Its size on disk.
    pub bytes: u64,
    /// Documents in it.
    pub documents: u64,
    /// Documents that were kept.
    pub kept: u64,
    /// Bytes of text that were kept.
    pub text_bytes: u64,
}

/// Documents that were read and not kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropped {
    /// Without any text.
    pub empty: u64,
    /// Shorter than `min_bytes`.
    pub short: u64,
    /// Longer than `max_bytes`.
    pub long: u64,
    /// Equal to an earlier one.
    pub duplicate: u64,
}

/// One split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// `train` or `val`.
    pub name: String,
    /// Its tokens, those that end documents included.
    pub tokens: u64,
    /// Its documents.
    pub documents: u64,
    /// Bytes of its text.
    pub text_bytes: u64,
    /// Its shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// One shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Its file, in the manifest's folder.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Its documents.
    pub documents: u64,
    /// Bytes of text of the documents that begin in it.
    pub text_bytes: u64,
    /// Its root checksum, in hexadecimal.
    pub root: String,
}

impl Manifest {
    /// A manifest without splits.
    pub(crate) fn new(tokenizer: TokenizerId, options: Shaping) -> Self {
        let (sources, splits) = (Vec::new(), Vec::new());
        let (format, dropped) = (FORMAT.to_owned(), Dropped::default());
        Manifest { format, version: VERSION, tokenizer, options, sources, dropped, cut: 0, splits }
    }

    /// Reads the manifest of a folder.
    ///
    /// # Errors
    /// It is not there, or is no manifest.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        Self::from_json(&bytes, &path)
    }

    /// From the bytes of `path`.
    ///
    /// # Errors
    /// They are no manifest.
    pub fn from_json(bytes: &[u8], path: &Path) -> Result<Self> {
        let wrong = |why: String| Error::Manifest { path: path.to_owned(), why };
        let mut value: Value = serde_json::from_slice(bytes).map_err(|e| wrong(format!("not a manifest: {e}")))?;
        let sum = value.as_object_mut().and_then(|fields| fields.shift_remove(CHECKSUM));
        let manifest = Manifest::deserialize(&value).map_err(|e| wrong(format!("not a manifest: {e}")))?;
        if (manifest.format.as_str(), manifest.version) != (FORMAT, VERSION) {
            let (format, version) = (&manifest.format, manifest.version);
            return Err(wrong(format!("format {format:?} version {version}; want {FORMAT:?} version {VERSION}")));
        }
        if sum.as_ref().and_then(Value::as_str) != Some(&*checksum(&value)) {
            return Err(wrong("its checksum does not match: it was damaged or edited".into()));
        }
        manifest.check().map_err(wrong)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        for (index, split) in self.splits.iter().enumerate() {
            let name = &split.name;
            if self.splits[..index].iter().any(|other| other.name == *name) {
                return Err(format!("two splits are called {name:?}"));
            }
            let sum = |count: fn(&ShardEntry) -> u64| {
                split.shards.iter().map(count).try_fold(0_u64, u64::checked_add).unwrap_or(u64::MAX)
            };
            if sum(|s| s.tokens) != split.tokens || sum(|s| s.documents) != split.documents {
                return Err(format!("split {name:?}: its counts are not those of its shards"));
            }
            for shard in &split.shards {
                let plain = !shard.file.is_empty() && !shard.file.contains(['/', '\\']) && shard.file != "..";
                if !plain {
                    return Err(format!("split {name:?}: {:?} is no file name", shard.file));
                }
                shard.root().map_err(|()| format!("split {name:?}, {}: root is no hexadecimal", shard.file))?;
            }
        }
        Ok(())
    }

    /// The file's bytes.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let mut value = serde_json::to_value(self).expect("invariant: a manifest has string keys only");
        let sum = checksum(&value);
        if let Some(fields) = value.as_object_mut() {
            fields.insert(CHECKSUM.to_owned(), Value::from(sum));
        }
        format!("{value:#}\n").into_bytes()
    }

    /// The split of a name.
    #[must_use]
    pub fn split(&self, name: &str) -> Option<&Split> {
        self.splits.iter().find(|split| split.name == name)
    }

    /// A number that two manifests share only if their shards are the same.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        xxh3_64(&self.to_json())
    }
}

impl ShardEntry {
    /// The root checksum as a number.
    pub(crate) fn root(&self) -> Result<u64, ()> {
        u64::from_str_radix(&self.root, 16).map_err(|_| ())
    }
}

fn checksum(value: &Value) -> String {
    format!("{:016x}", xxh3_64(format!("{value:#}").as_bytes()))
}

/// Bytes in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn manifest() -> Manifest {
        let tokenizer = TokenizerId { sha256: hex(&[0xab; 32]), vocab_size: 4096 };
        let options = Shaping {
            text_field: "text".into(),
            val_fraction: 0.01,
            dedup: true,
            min_bytes: 1,
            max_bytes: 1000,
            shard_tokens: 100,
        };
        let (file, root) = ("train-00000.shard".to_owned(), "00ff".to_owned());
        let shard = ShardEntry { file, bytes: 300, tokens: 60, documents: 3, text_bytes: 200, root };
        let split = Split { name: "train".into(), tokens: 60, documents: 3, text_bytes: 200, shards: vec![shard] };
        Manifest { splits: vec![split], ..Manifest::new(tokenizer, options) }
    }

    fn said(text: &str) -> String {
        Manifest::from_json(text.as_bytes(), Path::new("d/manifest.json")).unwrap_err().to_string()
    }

    #[test]
    fn a_manifest_comes_back() {
        let bytes = manifest().to_json();
        assert_eq!(Manifest::from_json(&bytes, Path::new("m")).unwrap(), manifest());
        assert_ne!(manifest().fingerprint(), Manifest { cut: 1, ..manifest() }.fingerprint());
    }

    /// As if the manifest had been written so.
    fn stamped(text: &str) -> Option<String> {
        let mut value: Value = serde_json::from_str(text).ok()?;
        value.as_object_mut()?.shift_remove(CHECKSUM);
        let sum = checksum(&value);
        value.as_object_mut()?.insert(CHECKSUM.into(), sum.into());
        Some(format!("{value:#}"))
    }

    #[test]
    fn what_is_wrong_is_named() {
        let text = String::from_utf8(manifest().to_json()).unwrap();
        let with = |from: &str, to: &str| {
            assert!(text.contains(from));
            said(&stamped(&text.replacen(from, to, 1)).unwrap())
        };
        let edited = text.replace("\"text_bytes\": 200", "\"text_bytes\": 201");
        assert!(said(&edited).contains("its checksum does not match"));
        assert!(with("\"version\": 1", "\"version\": 2").contains("d/manifest.json: format \"hymo-data\" version 2"));
        assert!(with("\"cut\"", "\"cuts\"").contains("unknown field `cuts`"));
        assert!(with("train-00000.shard", "../secret").contains("\"../secret\" is no file name"));
        assert!(with("\"root\": \"00ff\"", "\"root\": \"xyz\"").contains("root is no hexadecimal"));
        assert!(with("\"tokens\": 60", "\"tokens\": 61").contains("split \"train\": its counts are not"));
        assert!(said(&text[..200]).contains("not a manifest: EOF"));
    }

    proptest! {
        /// No bytes make the reader panic; what it takes is consistent.
        #[test]
        fn damaged_manifests_never_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), keep in any::<prop::sample::Index>(), whole in any::<bool>(), fix in any::<bool>()) {
            let mut bytes = manifest().to_json();
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if !whole {
                bytes.truncate(keep.index(bytes.len()));
            }
            if fix {
                if let Some(text) = std::str::from_utf8(&bytes).ok().and_then(stamped) {
                    bytes = text.into_bytes();
                }
            }
            if let Ok(read) = Manifest::from_json(&bytes, Path::new("m")) {
                prop_assert!(read.check().is_ok());
            }
        }
    }
}
