//! How long a run took and how long it will take, from the times in its records.

use std::collections::VecDeque;

/// Steps that the rate is taken from.
const RECENT: usize = 64;

/// Times of a run that may have been stopped and started again; what lay between is not counted.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Seconds of what ran before the last start.
    earlier: f64,
    start: Option<f64>,
    latest: f64,
    recent: VecDeque<(u64, f64)>,
}

impl Clock {
    pub(super) fn start(&mut self, step: u64, time: f64) {
        self.earlier = self.elapsed();
        (self.start, self.latest) = (Some(time), time);
        self.recent = [(step, time)].into();
    }

    /// A record of any kind.
    pub(super) fn seen(&mut self, time: f64) {
        self.start.get_or_insert(time);
        self.latest = self.latest.max(time);
    }

    pub(super) fn step(&mut self, step: u64, time: f64) {
        self.recent.retain(|(seen, _)| *seen < step);
        self.recent.push_back((step, time));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// Time of the last record, seconds since 1970.
    pub(super) fn latest(&self) -> f64 {
        self.latest
    }

    /// Seconds that the run ran.
    pub(super) fn elapsed(&self) -> f64 {
        self.earlier + self.start.map_or(0., |start| (self.latest - start).max(0.))
    }

    /// Seconds of a step lately, evaluations and all else between steps counted.
    pub(super) fn seconds_per_step(&self) -> Option<f64> {
        let ((first, begin), (last, end)) = (self.recent.front()?, self.recent.back()?);
        (last > first && end > begin).then(|| (end - begin) / (last - first) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_not_counted() {
        let mut clock = Clock::default();
        assert_eq!((clock.elapsed(), clock.seconds_per_step()), (0., None));
        for (begin, from) in [(1000., 0), (9000., 2)] {
            clock.start(from, begin);
            for step in 1..=4 {
                clock.seen(begin + 5. * step as f64);
                clock.step(from + step, begin + 5. * step as f64);
            }
        }
        assert_eq!((clock.elapsed(), clock.seconds_per_step(), clock.latest()), (40., Some(5.), 9020.));
    }
}
