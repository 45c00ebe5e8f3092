use super::OP;
use crate::Docs;
use hymo_tensor::{Error, Result};
use std::ops::Range;

/// Which keys each query sees: those of its own row, from its document's start up to the token itself.
///
/// Rows have as many keys as queries, or more when earlier keys are cached: a row's queries are its last tokens. The
/// first key seen never falls from one query to the next, since documents are contiguous, so what a run of queries sees
/// is one range of keys and what sees a run of keys is one range of queries.
#[derive(Debug, Clone)]
pub(super) struct Window {
    pub batch: usize,
    /// Queries of a row.
    pub queries: usize,
    /// Keys of a row.
    pub keys: usize,
    from: Vec<u32>,
    padding: Vec<bool>,
    #[cfg(feature = "cuda")]
    gpu: crate::gpu::OnGpu<[hymo_tensor::Tensor; 2]>,
}

impl Window {
    /// Packed documents, keys and queries of the same tokens.
    pub fn packed(docs: &Docs) -> Result<Self> {
        let (batch, len) = (docs.batch(), docs.len());
        if let Some(b) = (0..batch).find(|b| docs.continued(*b)) {
            let got = format!("row {b} continues an earlier piece");
            return Err(Error::value(OP, "docs", got, "whole documents; `cached` takes earlier keys too"));
        }
        let tokens = || (0..batch).flat_map(|b| (0..len).map(move |t| (b, t)));
        let from = tokens().map(|(b, t)| docs.start(b, t) as u32).collect();
        let padding = tokens().map(|(b, t)| docs.padding(b, t)).collect();
        Ok(Window::new(batch, [len, len], from, padding))
    }

    fn new(batch: usize, [queries, keys]: [usize; 2], from: Vec<u32>, padding: Vec<bool>) -> Self {
        Window {
            batch,
            queries,
            keys,
            from,
            padding,
            #[cfg(feature = "cuda")]
            gpu: crate::gpu::OnGpu::default(),
        }
    }

    /// The first key that each query sees, and 1 for padding, on a GPU: both i32, a query each.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(
        &self,
        ctx: &hymo_tensor::Ctx,
        gpu: &hymo_cuda::Gpu,
    ) -> Result<(hymo_tensor::Tensor, hymo_tensor::Tensor)> {
        let up = |v: Vec<i32>| hymo_tensor::Tensor::from_slice(ctx, &[v.len()], &v);
        let [from, padding] = self.gpu.get(gpu, || {
            let from = self.from.iter().map(|&f| f as i32).collect();
            Ok([up(from)?, up(self.padding.iter().map(|&p| i32::from(p)).collect())?])
        })?;
        Ok((from, padding))
    }

    /// The last tokens of one sequence of `keys`, each with the first key that it sees.
    pub fn cached(from: &[usize], keys: usize) -> Result<Self> {
        let queries = from.len();
        if queries > keys || keys > u32::MAX as usize {
            return Err(Error::value(OP, "from", format!("{queries} queries"), format!("at most {keys} keys")));
        }
        for (i, &f) in from.iter().enumerate() {
            let least = if i == 0 { 0 } else { from[i - 1] };
            if f < least || f > keys - queries + i {
                let want = format!("from {least} to the query's own key {}", keys - queries + i);
                return Err(Error::value(OP, "from", format!("{f} at query {i}"), want));
            }
        }
        let padding = vec![false; queries];
        Ok(Window::new(1, [queries, keys], from.iter().map(|&f| f as u32).collect(), padding))
    }

    /// The keys, by their index in row `b`, that its query `i` sees: never none.
    pub fn seen(&self, b: usize, i: usize) -> Range<usize> {
        self.from[b * self.queries + i] as usize..self.keys - self.queries + i + 1
    }

    /// As [`Window::seen`], within the tile of `n` keys from `j`, counted from `j`. May be empty.
    pub fn seen_in(&self, b: usize, i: usize, j: usize, n: usize) -> Range<usize> {
        let seen = self.seen(b, i);
        let (start, end) = (seen.start.max(j) - j, seen.end.clamp(j, j + n) - j);
        start.min(end)..end
    }

    /// The keys of row `b` that some query among `n` from `i` sees.
    pub fn seen_by(&self, b: usize, i: usize, n: usize) -> Range<usize> {
        self.seen(b, i).start..self.seen(b, i + n - 1).end
    }

    /// The queries of row `b` that see some key among `n` from `j`.
    pub fn seers(&self, b: usize, j: usize, n: usize) -> Range<usize> {
        let row = &self.from[b * self.queries..(b + 1) * self.queries];
        let first = j.saturating_sub(self.keys - self.queries).min(self.queries);
        first..row.partition_point(|&f| (f as usize) < j + n).max(first)
    }

    /// Whether query `i` of row `b` is padding.
    pub fn padding(&self, b: usize, i: usize) -> bool {
        self.padding[b * self.queries + i]
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.from.len() * (size_of::<u32>() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges of keys and ranges of queries say the same as looking at every pair.
    #[test]
    fn ranges_match_pairs() {
        let docs = Docs::new(2, 9, &[1, 1, 2, 3, 3, 3, 3, 4, 4, 7, 7, 7, 7, 7, 7, 7, 8, -1]).unwrap();
        let packed = Window::packed(&docs).unwrap();
        let cached = Window::cached(&[2, 2, 6, 9], 10).unwrap();
        assert!(packed.padding(1, 8) && !packed.padding(0, 8));
        for w in [packed, cached] {
            let sees = |b: usize, i: usize, j: usize| w.seen(b, i).contains(&j);
            for b in 0..w.batch {
                for j in 0..w.keys {
                    for n in 1..=w.keys - j {
                        let seers: Vec<_> = (0..w.queries).filter(|&i| (j..j + n).any(|j| sees(b, i, j))).collect();
                        assert_eq!(w.seers(b, j, n).collect::<Vec<_>>(), seers, "keys {j} + {n}");
                        for i in 0..w.queries {
                            let seen: Vec<_> = (0..n).filter(|&k| sees(b, i, j + k)).collect();
                            assert_eq!(w.seen_in(b, i, j, n).collect::<Vec<_>>(), seen);
                        }
                    }
                }
                for i in 0..w.queries {
                    for n in 1..=w.queries - i {
                        let seen: Vec<_> = (0..w.keys).filter(|&j| (i..i + n).any(|i| sees(b, i, j))).collect();
                        assert_eq!(w.seen_by(b, i, n).collect::<Vec<_>>(), seen, "queries {i} + {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn refuses_what_no_sequence_gives() {
        assert!(Window::cached(&[0, 0], 1).is_err() && Window::cached(&[1, 0], 4).is_err());
        assert!(Window::cached(&[3, 3], 4).is_err() && Window::cached(&[2, 3], 4).is_ok());
        let carried = Docs::continuing(1, 2, &[0, 0], &[true]).unwrap();
        let message = Window::packed(&carried).unwrap_err().to_string();
        assert!(message.starts_with("attention: docs is row 0 continues an earlier piece"), "{message}");
    }
}
