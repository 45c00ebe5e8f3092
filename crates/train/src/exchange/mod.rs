//! A model as others read it: one safetensors file, `config.json`, `tokenizer.json`. And back, every tensor accounted for
//! (HAZARD 27).

mod read;
mod write;

use crate::Error;
use crate::checkpoint;
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use read::{Source, import, load};
pub use write::{Precision, export};

/// The file of the configuration.
pub const CONFIG: &str = "config.json";
/// The file of the tensors.
pub const TENSORS: &str = "model.safetensors";

/// What `config.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Always `hymo`.
    pub model_type: String,
    /// Steps the model was trained for.
    #[serde(default)]
    pub step: u64,
    /// What the tensors are stored in: `float32` or `bfloat16`.
    pub torch_dtype: String,
    /// The id that ends a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<u32>,
    /// The model, as `[model]` of a run file has it.
    pub model: hymo_model::ModelConfig,
}

fn wrong(path: &Path, name: &str, problem: impl Into<String>) -> Error {
    checkpoint::Error::Tensor { path: path.to_owned(), name: name.to_owned(), problem: problem.into() }.into()
}

fn unreadable(path: &Path, reason: impl Into<String>) -> Error {
    checkpoint::Error::Unreadable { path: path.to_owned(), reason: reason.into() }.into()
}
