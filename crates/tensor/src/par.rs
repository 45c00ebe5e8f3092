//! Fixed blocks of work over the worker threads.
//!
//! Results never depend on the number of threads: callers cut the work into blocks by its size alone, every block
//! writes its own output, and sums over blocks are taken afterwards in block order.
//!
//! A block's work runs inside a function that the compiler built once for each generation of vector units, and the
//! processor's own is chosen at run time, so one binary uses the widest registers wherever it runs. What is to profit must
//! be inlined into it: the closure ([`each!`](crate::each) sees to that) and what it calls (`#[inline(always)]`). Nothing else changes: the compiler neither
//! reorders sums nor fuses a product into one, so the bits are those of plain code.

/// Runs `work` as compiled for this processor's vector units.
#[inline(always)]
pub fn vector<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// The vector units that [`vector`] compiles for here, to be printed at the start of long work (HAZARD 26).
#[must_use]
pub fn instructions() -> &'static str {
    // The names of the levels are the crate's; which of them a build has depends on its features.
    let level = format!("{:?}", pulp::Arch::new());
    match level.as_str() {
        l if l.contains("V4") => "AVX-512",
        l if l.contains("V3") => "AVX2 and FMA",
        l if l.contains("Neon") => "NEON",
        _ => "no vector units beyond the target's baseline",
    }
}

/// [`each`](fn@each) with the closure inlined, so that its loops use this processor's vector units.
#[macro_export]
macro_rules! each {
    ($tasks:expr, |$($arg:pat_param),*| $body:expr) => {
        $crate::par::each($tasks, #[inline(always)] |$($arg),*| $body)
    };
}

/// Runs `f(index, task)` for every task, compiled for this processor's vector units, on the worker threads when the feature `rayon` is on.
pub fn each<I: Send>(tasks: Vec<I>, f: impl Fn(usize, I) + Sync) {
    #[cfg(feature = "rayon")]
    if tasks.len() > 1 && rayon::current_num_threads() > 1 {
        use rayon::prelude::*;
        tasks.into_par_iter().enumerate().with_max_len(1).for_each(|(i, task)| {
            vector(
                #[inline(always)]
                || f(i, task),
            )
        });
        return;
    }
    for (i, task) in tasks.into_iter().enumerate() {
        vector(
            #[inline(always)]
            || f(i, task),
        );
    }
}

/// Runs `f` for `0..n` and collects the results in order.
pub fn map<R: Send>(n: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    #[cfg(feature = "rayon")]
    if n > 1 && rayon::current_num_threads() > 1 {
        use rayon::prelude::*;
        return (0..n).into_par_iter().with_max_len(1).map(&f).collect();
    }
    (0..n).map(f).collect()
}
