//! What the demo reads: text of the caller's, or the crate sources that every build of HyMo leaves on the machine.

use std::env;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use hymo_data::source::{Format, Inputs, ReadOptions, Records};

use crate::exit::{Usage, data_error};

/// The registry's crates, a folder's name a line, in Cargo.lock's order.
const CRATES: &str = include_str!(concat!(env!("OUT_DIR"), "/crates.txt"));
/// Enough for many minutes of training, and read in a second.
const MOST: u64 = 24 << 20;
/// Larger sources are mostly tables that a program wrote.
pub const LONGEST: u64 = 48 << 10;
/// Fewer documents are cut into pieces: a part of them is held out, and one book would be all or nothing.
const FEW: usize = 100;
/// Pieces of a text at least, where it is long enough, and the bytes of one.
const PIECES: usize = 100;
const PIECE: std::ops::RangeInclusive<usize> = 256..=4096;

/// Text to learn from.
pub struct Text {
    /// Its files.
    pub inputs: Inputs,
    /// What it is, for a person.
    pub what: String,
    /// Share of the documents to hold out: some, also of few.
    pub held_out: f64,
}

/// The sources of crates in the registry.
pub fn of_crates() -> anyhow::Result<Text> {
    let registry = cargo_home().map(|home| home.join("registry/src"));
    let indexes: Vec<PathBuf> = registry.as_deref().map(folders).unwrap_or_default();
    let found = CRATES.lines().filter_map(|name| indexes.iter().map(|index| index.join(name)).find(|dir| dir.is_dir()));
    let (mut inputs, mut crates, mut bytes) = (Inputs::default(), 0, 0);
    for folder in found {
        let Some(pattern) = folder.to_str().map(|folder| format!("{folder}/**/*.rs")) else { continue };
        let mut files = Inputs::find(&[pattern], Format::Text).map(|inputs| inputs.files).unwrap_or_default();
        files.retain(|file| {
            file.bytes <= LONGEST && bytes < MOST && {
                bytes += file.bytes;
                true
            }
        });
        crates += usize::from(!files.is_empty());
        inputs.files.append(&mut files);
        if bytes >= MOST {
            break;
        }
    }
    if inputs.files.is_empty() {
        let place = registry.map_or("~/.cargo/registry/src".to_owned(), |path| path.display().to_string());
        let what =
            format!("there are no crate sources in {place} to learn from; give text of your own with --text PATH");
        return Err(Usage(what).into());
    }
    let what = format!("Rust, {} files of the {crates} crates that HyMo is built from", inputs.files.len());
    Ok(Text { inputs, what, held_out: 0.04 })
}

/// The caller's text. Few documents are cut into pieces between paragraphs, which are written to `pieces`.
pub fn of_paths(paths: &[String], pieces: &Path) -> anyhow::Result<Text> {
    let inputs = Inputs::find(paths, Format::Text).map_err(data_error)?;
    let Some(total) = few(&inputs)? else {
        let what = format!("{} of yours", files(&inputs));
        return Ok(Text { inputs, what, held_out: 0.04 });
    };
    if total == 0 {
        return Err(Usage(format!("{}: no text in it", paths.join(", "))).into());
    }
    let least = (total / PIECES).clamp(*PIECE.start(), *PIECE.end());
    let count = write_pieces(&inputs, least, pieces).with_context(|| pieces.display().to_string())?;
    let what = format!("{} of yours, cut into {count} pieces", files(&inputs));
    let path = pieces.to_str().context("the folder's name is not UTF-8")?.to_owned();
    Ok(Text { inputs: Inputs::find(&[path], Format::Text).map_err(data_error)?, what, held_out: 0.1 })
}

/// The documents one after the other: a book of a gigabyte is in memory once, and only while it is read.
fn documents<'a>(inputs: &'a Inputs, options: &'a ReadOptions) -> impl Iterator<Item = anyhow::Result<Vec<u8>>> + 'a {
    let texts = Records::new(inputs, options.clone()).map(|record| record.and_then(|r| r.text(inputs, options)));
    texts.filter_map(|text| text.map_err(data_error).transpose())
}

/// The bytes of all documents, unless there are [`FEW`] or more.
fn few(inputs: &Inputs) -> anyhow::Result<Option<usize>> {
    let (options, mut total) = (ReadOptions::default(), 0);
    for (n, document) in documents(inputs, &options).enumerate() {
        total += document?.len();
        if n + 1 >= FEW {
            return Ok(None);
        }
    }
    Ok(Some(total))
}

/// Writes the pieces of the documents, a line of JSON each, and gives their number. Whole or not at all: a folder half
/// written would be taken for the text when the demo goes on.
fn write_pieces(inputs: &Inputs, least: usize, to: &Path) -> anyhow::Result<u64> {
    let (options, mut count, half) = (ReadOptions::default(), 0, to.with_extension("tmp"));
    let mut lines = BufWriter::new(File::create(&half)?);
    for document in documents(inputs, &options) {
        for piece in cut(&document?, least) {
            // JSON is text. Bytes that are none would come back as themselves from shards, but not from here.
            serde_json::to_writer(&mut lines, &serde_json::json!({ "text": String::from_utf8_lossy(piece) }))?;
            lines.write_all(b"\n")?;
            count += 1;
        }
    }
    lines.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    fs::rename(&half, to)?;
    Ok(count)
}

fn files(inputs: &Inputs) -> String {
    match inputs.files.len() {
        1 => "a file".to_owned(),
        n => format!("{n} files"),
    }
}

/// Cuts behind empty lines, or behind lines where there are none, into pieces of `least` to twice as many bytes.
fn cut(text: &[u8], least: usize) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > 2 * least {
        let behind = |what: &[u8]| {
            let at = rest[least..2 * least].windows(what.len()).position(|at| at == what)?;
            Some(least + at + what.len())
        };
        let at = behind(b"\n\n").or_else(|| behind(b"\n")).or_else(|| behind(b" ")).unwrap_or(least);
        let (piece, more) = rest.split_at(at);
        pieces.push(piece);
        rest = more;
    }
    if !rest.is_empty() {
        pieces.push(rest);
    }
    pieces
}

fn cargo_home() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("CARGO_HOME").or_else(|| Some(set("HOME").or_else(|| set("USERPROFILE"))?.join(".cargo")))
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_text() {
        let paragraph = "A sentence of some length, again and again. ".repeat(30) + "\n\n";
        for text in [paragraph.repeat(40), "word ".repeat(9000), "x".repeat(20_001), "short".to_owned(), String::new()]
        {
            let pieces = cut(text.as_bytes(), 4096);
            assert_eq!(pieces.concat(), text.as_bytes());
            assert!(pieces.iter().rev().skip(1).all(|p| (4096..=2 * 4096).contains(&p.len())));
        }
        assert!(cut(paragraph.repeat(40).as_bytes(), 4096).iter().all(|piece| piece.ends_with(b"\n\n")));
    }

    #[test]
    fn the_lock_files_crates_are_known() {
        assert!(CRATES.lines().count() > 50 && CRATES.lines().any(|name| name.starts_with("serde_json-1.")));
        assert!(!CRATES.contains("hymo-"));
    }
}
