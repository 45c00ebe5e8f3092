//! `cargo xtask tidy`: rules that a machine can check, so that no review has to.
//!
//! A check is a function from the tree to its findings. It reads nothing but the [`Tree`], so its tests hand it a
//! small made-up one and see it fail.

mod cargo;
mod hazards;
mod hygiene;
mod layers;
mod long_tests;
mod ops;
mod readme_tree;
mod sizes;
mod tokens;
mod tree;

use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use tree::Tree;

pub use long_tests::has_long_tests;
pub use tree::marked_block;

/// One broken rule: where, what is wrong and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    path: String,
    /// From 1; 0 is the file as a whole.
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: impl Into<String>, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.into(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// What a check needs: the files, or the folder in which to start cargo.
enum Check {
    Text(fn(&Tree) -> Vec<Finding>),
    Cargo(fn(&Path) -> Result<Vec<Finding>>),
}

/// In the order of what they cost: a slip in a text is told before clippy has compiled anything.
const CHECKS: &[(&str, Check)] = &[
    ("parse", Check::Text(tree::unparsed)),
    ("sizes", Check::Text(sizes::check)),
    ("readme-tree", Check::Text(readme_tree::check)),
    ("ops", Check::Text(ops::check)),
    ("hazards", Check::Text(hazards::check)),
    ("hygiene", Check::Text(hygiene::check)),
    ("layers", Check::Text(layers::check)),
    ("long-tests", Check::Text(long_tests::check)),
    ("fmt", Check::Cargo(cargo::fmt)),
    ("clippy", Check::Cargo(cargo::clippy)),
];

/// Runs the named checks (all without names) and prints what they find. `Ok(false)` is findings.
pub fn run(root: &Path, only: &[String]) -> Result<bool> {
    let names: Vec<&str> = CHECKS.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("no check is named `{unknown}`; there are {}", names.join(", "));
    }
    let tree = Tree::read(root)?;
    let mut found = 0;
    for (name, check) in CHECKS {
        if !only.is_empty() && !only.iter().any(|wanted| wanted == name) {
            continue;
        }
        let start = Instant::now();
        let mut findings = match check {
            Check::Text(check) => check(&tree),
            Check::Cargo(check) => check(root)?,
        };
        findings.sort();
        let verdict = if findings.is_empty() { "ok".to_owned() } else { format!("{} found", findings.len()) };
        println!("tidy {name:<12} {:>7.2} s  {verdict}", start.elapsed().as_secs_f64());
        for finding in &findings {
            println!("  {finding}");
        }
        found += findings.len();
    }
    Ok(found == 0)
}
