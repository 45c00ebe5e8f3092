//! HAZARDS.md lists the faults that must be impossible here. Each is a test, as soon as the part it lives in has landed.
//!
//! The file has a line `Landed: part, part` and a table whose rows read `| number | area | lands with | what |`. A test
//! names its hazards with `HAZARD 4:` or `HAZARD 2, 3:` in a comment directly above or inside the test function.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use proc_macro2::{Delimiter, TokenTree};
use regex::Regex;

use super::Finding;
use super::tokens;
use super::tree::{RustFile, Tree};

const FILE: &str = "HAZARDS.md";
/// The parts a hazard can land with: the crates, with ops split by device.
const PARTS: &[&str] =
    &["ops-cpu", "model", "cuda", "optim", "dist", "tokenizer", "data", "train", "infer", "serve", "export", "bench"];

static NAMED: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"//.*\bHAZARDS? (\d+(?:(?:, ?| and )\d+)*)").expect("invariant: a valid pattern"));

pub fn check(tree: &Tree) -> Vec<Finding> {
    let Some(text) = tree.text(FILE) else {
        return vec![Finding::new(FILE, 0, "is missing: it lists the faults that must be impossible here")];
    };
    let mut found = Vec::new();
    let landed = landed(text, &mut found);
    let hazards = hazards(text, &mut found);
    let mut tested = BTreeSet::new();
    for file in tree.rust.iter().filter(|file| file.path.starts_with("crates/")) {
        for (line, number) in named(file, 1, usize::MAX) {
            if !hazards.contains_key(&number) {
                found.push(Finding::new(&file.path, line, format!("{FILE} has no hazard {number}")));
            }
        }
        for (first, last) in tests(file) {
            tested.extend(named(file, first, last).into_iter().map(|(_, number)| number));
        }
    }
    for (number, hazard) in &hazards {
        if landed.contains(hazard.part.as_str()) && !tested.contains(number) {
            let message = format!(
                "hazard {number} has landed with {} and no test names it: write the test, with `HAZARD {number}:` in a comment above it",
                hazard.part
            );
            found.push(Finding::new(FILE, hazard.line, message));
        }
    }
    found
}

fn landed<'t>(text: &'t str, found: &mut Vec<Finding>) -> BTreeSet<&'t str> {
    let Some((number, list)) =
        text.lines().enumerate().find_map(|(index, line)| Some((index + 1, line.strip_prefix("Landed:")?)))
    else {
        found.push(Finding::new(FILE, 0, "no line `Landed: part, part`"));
        return BTreeSet::new();
    };
    let parts: BTreeSet<&str> = list.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    for part in parts.iter().filter(|part| !PARTS.contains(*part)) {
        found.push(Finding::new(FILE, number, format!("no part is named `{part}`; there are {}", PARTS.join(", "))));
    }
    parts
}

struct Hazard {
    part: String,
    line: usize,
}

fn hazards(text: &str, found: &mut Vec<Finding>) -> BTreeMap<u32, Hazard> {
    let mut hazards = BTreeMap::new();
    for (index, row) in text.lines().enumerate() {
        let cells: Vec<&str> = row.trim().trim_matches('|').split('|').map(str::trim).collect();
        let Some(number) = cells.first().and_then(|cell| cell.parse::<u32>().ok()) else {
            continue;
        };
        let line = index + 1;
        let &[_, area, part, what] = &cells[..] else {
            found.push(Finding::new(FILE, line, "a row is `| number | area | lands with | what |`"));
            continue;
        };
        if area.is_empty() || what.is_empty() {
            found.push(Finding::new(FILE, line, format!("hazard {number} has an empty cell")));
        }
        if !PARTS.contains(&part) {
            found.push(Finding::new(FILE, line, format!("no part is named `{part}`; there are {}", PARTS.join(", "))));
        }
        if number as usize != hazards.len() + 1 {
            let message = format!("hazard {number} stands where {} belongs: numbers never change", hazards.len() + 1);
            found.push(Finding::new(FILE, line, message));
        }
        hazards.insert(number, Hazard { part: part.to_owned(), line });
    }
    hazards
}

/// The hazards that comments in lines `first..=last` name, with their lines.
fn named(file: &RustFile, first: usize, last: usize) -> Vec<(usize, u32)> {
    let mut numbers = Vec::new();
    for (index, text) in file.text.lines().enumerate().skip(first - 1).take_while(|(index, _)| *index < last) {
        for list in NAMED.captures_iter(text) {
            let parts = list[1].split(|c: char| !c.is_ascii_digit());
            numbers.extend(parts.filter_map(|part| part.parse().ok()).map(|number| (index + 1, number)));
        }
    }
    numbers
}

/// First and last line of every test function, with the comments and attributes above it. Read from tokens, so that a
/// test inside `proptest! { .. }` counts like any other.
fn tests(file: &RustFile) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = file.text.lines().collect();
    let mut found = Vec::new();
    tokens::each_level(file.tokens.clone(), &mut |level| {
        for (at, token) in level.iter().enumerate() {
            let Some(TokenTree::Group(attribute)) = level.get(at + 1) else {
                continue;
            };
            let path_end =
                attribute.stream().into_iter().take_while(|part| !matches!(part, TokenTree::Group(_))).last();
            if !tokens::is_punct(Some(token), '#') || tokens::ident(path_end.as_ref()).as_deref() != Some("test") {
                continue;
            }
            let body = level[at + 2..].iter().find_map(|part| match part {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group.span_close().end().line),
                _ => None,
            });
            let Some(last) = body else { continue };
            let first = tokens::line(token);
            let above = |text: &&&str| text.trim_start().starts_with("//") || text.trim_start().starts_with("#[");
            found.push((first - lines[..first - 1].iter().rev().take_while(above).count(), last));
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str =
        "Landed: ops-cpu\n\n| 1 | numerics | cuda | a |\n| 2 | numerics | ops-cpu | b |\n| 3 | moe | ops-cpu | c |\n";

    fn messages(table: &str, code: &str) -> Vec<String> {
        check(&Tree::of(&[(FILE, table), ("crates/ops/src/a.rs", code)])).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_landed_hazard_needs_a_test_and_another_does_not() {
        let found = messages(TABLE, "// HAZARD 2: seen\nfn not_a_test() {}\n").join("\n");
        assert!(found.contains("hazard 2 has landed") && found.contains("hazard 3 has landed"), "{found}");
        assert!(!found.contains("hazard 1"), "{found}");
    }

    #[test]
    fn comments_above_inside_and_under_proptest_count() {
        for code in [
            "/// HAZARD 2, 3: both\n#[test]\nfn a() {}\n",
            "#[test]\n// HAZARD 2 and 3\nfn a() {\n}\n",
            "#[test]\nfn a() {\n    // HAZARD 2: b\n    g(); // HAZARD 3: c\n}\n",
            "proptest! {\n    // HAZARD 2, 3: any split\n    #[test]\n    fn a(x in 0..3) {}\n}\n",
            "mod tests {\n    // HAZARD 2,3:\n    #[test_log::test]\n    fn a() {}\n}\n",
        ] {
            assert_eq!(messages(TABLE, code), [""; 0], "{code}");
        }
    }

    #[test]
    fn a_comment_apart_from_the_test_does_not_count() {
        let code = "// HAZARD 2, 3: far away\n\n#[test]\nfn a() {}\n// HAZARD 2, 3: behind\n";
        assert_eq!(messages(TABLE, code).len(), 2);
        assert_eq!(
            messages(TABLE, "#[test]\nfn a() { let s = \"HAZARD 2, 3\"; }\n").len(),
            2,
            "a string is no comment"
        );
    }

    #[test]
    fn unknown_numbers_and_parts_are_found() {
        let code = "// HAZARD 2, 3, 31: c\n#[test]\nfn a() {}\n";
        assert_eq!(messages(TABLE, code), ["crates/ops/src/a.rs:1: HAZARDS.md has no hazard 31"]);
        let table = "Landed: gpu\n| 1 | numerics | ops | a |\n| 3 | moe | cuda | b |\n";
        let found = messages(table, "").join("\n");
        for part in ["named `gpu`", "named `ops`", "hazard 3 stands where 2"] {
            assert!(found.contains(part), "{part} in {found}");
        }
    }
}
