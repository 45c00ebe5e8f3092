//! Worker threads.

#[cfg(feature = "rayon")]
/// Runs `work` on so many threads, or on all cores.
pub fn on_threads<T: Send>(threads: Option<u16>, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.map_or(0, usize::from)).build()?;
    pool.install(work)
}

#[cfg(not(feature = "rayon"))]
/// Without threads: one at most.
pub fn on_threads<T>(threads: Option<u16>, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    match threads {
        None | Some(1) => work(),
        Some(n) => {
            Err(crate::exit::Usage(format!("--threads {n}: this hymo is built without the feature rayon")).into())
        }
    }
}

/// Worker threads that run.
#[cfg(feature = "rayon")]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

#[cfg(not(feature = "rayon"))]
pub fn threads() -> usize {
    1
}
