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
        let path = one_line(&path.into(), LONGEST);
        Problem { path, found: one_line(&found.to_string(), LONGEST), expected: expected.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}, expected {}", self.path, self.found, self.expected)
    }
}

/// Most problems that are displayed: more than a configuration has fields, fewer than hide the first.
const SHOWN: usize = 100;

/// All problems of one configuration. Displays one a line, the first hundred.
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
        self.0.iter().take(SHOWN).try_for_each(|p| write!(f, "\n  {p}"))?;
        if count > SHOWN { write!(f, "\n  and {} more", count - SHOWN) } else { Ok(()) }
    }
}

impl std::error::Error for Problems {}

/// Most characters of a name or value that a message repeats.
pub(crate) const LONGEST: usize = 80;

/// Text from outside made fit for one line of a message: control and other invisible characters escaped, runs of spaces and
/// line ends one space, and the rest of a long text left out. A file's content thus cannot move a terminal's cursor or
/// fill its screen.
#[must_use]
pub fn one_line(text: &str, longest: usize) -> String {
    let mut line = String::new();
    let mut space = false;
    for (n, c) in
        text.trim().chars().filter(|c| !(std::mem::replace(&mut space, c.is_whitespace()) && space)).enumerate()
    {
        if n == longest {
            return line + "...";
        }
        match c {
            c if c.is_whitespace() => line.push(' '),
            '"' | '\'' | '\\' => line.push(c),
            c => line.extend(c.escape_debug()),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_short_and_visible() {
        assert_eq!(one_line("plain \"text\" \\ of ümläuts", 60), "plain \"text\" \\ of ümläuts");
        assert_eq!(one_line("  two\n\n\t lines\r\n", 60), "two lines");
        assert_eq!(one_line("\u{1b}[31mred\u{7}\u{202e}", 60), "\\u{1b}[31mred\\u{7}\\u{202e}");
        assert_eq!(one_line(&"x".repeat(1 << 20), 5), "xxxxx...");
        assert_eq!(one_line("12345", 5), "12345");
        let problem = Problem::new("k".repeat(100), "v".repeat(100), "a field").to_string();
        assert!(problem.chars().count() < 240, "{problem}");
    }

    #[test]
    fn a_flood_of_problems_is_counted_not_listed() {
        let many = |n: usize| Problems((0..n).map(|i| Problem::new(format!("k{i}"), i, "none")).collect()).to_string();
        assert_eq!(many(SHOWN).lines().count(), 1 + SHOWN);
        assert!(many(SHOWN + 7).ends_with("\n  and 7 more"));
    }
}
