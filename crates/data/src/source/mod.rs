//! Inputs: files, folders, patterns and standard input, as one sequence of documents.
//!
//! | name ends in | documents |
//! |---|---|
//! | `.jsonl`, `.ndjson` | a line each, the text field of the object |
//! | `.parquet` | a row each, the text column |
//! | anything else | the whole file |
//!
//! The first and the last may be compressed: `.zst`, `.gz`. A folder is walked in the order of its paths, leaving out
//! hidden files, what its `.gitignore` names, and files with a NUL byte near their beginning (images, programs). A file
//! named directly is always read. Documents come in one order, however many threads read on.

mod find;
mod json;
mod lines;
mod parquet;

pub use find::{Compression, Format, Input, Inputs};

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// How documents are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// Field or column of the text.
    pub text_field: String,
    /// Longer documents are not kept in memory: they come as [`Raw::TooLong`].
    pub max_bytes: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions { text_field: "text".into(), max_bytes: MAX_DOCUMENT }
    }
}

/// No document is longer than this: lengths fit in 31 bits.
pub const MAX_DOCUMENT: u64 = (1 << 31) - 1;

/// A document as it stands in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Index of its input.
    pub input: usize,
    /// Its number in the file, from 1: a line or a row.
    pub number: u64,
    /// What was read.
    pub raw: Raw,
}

/// What was read of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Raw {
    /// Its bytes.
    Text(Vec<u8>),
    /// A line of JSON that has them.
    Json(Vec<u8>),
    /// It is longer than [`ReadOptions::max_bytes`].
    TooLong,
}

impl Record {
    /// The document's bytes; `None` if it is too long.
    ///
    /// # Errors
    /// The line is no JSON object or has no text field.
    pub fn text(self, inputs: &Inputs, options: &ReadOptions) -> Result<Option<Vec<u8>>> {
        let text = match self.raw {
            Raw::Text(text) => text,
            Raw::TooLong => return Ok(None),
            Raw::Json(line) => json::field(&line, &options.text_field)
                .map_err(|e| e.at(inputs.name(self.input), self.number, &options.text_field))?,
        };
        Ok((text.len() as u64 <= options.max_bytes).then_some(text))
    }
}

/// The documents of inputs, one after another.
pub struct Records<'a> {
    inputs: &'a Inputs,
    options: ReadOptions,
    next: usize,
    open: Option<Box<dyn Iterator<Item = Result<Raw>> + 'a>>,
    number: u64,
    read: &'a AtomicU64,
}

/// Where nobody asks how much was read.
static UNCOUNTED: AtomicU64 = AtomicU64::new(0);

impl<'a> Records<'a> {
    /// From the first document.
    #[must_use]
    pub fn new(inputs: &'a Inputs, options: ReadOptions) -> Self {
        Records::counting(inputs, options, &UNCOUNTED)
    }

    /// From the first document, adding the bytes read from files to `read`.
    #[must_use]
    pub fn counting(inputs: &'a Inputs, options: ReadOptions, read: &'a AtomicU64) -> Self {
        Records { inputs, options, next: 0, open: None, number: 0, read }
    }

    fn open(&self, input: &Input) -> Result<Box<dyn Iterator<Item = Result<Raw>> + 'a>> {
        let name = input.name.clone();
        if input.format == Format::Parquet {
            return Ok(Box::new(parquet::rows(input, &self.options, self.read)?));
        }
        let reader = decompressed(input, self.read)?;
        let max = self.options.max_bytes;
        Ok(match input.format {
            Format::JsonLines => Box::new(lines::Lines::new(name, reader, max)),
            _ => Box::new(std::iter::once_with(move || whole(&name, reader, max))),
        })
    }
}

impl Iterator for Records<'_> {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(open) = &mut self.open {
                if let Some(raw) = open.next() {
                    self.number += 1;
                    let (input, number) = (self.next - 1, self.number);
                    return Some(raw.map(|raw| Record { input, number, raw }));
                }
                self.open = None;
            }
            let input = self.inputs.files.get(self.next)?;
            self.next += 1;
            self.number = 0;
            match self.open(input) {
                Ok(open) => self.open = Some(open),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Bytes of an input.
type Bytes<'a> = Box<dyn Read + Send + 'a>;

/// Counts what passes.
struct Counting<'a, R> {
    reader: R,
    read: &'a AtomicU64,
}

impl<R: Read> Read for Counting<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.reader.read(buffer)?;
        self.read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// The file's bytes without its compression.
fn decompressed<'a>(input: &Input, read: &'a AtomicU64) -> Result<Bytes<'a>> {
    let file: Bytes = match &input.path {
        None => Box::new(Counting { reader: io::stdin(), read }),
        Some(path) => Box::new(Counting { reader: File::open(path).map_err(Error::io("open", path))?, read }),
    };
    Ok(match input.compression {
        Compression::None => file,
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file))),
        Compression::Zstd => {
            let broken = |e: io::Error| read_error(&input.name, "byte 0".into(), &e);
            let mut decoder = zstd::Decoder::new(file).map_err(broken)?;
            // Files compressed with --long reach back further than a decoder allows by itself.
            decoder.window_log_max(31).map_err(broken)?;
            Box::new(decoder)
        }
    })
}

fn read_error(input: &str, place: String, error: &io::Error) -> Error {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => format!("the file is cut short ({error})"),
        _ => error.to_string(),
    };
    Error::Read { input: input.to_owned(), place, why }
}

fn whole(name: &str, reader: Bytes, max: u64) -> Result<Raw> {
    let mut text = Vec::new();
    let mut limited = reader.take(max + 1);
    if let Err(error) = limited.read_to_end(&mut text) {
        return Err(read_error(name, format!("after byte {}", text.len()), &error));
    }
    Ok(if text.len() as u64 > max { Raw::TooLong } else { Raw::Text(text) })
}
