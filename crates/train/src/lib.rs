//! Training HyMo: [`Trainer::step`] reads from top to bottom on one screen, and [`checkpoint`] is what a run leaves on disk
//! and starts again from, to the bit. A run writes [`record::Record`]s; [`report`] and [`tensorboard`] show them.

pub mod checkpoint;
pub mod choices;
mod error;
pub mod evaluate;
pub mod exchange;
mod guard;
mod load;
pub mod profile;
mod qk_clip;
pub mod record;
pub mod report;
pub mod run;
mod step;
pub mod tensorboard;
mod trainer;

pub use error::Error;
pub use load::Model;
pub use record::StepReport;
pub use trainer::{LoopState, Trainer};
