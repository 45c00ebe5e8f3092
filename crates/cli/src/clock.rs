//! Reading clocks and memory.

use std::time::Instant;

use serde_json::{Value, json};

/// Times in milliseconds of one thing done again and again.
#[derive(Debug, Default, Clone)]
pub struct Times(pub Vec<f64>);

impl Times {
    /// Runs something and adds how long it took.
    pub fn add<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed().as_secs_f64() * 1e3);
        result
    }

    /// The middle time; of an even number the mean of the middle two.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        }
    }

    /// The shortest time.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }
}

/// Processor time of all the process's threads so far, ms: on a busy machine steadier than the wall clock.
#[cfg(unix)]
pub fn processor_ms() -> Option<f64> {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Some(t.tv_sec as f64 * 1e3 + t.tv_nsec as f64 * 1e-6)
}

/// Not known here.
#[cfg(not(unix))]
pub fn processor_ms() -> Option<f64> {
    None
}

/// What a result must say for another to be held against it.
pub fn circumstances() -> Value {
    // Without the program's own path, which says something of this machine and nothing of the result.
    let command: Vec<String> = ["hymo".to_owned()].into_iter().chain(std::env::args().skip(1)).collect();
    json!({
        "commit": env!("HYMO_COMMIT"),
        "command": command.join(" "),
        "processor": processor(),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "threads": crate::threads::threads(),
        "load_before": load(),
    })
}

/// Processes that wanted a core in the last minute, where the system tells.
pub fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(':')).map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_owned()
}

/// The process's memory: `VmRSS` now, `VmHWM` at its peak since [`reset_peak`]. MiB, where the system tells.
pub fn resident(field: &str) -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.)
}

/// Starts the peak anew; false where the system does not let us.
pub fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Times(vec![3., 1., 2.]).median(), 2.);
        assert_eq!(Times(vec![4., 1., 2., 3.]).median(), 2.5);
        assert!(Times::default().median().is_nan());
        assert_eq!(Times(vec![3., 1., 2.]).min(), 1.);
    }

    #[test]
    fn times_are_kept() {
        let mut times = Times::default();
        assert_eq!(times.add(|| 7), 7);
        assert!(times.0.len() == 1 && times.median() >= 0.);
    }
}
