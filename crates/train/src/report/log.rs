//! A report of what stands in `log.jsonl`.

use super::Report;
use crate::Error;
use crate::record::Record;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Every line begins with it.
const BEGINS: &[u8] = br#"{"kind":"#;

impl Report {
    /// Reads a run's log. The last line may be half written; steps that stand in it twice count as they were taken last.
    /// A line inside that cannot be read is left out, and the page says how many there were: a report stops no run.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn from_log(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io { doing: "read", path: path.to_owned(), source };
        let folder = path.parent().and_then(Path::file_name).map_or("run".into(), |name| name.to_string_lossy());
        let mut report = Report::new(folder);
        let mut lines = BufReader::with_capacity(1 << 16, File::open(path).map_err(failed)?);
        // One line at a time: the log of a long run is larger than memory.
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).map_err(failed)? > 0 {
            match parse(&line) {
                Some((record, whole)) => {
                    report.unread += u64::from(!whole);
                    report.push(&record);
                }
                None if line.ends_with(b"\n") && !line.trim_ascii().is_empty() => report.unread += 1,
                None => {}
            }
            line.clear();
        }
        report.ended = report.reached_the_end();
        Ok(report)
    }
}

/// A line's record, and whether it is all of the line: a run that was killed while it wrote left half a line, and the
/// first record of its continuation may stand right after it.
fn parse(line: &[u8]) -> Option<(Record, bool)> {
    if let Ok(record) = serde_json::from_slice(line) {
        return Some((record, true));
    }
    let last = line.windows(BEGINS.len()).rposition(|at| at == BEGINS)?;
    serde_json::from_slice(&line[last..]).ok().map(|record| (record, false))
}
