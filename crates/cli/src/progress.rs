//! How far long work has come: a bar with rate and time left on a terminal, a plain line now and then elsewhere.
//!
//! It goes to standard error, so that what a command prints stays what it is about.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, HumanDuration, ProgressBar, ProgressStyle};

/// Time between plain lines.
const PLAIN: Duration = Duration::from_secs(10);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Anything else.
    Count,
}

/// Work under way.
pub struct Progress {
    what: &'static str,
    unit: Unit,
    /// How much there is to do, where it is known.
    total: Option<u64>,
    bar: Option<ProgressBar>,
    start: Instant,
    said: Instant,
}

impl Progress {
    /// Begins.
    pub fn new(what: &'static str, unit: Unit, total: Option<u64>) -> Self {
        let bar = io::stderr().is_terminal().then(|| bar(what, unit, total));
        let start = Instant::now();
        Progress { what, unit, total, bar, start, said: start }
    }

    /// So much is done. `note` stands behind the numbers.
    pub fn set(&mut self, done: u64, note: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(note());
        } else if self.said.elapsed() >= PLAIN {
            self.said = Instant::now();
            let line = line(self.what, self.unit, done, self.total, self.start.elapsed());
            // Progress that nobody can read stops nothing.
            let _ = writeln!(io::stderr(), "{line} {}", note());
        }
    }

    /// Ends, and says how many seconds it took.
    pub fn finish(self) -> f64 {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.start.elapsed().as_secs_f64()
    }
}

fn bar(what: &'static str, unit: Unit, total: Option<u64>) -> ProgressBar {
    let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let template = match (unit, total.is_some()) {
        (Unit::Bytes, true) => "{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left {msg}",
        (Unit::Bytes, false) => "{prefix} {spinner} {bytes} {bytes_per_sec} {msg}",
        (Unit::Count, true) => "{prefix} {wide_bar} {human_pos}/{human_len} {per_sec}, {eta} left {msg}",
        (Unit::Count, false) => "{prefix} {spinner} {human_pos} {per_sec} {msg}",
    };
    let style = ProgressStyle::with_template(template).expect("invariant: a valid template");
    bar.with_style(style).with_prefix(what)
}

fn line(what: &str, unit: Unit, done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let show = |n: u64| match unit {
        Unit::Bytes => HumanBytes(n).to_string(),
        Unit::Count => HumanCount(n).to_string(),
    };
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    let rest = match total {
        Some(total) if done > 0 && total >= done => {
            let left = Duration::from_secs_f64((total - done) as f64 / rate);
            let percent = 100. * done as f64 / total.max(1) as f64;
            format!(" of {} ({percent:.0}%), {}/s, {} left", show(total), show(rate as u64), HumanDuration(left))
        }
        _ => format!(", {}/s", show(rate as u64)),
    };
    format!("{what}: {}{rest}", show(done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_tell_rate_and_time_left() {
        let half = line("prep", Unit::Bytes, 50 << 20, Some(100 << 20), Duration::from_secs(5));
        assert_eq!(half, "prep: 50.00 MiB of 100.00 MiB (50%), 10.00 MiB/s, 5 seconds left");
        assert_eq!(line("merge", Unit::Count, 5000, None, Duration::from_secs(2)), "merge: 5,000, 2,500/s");
        assert!(line("prep", Unit::Bytes, 0, Some(10), Duration::from_secs(1)).starts_with("prep: 0 B, 0 B/s"));
    }
}
