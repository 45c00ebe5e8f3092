//! Where a command's model comes from: a preset by name, or a configuration file.

use std::path::Path;

use hymo_model::{Error, ModelConfig, RunConfig, presets};

use crate::exit::Usage;

/// A model and its printed form, which for a preset names the preset.
pub struct Source {
    /// The model.
    pub model: ModelConfig,
    /// It as TOML.
    pub printed: String,
}

impl Source {
    /// Finds a preset or reads a file.
    pub fn find(name: &str) -> Result<Self, Usage> {
        let path = Path::new(name);
        let is_path = path.extension().is_some_and(|e| e == "toml") || name.contains(['/', '\\']);
        if !is_path {
            match presets::preset(name) {
                Ok(preset) => return Ok(Source { model: preset.model(), printed: preset.to_toml() }),
                // A file without the ending is taken too; a preset of the same name goes first.
                Err(_) if path.is_file() => {}
                Err(e) => return Err(Usage(format!("{e}. A configuration file is a path or ends in .toml"))),
            }
        }
        let run = read_config(path)?;
        Ok(Source { printed: run.to_toml(), model: run.model })
    }
}

/// Reads a configuration file. Whatever is wrong with it is the user's to change: wrong usage.
fn read_config(path: &Path) -> Result<RunConfig, Usage> {
    let wrong = |what: String| Usage(format!("{}: {what}", path.display()));
    if path.is_dir() {
        return Err(wrong("a folder, not a configuration file".to_owned()));
    }
    let bytes = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => wrong("no such file".to_owned()),
        _ => wrong(format!("not readable: {e}")),
    })?;
    let text = String::from_utf8(bytes)
        .map_err(|e| wrong(format!("not UTF-8 text (byte {})", e.utf8_error().valid_up_to())))?;
    RunConfig::from_toml(&text).map_err(|e| match e {
        Error::Toml { message } => wrong(format!("not TOML: {}", message.trim_end())),
        e => wrong(e.to_string()),
    })
}
