//! What a training step reads: rows of tokens with their documents, and what follows from them.

use hymo_ops::Docs;
use hymo_tensor::{Error, Result};
use std::sync::Arc;

/// `batch` rows that carry `len + n_modules + 1` tokens each, so that every position has its targets at every depth and
/// none is lost to the cut (MATH 5.1).
#[derive(Debug, Clone)]
pub struct Batch {
    docs: Arc<Docs>,
    depths: usize,
    tokens: Vec<i32>,
    seg: Vec<i32>,
}

/// Denominators of the means: counts over the whole step, all micro-batches and all ranks, so that accumulation and
/// sharding change nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct Counts {
    /// Valid targets of the head and of each prediction module.
    pub valid: Vec<f64>,
    /// Positions that are not padding.
    pub tokens: f64,
}

impl Counts {
    /// The sum of two batches' counts, which must be for equally many depths ([`crate::HyMo::loss`] refuses the rest).
    #[must_use]
    pub fn plus(mut self, other: &Counts) -> Counts {
        self.valid.iter_mut().zip(&other.valid).for_each(|(a, b)| *a += b);
        self.tokens += other.tokens;
        self
    }
}

impl Batch {
    /// From token and document ids, row after row. A new document id starts a document; negative ids are padding.
    ///
    /// # Errors
    /// Lengths that are not `batch` rows of `len + n_modules + 1`; a negative token id outside padding.
    pub fn new(batch: usize, len: usize, n_modules: usize, tokens: &[i32], seg: &[i32]) -> Result<Self> {
        let width = len.checked_add(n_modules).and_then(|w| w.checked_add(1));
        let want = || {
            let width = width.map_or("more than can be".to_owned(), |w| w.to_string());
            format!("{batch} rows of {width} (len {len}, {n_modules} prediction modules, 1 target)")
        };
        let fits = |width: &usize| len > 0 && batch > 0 && batch.checked_mul(*width) == Some(tokens.len());
        let Some(width) = width.filter(fits) else {
            return Err(Error::value("batch", "tokens", format!("{} ids", tokens.len()), want()));
        };
        if seg.len() != tokens.len() {
            return Err(Error::value("batch", "seg", format!("{} ids", seg.len()), want()));
        }
        if let Some(at) = (0..tokens.len()).find(|&i| tokens[i] < 0 && seg[i] >= 0) {
            let got = format!("{} in row {}, column {}", tokens[at], at / width, at % width);
            return Err(Error::value("batch", "tokens", got, "ids from 0 outside padding"));
        }
        let kept: Vec<i32> = seg.chunks(width).flat_map(|row| &row[..len]).copied().collect();
        let docs = Arc::new(Docs::new(batch, len, &kept)?);
        Ok(Batch { docs, depths: n_modules, tokens: tokens.to_vec(), seg: seg.to_vec() })
    }

    /// The documents of the positions.
    #[must_use]
    pub fn docs(&self) -> &Arc<Docs> {
        &self.docs
    }

    /// Prediction modules that the rows have targets for.
    #[must_use]
    pub fn n_modules(&self) -> usize {
        self.depths
    }

    /// Position of every token in its document, from 0.
    #[must_use]
    pub fn positions(&self) -> Vec<i32> {
        let d = &self.docs;
        (0..d.batch()).flat_map(|b| (0..d.len()).map(move |t| (t - d.start(b, t)) as i32)).collect()
    }

    /// For every position i: the token at i + `ahead`, or -1 when that lies in another document or in padding.
    /// HAZARD 10: never by rolling a row.
    #[must_use]
    pub fn ahead(&self, ahead: usize) -> Vec<i32> {
        let (len, width) = (self.docs.len(), self.docs.len() + self.depths + 1);
        let rows = self.tokens.chunks(width).zip(self.seg.chunks(width));
        rows.flat_map(|(tokens, seg)| {
            (0..len).map(move |i| {
                let inside = seg[i] >= 0 && seg[i..=i + ahead].iter().all(|&s| s == seg[i]);
                if inside { tokens[i + ahead] } else { -1 }
            })
        })
        .collect()
    }

    /// The tokens themselves; padding too, as the embedding of token 0.
    #[must_use]
    pub fn inputs(&self) -> Vec<i32> {
        let (len, width) = (self.docs.len(), self.docs.len() + self.depths + 1);
        let rows = self.tokens.chunks(width).zip(self.seg.chunks(width));
        rows.flat_map(|(t, s)| (0..len).map(move |i| if s[i] < 0 { 0 } else { t[i] })).collect()
    }

    /// This batch's own counts.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let valid = (1..=self.depths + 1).map(|k| self.ahead(k).iter().filter(|&&t| t >= 0).count() as f64).collect();
        let d = &self.docs;
        let tokens = (0..d.batch()).flat_map(|b| (0..d.len()).map(move |t| (b, t))).filter(|&(b, t)| !d.padding(b, t));
        Counts { valid, tokens: tokens.count() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HAZARD 10: targets and their counts at each depth come from document ids; the last positions of a row use the
    /// tokens that the row carries beyond its length.
    #[test]
    fn targets_stay_inside_their_document() {
        let b = Batch::new(1, 6, 2, &[10, 11, 12, 20, 30, 31, 32, 33, 40], &[0, 0, 0, 1, 2, 2, 2, 2, 3]).unwrap();
        assert_eq!(b.inputs(), [10, 11, 12, 20, 30, 31]);
        assert_eq!(b.positions(), [0, 1, 2, 0, 0, 1]);
        assert_eq!(b.ahead(1), [11, 12, -1, -1, 31, 32]);
        assert_eq!(b.ahead(2), [12, -1, -1, -1, 32, 33]);
        assert_eq!(b.ahead(3), [-1, -1, -1, -1, 33, -1]);
        assert_eq!(b.counts(), Counts { valid: vec![4., 3., 1.], tokens: 6. });
    }

    #[test]
    fn padding_is_no_target_and_not_counted() {
        let b = Batch::new(1, 4, 0, &[1, 2, 7, 7, 7], &[0, 0, -1, -1, -1]).unwrap();
        assert_eq!((b.inputs(), b.ahead(1)), (vec![1, 2, 0, 0], vec![2, -1, -1, -1]));
        assert_eq!(b.counts(), Counts { valid: vec![1.], tokens: 2. });
        let negative = Batch::new(1, 4, 0, &[1, 2, -7, 7, 7], &[0, 0, 0, -1, -1]).unwrap_err().to_string();
        assert_eq!(negative, "batch: tokens is -7 in row 0, column 2, want ids from 0 outside padding");
        assert!(Batch::new(1, 4, 1, &[1; 5], &[0; 5]).unwrap_err().to_string().contains("1 rows of 6"));
        for (batch, len, modules) in [(1, usize::MAX, 2), (1, 2, usize::MAX), (usize::MAX, 2, 2), (0, 4, 0), (1, 0, 3)]
        {
            assert!(Batch::new(batch, len, modules, &[1; 5], &[0; 5]).is_err(), "{batch} {len} {modules}");
        }
    }
}
