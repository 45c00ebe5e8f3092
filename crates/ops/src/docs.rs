use hymo_tensor::{Error, Result};

/// Which document every token of a batch belongs to: what keeps packed documents apart in every operation.
///
/// A batch is `batch` rows of `len` tokens. Documents are contiguous; a new document id starts a new document, and rows
/// never share one. Tokens with a negative id are padding: they form documents of their own, and counts leave them out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Docs {
    batch: usize,
    len: usize,
    seg: Vec<i32>,
    start: Vec<u32>,
    continued: Vec<bool>,
    #[cfg(feature = "cuda")]
    gpu: crate::gpu::OnGpu<crate::gpu::GpuDocs>,
}

impl Docs {
    /// From document ids, `batch` rows of `len`. Every row begins a document.
    pub fn new(batch: usize, len: usize, seg: &[i32]) -> Result<Self> {
        Docs::continuing(batch, len, seg, &vec![false; batch])
    }

    /// As [`Docs::new`], where the first document of row `b` goes on from an earlier piece, whose state is carried in,
    /// when `continued[b]`.
    pub fn continuing(batch: usize, len: usize, seg: &[i32], continued: &[bool]) -> Result<Self> {
        if batch.checked_mul(len) != Some(seg.len()) || len > u32::MAX as usize {
            return Err(Error::value("docs", "seg", format!("{} ids", seg.len()), format!("{batch} x {len}")));
        }
        if continued.len() != batch {
            return Err(Error::value(
                "docs",
                "continued",
                continued.len(),
                format!("one flag for each of {batch} rows"),
            ));
        }
        let mut start = vec![0; seg.len()];
        for (row, at) in seg.chunks(len.max(1)).zip(start.chunks_mut(len.max(1))) {
            for t in 1..row.len() {
                at[t] = if row[t] == row[t - 1] { at[t - 1] } else { t as u32 };
            }
        }
        Ok(Docs { start, seg: seg.to_vec(), continued: continued.to_vec(), ..Docs::whole(batch, len) })
    }

    /// One document a row.
    pub fn whole(batch: usize, len: usize) -> Self {
        let n = batch * len;
        Docs {
            batch,
            len,
            seg: vec![0; n],
            start: vec![0; n],
            continued: vec![false; batch],
            #[cfg(feature = "cuda")]
            gpu: crate::gpu::OnGpu::default(),
        }
    }

    /// The same on a GPU, for kernels.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self, ctx: &hymo_tensor::Ctx, gpu: &hymo_cuda::Gpu) -> Result<crate::gpu::GpuDocs> {
        self.gpu.get(gpu, || crate::gpu::GpuDocs::new(ctx, self))
    }

    /// Rows.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens of a row.
    #[allow(clippy::len_without_is_empty)] // the length of a row, not of a collection
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.batch * self.len
    }

    /// Index in row `b` of the first token of token `t`'s document.
    pub fn start(&self, b: usize, t: usize) -> usize {
        self.start[b * self.len + t] as usize
    }

    /// Whether row `b`'s first document goes on from an earlier piece.
    pub fn continued(&self, b: usize) -> bool {
        self.continued[b]
    }

    /// Whether token `t` of row `b` belongs to the document that an earlier piece of row `b` began.
    pub fn carried(&self, b: usize, t: usize) -> bool {
        self.continued[b] && self.start(b, t) == 0
    }

    /// Whether token `t` of row `b` is padding.
    pub fn padding(&self, b: usize, t: usize) -> bool {
        self.seg[b * self.len + t] < 0
    }

    /// The documents of row `b`, in order, as ranges of tokens.
    pub fn ranges(&self, b: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let mut t = 0;
        std::iter::from_fn(move || {
            if t >= self.len {
                return None;
            }
            let from = t;
            t += 1;
            while t < self.len && self.start(b, t) == from {
                t += 1;
            }
            Some(from..t)
        })
    }

    /// Fails unless a tensor's `rows` are this batch's tokens.
    pub fn expect(&self, op: &'static str, arg: &'static str, rows: usize) -> Result<()> {
        if rows == self.tokens() {
            return Ok(());
        }
        Err(Error::value(op, arg, format!("{rows} rows"), format!("{} x {} tokens", self.batch, self.len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_documents() {
        let d = Docs::continuing(2, 5, &[4, 4, 5, 6, 6, 1, 1, 1, -1, -1], &[true, false]).unwrap();
        assert_eq!(d.ranges(0).collect::<Vec<_>>(), [0..2, 2..3, 3..5]);
        assert_eq!(d.ranges(1).collect::<Vec<_>>(), [0..3, 3..5]);
        assert!(d.carried(0, 1) && !d.carried(0, 2) && !d.carried(1, 0));
        assert!(d.padding(1, 3) && !d.padding(1, 2));
        assert!(Docs::new(2, 5, &[0; 9]).is_err() && Docs::continuing(1, 1, &[0], &[]).is_err());
    }
}
