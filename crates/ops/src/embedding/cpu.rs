//! The oracle, then the fast path.

use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

pub(super) fn oracle<T: Real>(ctx: &Ctx, ids: &[i32], e: &Tensor) -> Result<Tensor> {
    let mut x = ctx.zeros::<T>(&[ids.len(), e.cols()])?;
    let (e, mut xs) = (e.view::<T>()?, x.view_mut::<T>()?);
    for (i, &id) in ids.iter().enumerate() {
        if id >= 0 {
            xs.row_mut(i).copy_from_slice(e.row(id as usize));
        }
    }
    Ok(x)
}

pub(super) fn oracle_backward<T: Real>(ctx: &Ctx, ids: &[i32], d_x: &Tensor, d_e: &mut GradSlot<'_>) -> Result<()> {
    let Some((mut d_e, add)) = d_e.target::<T>(ctx)? else { return Ok(()) };
    if !add {
        d_e.fill(T::zero());
    }
    let d_x = d_x.view::<T>()?;
    for (i, &id) in ids.iter().enumerate() {
        if id >= 0 {
            d_e.row_mut(id as usize).iter_mut().zip(d_x.row(i)).for_each(|(e, &x)| *e += x);
        }
    }
    Ok(())
}

/// Rows of x in a block of work.
const ROWS: usize = 64;

pub(super) fn forward(ctx: &Ctx, ids: &[i32], e: &Tensor) -> Result<Tensor> {
    let mut x = ctx.empty::<f32>(&[ids.len(), e.cols()])?;
    let e = e.view::<f32>()?;
    each!(x.view_mut::<f32>()?.row_blocks(ROWS), |b, mut xs| {
        for i in 0..xs.rows() {
            match ids[b * ROWS + i] {
                id if id >= 0 => xs.row_mut(i).copy_from_slice(e.row(id as usize)),
                _ => xs.row_mut(i).fill(0.),
            }
        }
    });
    Ok(x)
}

/// Positions in a block of the backward, at least: an id is never divided, so a frequent one makes a longer block.
const POSITIONS: usize = 128;

/// A token's id and position in one word: sorting words is then stable by id, whatever the sort.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64);

impl Key {
    fn new(id: i32, position: usize) -> Self {
        Key((id as u64) << 32 | position as u64)
    }

    fn id(self) -> usize {
        (self.0 >> 32) as usize
    }

    fn position(self) -> usize {
        self.0 as u32 as usize
    }
}

/// Some rows of d_E, from row `first` on, and the positions that add to them.
struct Band<'a> {
    first: usize,
    rows: MatMut<'a, f32>,
    keys: &'a [Key],
}

impl Band<'_> {
    fn sum(&mut self, d_x: Mat<'_, f32>, add: bool) {
        if !add {
            self.rows.fill(0.);
        }
        for key in self.keys {
            let row = self.rows.row_mut(key.id() - self.first);
            row.iter_mut().zip(d_x.row(key.position())).for_each(|(e, &x)| *e += x);
        }
    }
}

/// Cuts d_E between ids, so that every band has rows of its own and about as many positions as the others.
fn bands<'a>(d_e: MatMut<'a, f32>, mut keys: &'a [Key]) -> Vec<Band<'a>> {
    let (mut out, mut below, mut first) = (Vec::new(), d_e, 0);
    while keys.len() > POSITIONS {
        let last = keys[POSITIONS - 1].id();
        let (mine, others) = keys.split_at(keys.partition_point(|k| k.id() <= last));
        let (rows, rest) = below.split_rows(last + 1 - first);
        out.push(Band { first, rows, keys: mine });
        (below, keys, first) = (rest, others, last + 1);
    }
    out.push(Band { first, rows: below, keys });
    out
}

pub(super) fn backward(ctx: &Ctx, ids: &[i32], d_x: &Tensor, d_e: &mut GradSlot<'_>) -> Result<()> {
    let Some((d_e, add)) = d_e.target::<f32>(ctx)? else { return Ok(()) };
    let d_x = d_x.view::<f32>()?;
    let mut keys: Vec<Key> =
        ids.iter().enumerate().filter(|(_, id)| **id >= 0).map(|(i, &id)| Key::new(id, i)).collect();
    keys.sort_unstable();
    each!(bands(d_e, &keys), |_, mut band| band.sum(d_x, add));
    Ok(())
}
