//! Where a command's model comes from: a preset by name, or a configuration file.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use hymo_model::config::one_line;
use hymo_model::presets::Preset;
use hymo_model::{ModelConfig, RunConfig, presets};
use hymo_tensor::Ctx;
use hymo_train::Model;

use crate::exit::{Usage, train_error};

/// A model and its printed form, which for a preset names the preset.
pub struct Source {
    /// The model.
    pub model: ModelConfig,
    /// It as TOML.
    pub printed: String,
}

/// A run's configuration and what the run is called: the preset, or the file without its ending.
pub fn run_config(path: &Path, assignments: &[String]) -> Result<(RunConfig, String), Usage> {
    let text = text(path)?;
    let assignments: Vec<&str> = assignments.iter().map(String::as_str).collect();
    let run = RunConfig::from_toml_with(&text, &assignments);
    let name = path.file_stem().map_or_else(|| "run".to_owned(), |stem| stem.to_string_lossy().into_owned());
    Ok((run.map_err(|e| Usage(format!("{}: {e}", shown(path))))?, name))
}

/// A trained model, from a run's folder, a checkpoint or an exported folder. What was passed over is said at once.
pub fn trained(path: &Path) -> anyhow::Result<Model> {
    if !path.exists() {
        return Err(
            Usage(format!("{}: no such folder; want a run's folder, a checkpoint or an export", shown(path))).into()
        );
    }
    let model = Model::load(&Ctx::cpu(), path).map_err(train_error)?;
    for problem in &model.passed_over {
        // Standard output is for the answer.
        let _ = writeln!(io::stderr(), "hymo: a damaged checkpoint is passed over: {problem}");
    }
    Ok(model)
}

/// Most bytes of a configuration file: a hundred times the longest there is.
const MOST: u64 = 1 << 20;

impl Source {
    /// Finds a preset or reads a file.
    pub fn find(path: &(impl AsRef<Path> + ?Sized)) -> Result<Self, Usage> {
        let path = path.as_ref();
        let text = text(path)?;
        if let Some(preset) = preset(path) {
            return Ok(Source { model: preset.model(), printed: text });
        }
        let run = RunConfig::from_toml(&text).map_err(|e| Usage(format!("{}: {e}", shown(path))))?;
        Ok(Source { printed: run.to_toml(), model: run.model })
    }
}

/// The preset that a path names, if it is a name.
fn preset(path: &Path) -> Option<&'static Preset> {
    presets::preset(path.to_str()?).ok()
}

/// A preset's file, or a file.
fn text(path: &Path) -> Result<String, Usage> {
    // A name that is not UTF-8 is no preset's.
    let name = path.to_str().unwrap_or("/");
    let is_path = path.extension().is_some_and(|e| e == "toml") || name.contains(['/', '\\']);
    if !is_path {
        match presets::preset(name) {
            Ok(preset) => return Ok(preset.to_toml()),
            // A file without the ending is taken too; a preset of the same name goes first.
            Err(_) if fs::metadata(path).is_ok_and(|m| !m.is_dir()) => {}
            Err(e) => return Err(Usage(format!("{e}. A configuration file is a path or ends in .toml"))),
        }
    }
    read(path).map_err(|what| Usage(format!("{}: {what}", shown(path))))
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
