//! The invariants of ARCHITECTURE.md that a manifest shows: who may depend on whom, and what a browser does not have.

use super::Finding;
use super::tokens;
use super::tree::Tree;

/// The crates from the ground up: each may depend only on those before it.
const ORDER: &[&str] = &[
    "cuda",
    "tensor",
    "tape",
    "ops",
    "tokenizer",
    "model",
    "optim",
    "dist",
    "data",
    "infer",
    "train",
    "serve",
    "labs",
    "hymo",
    "cli",
];
/// Crates that may depend on less than the order gives.
const ONLY: &[(&str, &[&str])] = &[("tensor", &["cuda"]), ("tape", &["tensor"]), ("tokenizer", &[])];
/// Libraries that only the binary may use: below it errors are typed and nothing reads a command line or draws a bar.
const BINARY_ONLY: &[&str] = &["anyhow", "clap", "indicatif"];
/// Crates that also run in a browser, where there is neither an environment nor a clock.
const BROWSER: &[&str] = &["tensor", "tape", "ops", "tokenizer", "model", "infer", "labs"];
const NOT_IN_BROWSER: &[&str] = &["env", "time"];

pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for name in tree.crates() {
        manifest(tree, name, &mut found);
    }
    for file in &tree.rust {
        let browser = BROWSER.iter().any(|name| file.path.starts_with(&format!("crates/{name}/src/")));
        if !browser || file.path.ends_with("/tests.rs") {
            continue;
        }
        for (module, line) in tokens::std_modules(file) {
            if NOT_IN_BROWSER.contains(&module.as_str()) {
                let message = format!("`std::{module}` in a crate that runs in a browser: let the caller hand it in");
                found.push(Finding::new(&file.path, line, message));
            }
        }
    }
    found
}

fn manifest(tree: &Tree, name: &str, found: &mut Vec<Finding>) {
    let path = format!("crates/{name}/Cargo.toml");
    let table = match tree.text(&path).unwrap_or_default().parse::<toml::Table>() {
        Ok(table) => table,
        Err(error) => return found.push(Finding::new(path, 0, format!("does not parse: {error}"))),
    };
    let Some(place) = ORDER.iter().position(|known| *known == name) else {
        let message = "a crate without a place: put it into ORDER in xtask/src/tidy/layers.rs and into ARCHITECTURE.md";
        return found.push(Finding::new(path, 0, message));
    };
    for dependency in dependencies(&table) {
        if name != "cli" && BINARY_ONLY.contains(&dependency.as_str()) {
            found.push(Finding::new(&path, 0, format!("depends on {dependency}, which only crates/cli may")));
        }
        let Some(other) = dependency.strip_prefix("hymo-").or((dependency == "hymo").then_some("hymo")) else {
            continue;
        };
        let only = ONLY.iter().find(|(of, _)| *of == name).map(|(_, list)| *list);
        let allowed = match only {
            Some(list) => list.contains(&other),
            None => ORDER[..place].contains(&other),
        };
        if !allowed {
            let list = only.unwrap_or(&ORDER[..place]);
            let may = if list.is_empty() { "none of ours".to_owned() } else { list.join(", ") };
            found.push(Finding::new(&path, 0, format!("depends on {dependency}; {name} may depend on {may}")));
        }
    }
}

/// Normal and build dependencies, also those for one target. Tests may reach wherever they like.
fn dependencies(table: &toml::Table) -> Vec<String> {
    let targets = table.get("target").and_then(toml::Value::as_table);
    let tables = targets.into_iter().flat_map(|targets| targets.values()).filter_map(toml::Value::as_table);
    tables
        .chain([table])
        .flat_map(|table| ["dependencies", "build-dependencies"].map(|kind| table.get(kind)))
        .flatten()
        .filter_map(toml::Value::as_table)
        .flatten()
        .map(|(key, value)| {
            // A renamed dependency counts by its package.
            value.get("package").and_then(toml::Value::as_str).unwrap_or(key).to_owned()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&Tree::of(&[(path, text)])).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn dependencies_point_downwards() {
        for (name, text) in [
            ("tape", "[dependencies]\nhymo-ops.workspace = true"),
            ("ops", "[dependencies]\nhymo-model.workspace = true"),
            ("ops", "[target.'cfg(unix)'.dependencies]\nhymo-model = \"1\""),
            ("tensor", "[build-dependencies]\nm = { package = \"hymo-model\", version = \"1\" }"),
            ("model", "[dependencies]\nanyhow = \"1\""),
            ("ops", "[dependencies.clap]\nversion = \"4\""),
            ("gadget", ""),
            ("ops", "[dependencies"),
        ] {
            assert_eq!(findings(&format!("crates/{name}/Cargo.toml"), text).len(), 1, "{name}: {text}");
        }
    }

    #[test]
    fn what_the_order_allows_passes() {
        for (name, text) in [
            ("tape", "[dependencies]\nhymo-tensor.workspace = true\n[dev-dependencies]\nhymo-ops.workspace = true"),
            ("cli", "[dependencies]\nclap = \"4\"\nanyhow = \"1\"\nhymo = \"1\""),
            ("model", "[dependencies]\nhymo-ops = \"1\"\nserde = \"1\""),
        ] {
            assert_eq!(findings(&format!("crates/{name}/Cargo.toml"), text), [""; 0], "{name}");
        }
    }

    #[test]
    fn a_browser_has_no_clock_and_no_environment() {
        for code in [
            "fn a() { std::env::var(\"X\"); }",
            "use std::time::Instant;",
            "use std::{fs, time::{Duration, Instant}};",
            "fn a() { vec![::std::time::Instant::now()]; }",
        ] {
            assert_eq!(findings("crates/ops/src/a.rs", code).len(), 1, "{code}");
        }
        for code in
            ["use std::{fmt, sync::Arc};", "#[cfg(test)]\nmod tests { use std::time::Instant; }", "use time::std;"]
        {
            assert_eq!(findings("crates/ops/src/a.rs", code), [""; 0], "{code}");
        }
        assert_eq!(findings("crates/train/src/a.rs", "use std::time::Instant;"), [""; 0]);
    }
}
