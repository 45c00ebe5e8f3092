//! The latents of one attention layer, in pages that sequences share until one of them writes.

use super::CacheDtype;
use crate::Result;
use hymo_ops::attention::decode::{PAGE, Page};
use hymo_tensor::{Tensor, bf16};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug, Clone)]
enum Kept {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// The cached rows of one layer and sequence.
#[derive(Debug, Clone)]
pub(crate) struct Latents {
    pages: Vec<Arc<Kept>>,
    len: usize,
    /// Numbers of a row.
    width: usize,
    dtype: CacheDtype,
}

impl Latents {
    pub fn new(width: usize, dtype: CacheDtype) -> Self {
        Latents { pages: Vec::new(), len: 0, width, dtype }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the pages.
    pub fn bytes(&self) -> usize {
        self.pages.len() * PAGE * self.width * self.dtype.bytes()
    }

    /// Appends rows: of `kv` and of `k_r` side by side.
    pub fn append(&mut self, kv: &Tensor, k_r: &Tensor, rows: Range<usize>) -> Result<()> {
        let (kv, k_r) = (kv.view::<f32>()?, k_r.view::<f32>()?);
        let split = kv.cols();
        for i in rows {
            let at = self.len % PAGE * self.width;
            if at == 0 {
                self.pages.push(Arc::new(self.fresh()));
            }
            let page = Arc::make_mut(self.pages.last_mut().expect("invariant: the page of the row before"));
            // Without rotary numbers k_r is a tensor of no columns, and so of no rows.
            let turned = if k_r.cols() > 0 { k_r.row(i) } else { &[] };
            match page {
                Kept::F32(page) => {
                    page[at..at + split].copy_from_slice(kv.row(i));
                    page[at + split..at + self.width].copy_from_slice(turned);
                }
                Kept::Bf16(page) => {
                    let row = kv.row(i).iter().chain(turned);
                    page[at..at + self.width].iter_mut().zip(row).for_each(|(to, &x)| *to = bf16::from_f32(x));
                }
            }
            self.len += 1;
        }
        Ok(())
    }

    fn fresh(&self) -> Kept {
        match self.dtype {
            CacheDtype::F32 => Kept::F32(vec![0.; PAGE * self.width]),
            CacheDtype::Bf16 => Kept::Bf16(vec![bf16::ZERO; PAGE * self.width]),
        }
    }

    /// Takes back all rows but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(PAGE));
    }

    /// What attention reads.
    pub fn pages(&self) -> Vec<Page<'_>> {
        self.pages.iter().map(|p| page(p)).collect()
    }
}

fn page(kept: &Kept) -> Page<'_> {
    match kept {
        Kept::F32(p) => Page::F32(p),
        Kept::Bf16(p) => Page::Bf16(p),
    }
}
