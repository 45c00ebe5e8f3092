//! A file that outgrew its room, a function that outgrew its screen (STYLE.md, "Sizes").

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{RustFile, Tree};

/// STYLE.md says about 400; past 500 it is no longer a matter of taste.
const FILE_LINES: usize = 500;
/// STYLE.md says about 40.
const FUNCTION_LINES: usize = 60;
/// Files that may be longer, each with why.
const LONG_FILES: &[(&str, &str)] = &[];
/// Stands on a line of its own above or at the top of a function that may be longer, with why.
const MARK: &str = concat!("// tidy", ": long");

pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = files(tree, LONG_FILES);
    for file in &tree.rust {
        functions(file, &mut found);
    }
    found
}

fn files(tree: &Tree, allowed: &[(&str, &str)]) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in &tree.rust {
        let lines = file.text.lines().count();
        let listed = allowed.iter().any(|(path, _)| *path == file.path);
        if lines > FILE_LINES && !listed {
            let message = format!("{lines} lines, the limit is {FILE_LINES}: split it by what its parts are for");
            found.push(Finding::new(&file.path, 0, message));
        } else if lines <= FILE_LINES && listed {
            found.push(Finding::new(
                &file.path,
                0,
                "no longer long: take it out of LONG_FILES in xtask/src/tidy/sizes.rs",
            ));
        }
    }
    found
}

fn functions(file: &RustFile, found: &mut Vec<Finding>) {
    let lines: Vec<&str> = file.text.lines().collect();
    let mut marks: Vec<usize> = (1..=lines.len()).filter(|number| lines[number - 1].trim().starts_with(MARK)).collect();
    let mut functions = Functions::default();
    functions.visit_file(&file.ast);
    for function in functions.0 {
        let length = function.last - function.first + 1;
        if length <= FUNCTION_LINES {
            continue;
        }
        let top = comments_above(&lines, function.top);
        match marks.iter().position(|mark| (top..=function.body + 1).contains(mark)) {
            Some(at) => {
                let mark = marks.remove(at);
                if lines[mark - 1].trim().trim_start_matches(MARK).trim_matches([',', ' ']).is_empty() {
                    found.push(Finding::new(&file.path, mark, format!("say why it may be long: `{MARK}, <reason>`")));
                }
            }
            None => found.push(Finding::new(
                &file.path,
                function.first,
                format!("`{}` has {length} lines, the limit is {FUNCTION_LINES}: split it, or `{MARK}, <reason>` above it (kernels, the step, the command-line match)", function.name),
            )),
        }
    }
    for mark in marks {
        found.push(Finding::new(&file.path, mark, "no long function here: take the mark out"));
    }
}

/// The first of the comment lines that stand directly above line `line`, or `line` itself.
fn comments_above(lines: &[&str], line: usize) -> usize {
    let above = lines[..line - 1].iter().rev().take_while(|text| text.trim().starts_with("//")).count();
    line - above
}

struct Function {
    name: String,
    /// Line of the first attribute or doc comment.
    top: usize,
    /// Line of the signature.
    first: usize,
    /// Line of the body's opening brace.
    body: usize,
    last: usize,
}

#[derive(Default)]
struct Functions(Vec<Function>);

impl Functions {
    fn add(&mut self, whole: Span, sig: &syn::Signature, block: &syn::Block) {
        self.0.push(Function {
            name: sig.ident.to_string(),
            top: whole.start().line,
            first: sig.span().start().line,
            body: block.brace_token.span.open().start().line,
            last: block.brace_token.span.close().end().line,
        });
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.add(node.span(), &node.sig, &node.block);
        visit::visit_item_fn(self, node);
    }
    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.add(node.span(), &node.sig, &node.block);
        visit::visit_impl_item_fn(self, node);
    }
    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.add(node.span(), &node.sig, block);
        }
        visit::visit_trait_item_fn(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(text: &str) -> Vec<Finding> {
        check(&Tree::of(&[("a.rs", text)]))
    }

    fn function(above: &str, inside: &str, lines: usize) -> String {
        format!("{above}fn f() {{\n{inside}{}}}\n", "    g();\n".repeat(lines))
    }

    #[test]
    fn a_long_file_is_found_unless_listed() {
        let tree = Tree::of(&[("a.rs", &"\n".repeat(501)), ("b.rs", &"\n".repeat(500))]);
        assert_eq!(files(&tree, &[]).len(), 1);
        assert!(files(&tree, &[("a.rs", "a table")]).is_empty());
        assert_eq!(files(&tree, &[("a.rs", "a table"), ("b.rs", "stale")]).len(), 1);
    }

    #[test]
    fn a_long_function_is_found_wherever_it_stands() {
        assert!(check_text(&function("", "", 58)).is_empty());
        let found = check_text(&function("/// Doc.\n", "", 59));
        assert_eq!((found.len(), found[0].line), (1, 2));
        let method = format!("impl A {{\n{}}}\ntrait B {{\n{}}}\n", function("", "", 59), function("", "", 59));
        assert_eq!(check_text(&method).len(), 2);
    }

    #[test]
    fn a_mark_with_a_reason_allows_it() {
        let mark = format!("{MARK}, one kernel\n");
        assert!(check_text(&function(&mark, "", 70)).is_empty());
        assert!(check_text(&function(&format!("/// Doc.\n{mark}#[inline]\n"), "", 70)).is_empty());
        assert!(check_text(&function("#[inline]\n", &format!("    {mark}"), 70)).is_empty());
    }

    #[test]
    fn a_mark_without_reason_or_need_is_found() {
        assert_eq!(check_text(&function(&format!("{MARK}\n"), "", 70)).len(), 1);
        assert_eq!(check_text(&function(&format!("{MARK}, a kernel\n"), "", 5)).len(), 1);
    }
}
