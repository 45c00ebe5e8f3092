//! Attention of runs of tokens of many sequences over their own paged caches, for decoding and prefill alike. No gradient.
//!
//! A cached row holds what keys and values are made of: with a latent, c `[C]` and the turned rotary keys [G R]; without one,
//! the content keys [G D], the values [G V] and the rotary keys [G R]. With a latent the maps W_uk and W_uv stand on the
//! queries' side of both products (MATH 2.5), so that keys and values of cached tokens never exist. Pages are taken in order
//! under a running maximum, one token after another, each head by itself: an output's bits depend on the query and on the
//! cache up to it, and on nothing beside it. All sums in f32.

mod page;

use super::{Args, OP};
use hymo_tensor::{Ctx, Error, Mat, MatMut, Result, Tensor, bf16, each};
use page::{Sums, Walk};
use std::ops::Range;

/// Tokens of a page.
pub const PAGE: usize = 64;

/// Cached rows of [`PAGE`] tokens, the last of them perhaps not yet written.
#[derive(Debug, Clone, Copy)]
pub enum Page<'a> {
    /// As they were computed.
    F32(&'a [f32]),
    /// Rounded; half the memory.
    Bf16(&'a [bf16]),
}

/// The maps out of a latent, as [`attend`] reads them.
#[derive(Debug, Clone, Copy)]
pub struct Maps<'a> {
    /// Latent to content keys [G D, C].
    pub w_uk: &'a Tensor,
    /// Latent to values, each group's transposed: [G C, V].
    pub w_uv_t: &'a Tensor,
}

/// Consecutive tokens of one sequence, whose own rows are in the cache already.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    /// Which rows of the queries they are. Runs come in order and leave no row out.
    pub rows: Range<usize>,
    /// The first one's position in its sequence.
    pub position: usize,
    /// The sequence's pages, at least up to its last token.
    pub pages: Vec<Page<'a>>,
}

/// Queries whose keys one task walks together.
const QUERIES: usize = 16;

/// o [N, H V] of q [N, H (D + R)], turned, each run over its own pages. f32.
///
/// # Errors
/// Shapes that do not fit; runs that are not all rows in order; too few pages.
pub fn attend(ctx: &Ctx, q: &Tensor, maps: Option<Maps<'_>>, runs: &[Run<'_>], args: Args) -> Result<Tensor> {
    args.check()?;
    q.expect(OP, "q", &[q.rows(), args.n_heads * args.d_k()])?;
    let cache = Cache::new(maps, args)?;
    check(runs, q.rows(), cache.width)?;
    let mut o = ctx.empty::<f32>(&[q.rows(), args.n_heads * args.d_v])?;
    let (q, mut rest, mut tasks) = (q.view::<f32>()?, o.view_mut::<f32>()?, Vec::new());
    for run in runs {
        let mine;
        (mine, rest) = rest.split_rows(run.rows.len());
        let tiles = mine.grid(QUERIES, args.heads() * args.d_v).into_iter().enumerate();
        tasks.extend(tiles.map(|(i, tile)| (run, i / args.n_groups * QUERIES, i % args.n_groups, tile)));
    }
    each!(tasks, |_, (run, first, g, o)| cache.tile(q, run, first, g, o));
    Ok(o)
}

fn check(runs: &[Run<'_>], n: usize, width: usize) -> Result<()> {
    let mut at = 0;
    for run in runs {
        let whole = |p: &Page<'_>| match p {
            Page::F32(p) => p.len() == PAGE * width,
            Page::Bf16(p) => p.len() == PAGE * width,
        };
        let last = run.position + run.rows.len();
        if run.rows.start != at || run.rows.is_empty() || last > PAGE * run.pages.len() || !run.pages.iter().all(whole)
        {
            let got = format!("rows {:?} at {} over {} pages", run.rows, run.position, run.pages.len());
            let want = format!("rows from {at} and pages of {PAGE} x {width} up to their last token");
            return Err(Error::value(OP, "runs", got, want));
        }
        at = run.rows.end;
    }
    match at == n {
        true => Ok(()),
        false => Err(Error::value(OP, "runs", format!("{at} rows"), format!("all {n}"))),
    }
}

/// How a cached row lies and how it is read.
struct Cache<'a> {
    args: Args,
    /// W_uk and the transposed W_uv.
    maps: Option<[Mat<'a, f32>; 2]>,
    /// Numbers of a cached row.
    width: usize,
    /// Content numbers of a key, and numbers of what is summed as a value.
    content: usize,
    value: usize,
}

impl<'a> Cache<'a> {
    fn new(maps: Option<Maps<'a>>, args: Args) -> Result<Self> {
        let Args { n_groups, d_nope, d_rope, d_v, .. } = args;
        let Some(maps) = maps else {
            let width = n_groups * (d_nope + d_v + d_rope);
            return Ok(Cache { args, maps: None, width, content: d_nope, value: d_v });
        };
        let [_, c] = maps.w_uk.dims2(OP, "w_uk")?;
        maps.w_uk.expect(OP, "w_uk", &[n_groups * d_nope, c])?;
        maps.w_uv_t.expect(OP, "w_uv_t", &[n_groups * c, d_v])?;
        let views = [maps.w_uk.view::<f32>()?, maps.w_uv_t.view::<f32>()?];
        Ok(Cache { args, maps: Some(views), width: c + n_groups * d_rope, content: c, value: c })
    }

    /// Columns of a cached row: group `g`'s content key, rotary key and value.
    #[inline(always)]
    fn columns(&self, g: usize) -> [Range<usize>; 3] {
        let Args { n_groups, d_nope, d_rope, d_v, .. } = self.args;
        let part = |from: usize, n: usize| from..from + n;
        match self.maps {
            Some(_) => [part(0, self.content), part(self.content + g * d_rope, d_rope), part(0, self.content)],
            None => [
                part(g * d_nope, d_nope),
                part(n_groups * (d_nope + d_v) + g * d_rope, d_rope),
                part(n_groups * d_nope + g * d_v, d_v),
            ],
        }
    }

    /// Group `g`'s heads of the queries from the run's row `first` on.
    #[inline(always)]
    fn tile(&self, q: Mat<'_, f32>, run: &Run<'_>, first: usize, g: usize, mut o: MatMut<'_, f32>) {
        let (heads, d_k) = (self.args.heads(), self.args.d_k());
        let size = self.content + self.args.d_rope;
        let mut queries = vec![0.; o.rows() * heads * size];
        for (i, query) in queries.chunks_mut(size).enumerate() {
            let row = q.row(run.rows.start + first + i / heads);
            self.query(query, &row[(g * heads + i % heads) * d_k..][..d_k], g);
        }
        let mut sums = Sums::new(o.rows() * heads, self.value);
        let end = run.position + first + o.rows();
        let mut wide = vec![0.; PAGE * self.width];
        for (p, page) in run.pages.iter().enumerate().take(end.div_ceil(PAGE)) {
            let rows = match page {
                Page::F32(rows) => rows,
                Page::Bf16(rows) => {
                    wide.iter_mut().zip(*rows).for_each(|(to, x)| *to = f32::from_bits(u32::from(x.to_bits()) << 16));
                    &wide[..]
                }
            };
            for (i, queries) in queries.chunks(heads * size).enumerate() {
                let seen = (run.position + first + i + 1).saturating_sub(p * PAGE).min(PAGE);
                if seen > 0 {
                    pulp::Arch::new().dispatch(Walk {
                        sums: &mut sums,
                        first: i * heads,
                        queries,
                        sizes: [size, self.content],
                        scale: self.args.scale as f32,
                        rows: &rows[..seen * self.width],
                        width: self.width,
                        columns: self.columns(g),
                    });
                }
            }
        }
        for i in 0..o.rows() * heads {
            let out = &mut o.row_mut(i / heads)[i % heads * self.args.d_v..][..self.args.d_v];
            let values = sums.finish(i);
            match &self.maps {
                Some([_, w_uv_t]) => mapped(out, values, w_uv_t.rows_at(g * self.content, self.content)),
                None => out.copy_from_slice(values),
            }
        }
    }

    /// A head's query as the cache's keys are met: content before rotary numbers.
    #[inline(always)]
    fn query(&self, to: &mut [f32], q: &[f32], g: usize) {
        let d_nope = self.args.d_nope;
        let (content, rotary) = to.split_at_mut(self.content);
        match &self.maps {
            Some([w_uk, _]) => mapped(content, &q[..d_nope], w_uk.rows_at(g * d_nope, d_nope)),
            None => content.copy_from_slice(&q[..d_nope]),
        }
        rotary.copy_from_slice(&q[d_nope..]);
    }
}

/// Columns whose sums stay in registers.
const COLS: usize = 64;

/// to = Σ_d x_d m_d: a row times a matrix.
#[inline(always)]
fn mapped(to: &mut [f32], x: &[f32], m: Mat<'_, f32>) {
    for (i, to) in to.chunks_mut(COLS).enumerate() {
        let mut sums = [0f32; COLS];
        let n = to.len();
        if n == COLS {
            for (d, &x) in x.iter().enumerate() {
                sums.iter_mut().zip(&m.row(d)[i * COLS..]).for_each(|(s, &m)| *s += x * m);
            }
        } else {
            for (d, &x) in x.iter().enumerate() {
                sums[..n].iter_mut().zip(&m.row(d)[i * COLS..]).for_each(|(s, &m)| *s += x * m);
            }
        }
        to.copy_from_slice(&sums[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{self, Latent};
    use crate::check::{Noise, rms_error, values};

    fn noise(ctx: &Ctx, seed: u64, dims: &[usize]) -> Tensor {
        let x: Vec<f32> = Noise::new(seed).normals(dims.iter().product()).into_iter().map(|x| x as f32).collect();
        Tensor::from_slice(ctx, dims, &x).unwrap()
    }

    /// Pages of some rows; what lies behind the last of them is never read.
    fn paged(rows: &Tensor) -> Vec<Vec<f32>> {
        let mut all = rows.to_vec::<f32>().unwrap();
        all.resize(rows.rows().div_ceil(PAGE) * PAGE * rows.cols(), f32::NAN);
        all.chunks(PAGE * rows.cols()).map(<[f32]>::to_vec).collect()
    }

    fn beside(ctx: &Ctx, a: &Tensor, b: &Tensor) -> Tensor {
        let (x, y) = (a.view::<f32>().unwrap(), b.view::<f32>().unwrap());
        let both: Vec<f32> = (0..a.rows()).flat_map(|i| [x.row(i), y.row(i)].concat()).collect();
        Tensor::from_slice(ctx, &[a.rows(), a.cols() + b.cols()], &both).unwrap()
    }

    fn transposed(ctx: &Ctx, w: &Tensor, groups: usize) -> Tensor {
        let (w, v) = (w.view::<f32>().unwrap(), w.rows() / groups);
        let x: Vec<f32> = (0..groups)
            .flat_map(|g| (0..w.cols()).flat_map(move |c| (0..v).map(move |j| w.row(g * v + j)[c])))
            .collect();
        Tensor::from_slice(ctx, &[groups * w.cols(), v], &x).unwrap()
    }

    /// HAZARD 4, 20: pages, splits and company change no bit, and the numbers are those of the other forms.
    #[test]
    fn paged_attention_is_attention() {
        let ctx = Ctx::cpu().poisoned();
        for (latent, d_rope) in [(0, 4), (70, 6), (16, 0)] {
            let args = Args { n_heads: 6, n_groups: 2, d_nope: 5, d_rope, d_v: 7, scale: 0.3 };
            let n = 150;
            let (q, k_r) = (noise(&ctx, 1, &[n, 6 * args.d_k()]), noise(&ctx, 2, &[n, 2 * d_rope]));
            let (w_uk, w_uv) = (noise(&ctx, 4, &[10, latent.max(1)]), noise(&ctx, 5, &[14, latent.max(1)]));
            let kv = noise(&ctx, 3, &[n, if latent > 0 { latent } else { 24 }]);
            let from = vec![0; n];
            let want = match latent {
                0 => attention::cached(&ctx, &q, &kv, &k_r, &from, args).unwrap().o,
                _ => {
                    let latent = Latent { c: &kv, k_r: &k_r, w_uk: &w_uk, w_uv: &w_uv };
                    attention::absorbed(&ctx, &q, latent, &from, args).unwrap()
                }
            };
            let w_uv_t = transposed(&ctx, &w_uv, 2);
            let maps = (latent > 0).then_some(Maps { w_uk: &w_uk, w_uv_t: &w_uv_t });
            let pages = paged(&if d_rope > 0 { beside(&ctx, &kv, &k_r) } else { kv.clone() });
            let run = |rows: Range<usize>, position: usize| Run {
                rows,
                position,
                pages: pages.iter().map(|p| Page::F32(p)).collect(),
            };
            let whole = attend(&ctx, &q, maps, &[run(0..n, 0)], args).unwrap();
            let error = rms_error(&values(&whole).unwrap(), &values(&want).unwrap());
            assert!(error < 1e-6, "{latent}: {error:e}");
            let mut at = 0;
            for piece in [1, 2, 60, 1, 3, 83] {
                let part = q.slice_rows(at..at + piece).unwrap();
                let alone = attend(&ctx, &part, maps, &[run(0..piece, at)], args).unwrap();
                assert_eq!(alone.to_vec::<f32>(), whole.slice_rows(at..at + piece).unwrap().to_vec());
                at += piece;
            }
            // Two runs of other places beside each other.
            let part = q.slice_rows(10..14).unwrap();
            let both = attend(&ctx, &part, maps, &[run(0..2, 10), run(2..4, 12)], args).unwrap();
            assert_eq!(both.to_vec::<f32>(), whole.slice_rows(10..14).unwrap().to_vec());
            assert!(attend(&ctx, &part, maps, &[run(0..4, 300)], args).is_err());
            assert!(attend(&ctx, &part, maps, &[run(1..4, 3)], args).is_err());
        }
    }
}
