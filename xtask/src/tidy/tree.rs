//! The files under check: what git would carry (ignored files are left out), read and parsed once.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use ignore::WalkBuilder;
use proc_macro2::TokenStream;
use quote::ToTokens;

use super::Finding;

/// A Rust file: its syntax tree for items, its tokens for what hides inside macro calls.
pub struct RustFile {
    pub path: String,
    pub text: String,
    pub ast: syn::File,
    pub tokens: TokenStream,
}

/// Paths are relative to the root, with `/`.
#[derive(Default)]
pub struct Tree {
    /// Every file; `None` where it is no text.
    files: BTreeMap<String, Option<String>>,
    pub rust: Vec<RustFile>,
    unparsed: Vec<Finding>,
}

impl Tree {
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        // Only the project's own ignore files: a developer's global ones must not change what is found.
        let walk = WalkBuilder::new(root)
            .hidden(false)
            .parents(false)
            .git_global(false)
            .require_git(false)
            .filter_entry(|entry| entry.file_name() != ".git")
            .build();
        for entry in walk {
            let entry = entry?;
            if !entry.file_type().is_some_and(|kind| kind.is_file()) {
                continue;
            }
            let path = entry.path();
            let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
            let relative = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
            tree.add(relative, String::from_utf8(bytes).ok());
        }
        Ok(tree)
    }

    fn add(&mut self, path: String, text: Option<String>) {
        if let (true, Some(text)) = (path.ends_with(".rs"), &text) {
            match syn::parse_file(text) {
                Ok(ast) => {
                    let tokens = ast.to_token_stream();
                    self.rust.push(RustFile { path: path.clone(), text: text.clone(), ast, tokens });
                }
                Err(error) => {
                    let line = error.span().start().line;
                    self.unparsed.push(Finding::new(&path, line, format!("does not parse: {error}")));
                }
            }
        }
        self.files.insert(path, text);
    }

    /// Every path, sorted.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Every text file with its path.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().filter_map(|(path, text)| Some((path.as_str(), text.as_deref()?)))
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path)?.as_deref()
    }

    /// The names of the folders directly under `folder` (`""` is the root).
    pub fn folders(&self, folder: &str) -> Vec<&str> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut names: Vec<&str> =
            self.paths().filter_map(|path| path.strip_prefix(&prefix)?.split_once('/')).map(|(name, _)| name).collect();
        names.dedup();
        names
    }

    /// The folders of `crates/` that hold a manifest.
    pub fn crates(&self) -> Vec<&str> {
        let mut crates = self.folders("crates");
        crates.retain(|name| self.files.contains_key(&format!("crates/{name}/Cargo.toml")));
        crates
    }
}

/// A Rust file that does not parse would slip past every other check.
pub fn unparsed(tree: &Tree) -> Vec<Finding> {
    tree.unparsed.clone()
}

/// The lines between `<!-- NAME:begin -->` and `<!-- NAME:end -->` that a code fence holds, with their numbers.
pub fn marked_block<'t>(text: &'t str, name: &str) -> Option<Vec<(usize, &'t str)>> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let mut numbered = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    numbered.by_ref().find(|(_, line)| line.trim() == begin)?;
    let mut block = Vec::new();
    let mut fenced = false;
    for (number, line) in numbered {
        if line.trim() == end {
            return Some(block);
        }
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced && !line.trim().is_empty() {
            block.push((number, line));
        }
    }
    None
}

#[cfg(test)]
impl Tree {
    /// A made-up tree.
    pub fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        for (path, text) in files {
            tree.add((*path).to_owned(), Some((*text).to_owned()));
        }
        tree
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_is_found() {
        let tree = Tree::of(&[("a.rs", "fn a( {"), ("b.rs", "fn b() {}")]);
        assert_eq!(unparsed(&tree).len(), 1);
        assert_eq!(tree.rust.len(), 1);
    }

    #[test]
    fn folders_are_one_level_and_once() {
        let tree = Tree::of(&[("crates/a/Cargo.toml", ""), ("crates/a/src/lib.rs", ""), ("crates/b/x", ""), ("c", "")]);
        assert_eq!(tree.folders(""), ["crates"]);
        assert_eq!(tree.folders("crates"), ["a", "b"]);
        assert_eq!(tree.crates(), ["a"]);
    }

    #[test]
    fn a_marked_block_is_what_its_fence_holds() {
        let text = "a\n<!-- x:begin -->\nprose\n```text\nb\n\nc\n```\n<!-- x:end -->\n";
        assert_eq!(marked_block(text, "x").unwrap(), [(5, "b"), (7, "c")]);
        assert_eq!(marked_block(text, "y"), None);
        assert_eq!(marked_block("<!-- x:begin -->\n```\nb\n```\n", "x"), None, "no end marker");
    }
}
