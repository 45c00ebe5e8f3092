//! The fast path: tiles of queries against tiles of keys, two matrix products and one pass of the softmax a tile.
//!
//! A panel holds the queries of one group's heads, token by token: row `i heads + h` is head h of token i. All of them
//! see the same keys, so one product serves them together, and a panel is a plain copy of columns that lie side by side.

use super::operands::{Operands, Views};
use super::window::Window;
use super::{Args, Saved};
use crate::exp::exp;
use crate::gemm::local;
use crate::lanes::{self, dot};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Result, Tensor, each};
use std::ops::Range;

/// Keys in a tile.
const KEYS: usize = 128;

/// Rows of the batch times groups from which the backward takes each of them as one task, with five products a pair of
/// tiles. With fewer there would be too little to do at once, and queries and keys are walked apart, with seven.
const WIDE: usize = 8;

/// Tokens in a tile of queries, so that a panel has about 128 rows. Part of the result: never by thread count.
fn tokens(args: Args) -> usize {
    (128 / args.heads()).clamp(16, 64)
}

/// Everything that a tile's work reads.
#[derive(Clone, Copy)]
struct Job<'a> {
    x: Views<'a, f32>,
    window: &'a Window,
    args: Args,
}

/// Where a tile lies: row of the batch, group, first query or key of the row.
#[derive(Clone, Copy)]
struct At {
    b: usize,
    g: usize,
    first: usize,
}

pub(super) fn forward(ctx: &Ctx, x: &Operands, window: &Window, args: Args) -> Result<(Tensor, Tensor, Tensor)> {
    let n = window.batch * window.queries;
    let (step, heads) = (tokens(args), args.heads());
    let mut o = ctx.empty::<f32>(&[n, args.n_heads * args.d_v])?;
    let mut lse = ctx.empty::<f32>(&[n, args.n_heads])?;
    let job = Job { x: x.views(args)?, window, args };
    let os = tiles(o.view_mut::<f32>()?, window.batch, step, heads * args.d_v);
    let lses = tiles(lse.view_mut::<f32>()?, window.batch, step, heads);
    let mut peaks = vec![f32::NEG_INFINITY; os.len() * heads];
    let tasks: Vec<_> = os.into_iter().zip(lses).zip(peaks.chunks_mut(heads)).collect();
    each!(tasks, |i, ((o, lse), peak)| job.forward_tile(job.at(i, window.queries, step), o, lse, peak));

    let mut max_logit = ctx.empty::<f32>(&[args.n_heads])?;
    let max = max_logit.flat_mut::<f32>()?;
    max.fill(f32::NEG_INFINITY);
    for (i, peak) in peaks.chunks(heads).enumerate() {
        let g = i % args.n_groups;
        max[g * heads..(g + 1) * heads].iter_mut().zip(peak).for_each(|(m, &p)| *m = m.max(p));
    }
    Ok((o, lse, max_logit))
}

/// The tiles of a matrix of `batch` equal runs of rows: tile by tile of a run, group by group of a tile.
fn tiles<T>(m: MatMut<'_, T>, batch: usize, rows: usize, cols: usize) -> Vec<MatMut<'_, T>> {
    let run = m.rows() / batch.max(1);
    let mut out = Vec::with_capacity(batch * run.div_ceil(rows) * m.cols().div_ceil(cols.max(1)));
    let mut below = m;
    for _ in 0..batch {
        let row;
        (row, below) = below.split_rows(run);
        out.extend(row.grid(rows, cols));
    }
    out
}

impl<'a> Job<'a> {
    /// The place of the `i`th of [`tiles`] of `step` rows, `len` to a run.
    #[inline(always)]
    fn at(&self, i: usize, len: usize, step: usize) -> At {
        let (groups, per_row) = (self.args.n_groups, len.div_ceil(step));
        At { b: i / groups / per_row, g: i % groups, first: i / groups % per_row * step }
    }

    #[inline(always)]
    fn forward_tile(&self, at: At, mut o: MatMut<'_, f32>, mut lse: MatMut<'_, f32>, peak: &mut [f32]) {
        let Job { window, args, .. } = *self;
        let (n, heads, d_v) = (o.rows(), args.heads(), args.d_v);
        let rows = n * heads;
        let q = panel(self.x.q, at.b * window.queries + at.first, n, at.g, heads * args.d_k());
        let q = Mat::new(&q, rows, args.d_k(), args.d_k());
        let (mut k, mut s) = (Vec::new(), vec![0.; rows * KEYS]);
        let (mut acc, mut max, mut sum) = (vec![0.; rows * d_v], vec![f32::NEG_INFINITY; rows], vec![0.; rows]);
        for keys in split(window.seen_by(at.b, at.first, n), KEYS) {
            let v = self.x.values(at.g, at.b * window.keys + keys.start, keys.len());
            let mut s = MatMut::new(&mut s, rows, keys.len(), keys.len());
            local::nt(s.reborrow(), q, self.keys(&mut k, at, &keys), args.scale as f32, false);
            for r in 0..rows {
                let seen = window.seen_in(at.b, at.first + r / heads, keys.start, keys.len());
                let shrink = online(s.row_mut(r), seen, &mut max[r], &mut sum[r]);
                if shrink != 1. {
                    acc[r * d_v..(r + 1) * d_v].iter_mut().for_each(|a| *a *= shrink);
                }
            }
            local::nn(MatMut::new(&mut acc, rows, d_v, d_v), s.as_mat(), v, 1., true);
        }
        for (r, (acc, (max, sum))) in acc.chunks(d_v).zip(max.into_iter().zip(sum)).enumerate() {
            let (i, h) = (r / heads, r % heads);
            let (out, scale) = (&mut o.row_mut(i)[h * d_v..(h + 1) * d_v], sum.recip());
            out.iter_mut().zip(acc).for_each(|(o, a)| *o = a * scale);
            lse.row_mut(i)[h] = max + sum.ln();
            if !window.padding(at.b, at.first + i) {
                peak[h] = peak[h].max(max);
            }
        }
    }

    /// The keys of a tile, content and rotary columns side by side, in `buf`.
    #[inline(always)]
    fn keys<'b>(&self, buf: &'b mut Vec<f32>, at: At, keys: &Range<usize>) -> Mat<'b, f32> {
        buf.clear();
        for j in keys.clone() {
            let n = at.b * self.window.keys + j;
            buf.extend_from_slice(self.x.content(at.g, n));
            buf.extend_from_slice(self.x.rotary(at.g, n));
        }
        Mat::new(buf, keys.len(), self.args.d_k(), self.args.d_k())
    }
}

/// One row of one tile of the online softmax: scores become e^(s - max) where seen and 0 elsewhere, `max` and `sum` take
/// the tile in. What was summed before must shrink by the factor returned.
#[inline(always)]
fn online(s: &mut [f32], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
    // A row that sees nothing of this tile: no exponent is taken, so that no -inf meets another.
    if seen.is_empty() {
        s.fill(0.);
        return 1.;
    }
    s[..seen.start].fill(0.);
    s[seen.end..].fill(0.);
    let s = &mut s[seen];
    let new = lanes::largest(s).max(*max);
    exponentials(s, new);
    let shrink = exp(*max - new);
    *sum = *sum * shrink + lanes::sum(s, |s| s);
    *max = new;
    shrink
}

/// x <- e^(x - by), a flat loop over a row.
#[inline(always)]
fn exponentials(x: &mut [f32], by: f32) {
    x.iter_mut().for_each(|x| *x = exp(*x - by));
}

/// Group `g`'s `width` columns of `n` rows from `row`, without gaps.
#[inline(always)]
fn panel(m: Mat<'_, f32>, row: usize, n: usize, g: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(n * width);
    for i in row..row + n {
        out.extend_from_slice(&m.row(i)[g * width..(g + 1) * width]);
    }
    out
}

/// A range in pieces of `step`.
#[inline(always)]
fn split(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(step).map(move |i| i..(i + step).min(range.end))
}

pub(super) fn backward(
    ctx: &Ctx,
    saved: &Saved,
    d_o: &Tensor,
    args: Args,
    [d_q, d_kv, d_k_r]: [&mut GradSlot<'_>; 3],
) -> Result<()> {
    let window = &*saved.window;
    let (lse, d_o) = (saved.lse.view::<f32>()?, d_o.view::<f32>()?);
    let mut delta = ctx.empty::<f32>(&[d_o.rows(), args.n_heads])?;
    deltas(delta.view_mut::<f32>()?, d_o, saved.o.view::<f32>()?, args.d_v);
    let job = Job { x: saved.x.views(args)?, window, args };
    let job = Backward { job, lse, d_o, delta: delta.view::<f32>()? };

    if window.batch * args.n_groups >= WIDE {
        return job.by_group([d_q.target::<f32>(ctx)?, d_kv.target::<f32>(ctx)?, d_k_r.target::<f32>(ctx)?]);
    }
    if let Some((d_q, add)) = d_q.target::<f32>(ctx)? {
        let step = tokens(args);
        let tasks = tiles(d_q, window.batch, step, args.heads() * args.d_k());
        each!(tasks, |i, d_q| job.query_tile(job.job.at(i, window.queries, step), d_q, add));
    }
    let (d_kv, d_k_r) = (d_kv.target::<f32>(ctx)?, d_k_r.target::<f32>(ctx)?);
    if d_kv.is_none() && d_k_r.is_none() {
        return Ok(());
    }
    let adds = [d_kv.as_ref().is_some_and(|t| t.1), d_k_r.as_ref().is_some_and(|t| t.1)];
    let (d_k_n, d_v) = d_kv.map(|(m, _)| m.split_cols(args.n_groups * args.d_nope)).unzip();
    let (d_k_n, d_v) = (
        wanted(d_k_n, window, args, (window.keys, KEYS), args.d_nope),
        wanted(d_v, window, args, (window.keys, KEYS), args.d_v),
    );
    let tasks: Vec<_> = d_k_n
        .into_iter()
        .zip(d_v)
        .zip(wanted(d_k_r.map(|t| t.0), window, args, (window.keys, KEYS), args.d_rope))
        .collect();
    each!(tasks, |i, ((d_k_n, d_v), d_k_r)| {
        let at = job.job.at(i, window.keys, KEYS);
        let (d_k, d_v_sum) = job.key_tile(at);
        store(d_k_n, &d_k, args.d_k(), 0, adds[0]);
        store(d_k_r, &d_k, args.d_k(), args.d_nope, adds[1]);
        store(d_v, &d_v_sum, args.d_v, 0, adds[0]);
    });
    Ok(())
}

/// The tiles of a gradient, `width` columns to a group, `rows` of a run of `run` at a time; as many of nothing where none is
/// wanted.
fn wanted<'a>(
    m: Option<MatMut<'a, f32>>,
    window: &Window,
    args: Args,
    (run, rows): (usize, usize),
    width: usize,
) -> Vec<Option<MatMut<'a, f32>>> {
    match m {
        Some(m) if width > 0 => tiles(m, window.batch, rows, width).into_iter().map(Some).collect(),
        _ => (0..window.batch * run.div_ceil(rows) * args.n_groups).map(|_| None).collect(),
    }
}

/// D = <d_o, o> for every token and head.
fn deltas(delta: MatMut<'_, f32>, d_o: Mat<'_, f32>, o: Mat<'_, f32>, d_v: usize) {
    const ROWS: usize = 64;
    each!(delta.row_blocks(ROWS), |b, mut delta| {
        for i in 0..delta.rows() {
            let (d_o, o) = (d_o.row(b * ROWS + i), o.row(b * ROWS + i));
            for ((delta, d_o), o) in delta.row_mut(i).iter_mut().zip(d_o.chunks(d_v)).zip(o.chunks(d_v)) {
                *delta = dot(d_o, o);
            }
        }
    });
}

/// Writes or adds columns from `col` of `from`, rows of `width`, to a tile.
#[inline(always)]
fn store(to: Option<MatMut<'_, f32>>, from: &[f32], width: usize, col: usize, add: bool) {
    let Some(mut to) = to else { return };
    for i in 0..to.rows() {
        let to = to.row_mut(i).iter_mut();
        let from = &from[i * width + col..];
        if add {
            to.zip(from).for_each(|(to, &x)| *to += x);
        } else {
            to.zip(from).for_each(|(to, &x)| *to = x);
        }
    }
}

/// Everything that a tile's gradients read.
#[derive(Clone, Copy)]
struct Backward<'a> {
    job: Job<'a>,
    lse: Mat<'a, f32>,
    d_o: Mat<'a, f32>,
    delta: Mat<'a, f32>,
}

/// A panel of queries with what belongs to its rows.
struct Panel {
    first: usize,
    rows: usize,
    q: Vec<f32>,
    d_o: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
}

/// Some rows of a panel.
#[derive(Clone, Copy)]
struct Queries<'a> {
    first: usize,
    rows: usize,
    q: &'a [f32],
    d_o: &'a [f32],
    lse: &'a [f32],
    delta: &'a [f32],
}

impl Backward<'_> {
    #[inline(always)]
    fn panel(&self, b: usize, g: usize, tokens: Range<usize>) -> Panel {
        let Job { window, args, x } = self.job;
        let (row, n, heads) = (b * window.queries + tokens.start, tokens.len(), args.heads());
        Panel {
            first: tokens.start,
            rows: n * heads,
            q: panel(x.q, row, n, g, heads * args.d_k()),
            d_o: panel(self.d_o, row, n, g, heads * args.d_v),
            lse: panel(self.lse, row, n, g, heads),
            delta: panel(self.delta, row, n, g, heads),
        }
    }

    /// p and ds / scale of a panel of queries against a tile of keys, in `p` and `ds`.
    #[inline(always)]
    fn scores(
        &self,
        at: At,
        queries: Queries<'_>,
        k: Mat<'_, f32>,
        keys: &Range<usize>,
        p: &mut [f32],
        ds: &mut [f32],
    ) {
        let Job { window, args, x } = self.job;
        let (rows, n, heads) = (queries.rows, keys.len(), args.heads());
        let (q, d_o) = (queries.q(args.d_k()), queries.d_o(args.d_v));
        let v = x.values(at.g, at.b * window.keys + keys.start, n);
        let (mut p, mut ds) = (MatMut::new(p, rows, n, n), MatMut::new(ds, rows, n, n));
        local::nt(p.reborrow(), q, k, args.scale as f32, false);
        local::nt(ds.reborrow(), d_o, v, 1., false);
        for r in 0..rows {
            let seen = window.seen_in(at.b, queries.first + r / heads, keys.start, n);
            let (p, ds) = (p.row_mut(r), ds.row_mut(r));
            for x in [&mut *p, &mut *ds] {
                x[..seen.start].fill(0.);
                x[seen.end..].fill(0.);
            }
            let (p, ds) = (&mut p[seen.clone()], &mut ds[seen]);
            exponentials(p, queries.lse[r]);
            ds.iter_mut().zip(&*p).for_each(|(d, p)| *d = p * (*d - queries.delta[r]));
        }
    }

    #[inline(always)]
    fn query_tile(&self, at: At, d_q: MatMut<'_, f32>, add: bool) {
        let Job { window, args, .. } = self.job;
        let (n, heads, d_k) = (d_q.rows(), args.heads(), args.d_k());
        let panel = self.panel(at.b, at.g, at.first..at.first + n);
        let rows = panel.rows;
        let (mut k, mut p, mut ds) = (Vec::new(), vec![0.; rows * KEYS], vec![0.; rows * KEYS]);
        let mut sum = vec![0.; rows * d_k];
        for keys in split(window.seen_by(at.b, at.first, n), KEYS) {
            let (len, k) = (keys.len(), self.job.keys(&mut k, at, &keys));
            let (p, ds) = (&mut p[..rows * len], &mut ds[..rows * len]);
            self.scores(at, panel.all(), k, &keys, p, ds);
            local::nn(MatMut::new(&mut sum, rows, d_k, d_k), Mat::new(ds, rows, len, len), k, args.scale as f32, true);
        }
        store(Some(d_q), &sum, heads * d_k, 0, add);
    }

    /// d_k and d_v of a tile of keys.
    #[inline(always)]
    fn key_tile(&self, at: At) -> (Vec<f32>, Vec<f32>) {
        let Job { window, args, .. } = self.job;
        let keys = at.first..(at.first + KEYS).min(window.keys);
        let (n, d_k, d_v) = (keys.len(), args.d_k(), args.d_v);
        let step = tokens(args);
        let most = step * args.heads() * n;
        let (mut k, mut p, mut ds) = (Vec::new(), vec![0.; most], vec![0.; most]);
        let k = self.job.keys(&mut k, at, &keys);
        let (mut d_k_sum, mut d_v_sum) = (vec![0.; n * d_k], vec![0.; n * d_v]);
        for tokens in split(window.seers(at.b, at.first, n), step) {
            let panel = self.panel(at.b, at.g, tokens);
            let (rows, queries) = (panel.rows, panel.all());
            let (p, ds) = (&mut p[..rows * n], &mut ds[..rows * n]);
            self.scores(at, queries, k, &keys, p, ds);
            let (p, ds) = (Mat::new(p, rows, n, n), Mat::new(ds, rows, n, n));
            local::tn(MatMut::new(&mut d_v_sum, n, d_v, d_v), p, queries.d_o(d_v), 1., true);
            local::tn(MatMut::new(&mut d_k_sum, n, d_k, d_k), ds, queries.q(d_k), args.scale as f32, true);
        }
        (d_k_sum, d_v_sum)
    }
}

impl Panel {
    #[inline(always)]
    fn all(&self) -> Queries<'_> {
        let Panel { first, rows, ref q, ref d_o, ref lse, ref delta } = *self;
        Queries { first, rows, q, d_o, lse, delta }
    }

    /// The rows of some tokens, counted from the panel's first.
    #[inline(always)]
    fn some(&self, tokens: Range<usize>, args: Args) -> Queries<'_> {
        let rows = tokens.start * args.heads()..tokens.end * args.heads();
        let cut = |of: &'_ [f32], width: usize| rows.start * width..(rows.end * width).min(of.len());
        Queries {
            first: self.first + tokens.start,
            rows: rows.len(),
            q: &self.q[cut(&self.q, args.d_k())],
            d_o: &self.d_o[cut(&self.d_o, args.d_v)],
            lse: &self.lse[cut(&self.lse, 1)],
            delta: &self.delta[cut(&self.delta, 1)],
        }
    }
}

impl<'a> Queries<'a> {
    #[inline(always)]
    fn q(&self, d_k: usize) -> Mat<'a, f32> {
        Mat::new(self.q, self.rows, d_k, d_k)
    }

    #[inline(always)]
    fn d_o(&self, d_v: usize) -> Mat<'a, f32> {
        Mat::new(self.d_o, self.rows, d_v, d_v)
    }
}

/// A gradient's memory and whether to add to it.
type Target<'a> = Option<(MatMut<'a, f32>, bool)>;

impl Backward<'_> {
    /// All gradients, a row of the batch and a group at a time.
    fn by_group(&self, [d_q, d_kv, d_k_r]: [Target<'_>; 3]) -> Result<()> {
        let Job { window, args, .. } = self.job;
        let adds = [&d_q, &d_kv, &d_k_r].map(|t| t.as_ref().is_some_and(|t| t.1));
        let (d_k_n, d_v) = d_kv.map(|(m, _)| m.split_cols(args.n_groups * args.d_nope)).unzip();
        let (queries, keys) = ((window.queries, window.queries.max(1)), (window.keys, window.keys.max(1)));
        let d_q = wanted(d_q.map(|t| t.0), window, args, queries, args.heads() * args.d_k());
        let d_k_n = wanted(d_k_n, window, args, keys, args.d_nope);
        let d_v = wanted(d_v, window, args, keys, args.d_v);
        let d_k_r = wanted(d_k_r.map(|t| t.0), window, args, keys, args.d_rope);
        let tasks: Vec<_> = d_q.into_iter().zip(d_k_n).zip(d_v).zip(d_k_r).collect();
        each!(tasks, |i, (((d_q, d_k_n), d_v), d_k_r)| {
            let at = At { b: i / args.n_groups, g: i % args.n_groups, first: 0 };
            self.group(at, d_q, [d_k_n, d_v, d_k_r], adds);
        });
        Ok(())
    }

    /// One row and group: tile of keys by tile of queries, each pair's scores made once.
    #[inline(always)]
    fn group(&self, at: At, d_q: Option<MatMut<'_, f32>>, d_keys: [Option<MatMut<'_, f32>>; 3], adds: [bool; 3]) {
        let Job { window, args, .. } = self.job;
        let (d_k, d_v, heads, step) = (args.d_k(), args.d_v, args.heads(), tokens(args));
        let [mut d_k_n, mut d_vs, mut d_k_r] = d_keys;
        let panel = self.panel(at.b, at.g, 0..window.queries);
        let mut d_q_sum = vec![0.; panel.rows * d_k];
        let (mut k, mut p, mut ds) = (Vec::new(), vec![0.; step * heads * KEYS], vec![0.; step * heads * KEYS]);
        let (mut d_k_sum, mut d_v_sum) = (vec![0.; KEYS * d_k], vec![0.; KEYS * d_v]);
        for keys in split(0..window.keys, KEYS) {
            let n = keys.len();
            let k = self.job.keys(&mut k, at, &keys);
            let (d_k_sum, d_v_sum) = (&mut d_k_sum[..n * d_k], &mut d_v_sum[..n * d_v]);
            d_k_sum.fill(0.);
            d_v_sum.fill(0.);
            for tokens in split(window.seers(at.b, keys.start, n), step) {
                let queries = panel.some(tokens.clone(), args);
                let rows = queries.rows;
                let (p, ds) = (&mut p[..rows * n], &mut ds[..rows * n]);
                self.scores(at, queries, k, &keys, p, ds);
                let (p, ds) = (Mat::new(p, rows, n, n), Mat::new(ds, rows, n, n));
                let d_q = &mut d_q_sum[tokens.start * heads * d_k..][..rows * d_k];
                let scale = args.scale as f32;
                local::tn(MatMut::new(d_v_sum, n, d_v, d_v), p, queries.d_o(d_v), 1., true);
                local::tn(MatMut::new(d_k_sum, n, d_k, d_k), ds, queries.q(d_k), scale, true);
                local::nn(MatMut::new(d_q, rows, d_k, d_k), ds, k, scale, true);
            }
            let part = |m: &mut Option<MatMut<'_, f32>>, from: &[f32], width: usize, col: usize, add: bool| {
                let tile = m.as_mut().map(|m| m.reborrow().split_rows(keys.start).1.split_rows(n).0);
                store(tile, from, width, col, add);
            };
            part(&mut d_k_n, d_k_sum, d_k, 0, adds[1]);
            part(&mut d_k_r, d_k_sum, d_k, args.d_nope, adds[2]);
            part(&mut d_vs, d_v_sum, d_v, 0, adds[1]);
        }
        store(d_q, &d_q_sum, heads * d_k, 0, adds[0]);
    }
}
