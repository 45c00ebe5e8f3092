//! Training HyMo: [`Trainer::step`] reads from top to bottom on one screen, and [`checkpoint`] is what a run leaves on disk
//! and starts again from, to the bit.

pub mod checkpoint;
mod error;
mod step;
mod trainer;

pub use error::Error;
pub use step::StepReport;
pub use trainer::{LoopState, Trainer};
