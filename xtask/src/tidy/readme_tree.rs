//! The tree in README.md is the list of what there is: every crate and top-level folder, one line each with a phrase.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::{Tree, marked_block};

const README: &str = "README.md";

pub fn check(tree: &Tree) -> Vec<Finding> {
    let Some(block) = tree.text(README).and_then(|text| marked_block(text, "tree")) else {
        let message = "no fenced block between <!-- tree:begin --> and <!-- tree:end -->";
        return vec![Finding::new(README, 0, message)];
    };
    let mut found = Vec::new();
    let listed = listed(block, &mut found);
    let folders = tree.folders("").into_iter().map(|name| format!("{name}/"));
    let crates = tree.crates().into_iter().map(|name| format!("crates/{name}/"));
    for wanted in folders.chain(crates).filter(|wanted| !listed.contains_key(wanted)) {
        let message = format!("{wanted} is missing in the tree: add a line with what it is for");
        found.push(Finding::new(README, 0, message));
    }
    for (path, number) in listed {
        let exists = match path.strip_suffix('/') {
            Some(_) => tree.paths().any(|file| file.starts_with(&path)),
            None => tree.text(&path).is_some(),
        };
        if !exists {
            let message = format!("{path} is listed but is not there (a folder ends in /)");
            found.push(Finding::new(README, number, message));
        }
    }
    found
}

/// Every path the block lists, with its line. An indented name belongs to the last one that is not.
fn listed(block: Vec<(usize, &str)>, found: &mut Vec<Finding>) -> BTreeMap<String, usize> {
    let mut listed = BTreeMap::new();
    let mut parent = "";
    for (number, line) in block {
        let name = line.split_whitespace().next().unwrap_or_default();
        let path = if line.starts_with(char::is_whitespace) {
            format!("{parent}{name}")
        } else {
            parent = name;
            name.to_owned()
        };
        // `crates/` speaks through its children.
        if line.trim() == name && path != "crates/" {
            let message = format!("{path} is listed without a phrase: say what it is for");
            found.push(Finding::new(README, number, message));
        }
        if listed.insert(path.clone(), number).is_some() {
            found.push(Finding::new(README, number, format!("{path} is listed twice")));
        }
    }
    listed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(tree_lines: &str) -> Vec<String> {
        let readme = format!("<!-- tree:begin -->\n```\n{tree_lines}```\n<!-- tree:end -->\n");
        let tree = Tree::of(&[
            (README, &readme),
            ("crates/a/Cargo.toml", ""),
            ("crates/b/Cargo.toml", ""),
            ("docs/x.md", ""),
            (".ci/run", ""),
        ]);
        check(&tree).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_true_tree_passes() {
        let lines = "README.md  this\ncrates/\n  a/  one\n  b/  two\ndocs/  pages\n.ci/  what CI runs\n";
        assert_eq!(messages(lines), [""; 0]);
    }

    #[test]
    fn missing_stale_bare_and_double_lines_are_found() {
        let found = messages("crates/\n  a/\n  a/  one\n  c/  gone\ndocs/  pages\n").join("\n");
        for part in
            ["crates/b/ is missing", ".ci/ is missing", "crates/c/ is listed but", "without a phrase", "listed twice"]
        {
            assert!(found.contains(part), "{part} in {found}");
        }
    }

    #[test]
    fn no_block_is_found() {
        assert_eq!(check(&Tree::of(&[(README, "# HyMo\n")])).len(), 1);
    }
}
