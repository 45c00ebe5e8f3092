//! One step of all parameters.

use crate::normuon::{self, Work};
use crate::schedule::MOST_STEPS;
use crate::state::{Piece, State};
use crate::{Error, GradNorm, Groups, Method, adamw, oracle};
use hymo_model::Params;
use hymo_model::config::OptimConfig;
use hymo_tensor::{Ctx, DType, Path, Real, Tensor, each};

/// Bytes of working memory of the matrices that are orthogonalised at once; a matrix that needs more is taken alone.
const WAVE: usize = 64 << 20;

/// What came of a step.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "a refused step changed nothing: stop, skip or roll back"]
pub enum Outcome {
    /// All parameters moved.
    Stepped {
        /// Norm of the whole gradient before clipping.
        grad_norm: f64,
        /// Factor that clipping put on it, 1 for none.
        clip: f64,
    },
    /// A gradient is not finite, or its norm above a limit. Neither a parameter nor the state changed, and the step is not counted.
    Refused {
        /// The norm: infinite, no number, or above the limit.
        grad_norm: f64,
        /// Parameters whose gradients are not finite; none when the norm was handed in and says so of other ranks, or when it
        /// is above the limit.
        params: Vec<String>,
    },
}

/// The optimizers of a model with their state.
///
/// Parameters and gradients are flat buffers, one a unit, as [`Params`] and its gradients have them. `f32` takes the fast
/// path; `f64`, and a context on the oracle's path, the plain loops. No result depends on the number of threads.
#[derive(Debug)]
pub struct Optimizer {
    config: OptimConfig,
    groups: Groups,
    state: State,
    blocks: Vec<Matrix>,
    /// Ranges of `blocks` that are orthogonalised together.
    waves: Vec<std::ops::Range<usize>>,
}

/// A matrix that is orthogonalised: a member, or one block of its rows.
#[derive(Debug, Clone)]
struct Matrix {
    /// Its place among all of them in the order of members and rows.
    index: usize,
    rows: usize,
    cols: usize,
}

impl Matrix {
    fn elements(&self) -> usize {
        Work::<f32>::elements(self.rows, self.cols).iter().sum()
    }

    fn cost(&self) -> usize {
        let r = self.rows.min(self.cols);
        r.saturating_mul(r).saturating_mul(self.rows + self.cols)
    }
}

impl Optimizer {
    /// The optimizer that a model's table declares, its state zero.
    ///
    /// # Errors
    /// As [`Groups::declared`] and [`Optimizer::with_groups`].
    pub fn new(ctx: &Ctx, params: &Params, config: &OptimConfig) -> Result<Self, Error> {
        let groups = Groups::declared(params.table().params(), config)?;
        Optimizer::with_groups(ctx, params.flats(), groups, config)
    }

    /// An optimizer of these groups for parameters in `flats`. Learning rate factors and decays are the groups'; the rest of
    /// `config` applies to both optimizers.
    ///
    /// # Errors
    /// [`Error::Place`] when parameters overlap or lie outside the buffers.
    pub fn with_groups(ctx: &Ctx, flats: &[Tensor], groups: Groups, config: &OptimConfig) -> Result<Self, Error> {
        let state = State::new(ctx, &groups, flats)?;
        let mut blocks: Vec<Matrix> = Vec::new();
        for member in groups.members().iter().filter(|m| groups.group_of(m).method == Method::NorMuon) {
            let (rows, cols, first) = (member.rows / member.blocks, member.cols, blocks.len());
            blocks.extend((0..member.blocks).map(|block| Matrix { index: first + block, rows, cols }));
        }
        // The largest first, so that no thread is left with one at the end.
        blocks.sort_by_key(|b| std::cmp::Reverse(b.cost()));
        let (mut waves, mut start, mut bytes) = (Vec::new(), 0, 0);
        for (at, block) in blocks.iter().enumerate() {
            let more = block.elements() * state.dtype().size();
            if at > start && bytes + more > WAVE {
                waves.push(start..at);
                (start, bytes) = (at, 0);
            }
            bytes += more;
        }
        waves.push(start..blocks.len()); // empty without such matrices
        Ok(Optimizer { config: config.clone(), groups, state, blocks, waves })
    }

    /// The groups; they print as a table.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Bytes that a step works in, beside the state: the matrices that are orthogonalised at once.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        let of = |wave: &std::ops::Range<usize>| self.blocks[wave.clone()].iter().map(Matrix::elements).sum::<usize>();
        (self.waves.iter().map(of).max().unwrap_or(0) * self.state.dtype().size()) as u64
    }

    /// Steps taken, refused ones not counted.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.state.steps
    }

    /// The state by name, `optim.step` (`i32`) and two tensors a parameter: `optim.momentum.*` of its shape and
    /// `optim.row_moment.*` `[rows]` of NorMuon, `optim.first_moment.*` and `optim.second_moment.*` of its shape of AdamW. Views
    /// that share the state's memory: the next step is an error until they are dropped.
    ///
    /// # Errors
    /// None in practice: the views are this type's own.
    pub fn tensors(&self) -> Result<Vec<(String, Tensor)>, Error> {
        self.state.tensors(&self.groups)
    }

    /// Takes a saved state over, all of it or none. With it, the same gradients move the same parameters to the same bits.
    ///
    /// # Errors
    /// [`Error::State`] with every tensor that is missing, unknown, of another shape or dtype, or not finite.
    pub fn load<'t>(&mut self, saved: impl IntoIterator<Item = (&'t str, &'t Tensor)>) -> Result<(), Error> {
        self.state.load(&self.groups, saved)
    }

    /// Moves all parameters by one step with learning rate `lr`, usually [`OptimConfig::lr`] times the schedule's factor.
    /// The gradients are clipped to the configured norm as they are read, and stay as they are.
    ///
    /// # Errors
    /// [`Error::Layout`] for other buffers than those of the start, a learning rate that is negative or not finite, and
    /// buffers that something else still holds. Nothing has changed then.
    pub fn step(&mut self, ctx: &Ctx, params: &mut [Tensor], grads: &[Tensor], lr: f64) -> Result<Outcome, Error> {
        self.step_below(ctx, params, grads, lr, f64::INFINITY)
    }

    /// [`Optimizer::step`], refused also where the gradient's norm is above `limit`; no parameter is named then. On a GPU all of
    /// it is decided there, and waited for once, when everything has been asked for.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step_below(
        &mut self,
        ctx: &Ctx,
        params: &mut [Tensor],
        grads: &[Tensor],
        lr: f64,
        limit: f64,
    ) -> Result<Outcome, Error> {
        self.check(params, grads, lr)?;
        #[cfg(feature = "cuda")]
        if params.iter().any(Tensor::is_on_gpu) {
            return self.on_gpu(ctx, params, grads, (lr, limit), crate::cuda::sum_of_squares(grads)?);
        }
        let norm = GradNorm::of(grads)?;
        if norm.value() > limit {
            return Ok(Outcome::Refused { grad_norm: norm.value(), params: self.not_finite(grads)? });
        }
        self.step_with(ctx, params, grads, lr, norm)
    }

    /// [`Optimizer::step`] with a norm of one's own, such as that of the gradients of all ranks.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step_with(
        &mut self,
        ctx: &Ctx,
        params: &mut [Tensor],
        grads: &[Tensor],
        lr: f64,
        norm: GradNorm,
    ) -> Result<Outcome, Error> {
        self.check(params, grads, lr)?;
        #[cfg(feature = "cuda")]
        if params.iter().any(Tensor::is_on_gpu) {
            return self.on_gpu(ctx, params, grads, (lr, f64::INFINITY), Tensor::scalar(ctx, norm.sum())?);
        }
        let grad_norm = norm.value();
        if !norm.is_finite() {
            return Ok(Outcome::Refused { grad_norm, params: self.not_finite(grads)? });
        }
        let clip = norm.clip(self.config.clip_norm);
        match self.state.dtype() {
            DType::F64 => self.run::<f64>(ctx, params, grads, lr, clip)?,
            _ => self.run::<f32>(ctx, params, grads, lr, clip)?,
        }
        Ok(Outcome::Stepped { grad_norm, clip })
    }

    /// A step whose norm's square, `sum`, is on the GPU: what may move and by how much is decided there.
    #[cfg(feature = "cuda")]
    fn on_gpu(
        &mut self,
        ctx: &Ctx,
        params: &mut [Tensor],
        grads: &[Tensor],
        (lr, limit): (f64, f64),
        sum: Tensor,
    ) -> Result<Outcome, Error> {
        let Optimizer { config, groups, state, .. } = self;
        let factor = crate::cuda::factor(ctx, &sum, config.clip_norm, limit)?;
        crate::cuda::step(ctx, config, groups, state, params, grads, (lr, &factor))?;
        let norm = GradNorm::from_sum(sum.item()?);
        let grad_norm = norm.value();
        if !norm.is_finite() || grad_norm > limit {
            return Ok(Outcome::Refused { grad_norm, params: self.not_finite(grads)? });
        }
        let clip = norm.clip(config.clip_norm);
        state.steps += 1;
        Ok(Outcome::Stepped { grad_norm, clip })
    }

    fn check(&self, params: &[Tensor], grads: &[Tensor], lr: f64) -> Result<(), Error> {
        self.state.check("gradients", grads)?;
        self.state.check("parameters", params)?;
        if !(lr.is_finite() && lr >= 0.0) {
            return Err(hymo_tensor::Error::value("optimizer", "lr", lr, "finite, not negative").into());
        }
        if self.state.steps >= MOST_STEPS {
            return Err(hymo_tensor::Error::value("optimizer", "steps", self.state.steps, "fewer").into());
        }
        Ok(())
    }

    fn not_finite(&self, grads: &[Tensor]) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for member in self.groups.members() {
            let grad = grads[member.unit.index()].slice_flat(member.offset, &[member.numel()])?;
            if !GradNorm::of(&[grad])?.is_finite() {
                names.push(member.name.clone());
            }
        }
        Ok(names)
    }

    fn run<T: Real>(
        &mut self,
        ctx: &Ctx,
        params: &mut [Tensor],
        grads: &[Tensor],
        lr: f64,
        clip: f64,
    ) -> Result<(), Error> {
        let Optimizer { config, groups, state, blocks, waves } = self;
        let number = state.steps + 1;
        // Whether anything is still held elsewhere shows here, before anything is written.
        let mut pieces = state.pieces::<T>(groups, params, grads)?.into_iter().map(Some).collect::<Vec<_>>();
        let at = At { config, groups, lr, clip, number };
        if ctx.path() == Path::Oracle || T::DTYPE == DType::F64 {
            at.oracle(pieces.into_iter().flatten());
        } else {
            at.adamw(&mut pieces);
            at.normuon(ctx, &mut pieces, blocks, waves)?;
        }
        state.steps = number;
        Ok(())
    }
}

/// A step with everything that it does not change.
struct At<'a> {
    config: &'a OptimConfig,
    groups: &'a Groups,
    lr: f64,
    clip: f64,
    number: u64,
}

impl At<'_> {
    /// Learning rate and decay of a member.
    fn rates(&self, member: usize) -> [f64; 2] {
        let group = self.groups.group_of(&self.groups.members()[member]);
        [self.lr * group.lr_mult, group.weight_decay]
    }

    fn method(&self, member: usize) -> Method {
        self.groups.group_of(&self.groups.members()[member]).method
    }

    fn oracle<'p, T: Real>(&self, pieces: impl Iterator<Item = Piece<'p, T>>) {
        for (index, Piece { w, g, first, second }) in pieces.enumerate() {
            let [lr, weight_decay] = self.rates(index);
            let step = oracle::Step { number: self.number, lr, weight_decay, clip: self.clip };
            if self.method(index) == Method::AdamW {
                oracle::adamw(&self.config.adamw, &step, w, g, first, second);
                continue;
            }
            let member = &self.groups.members()[index];
            let (n, rows) = (w.len() / member.blocks, member.rows / member.blocks);
            let blocks = w.chunks_mut(n).zip(g.chunks(n)).zip(first.chunks_mut(n)).zip(second.chunks_mut(rows));
            for (((w, g), m), v) in blocks {
                oracle::normuon(&self.config.normuon, &step, w, g, m, v);
            }
        }
    }

    fn adamw<T: Real>(&self, pieces: &mut [Option<Piece<'_, T>>]) {
        let mine = |(index, slot): (usize, &mut Option<_>)| {
            let Piece { w, g, first: m, second: v } =
                if self.method(index) == Method::AdamW { slot.take()? } else { return None };
            let [lr, weight_decay] = self.rates(index);
            Some(adamw::Piece { tensor: index, numel: w.len(), w, g, m, v, lr, weight_decay })
        };
        let tensors = pieces.len();
        let pieces = pieces.iter_mut().enumerate().filter_map(mine).collect();
        adamw::step(&self.config.adamw, self.number, self.clip, tensors, pieces);
    }

    /// What `adamw` left, in waves whose working memory is taken from the pool beforehand: its size and order are then the
    /// same in every step, whatever the threads do.
    fn normuon<T: Real>(
        &self,
        ctx: &Ctx,
        pieces: &mut [Option<Piece<'_, T>>],
        matrices: &[Matrix],
        waves: &[std::ops::Range<usize>],
    ) -> Result<(), Error> {
        let mut blocks: Vec<Option<normuon::Block<'_, T>>> = Vec::with_capacity(matrices.len());
        for (index, piece) in pieces.iter_mut().enumerate() {
            let Some(Piece { w, g, first, second }) = piece.take() else { continue };
            let [lr, weight_decay] = self.rates(index);
            let member = &self.groups.members()[index];
            let (n, rows, cols) = (w.len() / member.blocks, member.rows / member.blocks, member.cols);
            let parts = w.chunks_mut(n).zip(g.chunks(n)).zip(first.chunks_mut(n)).zip(second.chunks_mut(rows));
            let block = |(((w, g), m), v)| Some(normuon::Block { rows, cols, w, g, m, v, lr, weight_decay });
            blocks.extend(parts.map(block));
        }
        for wave in waves.iter().filter(|wave| !wave.is_empty()) {
            let wave = &matrices[wave.clone()];
            let (elements, rows) = wave.iter().fold((0, 0), |(e, r), m| (e + m.elements(), r + m.rows));
            let (mut memory, mut sums) = (ctx.empty::<T>(&[elements])?, ctx.empty::<f64>(&[rows])?);
            let (mut rest, mut sums) = (memory.flat_mut::<T>()?, sums.flat_mut::<f64>()?);
            let mut tasks = Vec::with_capacity(wave.len());
            for block in wave.iter().filter_map(|m| blocks[m.index].take()) {
                let [x, y, squares] = Work::<T>::elements(block.rows, block.cols).map(|n| {
                    let (part, after) = std::mem::take(&mut rest).split_at_mut(n);
                    rest = after;
                    part
                });
                let (own, after) = std::mem::take(&mut sums).split_at_mut(block.rows);
                sums = after;
                tasks.push((block, Work { x, y, squares, sums: own }));
            }
            each!(tasks, |_, (block, work)| normuon::step(ctx, &self.config.normuon, self.clip, block, work));
        }
        Ok(())
    }
}
