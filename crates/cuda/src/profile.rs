//! Where a GPU's time goes: events around every kernel and product, added up by name.
#![allow(unsafe_code)]

use crate::gpu::{check, lock};
use crate::{Gpu, Result};
use cudarc::driver::sys;
use std::collections::BTreeMap;

/// What is being measured, if anything is.
#[derive(Default)]
pub(crate) struct Profile {
    on: bool,
    marks: Vec<(String, u64, [sys::CUevent; 2])>,
}

/// All runs of one kernel, or of products of one shape.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Spent {
    /// The kernel's name, or the product's sizes and types.
    pub name: String,
    /// Runs.
    pub count: usize,
    /// Milliseconds of all of them.
    pub ms: f64,
    /// Multiplications and additions of all of them, where they are known (products).
    pub flops: u64,
}

impl Gpu {
    /// Measures from now on. Events cost a little: what is measured is not what a run without them takes in all.
    pub fn profile(&self) {
        lock(&self.0.profile).on = true;
    }

    /// Runs `work`, between events when something is being measured.
    pub(crate) fn measured(
        &self,
        name: impl FnOnce() -> (String, u64),
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !lock(&self.0.profile).on {
            return work();
        }
        let mark = || -> Result<sys::CUevent> {
            let mut event = std::ptr::null_mut();
            // SAFETY: the pointer is to a value of this frame; the context is current, the stream alive.
            unsafe {
                check("cuEventCreate", sys::cuEventCreate(&mut event, 0))?;
                check("cuEventRecord", sys::cuEventRecord(event, self.0.stream))?;
            }
            Ok(event)
        };
        let first = mark()?;
        work()?;
        let last = mark()?;
        let (name, flops) = name();
        lock(&self.0.profile).marks.push((name, flops, [first, last]));
        Ok(())
    }

    /// Stops measuring; what took longest comes first.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn spent(&self) -> Result<Vec<Spent>> {
        self.synchronize()?;
        let Profile { marks, .. } = std::mem::take(&mut *lock(&self.0.profile));
        let mut by_name = BTreeMap::<String, Spent>::new();
        for (name, flops, [first, last]) in marks {
            let mut ms = 0f32;
            // SAFETY: both events were recorded and are done, and are not used after this.
            unsafe {
                check("cuEventElapsedTime", sys::cuEventElapsedTime_v2(&mut ms, first, last))?;
                sys::cuEventDestroy_v2(first);
                sys::cuEventDestroy_v2(last);
            }
            let spent = by_name.entry(name.clone()).or_default();
            *spent = Spent { name, count: spent.count + 1, ms: spent.ms + f64::from(ms), flops: spent.flops + flops };
        }
        let mut all: Vec<Spent> = by_name.into_values().collect();
        all.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Ok(all)
    }
}
