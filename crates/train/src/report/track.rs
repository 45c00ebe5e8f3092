//! Curves of any length in bounded memory.

/// What became of a column's values in a bucket. Values that are not finite are left out.
#[derive(Debug, Clone, Copy)]
struct Cell {
    sum: f64,
    n: u32,
    min: f32,
    max: f32,
}

impl Cell {
    const EMPTY: Cell = Cell { sum: 0., n: 0, min: f32::INFINITY, max: f32::NEG_INFINITY };

    fn of(value: f64) -> Cell {
        match value.is_finite() {
            true => Cell { sum: value, n: 1, min: value as f32, max: value as f32 },
            false => Cell::EMPTY,
        }
    }

    fn add(&mut self, more: Cell) {
        self.sum += more.sum;
        self.n += more.n;
        self.min = self.min.min(more.min);
        self.max = self.max.max(more.max);
    }

    fn get(self, which: Which) -> f64 {
        match which {
            _ if self.n == 0 => f64::NAN,
            Which::Mean => self.sum / f64::from(self.n),
            Which::Min => self.min.into(),
            Which::Max => self.max.into(),
        }
    }
}

/// What to draw of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Mean,
    Min,
    Max,
}

/// Consecutive steps.
#[derive(Debug)]
struct Bucket {
    index: u64,
    /// The last step in it, and the run's tokens then.
    step: u64,
    tokens: u64,
    cells: Vec<Cell>,
}

impl Bucket {
    fn add(&mut self, step: u64, tokens: u64, cells: impl ExactSizeIterator<Item = Cell>) {
        (self.step, self.tokens) = (step, tokens);
        if self.cells.len() < cells.len() {
            self.cells.resize(cells.len(), Cell::EMPTY);
        }
        self.cells.iter_mut().zip(cells).for_each(|(cell, more)| cell.add(more));
    }
}

/// Columns of numbers over steps: mean, least and largest of buckets of `width` consecutive steps. When there are too many
/// buckets, neighbours are merged and the width doubles, so that a push costs the same however long the run is.
#[derive(Debug)]
pub(super) struct Track {
    max_points: usize,
    max_numbers: usize,
    width: u64,
    buckets: Vec<Bucket>,
}

impl Track {
    /// Never more than `max_points` buckets, and fewer where they would hold more than `max_numbers` numbers in all.
    pub(super) fn new(max_points: usize, max_numbers: usize) -> Self {
        Track { max_points, max_numbers, width: 1, buckets: Vec::new() }
    }

    pub(super) fn push(&mut self, step: u64, tokens: u64, values: &[f64]) {
        let index = step.saturating_sub(1) / self.width;
        let cells = values.iter().map(|value| Cell::of(*value));
        match self.buckets.last_mut() {
            Some(last) if last.index == index => last.add(step, tokens, cells),
            _ => self.buckets.push(Bucket { index, step, tokens, cells: cells.collect() }),
        }
        let room = (self.max_numbers / values.len().max(1)).clamp(self.max_points.min(8), self.max_points);
        while self.buckets.len() > room {
            self.halve();
        }
    }

    fn halve(&mut self) {
        self.width *= 2;
        let mut merged: Vec<Bucket> = Vec::with_capacity(self.buckets.len());
        for bucket in self.buckets.drain(..) {
            let index = bucket.index / 2;
            match merged.last_mut() {
                Some(last) if last.index == index => last.add(bucket.step, bucket.tokens, bucket.cells.into_iter()),
                _ => merged.push(Bucket { index, ..bucket }),
            }
        }
        self.buckets = merged;
    }

    /// Forgets the steps after `step`. A bucket that also holds earlier ones goes as a whole: the steps that come now fill
    /// its place, and are what it then shows.
    pub(super) fn back_to(&mut self, step: u64) {
        self.buckets.retain(|bucket| bucket.step <= step);
    }

    /// Steps that a point stands for.
    pub(super) fn width(&self) -> u64 {
        self.width
    }

    pub(super) fn steps(&self) -> Vec<u64> {
        self.buckets.iter().map(|bucket| bucket.step).collect()
    }

    pub(super) fn tokens(&self) -> Vec<u64> {
        self.buckets.iter().map(|bucket| bucket.tokens).collect()
    }

    pub(super) fn last_tokens(&self) -> u64 {
        self.buckets.last().map_or(0, |bucket| bucket.tokens)
    }

    pub(super) fn columns(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.cells.len()).max().unwrap_or(0)
    }

    /// A column's points; NaN where there is no finite value.
    pub(super) fn column(&self, at: usize, which: Which) -> impl Iterator<Item = f64> {
        self.buckets.iter().map(move |bucket| bucket.cells.get(at).map_or(f64::NAN, |cell| cell.get(which)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(steps: u64, max_points: usize) -> Track {
        let mut track = Track::new(max_points, usize::MAX);
        (1..=steps).for_each(|step| track.push(step, 10 * step, &[step as f64, -1.]));
        track
    }

    #[test]
    fn few_steps_are_kept_one_by_one() {
        let track = filled(100, 100);
        assert_eq!((track.width(), track.columns(), track.steps().len()), (1, 2, 100));
        assert!(track.column(0, Which::Mean).eq((1..=100).map(f64::from)));
        assert!(track.tokens().into_iter().eq((1..=100).map(|step| 10 * step)));
    }

    #[test]
    fn many_steps_are_means_with_their_ends() {
        let track = filled(1001, 100);
        assert_eq!((track.width(), track.steps().len()), (16, 63));
        let (mean, min, max) = (Which::Mean, Which::Min, Which::Max);
        let first = |which| track.column(0, which).next().unwrap();
        assert_eq!((first(min), first(mean), first(max)), (1., 8.5, 16.));
        assert_eq!(track.column(0, mean).last(), Some((993 + 1001) as f64 / 2.));
        assert_eq!(*track.steps().last().unwrap(), 1001);
    }

    #[test]
    fn numbers_that_are_not_finite_are_left_out() {
        let mut track = Track::new(2, usize::MAX);
        for (step, value) in [(1, 1.), (2, f64::NAN), (3, f64::INFINITY), (4, f64::NAN), (5, 5.)] {
            track.push(step, 0, &[value]);
        }
        let means: Vec<f64> = track.column(0, Which::Mean).collect();
        assert_eq!(means, [1., 5.]);
        track.back_to(0);
        track.push(1, 0, &[f64::NAN]);
        assert!(track.column(0, Which::Min).next().unwrap().is_nan());
    }

    #[test]
    fn steps_taken_again_replace_what_was_there() {
        let mut track = filled(1000, 100);
        track.back_to(500);
        assert_eq!(*track.steps().last().unwrap(), 496, "the bucket of 497 to 512 is gone");
        (501..=1000).for_each(|step| track.push(step, 0, &[7., 7.]));
        let means: Vec<f64> = track.column(0, Which::Mean).collect();
        assert_eq!((means[30], means[31], means.len()), (488.5, 7., 63));
    }

    #[test]
    fn wide_rows_have_fewer_points() {
        let mut track = Track::new(100, 2000);
        (1..=1000).for_each(|step| track.push(step, 0, &[1.; 100]));
        assert!((10..=20).contains(&track.steps().len()));
    }
}
