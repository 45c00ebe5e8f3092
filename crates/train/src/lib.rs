//! Training HyMo. So far: [`checkpoint`], what a run leaves on disk and starts again from.

pub mod checkpoint;
