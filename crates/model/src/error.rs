//! What can go wrong in this crate.

use crate::config::{LONGEST, Problems, one_line};
use crate::params::Unit;

/// An error of the model crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not TOML.
    #[error("not TOML: {message}")]
    Toml {
        /// Line, column, what the parser says, and the line itself, shortened.
        message: String,
    },
    /// The configuration cannot be built.
    #[error(transparent)]
    Config(#[from] Problems),
    /// No preset has this name.
    #[error("no preset is called \"{}\"{}; presets: {}", one_line(name, LONGEST), hint(*nearest), presets())]
    UnknownPreset {
        /// The name asked for.
        name: String,
        /// The preset it most resembles.
        nearest: Option<&'static str>,
    },
    /// No parameter has this name.
    #[error("no parameter is called \"{name}\"")]
    UnknownParam {
        /// The name asked for.
        name: String,
    },
    /// Parameters asked for as one matrix do not lie in one.
    #[error("\"{next}\" ({next_unit} at {next_offset}) does not continue \"{name}\", which ends in {unit} at {end}")]
    NotAdjacent {
        /// The earlier parameter.
        name: String,
        /// Its unit.
        unit: Unit,
        /// One past its last element.
        end: usize,
        /// The parameter that should follow.
        next: String,
        /// Where it is.
        next_unit: Unit,
        /// Where it begins.
        next_offset: usize,
    },
    /// A parameter was given the wrong number of values.
    #[error("\"{name}\" has {expected} elements, {found} values were given")]
    Length {
        /// The parameter.
        name: String,
        /// Values given.
        found: usize,
        /// Its elements.
        expected: usize,
    },
    /// An operation refused its input.
    #[error(transparent)]
    Op(#[from] hymo_tensor::Error),
    /// Parameters asked for as one matrix have rows of different lengths.
    #[error("rows of \"{name}\" have {found} elements, those before it {expected}")]
    UnequalRows {
        /// The parameter that differs.
        name: String,
        /// Its row length.
        found: usize,
        /// The row length before it.
        expected: usize,
    },
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map(|n| format!("; did you mean \"{n}\"?")).unwrap_or_default()
}

fn presets() -> String {
    crate::presets::PRESETS.iter().map(|p| p.name).collect::<Vec<_>>().join(", ")
}
