//! Both optimizers on a GPU, over the same flat buffers and state. Matrices of one shape are orthogonalised together by
//! batched products, in bf16 where activations are bf16, else in f32. Deterministic.

use crate::normuon::coefficients;
use crate::state::State;
use crate::{Error, Groups, Method};
use hymo_cuda::{Arg, Gpu, Kind, Launch, Matrix, Product, Ptr, Source};
use hymo_model::config::OptimConfig;
use hymo_ops::gpu::PRELUDE;
use hymo_tensor::{Ctx, DType, GpuMat, Tensor};
use std::collections::BTreeMap;

const OPTIM: Source = Source { name: "optim", parts: &[PRELUDE, ("optim.cu", include_str!("optim.cu"))] };

/// Elements that a block of a sum or of AdamW takes.
const BLOCK: usize = 1 << 14;
/// Bytes of the matrices that are orthogonalised at once; one that needs more is taken alone.
const WAVE: usize = 1 << 30;

/// This crate's kernel source with the `#define`s that it is compiled with.
#[must_use]
pub fn kernel_sources() -> Vec<(Source, Vec<(&'static str, &'static str)>)> {
    ["float", "bf16"].map(|t| (OPTIM, vec![("T", t)])).to_vec()
}

type Result<T> = std::result::Result<T, Error>;

fn launch(gpu: &Gpu, t: &'static str, kernel: &'static str, grid: [usize; 2], args: &[Arg]) -> Result<()> {
    let [x, y] = grid;
    let defines = [("T", t)];
    let launch = Launch { source: &OPTIM, defines: &defines, kernel, grid: [x, y, 1], threads: 256, shared: 0 };
    Ok(gpu.launch(&launch, args).map_err(hymo_tensor::Error::from)?)
}

/// Blocks of an elementwise pass over `n`.
fn blocks(n: usize) -> usize {
    n.div_ceil(1024).min(1 << 12)
}

/// Σ x² of flat tensors on one GPU, in double precision: `[1]`. Waits for nothing.
pub(crate) fn sum_of_squares(flats: &[Tensor]) -> Result<Tensor> {
    let gpu =
        flats.first().ok_or_else(|| hymo_tensor::Error::value("norm", "gradients", "none", "one or more"))?.gpu()?;
    let gpu = gpu.device().clone();
    let ctx = Ctx::cuda(gpu.clone());
    let counts: Vec<usize> = flats.iter().map(|t| t.numel().div_ceil(BLOCK)).collect();
    let total = counts.iter().sum::<usize>();
    let (parts, sum) = (ctx.empty::<f64>(&[total.max(1)])?, ctx.empty::<f64>(&[1])?);
    let (mut at, to) = (parts.gpu()?.at(), sum.gpu()?.at());
    for (flat, n) in flats.iter().zip(counts) {
        let args = [flat.gpu()?.at().into(), flat.numel().into(), BLOCK.into(), at.into()];
        launch(&gpu, "float", "sum_squares", [n, 1], &args)?;
        at = at.plus(8 * n);
    }
    launch(&gpu, "float", "sum_all", [1, 1], &[parts.gpu()?.at().into(), total.into(), to.into()])?;
    Ok(sum)
}

/// What every kernel of a step multiplies gradients by, decided on the GPU: the factor of clipping, or NaN where the sum of
/// squares is not finite or above `limit`'s square, and then none of them changes anything.
pub(crate) fn factor(ctx: &Ctx, sum: &Tensor, clip_norm: f64, limit: f64) -> Result<Tensor> {
    let (sum, factor) = (sum.gpu()?, ctx.empty::<f32>(&[1])?);
    let args = [sum.at().into(), factor.gpu()?.at().into(), clip_norm.into(), limit.into()];
    launch(sum.device(), "float", "clip_factor", [1, 1], &args)?;
    Ok(factor)
}

/// E <- decay E + (1 - decay) W.
pub(crate) fn average(ema: &mut Tensor, w: &Tensor, decay: f64) -> Result<()> {
    let (to, from, n) = (ema.gpu_mut()?, w.gpu()?, w.numel());
    let args = [to.at().into(), from.at().into(), n.into(), (decay as f32).into(), ((1. - decay) as f32).into()];
    launch(from.device(), "float", "average", [blocks(n), 1], &args)
}

/// Where a member lies: w, g and the two moments.
struct Places {
    at: [Ptr; 4],
    lr: f32,
    decay: f32,
}

impl Places {
    fn words(&self) -> [i64; 5] {
        let [w, g, m, v] = self.at.map(|p| p.address() as i64);
        let rates = u64::from(self.lr.to_bits()) | u64::from(self.decay.to_bits()) << 32;
        [w, g, m, v, rates as i64]
    }
}

/// One step of everything with a learning rate and what [`factor`] made. Waits for nothing.
pub(crate) fn step(
    ctx: &Ctx,
    config: &OptimConfig,
    groups: &Groups,
    state: &mut State,
    params: &mut [Tensor],
    grads: &[Tensor],
    (lr, clip): (f64, &Tensor),
) -> Result<()> {
    let ws = params.iter_mut().map(Tensor::gpu_mut).collect::<hymo_tensor::Result<Vec<_>>>()?;
    let gs = grads.iter().map(Tensor::gpu).collect::<hymo_tensor::Result<Vec<_>>>()?;
    let (mut adamw, mut normuon) = (Vec::new(), BTreeMap::<[usize; 2], Vec<Places>>::new());
    for (index, member) in groups.members().iter().enumerate() {
        let (unit, group) = (member.unit.index(), groups.group_of(member));
        let ([first, second], [at, place]) = state.parts(member, index);
        let (first, second) = (first.gpu_mut()?, second.gpu_mut()?);
        let float = |m: &GpuMat, at: usize| m.at().plus(4 * at);
        let of = |skip: usize, rows: usize| Places {
            at: [
                float(&ws[unit], at + skip),
                float(&gs[unit], at + skip),
                float(&first, at + skip),
                float(&second, place + rows),
            ],
            lr: (lr * group.lr_mult) as f32,
            decay: (lr * group.lr_mult * group.weight_decay) as f32,
        };
        match group.method {
            Method::AdamW => adamw.push((of(0, 0), member.numel())),
            Method::NorMuon => {
                let rows = member.rows / member.blocks;
                let same = normuon.entry([rows, member.cols]).or_default();
                same.extend((0..member.blocks).map(|b| of(b * rows * member.cols, b * rows)));
            }
        }
    }
    let Some(gpu) = ws.first().map(|w| w.device().clone()) else { return Ok(()) };
    let work = Work { ctx, gpu: &gpu, config, clip: clip.gpu()?.at() };
    work.adamw(&adamw, state.steps + 1)?;
    for (shape, all) in normuon {
        let [rows, cols] = shape;
        let each = (2 * rows * cols + 3 * rows.min(cols).pow(2)) * work.dtype().size();
        for wave in all.chunks((WAVE / each.max(1)).max(1)) {
            work.normuon(shape, wave)?;
        }
    }
    Ok(())
}

struct Work<'a> {
    ctx: &'a Ctx,
    gpu: &'a Gpu,
    config: &'a OptimConfig,
    clip: Ptr,
}

impl Work<'_> {
    fn dtype(&self) -> DType {
        self.ctx.activations()
    }

    fn kind(&self) -> (Kind, &'static str) {
        if self.dtype() == DType::BF16 { (Kind::Bf16, "bf16") } else { (Kind::F32, "float") }
    }

    fn adamw(&self, members: &[(Places, usize)], step: u64) -> Result<()> {
        let c = &self.config.adamw;
        let (mut table, mut owner) = (Vec::new(), Vec::<i32>::new());
        for (index, (places, numel)) in members.iter().enumerate() {
            let [w, g, m, v, rates] = places.words();
            let (first, n) = (owner.len(), numel.div_ceil(BLOCK));
            table.extend([w, g, m, v, *numel as i64, first as i64, n as i64, rates]);
            owner.extend(std::iter::repeat_n(index as i32, n));
        }
        let n = owner.len();
        if n == 0 {
            return Ok(());
        }
        let words = words(self.ctx, &table)?;
        let (owner, counts) = (Tensor::from_slice(self.ctx, &[n], &owner)?, self.ctx.empty::<i32>(&[n])?);
        let (table, owner, counts) = (words.gpu()?.at(), owner.gpu()?.at(), counts.gpu()?.at());
        let f = |x: f64| Arg::F32(x as f32);
        let (keep1, take1, keep2, take2) = (f(c.beta1), f(1. - c.beta1), f(c.beta2), f(1. - c.beta2));
        let args =
            [table.into(), owner.into(), counts.into(), BLOCK.into(), self.clip.into(), keep1, take1, keep2, take2];
        launch(self.gpu, "float", "adamw_moments", [n, 1], &args)?;
        let correct = |beta: f64| f(1. / (1. - libm::pow(beta, step as f64)));
        let args = [
            table.into(),
            owner.into(),
            counts.into(),
            BLOCK.into(),
            self.clip.into(),
            correct(c.beta1),
            correct(c.beta2),
            f(c.eps),
            c.cautious.into(),
        ];
        launch(self.gpu, "float", "adamw_apply", [n, 1], &args)
    }

    /// Matrices of one shape, as a batch.
    // tidy: long, a kernel's launches in order
    fn normuon(&self, [rows, cols]: [usize; 2], matrices: &[Places]) -> Result<()> {
        let (c, n, r) = (&self.config.normuon, matrices.len(), rows.min(cols));
        let (kind, t) = self.kind();
        let table = words(self.ctx, &matrices.iter().flat_map(Places::words).collect::<Vec<_>>())?;
        let of = |len: usize| self.ctx.empty_real(self.dtype(), &[n, len]);
        let [mut x, mut y] = [of(rows * cols)?, of(rows * cols)?];
        let (a, d, b) = (of(r * r)?, of(r * r)?, of(r * r)?);
        let (sums, by) = (self.ctx.empty::<f64>(&[n, rows])?, self.ctx.empty::<f32>(&[n])?);
        let (table, sums, by) = (table.gpu()?.at(), sums.gpu()?.at(), by.gpu()?.at());
        let at = |t: &Tensor| -> Result<Ptr> { Ok(t.gpu()?.at()) };
        let f = |x: f64| Arg::F32(x as f32);
        let run = |kernel, grid, args: &[Arg]| launch(self.gpu, t, kernel, grid, args);

        let (keep, take) = (f(c.beta1), f(1. - c.beta1));
        let list = [
            table.into(),
            at(&x)?.into(),
            sums.into(),
            rows.into(),
            cols.into(),
            self.clip.into(),
            keep,
            take,
            c.nesterov.into(),
        ];
        run("normuon_momentum", [rows, n], &list)?;
        let (steps, over) = coefficients(c.orth);
        run("normuon_inverse", [n, 1], &[sums.into(), by.into(), rows.into(), 1f64.into(), over.into(), 1e-7.into()])?;
        run("normuon_scale", [blocks(rows * cols), n], &[at(&x)?.into(), by.into(), (rows * cols).into()])?;

        let matrix = |at: Ptr, stride: usize, each: usize| Matrix { at, stride, batch_stride: each, kind };
        let wide = |t: &Tensor| -> Result<Matrix> { Ok(matrix(at(t)?, cols, rows * cols)) };
        let square = |t: &Tensor| -> Result<Matrix> { Ok(matrix(at(t)?, r, r * r)) };
        let product = |mnk, transposed, beta: f64, to, left, right| {
            let product = Product { mnk, batch: n, transposed, alpha: 1., beta: beta as f32 };
            self.gpu.product(&product, to, left, right).map_err(hymo_tensor::Error::from)
        };
        let flat = rows <= cols;
        for &[one, two, three] in steps {
            // A = X Xᵀ or XᵀX, D = b I + c A, then X <- a X + (A D) X: a goes through the sum in f32.
            let gram = if flat { ([r, r, cols], [false, true]) } else { ([r, r, rows], [true, false]) };
            product(gram.0, gram.1, 0., square(&a)?, wide(&x)?, wide(&x)?)?;
            run("normuon_poly", [blocks(r * r), n], &[at(&a)?.into(), at(&d)?.into(), r.into(), f(two), f(three)])?;
            product([r, r, r], [false, false], 0., square(&b)?, square(&a)?, square(&d)?)?;
            let bytes = n * rows * cols * self.dtype().size();
            self.gpu.copy_rows(at(&y)?, at(&x)?, 1, bytes, [0, 0]).map_err(hymo_tensor::Error::from)?;
            let (left, right) = if flat { (square(&b)?, wide(&x)?) } else { (wide(&x)?, square(&b)?) };
            product([rows, cols, r], [false, false], one, wide(&y)?, left, right)?;
            std::mem::swap(&mut x, &mut y);
        }

        let list = [
            table.into(),
            at(&x)?.into(),
            sums.into(),
            rows.into(),
            cols.into(),
            c.beta2.into(),
            c.eps.into(),
            self.clip.into(),
        ];
        run("normuon_moments", [rows, n], &list)?;
        let numer = c.rms * ((rows * cols) as f64).sqrt();
        run(
            "normuon_inverse",
            [n, 1],
            &[sums.into(), by.into(), rows.into(), numer.into(), 1f64.into(), 1e-10.into()],
        )?;
        let list = [
            table.into(),
            at(&x)?.into(),
            by.into(),
            rows.into(),
            cols.into(),
            c.eps.into(),
            c.cautious_decay.into(),
            self.clip.into(),
        ];
        run("normuon_apply", [rows, n], &list)
    }
}

/// A table of 64-bit words in the GPU's memory: two i32 each.
fn words(ctx: &Ctx, table: &[i64]) -> Result<Tensor> {
    let halves: Vec<i32> = table.iter().flat_map(|&x| [x as i32, (x >> 32) as i32]).collect();
    Ok(Tensor::from_slice(ctx, &[halves.len()], &halves)?)
}
