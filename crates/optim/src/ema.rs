//! A moving average of the weights, to evaluate or to keep.

use crate::Error;
use hymo_tensor::{Ctx, DType, Real, Tensor};

/// Elements of a block of work.
const BLOCK: usize = 1 << 15;

/// `E <- decay E + (1 - decay) W` after each step, starting from the weights it was made with. Flat buffers laid out as the
/// parameters are.
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    flats: Vec<Tensor>,
}

impl Ema {
    /// The average of these weights alone. `decay` is the share kept in a step, 0 to below 1.
    ///
    /// # Errors
    /// A decay out of its range, or tensors that are not flat buffers of `f32` or `f64`.
    pub fn new(ctx: &Ctx, params: &[Tensor], decay: f64) -> Result<Self, Error> {
        if !(0.0..1.0).contains(&decay) {
            return Err(hymo_tensor::Error::value("ema", "decay", decay, "0 to below 1").into());
        }
        let flats = params.iter().map(|flat| flat.copy(ctx)).collect::<hymo_tensor::Result<_>>()?;
        Ok(Ema { decay, flats })
    }

    /// Takes the weights of a step in.
    ///
    /// # Errors
    /// [`Error::Layout`] for other buffers than those of the start.
    pub fn update(&mut self, params: &[Tensor]) -> Result<(), Error> {
        same(&self.flats, params)?;
        for (ema, flat) in self.flats.iter_mut().zip(params) {
            #[cfg(feature = "cuda")]
            if flat.is_on_gpu() {
                crate::cuda::average(ema, flat, self.decay)?;
                continue;
            }
            match flat.dtype() {
                DType::F64 => average::<f64>(ema, flat, self.decay)?,
                _ => average::<f32>(ema, flat, self.decay)?,
            }
        }
        Ok(())
    }

    /// The average: flat buffers, the root's, then each layer's.
    #[must_use]
    pub fn flats(&self) -> &[Tensor] {
        &self.flats
    }

    /// Copies a saved average in.
    ///
    /// # Errors
    /// [`Error::Layout`] for other buffers, in which case nothing is taken over.
    pub fn load(&mut self, ctx: &Ctx, saved: &[Tensor]) -> Result<(), Error> {
        same(&self.flats, saved)?;
        self.flats = saved.iter().map(|flat| flat.copy(ctx)).collect::<hymo_tensor::Result<_>>()?;
        Ok(())
    }
}

fn same(own: &[Tensor], given: &[Tensor]) -> Result<(), Error> {
    let say = |t: Option<&Tensor>| t.map_or("no buffer".to_owned(), |t| format!("{} of {}", t.shape(), t.dtype()));
    for unit in 0..own.len().max(given.len()) {
        let (found, want) = (say(given.get(unit)), say(own.get(unit)));
        if found != want {
            return Err(Error::Layout { what: "weights of an average", unit, found, want });
        }
    }
    Ok(())
}

fn average<T: Real>(ema: &mut Tensor, params: &Tensor, decay: f64) -> Result<(), Error> {
    let (keep, take) = (T::of(decay), T::of(1.0 - decay));
    let blocks = ema.flat_mut::<T>()?.chunks_mut(BLOCK).zip(params.flat::<T>()?.chunks(BLOCK)).collect();
    hymo_tensor::each!(blocks, |_, (ema, w)| {
        for (e, &w) in ema.iter_mut().zip(w) {
            *e = keep * *e + take * w;
        }
    });
    Ok(())
}
