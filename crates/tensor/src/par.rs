//! Fixed blocks of work over the worker threads.
//!
//! Results never depend on the number of threads: callers cut the work into blocks by its size alone, every block
//! writes its own output, and sums over blocks are taken afterwards in block order.

/// Runs `f(index, task)` for every task, on the worker threads when the feature `rayon` is on.
pub fn each<I: Send>(tasks: Vec<I>, f: impl Fn(usize, I) + Sync) {
    #[cfg(feature = "rayon")]
    if tasks.len() > 1 && rayon::current_num_threads() > 1 {
        use rayon::prelude::*;
        tasks.into_par_iter().enumerate().with_max_len(1).for_each(|(i, task)| f(i, task));
        return;
    }
    for (i, task) in tasks.into_iter().enumerate() {
        f(i, task);
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
