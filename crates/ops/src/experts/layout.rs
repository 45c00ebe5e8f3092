//! The order in which grouped products see the tokens: by expert, and within an expert by token.

use hymo_tensor::{Ctx, Error, MatMut, Result, Tensor, each};

/// Rows in a block of copying.
const ROWS: usize = 64;

/// The pairs (token n, choice j), numbered n K + j, sorted by expert; equal experts keep the order of the numbers, so
/// the layout is one function of the choice. The rows of expert e are `offsets[e]..offsets[e + 1]`.
#[derive(Debug, Clone)]
pub struct Layout {
    top_k: usize,
    /// [N K] i32: the pair in each row.
    order: Tensor,
    /// [N K] i32: the row of each pair, the inverse of `order`.
    slot: Tensor,
    offsets: Vec<usize>,
}

impl Layout {
    /// Of the chosen experts [N, K] i32, each in `0..experts`.
    pub fn new(ctx: &Ctx, chosen: &Tensor, experts: usize) -> Result<Self> {
        let [n, top_k] = chosen.dims2(super::OP, "chosen")?;
        if n.checked_mul(top_k).is_none_or(|pairs| pairs > i32::MAX as usize) {
            return Err(Error::value(super::OP, "chosen", format!("{n} x {top_k}"), "fewer than 2^31 choices"));
        }
        let ids = chosen.view::<i32>()?;
        let mut offsets = vec![0usize; experts + 1];
        for &e in (0..ids.rows()).flat_map(|i| ids.row(i)) {
            if e < 0 || e as usize >= experts {
                return Err(Error::value(super::OP, "chosen", e, format!("an expert of 0..{experts}")));
            }
            offsets[e as usize + 1] += 1;
        }
        for e in 0..experts {
            offsets[e + 1] += offsets[e];
        }
        let mut next = offsets.clone();
        let mut order = ctx.empty::<i32>(&[n * top_k])?;
        let mut slot = ctx.empty::<i32>(&[n * top_k])?;
        {
            let (order, slot) = (order.flat_mut::<i32>()?, slot.flat_mut::<i32>()?);
            for (pair, &e) in (0..ids.rows()).flat_map(|i| ids.row(i)).enumerate() {
                let row = &mut next[e as usize];
                order[*row] = pair as i32;
                slot[pair] = *row as i32;
                *row += 1;
            }
        }
        Ok(Layout { top_k, order, slot, offsets })
    }

    /// Where each expert's rows begin, and where the last one's end.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// N K.
    pub fn rows(&self) -> usize {
        self.order.numel()
    }

    /// [N K] i32: the pair n K + j in each row.
    pub fn order(&self) -> &Tensor {
        &self.order
    }

    /// [N K] i32: the row of each pair n K + j.
    pub fn slot(&self) -> &Tensor {
        &self.slot
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.order.bytes() + self.slot.bytes() + self.offsets.len() * size_of::<usize>()
    }

    /// Token and choice in each row.
    pub fn pairs(&self) -> Result<impl Fn(usize) -> (usize, usize) + Sync + '_> {
        let (order, k) = (self.order.flat::<i32>()?, self.top_k);
        Ok(move |row: usize| (order[row] as usize / k, order[row] as usize % k))
    }

    /// The tokens' rows of x [N, D] in this order: [N K, D].
    pub fn gather(&self, ctx: &Ctx, x: &Tensor) -> Result<Tensor> {
        let mut out = ctx.empty::<f32>(&[self.rows(), x.cols()])?;
        let (x, pair) = (x.view::<f32>()?, self.pairs()?);
        each!(out.view_mut::<f32>()?.row_blocks(ROWS), |b, mut out| {
            for i in 0..out.rows() {
                out.row_mut(i).copy_from_slice(x.row(pair(b * ROWS + i).0));
            }
        });
        Ok(out)
    }

    /// y_n = Σ_j z_(row of (n, j)), or y_n += that sum when `add`: a gather in the order of j, not a scatter.
    pub fn combine(&self, y: MatMut<'_, f32>, z: &Tensor, add: bool) -> Result<()> {
        let (z, slot, k) = (z.view::<f32>()?, self.slot.flat::<i32>()?, self.top_k);
        each!(y.row_blocks(ROWS), |b, mut y| {
            for i in 0..y.rows() {
                let first = (b * ROWS + i) * k;
                let y = y.row_mut(i);
                for (j, &row) in slot[first..first + k].iter().enumerate() {
                    let z = z.row(row as usize);
                    if j == 0 && !add {
                        y.copy_from_slice(z);
                    } else {
                        y.iter_mut().zip(z).for_each(|(y, &z)| *y += z);
                    }
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_stably_and_gathers_back() {
        let ctx = Ctx::cpu().poisoned();
        let chosen = Tensor::from_vec(&[4, 2], vec![2, 0, 0, 2, 2, 3, 3, 0]).unwrap();
        let layout = Layout::new(&ctx, &chosen, 5).unwrap();
        assert_eq!(layout.offsets(), [0, 3, 3, 6, 8, 8]);
        assert_eq!(layout.order().to_vec::<i32>().unwrap(), [1, 2, 7, 0, 3, 4, 5, 6]);
        assert_eq!(layout.slot().to_vec::<i32>().unwrap(), [3, 0, 1, 4, 5, 6, 7, 2]);
        let x = Tensor::from_vec(&[4, 1], vec![1f32, 2., 3., 4.]).unwrap();
        let rows = layout.gather(&ctx, &x).unwrap();
        assert_eq!(rows.to_vec::<f32>().unwrap(), [1., 2., 4., 1., 2., 3., 3., 4.]);
        let mut y = ctx.empty::<f32>(&[4, 1]).unwrap();
        layout.combine(y.view_mut().unwrap(), &rows, false).unwrap();
        layout.combine(y.view_mut().unwrap(), &rows, true).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [4., 8., 12., 16.]);
    }

    #[test]
    fn experts_out_of_range_are_refused() {
        let ctx = Ctx::cpu();
        for bad in [-1, 3, i32::MIN] {
            let chosen = Tensor::from_vec(&[1, 2], vec![0, bad]).unwrap();
            let err = Layout::new(&ctx, &chosen, 3).unwrap_err().to_string();
            assert_eq!(err, format!("experts: chosen is {bad}, want an expert of 0..3"));
        }
    }
}
