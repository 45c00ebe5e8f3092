//! What must not be in the tree: unfinished code, this or that machine's paths, grab bags, stray `unsafe`, printing.

use std::sync::LazyLock;

use proc_macro2::TokenTree;
use regex::Regex;

use super::Finding;
use super::tokens;
use super::tree::{RustFile, Tree, marked_block};

/// Macros that say a thing is not done, or was being looked at.
const UNFINISHED: &[&str] = &["todo", "unimplemented", "dbg"];
const PRINTING: &[&str] = &["print", "println", "eprint", "eprintln"];
/// A name that says nothing collects everything.
const GRAB_BAGS: &[&str] = &["common", "helpers", "misc", "util", "utils"];
/// Crates that are a command line.
const BINARIES: &[&str] = &["crates/cli/"];
const INVARIANTS: &str = "ARCHITECTURE.md";
const LOCK: &str = "Cargo.lock";
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Absolute paths of somebody's machine; `~/` and `https://host/home/` are none.
static MACHINE_PATH: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = concat!(r#"(?:^|[\s"'`(=:,<>\[])("#, r"/(?:home|Users)/\w+|/(?:root|work)/\w*)");
    Regex::new(pattern).expect("invariant: a valid pattern")
});
static MARKER: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(concat!(r"(?://|#|/\*).*\b(TO", "DO|FIX", r"ME)\b")).expect("invariant: a valid pattern")
});

pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.texts() {
        lines(path, text, &mut found);
    }
    let unsafe_files = unsafe_files(tree, &mut found);
    for file in &tree.rust {
        calls(file, &mut found);
        ignored_tests(file, &mut found);
        module_names(file, &mut found);
        if !unsafe_files.iter().any(|allowed| file.path.starts_with(allowed)) {
            unsafe_code(file, &mut found);
        }
    }
    lock_sources(tree, &mut found);
    found
}

fn lines(path: &str, text: &str, found: &mut Vec<Finding>) {
    let code = [".rs", ".cu", ".cuh", ".sh", ".py"].iter().any(|end| path.ends_with(end));
    for (index, line) in text.lines().enumerate() {
        if let Some(hit) = MACHINE_PATH.captures(line) {
            found.push(Finding::new(path, index + 1, format!("a machine's own path, {}: make it relative", &hit[1])));
        }
        if let (true, Some(hit)) = (code, MARKER.captures(line)) {
            found.push(Finding::new(path, index + 1, format!("{}: do it, or write into LOG.md why not yet", &hit[1])));
        }
    }
}

fn calls(file: &RustFile, found: &mut Vec<Finding>) {
    let library = file.path.starts_with("crates/")
        && file.path.contains("/src/")
        && !BINARIES.iter().any(|binary| file.path.starts_with(binary));
    for (name, line) in tokens::macro_calls(file) {
        if UNFINISHED.contains(&name.as_str()) {
            found.push(Finding::new(
                &file.path,
                line,
                format!("`{name}!`: finish it, or return an error that names what can't be done"),
            ));
        }
        if library && PRINTING.contains(&name.as_str()) {
            found.push(Finding::new(
                &file.path,
                line,
                format!("`{name}!` in a library: return it, or let the caller print"),
            ));
        }
    }
}

fn ignored_tests(file: &RustFile, found: &mut Vec<Finding>) {
    for (attribute, line) in tokens::attributes(file) {
        let parts: Vec<TokenTree> = attribute.into_iter().collect();
        let named = |at: usize| tokens::ident(parts.get(at));
        let conditional = match (named(0).as_deref(), parts.get(1)) {
            (Some("cfg_attr"), Some(TokenTree::Group(group))) => {
                group.stream().into_iter().any(|token| tokens::ident(Some(&token)).as_deref() == Some("ignore"))
            }
            _ => false,
        };
        if named(0).as_deref() == Some("ignore") || conditional {
            let message = "an ignored test is never run: make it pass, or a long test (STYLE.md, \"Tests\")";
            found.push(Finding::new(&file.path, line, message));
        }
    }
}

fn module_names(file: &RustFile, found: &mut Vec<Finding>) {
    let mut parts: Vec<&str> = file.path.trim_end_matches(".rs").split('/').collect();
    parts.extend(file.path.ends_with("mod.rs").then_some("mod"));
    if let Some(name) = parts.iter().find(|part| GRAB_BAGS.contains(part)) {
        found.push(Finding::new(
            &file.path,
            0,
            format!("`{name}` says nothing of what is in it: name it by its purpose"),
        ));
    }
    for item in &file.ast.items {
        if let syn::Item::Mod(syn::ItemMod { ident, content: Some(_), .. }) = item {
            if GRAB_BAGS.iter().any(|bag| ident == bag) {
                let line = ident.span().start().line;
                found.push(Finding::new(&file.path, line, format!("module `{ident}`: name it by its purpose")));
            }
        }
    }
}

/// Files (or folders, with `/`) that ARCHITECTURE.md lets hold `unsafe`, the first word of each line in its block.
fn unsafe_files(tree: &Tree, found: &mut Vec<Finding>) -> Vec<String> {
    let Some(block) = tree.text(INVARIANTS).and_then(|text| marked_block(text, "unsafe")) else {
        found.push(Finding::new(
            INVARIANTS,
            0,
            "no fenced block between <!-- unsafe:begin --> and <!-- unsafe:end -->",
        ));
        return Vec::new();
    };
    let mut allowed = Vec::new();
    for (line, text) in block {
        let Some(path) = text.split_whitespace().next() else {
            continue;
        };
        let matching: Vec<&RustFile> = tree.rust.iter().filter(|file| file.path.starts_with(path)).collect();
        if matching.is_empty() {
            found.push(Finding::new(INVARIANTS, line, format!("{path} may hold unsafe code but is not there")));
        } else if !matching.iter().any(|file| has_unsafe(file).is_some()) {
            found.push(Finding::new(INVARIANTS, line, format!("{path} holds no unsafe code: take it out of the list")));
        }
        allowed.push(path.to_owned());
    }
    allowed
}

fn has_unsafe(file: &RustFile) -> Option<usize> {
    let mut first = None;
    tokens::each_level(file.tokens.clone(), &mut |level| {
        let here = level.iter().find(|token| tokens::ident(Some(token)).as_deref() == Some("unsafe"));
        first = first.or(here.map(tokens::line));
    });
    first
}

fn unsafe_code(file: &RustFile, found: &mut Vec<Finding>) {
    if let Some(line) = has_unsafe(file) {
        let message =
            format!("`unsafe` in a file that the list in {INVARIANTS} does not name: do without, or move it there");
        found.push(Finding::new(&file.path, line, message));
    }
}

/// A lock file made behind a mirror would send everyone else there.
fn lock_sources(tree: &Tree, found: &mut Vec<Finding>) {
    for (index, line) in tree.text(LOCK).unwrap_or_default().lines().enumerate() {
        if let Some(source) = line.strip_prefix("source = ") {
            if source.trim_matches('"') != CRATES_IO {
                found.push(Finding::new(LOCK, index + 1, format!("source {source}: only crates.io")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_UNSAFE: &str = "<!-- unsafe:begin -->\n```\n```\n<!-- unsafe:end -->\n";

    fn findings(path: &str, text: &str) -> Vec<String> {
        let tree = Tree::of(&[(INVARIANTS, NO_UNSAFE), (path, text)]);
        check(&tree).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn machine_paths_are_found_and_addresses_are_not() {
        for path in [concat!("see /ho", "me/me/x"), concat!("\"/ro", "ot/.cache\""), concat!("p=/wo", "rk/main")] {
            assert_eq!(findings("a.md", path).len(), 1, "{path}");
        }
        for path in ["~/.cache", "https://example.org/home/a", "target/work/x", "/usr/lib"] {
            assert_eq!(findings("a.md", path), [""; 0], "{path}");
        }
    }

    #[test]
    fn unfinished_code_is_found_also_inside_macros() {
        for code in ["todo!()", "dbg!(1)", "std::unimplemented!()", "vec![{ todo!(\"x\") }]"] {
            assert_eq!(findings("crates/a/tests/a.rs", &format!("fn a() {{ {code}; }}")).len(), 1, "{code}");
        }
        assert_eq!(findings("a.rs", concat!("// TO", "DO: later\n")).len(), 1);
        assert_eq!(findings("a.rs", "fn a(todo: bool) -> bool { todo != true }"), [""; 0]);
    }

    #[test]
    fn ignored_tests_are_found() {
        for attribute in ["#[ignore]", "#[ignore = \"slow\"]", "#[cfg_attr(miri, ignore)]"] {
            assert_eq!(findings("a.rs", &format!("{attribute}\n#[test]\nfn a() {{}}")).len(), 1, "{attribute}");
        }
    }

    #[test]
    fn grab_bags_are_found() {
        for path in ["crates/a/src/utils.rs", "crates/a/src/common/mod.rs", "crates/a/tests/common/mod.rs"] {
            assert_eq!(findings(path, "").len(), 1, "{path}");
        }
        assert_eq!(findings("a.rs", "mod helpers { }").len(), 1);
        assert_eq!(findings("crates/a/src/utilisation.rs", ""), [""; 0]);
    }

    #[test]
    fn libraries_do_not_print_and_binaries_do() {
        let code = "fn a() { println!(\"x\"); }";
        assert_eq!(findings("crates/tensor/src/lib.rs", code).len(), 1);
        for path in ["crates/cli/src/main.rs", "xtask/src/main.rs", "crates/tensor/tests/a.rs"] {
            assert_eq!(findings(path, code), [""; 0], "{path}");
        }
    }

    #[test]
    fn unsafe_stands_only_where_the_list_says() {
        let code = "#![deny(unsafe_code)]\nfn a() { unsafe { b() } }";
        assert_eq!(findings("crates/ops/src/a.rs", code).len(), 1);
        let list = NO_UNSAFE.replacen("```\n", "```\ncrates/ops/src/a.rs  AVX2\ncrates/ops/src/b.rs  stale\n", 1);
        let files = [(INVARIANTS, list.as_str()), ("crates/ops/src/a.rs", code), ("crates/ops/src/b.rs", "")];
        let found = check(&Tree::of(&files));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].message.contains("crates/ops/src/b.rs holds no unsafe code"));
        assert_eq!(check(&Tree::of(&[("a.rs", "")])).len(), 1, "no list");
    }

    #[test]
    fn a_lock_file_from_elsewhere_is_found() {
        let line = |source: &str| format!("[[package]]\nsource = \"{source}\"\n");
        assert_eq!(findings(LOCK, &line(CRATES_IO)), [""; 0]);
        assert_eq!(findings(LOCK, &line("sparse+https://mirror.example/index/")).len(), 1);
    }
}
