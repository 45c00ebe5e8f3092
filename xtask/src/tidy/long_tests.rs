//! Long tests are targets named `long_*` with `test = false`: `cargo test` passes over them, `--test 'long_*'` runs
//! them, and no feature has to rebuild a crate for it.

use std::path::Path;

use super::Finding;
use super::tree::Tree;

pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for name in tree.crates() {
        let manifest = format!("crates/{name}/Cargo.toml");
        let targets = tree.text(&manifest).and_then(|text| text.parse::<toml::Table>().ok());
        let targets = targets.as_ref().and_then(|table| table.get("test")?.as_array());
        let prefix = format!("crates/{name}/tests/");
        for path in tree.paths() {
            let Some(target) = path.strip_prefix(&prefix).and_then(|file| file.strip_suffix(".rs")) else {
                continue;
            };
            let apart = targets.into_iter().flatten().any(|entry| {
                entry.get("name").and_then(toml::Value::as_str) == Some(target)
                    && entry.get("test").and_then(toml::Value::as_bool) == Some(false)
            });
            match (target.starts_with("long_"), apart) {
                (true, false) => found.push(Finding::new(
                    path,
                    0,
                    format!("a long test that every `cargo test` runs; {manifest} needs [[test]] name = \"{target}\", test = false"),
                )),
                (false, true) => found.push(Finding::new(
                    path,
                    0,
                    format!("`test = false` in {manifest} keeps it from ever running: name it long_{target}.rs"),
                )),
                _ => {}
            }
        }
    }
    found
}

/// cargo refuses a target pattern that matches nothing, so whoever runs the long tests asks first.
pub fn has_long_tests(root: &Path) -> bool {
    let crates = std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    let mut tests = crates.flat_map(|folder| std::fs::read_dir(folder.path().join("tests"))).flatten().flatten();
    tests.any(|file| file.file_name().to_string_lossy().starts_with("long_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_test_must_be_set_apart_and_no_other() {
        let manifest = "[[test]]\nname = \"long_b\"\ntest = false\n[[test]]\nname = \"c\"\ntest = false\n";
        let tree = Tree::of(&[
            ("crates/x/Cargo.toml", manifest),
            ("crates/x/tests/long_a.rs", ""),
            ("crates/x/tests/long_b.rs", ""),
            ("crates/x/tests/c.rs", ""),
            ("crates/x/tests/d.rs", ""),
        ]);
        let paths: Vec<String> = check(&tree).into_iter().map(|finding| finding.path).collect();
        assert_eq!(paths, ["crates/x/tests/c.rs", "crates/x/tests/long_a.rs"]);
    }
}
