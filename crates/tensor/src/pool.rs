use crate::Element;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Free buffers of one element type, by capacity.
pub type Shelf<T> = Mutex<BTreeMap<usize, Vec<Vec<T>>>>;

/// Buffers that come back when their tensor is dropped, so that a training step in steady state allocates nothing.
///
/// A reused buffer keeps its old contents: operations write every element of what they are given, and tests run with
/// [`Ctx::poisoned`](crate::Ctx::poisoned) to prove it.
#[derive(Debug, Default)]
pub struct Pool {
    pub(crate) f32: Shelf<f32>,
    pub(crate) f64: Shelf<f64>,
    pub(crate) bf16: Shelf<half::bf16>,
    pub(crate) i32: Shelf<i32>,
    pub(crate) i8: Shelf<i8>,
    asked: AtomicUsize,
    live: AtomicUsize,
    peak: AtomicUsize,
    fresh: AtomicUsize,
}

/// What a [`Pool`] has handed out, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// What tensors that live now asked for: `live` without the rounding up of capacities.
    pub asked: usize,
    /// Held by tensors now.
    pub live: usize,
    /// The most ever held at once.
    pub peak: usize,
    /// Allocated from the system so far; constant in steady state.
    pub fresh: usize,
}

/// Rounds up to five significant bits: at most 1/16 is wasted, and near sizes share buffers.
fn capacity(len: usize) -> usize {
    let step = (len.max(1).next_power_of_two() / 32).max(16);
    len.max(1).div_ceil(step) * step
}

/// The largest buffer that serves a capacity: a quarter more, so that what one phase of a step leaves free serves the next.
fn serves(cap: usize) -> usize {
    cap + cap / 4
}

impl Pool {
    pub(crate) fn take<T: Element>(self: &Arc<Self>, len: usize) -> Buf<T> {
        let cap = capacity(len);
        let found = {
            let mut shelf = T::shelf(self).lock().unwrap_or_else(PoisonError::into_inner);
            shelf.range_mut(cap..=serves(cap)).find_map(|(_, free)| free.pop())
        };
        let data = found.unwrap_or_else(|| {
            self.fresh.fetch_add(cap * size_of::<T>(), Relaxed);
            vec![T::default(); cap]
        });
        let held = data.len() * size_of::<T>();
        let live = self.live.fetch_add(held, Relaxed) + held;
        self.peak.fetch_max(live, Relaxed);
        self.asked.fetch_add(len * size_of::<T>(), Relaxed);
        Buf { data, len, pool: Some(Arc::clone(self)) }
    }

    fn give<T: Element>(&self, data: Vec<T>, len: usize) {
        self.asked.fetch_sub(len * size_of::<T>(), Relaxed);
        self.live.fetch_sub(data.len() * size_of::<T>(), Relaxed);
        let mut shelf = T::shelf(self).lock().unwrap_or_else(PoisonError::into_inner);
        shelf.entry(data.len()).or_default().push(data);
    }

    /// Bytes held, peak and allocated.
    pub fn stats(&self) -> PoolStats {
        let [asked, live, peak, fresh] =
            [&self.asked, &self.live, &self.peak, &self.fresh].map(|counter| counter.load(Relaxed));
        PoolStats { asked, live, peak, fresh }
    }

    /// Starts a new peak at what is held now.
    pub fn reset_peak(&self) {
        self.peak.store(self.live.load(Relaxed), Relaxed);
    }
}

/// A buffer that returns to its pool.
#[derive(Debug)]
pub struct Buf<T: Element> {
    data: Vec<T>,
    len: usize,
    pool: Option<Arc<Pool>>,
}

impl<T: Element> Buf<T> {
    pub(crate) fn owned(data: Vec<T>) -> Self {
        Buf { len: data.len(), data, pool: None }
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.data[..self.len]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data[..self.len]
    }
}

impl<T: Element> Drop for Buf<T> {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.give(std::mem::take(&mut self.data), self.len);
        }
    }
}
