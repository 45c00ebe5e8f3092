//! Every op is registered, so that `hymo doctor`, the op harness and the benches see it without being told.
//!
//! An op is a folder of `crates/ops/src`; the registry is the constant `OPS` in `crates/ops/src/registry.rs`, read here
//! as struct literals that have a field `name`.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::Finding;
use super::tree::Tree;

const SRC: &str = "crates/ops/src";
const REGISTRY: &str = "crates/ops/src/registry.rs";
/// Folders that hold no op.
const NOT_OPS: &[&str] = &["harness", "registry", "simd"];
/// What an entry needs beside its name: the cases that the tests and `hymo doctor` run, the sizes that benches time.
const FIELDS: &[&str] = &["cases", "benches"];

pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut ops = tree.folders(SRC);
    ops.retain(|name| !NOT_OPS.contains(name));
    let mut entries = Entries::default();
    if let Some(registry) = tree.rust.iter().find(|file| file.path == REGISTRY) {
        entries.visit_file(&registry.ast);
    }
    let mut found = Vec::new();
    for op in &ops {
        if !entries.by_name.contains_key(*op) {
            let message = format!("has no entry with name: \"{op}\" in {REGISTRY}");
            found.push(Finding::new(format!("{SRC}/{op}"), 0, message));
        }
        if !has_tests(tree, op) {
            found.push(Finding::new(format!("{SRC}/{op}"), 0, "has no tests: add `mod tests` or tests.rs"));
        }
    }
    let required: BTreeSet<String> = FIELDS.iter().map(|field| field.to_string()).chain(entries.declared).collect();
    for (name, entry) in &entries.by_name {
        if !ops.contains(&name.as_str()) {
            found.push(Finding::new(REGISTRY, entry.line, format!("`{name}` has no folder {SRC}/{name}")));
        }
        // And whatever the registry declares for benches: an entry may not leave it to a `..` default.
        for field in &required {
            if !entry.fields.contains(field) {
                found.push(Finding::new(REGISTRY, entry.line, format!("`{name}` has no field `{field}`")));
            }
        }
    }
    found.extend(entries.twice);
    found
}

fn has_tests(tree: &Tree, op: &str) -> bool {
    let prefix = format!("{SRC}/{op}/");
    tree.rust.iter().filter(|file| file.path.starts_with(&prefix)).any(|file| {
        file.path.ends_with("/tests.rs")
            || file.ast.items.iter().any(|item| matches!(item, syn::Item::Mod(module) if module.ident == "tests"))
    })
}

struct Entry {
    line: usize,
    fields: Vec<String>,
}

#[derive(Default)]
struct Entries {
    by_name: BTreeMap<String, Entry>,
    /// The fields of the registry's own `struct OpInfo`.
    declared: Vec<String>,
    twice: Vec<Finding>,
}

impl<'ast> Visit<'ast> for Entries {
    fn visit_item_struct(&mut self, node: &'ast syn::ItemStruct) {
        if node.ident == "OpInfo" {
            self.declared.extend(node.fields.iter().filter_map(|field| Some(field.ident.as_ref()?.to_string())));
        }
        visit::visit_item_struct(self, node);
    }

    fn visit_expr_struct(&mut self, node: &'ast syn::ExprStruct) {
        let fields: Vec<(String, &syn::Expr)> = node
            .fields
            .iter()
            .filter_map(|field| match &field.member {
                syn::Member::Named(name) => Some((name.to_string(), &field.expr)),
                syn::Member::Unnamed(_) => None,
            })
            .collect();
        let name = fields.iter().find(|(field, _)| field == "name").map(|(_, value)| value);
        if let Some(syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(name), .. })) = name {
            let entry = Entry {
                line: name.span().start().line,
                fields: fields.iter().map(|(field, _)| field.clone()).collect(),
            };
            let line = entry.line;
            if self.by_name.insert(name.value(), entry).is_some() {
                self.twice.push(Finding::new(REGISTRY, line, format!("`{}` is registered twice", name.value())));
            }
        }
        visit::visit_expr_struct(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: (&str, &str) = ("crates/ops/src/rms_norm/mod.rs", "#[cfg(test)]\nmod tests {}");

    fn registry(entries: &str) -> String {
        format!("pub const OPS: &[OpInfo] = &[{entries}];")
    }

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_registered_op_with_tests_passes() {
        let text = registry("OpInfo { name: \"rms_norm\", cases: crate::rms_norm::cases, benches }");
        assert_eq!(messages(&[OP, (REGISTRY, &text), ("crates/ops/src/simd/mod.rs", "")]), [""; 0]);
    }

    #[test]
    fn no_ops_need_no_registry_but_one_does() {
        assert_eq!(messages(&[("crates/ops/src/lib.rs", "")]), [""; 0]);
        assert_eq!(messages(&[OP]).len(), 1);
    }

    #[test]
    fn a_missing_field_folder_or_test_is_found() {
        let text = registry(
            "OpInfo { name: \"rms_norm\", cases, benches }, OpInfo { name: \"rope\", cases, benches }, OpInfo { name: \"gdn\", benches }",
        );
        let found = messages(&[OP, ("crates/ops/src/gdn/mod.rs", ""), (REGISTRY, &text)]).join("\n");
        for part in ["`rope` has no folder", "`gdn` has no field `cases`", "src/gdn: has no tests"] {
            assert!(found.contains(part), "{part} in {found}");
        }
        assert_eq!(found.lines().count(), 3);
    }

    #[test]
    fn a_declared_field_may_not_be_left_to_a_default() {
        let declared = "pub struct OpInfo { name: &'static str, cases: fn(), flops: Option<fn()> }\n";
        let text = format!("{declared}{}", registry("OpInfo { name: \"rms_norm\", cases, benches, ..NONE }"));
        assert_eq!(
            messages(&[OP, (REGISTRY, &text)]),
            ["crates/ops/src/registry.rs:2: `rms_norm` has no field `flops`"]
        );
    }

    #[test]
    fn an_op_registered_twice_is_found() {
        let entry = "OpInfo { name: \"rms_norm\", cases, benches }";
        assert_eq!(messages(&[OP, (REGISTRY, &registry(&format!("{entry}, {entry}")))]).len(), 1);
    }
}
