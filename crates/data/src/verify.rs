//! Whether a data folder is, bit for bit, what was written.

use std::fs;
use std::path::{Path, PathBuf};

use hymo_tokenizer::Tokenizer;
use serde::Serialize;

use crate::manifest::{MANIFEST, Manifest, ShardEntry, hex};
use crate::prep::TOKENIZER;
use crate::shard::{Damage, Shard};
use crate::{Error, Result};

/// Something that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// Where in it.
    pub place: String,
    /// What is wrong there.
    pub why: String,
}

/// Reads every byte of a folder's shards, and its manifest and tokenizer, and names each place that differs from what was
/// written. `seen` is told how many bytes were read.
///
/// # Errors
/// There is no manifest, or it is damaged so that it does not say which shards there are.
pub fn verify(folder: &Path, seen: &mut dyn FnMut(u64)) -> Result<Vec<Finding>> {
    let manifest = Manifest::read(folder)?;
    let mut findings = Vec::new();
    let path = folder.join(MANIFEST);
    let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
    let canonical = manifest.to_json();
    if bytes != canonical {
        let at = bytes.iter().zip(&canonical).take_while(|(a, b)| a == b).count();
        findings.push(finding(&path, format!("byte {at}"), "not as it was written, though it says the same"));
    }
    findings.extend(tokenizer(folder, &manifest));
    for entry in manifest.splits.iter().flat_map(|split| &split.shards) {
        shard(&folder.join(&entry.file), entry, &manifest, &mut findings, seen)?;
    }
    Ok(findings)
}

fn finding(file: &Path, place: impl Into<String>, why: impl Into<String>) -> Finding {
    Finding { file: file.to_owned(), place: place.into(), why: why.into() }
}

/// The tokenizer's copy beside the shards, if it is not that of the manifest.
fn tokenizer(folder: &Path, manifest: &Manifest) -> Option<Finding> {
    let path = folder.join(TOKENIZER);
    let found = match fs::read(&path) {
        Ok(json) => Tokenizer::from_json(&json).map(|tokenizer| hex(&tokenizer.sha256())).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    match found {
        Ok(sha256) if sha256 == manifest.tokenizer.sha256 => None,
        Ok(sha256) => {
            Some(finding(&path, "SHA-256", format!("{sha256}, the manifest has {}", manifest.tokenizer.sha256)))
        }
        Err(why) => Some(finding(&path, "the file", why)),
    }
}

fn shard(
    path: &Path,
    entry: &ShardEntry,
    manifest: &Manifest,
    findings: &mut Vec<Finding>,
    seen: &mut dyn FnMut(u64),
) -> Result<()> {
    let open = match Shard::open(path) {
        Ok(open) => open,
        Err(error) => {
            findings.push(match error {
                Error::Shard { place, why, .. } => finding(path, place, why),
                other => finding(path, "the file", other.to_string()),
            });
            return Ok(());
        }
    };
    let header = open.header();
    if (header.tokens, header.documents) != (entry.tokens, entry.documents) {
        findings.push(finding(path, "header", "its counts are not those of the manifest"));
    }
    if hex(&header.tokenizer) != manifest.tokenizer.sha256 {
        findings.push(finding(path, "header", "made with another tokenizer than the manifest says"));
    }
    let damage = open.verify(entry.root().ok(), seen)?;
    if damage.is_empty() {
        match open.foreign_token() {
            Ok(None) => (),
            Ok(Some(document)) => {
                findings.push(finding(path, format!("document {document}"), "an id outside the vocabulary"));
            }
            Err(Error::Shard { place, why, .. }) => findings.push(finding(path, place, why)),
            Err(error) => return Err(error),
        }
    }
    findings.extend(damage.iter().map(|damage| finding(path, place(damage), "differs from its checksum")));
    Ok(())
}

fn place(damage: &Damage) -> String {
    let bytes = format!("{}, bytes {} to {}", damage.part, damage.bytes.start, damage.bytes.end - 1);
    match &damage.documents {
        Some(range) if range.end > range.start + 1 => {
            format!("{bytes} (documents {} to {})", range.start, range.end - 1)
        }
        Some(range) => format!("{bytes} (document {})", range.start),
        None => bytes,
    }
}
