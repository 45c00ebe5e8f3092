//! Where a command's model comes from: a preset by name, or a configuration file.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use hymo_model::config::one_line;
use hymo_model::{ModelConfig, RunConfig, presets};

use crate::exit::Usage;

/// A model and its printed form, which for a preset names the preset.
pub struct Source {
    /// The model.
    pub model: ModelConfig,
    /// It as TOML.
    pub printed: String,
}

/// Most bytes of a configuration file: a hundred times the longest there is.
const MOST: u64 = 1 << 20;

impl Source {
    /// Finds a preset or reads a file.
    pub fn find(path: &(impl AsRef<Path> + ?Sized)) -> Result<Self, Usage> {
        let path = path.as_ref();
        // A name that is not UTF-8 is no preset's.
        let name = path.to_str().unwrap_or("/");
        let is_path = path.extension().is_some_and(|e| e == "toml") || name.contains(['/', '\\']);
        if !is_path {
            match presets::preset(name) {
                Ok(preset) => return Ok(Source { model: preset.model(), printed: preset.to_toml() }),
                // A file without the ending is taken too; a preset of the same name goes first.
                Err(_) if fs::metadata(path).is_ok_and(|m| !m.is_dir()) => {}
                Err(e) => return Err(Usage(format!("{e}. A configuration file is a path or ends in .toml"))),
            }
        }
        let wrong = |what: String| Usage(format!("{}: {what}", shown(path)));
        let text = read(path).map_err(wrong)?;
        let run = RunConfig::from_toml(&text).map_err(|e| wrong(e.to_string()))?;
        Ok(Source { printed: run.to_toml(), model: run.model })
    }
}

/// A path fit for a message.
pub fn shown(path: &Path) -> String {
    one_line(&path.to_string_lossy(), 200)
}

/// Reads a configuration file. Whatever is wrong with it is the user's to change.
fn read(path: &Path) -> Result<String, String> {
    let found = fs::metadata(path).map_err(|e| unreadable(path, &e))?;
    // Before it is opened: opening a pipe that nobody writes to would wait for ever. What the shell hands over is a pipe too.
    let handed_over = path == Path::new("/dev/stdin") || path.starts_with("/dev/fd");
    if found.is_dir() {
        return Err("a folder, not a configuration file".to_owned());
    }
    if !found.is_file() && !handed_over {
        return Err("not a regular file (a device, a pipe or a socket)".to_owned());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| unreadable(path, &e))?;
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(|e| unreadable(path, &e))?;
    if bytes.len() as u64 > MOST {
        return Err("more than 1 MiB: not a configuration file".to_owned());
    }
    String::from_utf8(bytes).map_err(|e| format!("not UTF-8 text (byte {})", e.utf8_error().valid_up_to()))
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    if error.kind() != io::ErrorKind::NotFound {
        return format!("not readable: {error}");
    }
    let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("");
    match presets::PRESETS.iter().find(|p| p.name.eq_ignore_ascii_case(stem)) {
        Some(preset) => format!("no such file; did you mean the preset \"{}\"?", preset.name),
        None => "no such file".to_owned(),
    }
}
