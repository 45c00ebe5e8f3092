//! Lines of JSON, one document each.

use std::io::{BufRead, BufReader};

use super::{Bytes, Raw, read_error};
use crate::Result;

/// Escapes can make a document's line six times as long as the document, and other fields longer still.
const LINE_PER_TEXT: u64 = 8;
/// A line may be this long whatever the longest document is.
const SHORT_LINE: u64 = 1 << 20;

/// The lines of a file that are not blank.
pub struct Lines<'a> {
    name: String,
    reader: BufReader<Bytes<'a>>,
    max: u64,
    number: u64,
    failed: bool,
}

impl<'a> Lines<'a> {
    pub fn new(name: String, reader: Bytes<'a>, max_text: u64) -> Self {
        let max = max_text.saturating_mul(LINE_PER_TEXT).max(SHORT_LINE);
        Lines { name, reader: BufReader::with_capacity(1 << 18, reader), max, number: 0, failed: false }
    }

    /// Reads a line without its end. `None` at the end of the file.
    fn line(&mut self) -> Result<Option<Raw>> {
        let (mut line, mut too_long, mut any) = (Vec::new(), false, false);
        loop {
            let at = |number| format!("line {}", number + 1);
            let buffer = self.reader.fill_buf().map_err(|e| read_error(&self.name, at(self.number), &e))?;
            if buffer.is_empty() {
                break;
            }
            any = true;
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            too_long |= line.len() as u64 + part.len() as u64 > self.max;
            if too_long {
                line = Vec::new();
            } else {
                line.extend_from_slice(part);
            }
            let used = end.map_or(buffer.len(), |end| end + 1);
            self.reader.consume(used);
            if end.is_some() {
                break;
            }
        }
        self.number += u64::from(any);
        Ok(any.then_some(if too_long { Raw::TooLong } else { Raw::Json(line) }))
    }
}

impl Iterator for Lines<'_> {
    type Item = Result<Raw>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let line = self.line().transpose()?;
        self.failed = line.is_err();
        Some(line)
    }
}
