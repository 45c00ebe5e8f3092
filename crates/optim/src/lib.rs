//! The optimizers of HyMo.
//!
//! - [`Optimizer`]: [`normuon`] for dense hidden matrices, Cautious [`adamw`] for the rest, over flat buffers; its state by
//!   name for a checkpoint, and a typed [`Outcome`] when a gradient is not finite.
//! - [`Groups`]: who moves what. Declared in the model's parameter table, checked to cover every parameter exactly once,
//!   printable.
//! - [`Schedule`]: the learning rate over the steps. [`GradNorm`]: norm, finite flag and clipping. [`Ema`]: averaged weights.
//! - [`oracle`]: plain loops that the fast paths are held to; `f64` parameters take them.
//!
//! The configuration is the model crate's: `[optim]` and `[schedule]` of a run file.
//!
//! ```
//! use hymo_model::config::{OptimConfig, ScheduleConfig};
//! use hymo_model::{Params, presets};
//! use hymo_optim::{Optimizer, Outcome, Schedule};
//! use hymo_tensor::Ctx;
//!
//! let (ctx, model) = (Ctx::cpu(), presets::hymo_nano());
//! let mut params = Params::init(&ctx, &model, 1)?;
//! let (config, schedule) = (OptimConfig::default(), Schedule::new(&ScheduleConfig::default())?);
//! let mut optim = Optimizer::new(&ctx, &params, &config)?;
//! assert!(optim.groups().to_string().contains("layers.*.gdn.q.weight"));
//!
//! let grads = params.zero_grads(&ctx)?; // a tape's, in training
//! let lr = config.lr * schedule.factor(optim.steps() + 1);
//! match optim.step(&ctx, params.flats_mut(), grads.flats(), lr)? {
//!     Outcome::Stepped { grad_norm, .. } => assert_eq!(grad_norm, 0.0),
//!     Outcome::Refused { params, .. } => panic!("not finite: {params:?}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod adamw;
pub mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod ema;
mod error;
mod groups;
mod norm;
pub mod normuon;
mod optimizer;
pub mod oracle;
mod schedule;
mod state;

#[cfg(feature = "cuda")]
pub use cuda::kernel_sources;
pub use ema::Ema;
pub use error::Error;
pub use groups::{Group, Groups, Member, Method};
pub use norm::GradNorm;
pub use optimizer::{Optimizer, Outcome};
pub use schedule::Schedule;
