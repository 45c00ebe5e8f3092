use crate::slot::{GradSlot, Target};
use crate::{Place, Var};
use hymo_tensor::{Ctx, DType, Error, Result, Shape, Tensor};
use std::ops::Range;

/// Gradients of all parameters: one flat tensor per unit, laid out as the parameters are. Contributions add.
#[derive(Debug)]
pub struct ParamGrads {
    flats: Vec<Tensor>,
}

impl ParamGrads {
    /// From flat tensors (`f32` or `f64`), one per unit, that no one else holds: zeros before the first micro-batch.
    pub fn new(flats: Vec<Tensor>) -> Result<Self> {
        for flat in &flats {
            if !matches!(flat.dtype(), DType::F32 | DType::F64) {
                return Err(Error::DType { op: "grads", arg: "flat", got: flat.dtype(), want: "f32 or f64" });
            }
            if !flat.is_unique() || !flat.is_contiguous() {
                return Err(Error::Shared { op: "grads", shape: flat.shape() });
            }
        }
        Ok(ParamGrads { flats })
    }

    /// The flat gradients, by unit.
    pub fn flats(&self) -> &[Tensor] {
        &self.flats
    }

    /// The flat gradients, writable: to be zeroed, clipped or stepped.
    pub fn flats_mut(&mut self) -> &mut [Tensor] {
        &mut self.flats
    }
}

/// What a variable's slot needs to know: its place, shape and dtype.
pub(crate) type Wanted = (Place, Shape, DType);

/// Gradients during and after a backward pass.
#[derive(Debug)]
pub struct Grads {
    slots: Vec<Option<Tensor>>,
    params: Option<ParamGrads>,
}

impl Grads {
    pub(crate) fn new(slots: usize, params: Option<ParamGrads>) -> Self {
        Grads { slots: vec![None; slots], params }
    }

    /// Takes a variable's gradient out; `None` when nothing reached it (or it is a parameter, whose gradient stays in
    /// the flat buffer).
    pub fn take(&mut self, var: &Var) -> Option<Tensor> {
        self.take_place(var.place)
    }

    pub(crate) fn take_place(&mut self, place: Place) -> Option<Tensor> {
        match place {
            Place::Slot(i) => self.slots.get_mut(i)?.take(),
            _ => None,
        }
    }

    /// The parameters' gradients, if the tape had any.
    pub fn into_params(self) -> Option<ParamGrads> {
        self.params
    }

    pub(crate) fn take_params(&mut self) -> Option<ParamGrads> {
        self.params.take()
    }

    pub(crate) fn put_params(&mut self, params: Option<ParamGrads>) {
        self.params = params;
    }

    /// Hands over a finished gradient of one variable.
    pub(crate) fn give(&mut self, ctx: &Ctx, var: &Var, d: Tensor) -> Result<()> {
        self.give_place(ctx, var.place, d)
    }

    pub(crate) fn give_place(&mut self, ctx: &Ctx, place: Place, d: Tensor) -> Result<()> {
        let Place::Slot(i) = place else { return Ok(()) };
        let mut slot = GradSlot { shape: d.shape(), dtype: d.dtype(), target: Target::Owned(self.slots[i].take()) };
        slot.give(ctx, d)?;
        if let Target::Owned(sum) = slot.target {
            self.slots[i] = sum;
        }
        Ok(())
    }

    /// Opens one slot per variable, runs `f` on them, and puts the gradients back.
    pub(crate) fn with<const N: usize>(
        &mut self,
        ctx: &Ctx,
        vars: &[Wanted; N],
        f: impl FnOnce(&mut [GradSlot<'_>; N]) -> Result<()>,
    ) -> Result<()> {
        let mut owned: [Option<Tensor>; N] = std::array::from_fn(|i| match vars[i].0 {
            Place::Slot(s) => self.slots[s].take(),
            _ => None,
        });
        let mut flats = self.open_flats(vars)?;
        let mut slots: [GradSlot<'_>; N] = std::array::from_fn(|i| {
            let (place, shape, dtype) = vars[i];
            let target = match place {
                Place::Nowhere => Target::Unwanted,
                Place::Slot(_) => Target::Owned(owned[i].take()),
                Place::Flat { .. } => flats[i].take().unwrap_or(Target::Unwanted),
            };
            GradSlot { target, shape, dtype }
        });
        f(&mut slots)?;
        let filled = slots.map(|slot| match slot.target {
            Target::Owned(grad) => grad,
            _ => None,
        });
        for ((place, ..), grad) in vars.iter().zip(filled) {
            if let Some(grad) = grad {
                self.give_place(ctx, *place, grad)?;
            }
        }
        Ok(())
    }

    /// The ranges of the flat gradients that the parameters among `vars` own, which must not overlap.
    fn open_flats<const N: usize>(&mut self, vars: &[Wanted; N]) -> Result<[Option<Target<'_>>; N]> {
        let mut out = std::array::from_fn(|_| None);
        let mut wanted: Vec<(usize, Range<usize>, usize)> = Vec::new();
        for (i, (place, shape, _)) in vars.iter().enumerate() {
            if let Place::Flat { unit, offset } = *place {
                wanted.push((unit, offset..offset + shape.numel(), i));
            }
        }
        if wanted.is_empty() {
            return Ok(out);
        }
        wanted.sort_by_key(|(unit, range, _)| (*unit, range.start));
        let want = "a tape made by Tape::training with one flat gradient per unit";
        let missing = || Error::value("grads", "params", "no flat gradient for a parameter", want);
        let params = self.params.as_mut().ok_or_else(missing)?;
        let mut wanted = wanted.into_iter().peekable();
        for (unit, flat) in params.flats.iter_mut().enumerate() {
            let mut mine = Vec::new();
            while let Some((_, range, i)) = wanted.next_if(|w| w.0 == unit) {
                mine.push((range, i));
            }
            if mine.is_empty() {
                continue;
            }
            #[cfg(feature = "cuda")]
            if flat.is_on_gpu() {
                gpu_ranges(flat, mine, vars, |i, mat| out[i] = Some(Target::Gpu(mat)))?;
                continue;
            }
            match flat.dtype() {
                DType::F64 => carve(flat.flat_mut::<f64>()?, mine, |i, s| out[i] = Some(Target::F64(s)))?,
                _ => carve(flat.flat_mut::<f32>()?, mine, |i, s| out[i] = Some(Target::F32(s)))?,
            }
        }
        if wanted.peek().is_some() { Err(missing()) } else { Ok(out) }
    }
}

/// As [`carve`] on a GPU, each range in its variable's shape.
#[cfg(feature = "cuda")]
fn gpu_ranges<const N: usize>(
    flat: &mut Tensor,
    ranges: Vec<(Range<usize>, usize)>,
    vars: &[Wanted; N],
    mut put: impl FnMut(usize, hymo_tensor::GpuMat),
) -> Result<()> {
    flat.gpu_mut()?; // no one else may hold it
    let mut done = 0;
    for (range, i) in ranges {
        if range.start < done {
            let want = "ranges of one unit that do not overlap";
            return Err(Error::value("grads", "param range", format!("{range:?} after {done}"), want));
        }
        done = range.end;
        put(i, flat.slice_flat(range.start, vars[i].1.dims())?.gpu()?);
    }
    Ok(())
}

/// Hands out the sorted, disjoint `ranges` of `flat`.
fn carve<'a, T>(
    mut flat: &'a mut [T],
    ranges: Vec<(Range<usize>, usize)>,
    mut put: impl FnMut(usize, &'a mut [T]),
) -> Result<()> {
    let mut done = 0;
    for (range, i) in ranges {
        let fits = range.start >= done && range.end - done <= flat.len();
        if !fits {
            let got = format!("{range:?} after {done}, {} left", flat.len());
            return Err(Error::value("grads", "param range", got, "ranges of one unit that do not overlap"));
        }
        let (_, rest) = flat.split_at_mut(range.start - done);
        let (mine, rest) = rest.split_at_mut(range.len());
        put(i, mine);
        flat = rest;
        done = range.end;
    }
    Ok(())
}
