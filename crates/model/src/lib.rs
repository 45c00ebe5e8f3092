//! The HyMo language model.
//!
//! A model is a [`ModelConfig`]: sizes, pattern of layers, experts, prediction modules. From it follow
//! - [`ParamTable`]: every parameter with its place in the flat buffers, its initial values ([`init`]) and its optimizer;
//! - [`Params`]: their memory; [`HyMo`]: the network over it, its loss on a [`Batch`] and its logits token by token;
//! - [`Cost`]: parameters by part, operations a token, memory in training and in decoding.
//!
//! [`presets`] are the models with names. A run file is read by [`RunConfig::from_toml`], which reports every problem of the
//! file at once.
//!
//! ```
//! use hymo_model::{Cost, CostOptions, ParamTable, RunConfig, presets};
//!
//! let model = presets::hymo_434m();
//! let table = ParamTable::new(&model)?;
//! let qkvzab = ["q", "k", "v", "z", "a", "b"].map(|w| format!("layers.0.gdn.{w}.weight"));
//! let span = table.span(&qkvzab.each_ref().map(String::as_str))?;
//! assert_eq!((span.rows, span.cols), (6176, 896));
//!
//! let cost = Cost::new(&model, CostOptions { context: 32_768, batch: 1 })?;
//! assert_eq!(cost.params.active, 433_708_992);
//! assert_eq!(cost.cache.bytes_at_context, 128 << 20);
//!
//! let file = RunConfig::new(model).to_toml().replace("n_kv_groups = 4", "n_kv_groups = 5");
//! let problems = RunConfig::from_toml(&file).unwrap_err().to_string();
//! assert!(problems.contains("model.mla.n_kv_groups: found 5, expected a divisor of model.mla.n_heads, 16"));
//! # Ok::<(), hymo_model::Error>(())
//! ```
//!
//! Nothing here reads a clock, a file or the environment: the crate builds for WebAssembly as it is.

mod batch;
pub mod check;
pub mod config;
pub mod cost;
mod error;
pub mod init;
mod net;
pub mod params;
pub mod presets;
mod store;

pub use batch::{Batch, Counts};
pub use config::{ModelConfig, Problem, Problems, RunConfig};
pub use cost::{Cost, CostOptions};
pub use error::Error;
pub use net::args;
pub use net::{HyMo, LayerStats, LossValues, Losses, Options, State};
pub use params::{OptimGroup, ParamSpec, ParamTable, Span, Unit};
pub use store::Params;
