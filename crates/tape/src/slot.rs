use hymo_tensor::{Ctx, DType, Error, MatMut, Real, Result, Shape, Tensor};

/// Where an operation's backward writes one input's gradient.
#[derive(Debug)]
pub struct GradSlot<'a> {
    pub(crate) target: Target<'a>,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
}

#[derive(Debug)]
pub(crate) enum Target<'a> {
    /// The input is a constant.
    Unwanted,
    /// The gradient so far, if any.
    Owned(Option<Tensor>),
    /// A parameter's range of the flat gradient, which only ever adds.
    F32(&'a mut [f32]),
    /// The same in double precision.
    F64(&'a mut [f64]),
    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    Gpu(hymo_tensor::GpuMat),
}

impl GradSlot<'_> {
    /// Whether the gradient is wanted at all.
    pub fn wanted(&self) -> bool {
        !matches!(self.target, Target::Unwanted)
    }

    /// The gradient's memory as a matrix shaped like the input, and whether to add (`true`) or to write every element
    /// (`false`). `None` when the gradient is not wanted. After a first call, later calls add.
    pub fn target<T: Real>(&mut self, ctx: &Ctx) -> Result<Option<(MatMut<'_, T>, bool)>> {
        let (rows, cols) = (self.shape.rows(), self.shape.cols());
        match &mut self.target {
            Target::Unwanted => Ok(None),
            Target::Owned(grad) => {
                let add = grad.is_some();
                match grad {
                    Some(t) if !t.is_unique() || !t.is_contiguous() => *t = t.copy(ctx)?,
                    Some(_) => {}
                    None => *grad = Some(ctx.empty::<T>(self.shape.dims())?),
                }
                let tensor = grad.as_mut().expect("invariant: filled above");
                Ok(Some((tensor.view_mut::<T>()?, add)))
            }
            Target::F32(flat) => flat_target(T::pick(Some(flat), None), rows, cols, self.dtype),
            Target::F64(flat) => flat_target(T::pick(None, Some(flat)), rows, cols, self.dtype),
            #[cfg(feature = "cuda")]
            Target::Gpu(_) => Err(Error::Elsewhere { op: "grad", place: "a GPU's memory", want: "the processor's" }),
        }
    }

    /// As [`GradSlot::target`] on a GPU, for kernels. An activation's gradient is of its dtype, a parameter's f32.
    #[cfg(feature = "cuda")]
    pub fn gpu(&mut self, ctx: &Ctx) -> Result<Option<(hymo_tensor::GpuMat, bool)>> {
        match &mut self.target {
            Target::Unwanted => Ok(None),
            Target::Owned(grad) => {
                let add = grad.is_some();
                match grad {
                    Some(t) if !t.is_unique() || !t.is_contiguous() => *t = t.copy(ctx)?,
                    Some(_) => {}
                    None => *grad = Some(ctx.empty_real(self.dtype, self.shape.dims())?),
                }
                let tensor = grad.as_mut().expect("invariant: filled above");
                Ok(Some((tensor.gpu_mut()?, add)))
            }
            Target::Gpu(flat) => Ok(Some((flat.clone(), true))),
            Target::F32(_) | Target::F64(_) => {
                Err(Error::Elsewhere { op: "grad", place: "the processor's memory", want: "a GPU's" })
            }
        }
    }

    /// Hands over a finished gradient: moved in when it is the first contribution, added otherwise.
    pub fn give(&mut self, ctx: &Ctx, d: Tensor) -> Result<()> {
        d.expect("grad", "give", self.shape.dims())?;
        match &mut self.target {
            Target::Unwanted => Ok(()),
            Target::Owned(grad @ None) => {
                *grad = Some(d);
                Ok(())
            }
            Target::Owned(Some(grad)) => {
                if !grad.is_unique() {
                    *grad = grad.copy(ctx)?;
                }
                grad.add_assign(&d)
            }
            Target::F32(flat) => add_flat(flat, &d),
            Target::F64(flat) => add_flat(flat, &d),
            #[cfg(feature = "cuda")]
            Target::Gpu(flat) => flat.add(&d.gpu()?),
        }
    }
}

fn flat_target<T: Real>(
    flat: Option<&mut [T]>,
    rows: usize,
    cols: usize,
    got: DType,
) -> Result<Option<(MatMut<'_, T>, bool)>> {
    let want = "the dtype of the flat gradient";
    let flat = flat.ok_or(Error::DType { op: "grad", arg: "param", got, want })?;
    Ok(Some((MatMut::new(flat, rows, cols, cols), true)))
}

fn add_flat<T: Real>(flat: &mut [T], d: &Tensor) -> Result<()> {
    let d = d.view::<T>()?;
    for (to, i) in flat.chunks_exact_mut(d.cols().max(1)).zip(0..d.rows()) {
        to.iter_mut().zip(d.row(i)).for_each(|(y, &x)| *y += x);
    }
    Ok(())
}
