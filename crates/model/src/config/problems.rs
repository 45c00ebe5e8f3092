//! What is wrong with a configuration, all of it at once.

use std::fmt;

/// One thing wrong: where, what was found, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path of the field as in the file, such as `model.mla.n_kv_groups`.
    pub path: String,
    /// The value found, or `absent`.
    pub found: String,
    /// What would be right: a type, a range, a rule, the nearest known name.
    pub expected: String,
}

impl Problem {
    /// Builds a problem from its three parts.
    pub fn new(path: impl Into<String>, found: impl fmt::Display, expected: impl Into<String>) -> Self {
        Problem { path: path.into(), found: shortened(&found.to_string()), expected: expected.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}, expected {}", self.path, self.found, self.expected)
    }
}

/// All problems of one configuration. Displays one a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// `Err` with the problems when there are any.
    ///
    /// # Errors
    /// When the list is not empty.
    pub fn unless_empty(problems: Vec<Problem>) -> Result<(), Problems> {
        if problems.is_empty() { Ok(()) } else { Err(Problems(problems)) }
    }

    /// The problems, in the order of the schema as far as they concern known fields.
    #[must_use]
    pub fn as_slice(&self) -> &[Problem] {
        &self.0
    }

    /// The first problem at a path.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Problem> {
        self.0.iter().find(|p| p.path == path)
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Problems(vec![problem])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "{count} problem{} in the configuration:", if count == 1 { "" } else { "s" })?;
        self.0.iter().try_for_each(|p| write!(f, "\n  {p}"))
    }
}

impl std::error::Error for Problems {}

/// A value found may be a whole table; a message is no place for it.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}
