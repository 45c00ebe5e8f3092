//! Walks token streams: what a macro call holds is tokens, so a syntax tree alone would miss it.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use quote::ToTokens;

use super::tree::RustFile;

/// Calls `visit` on the flat token list of the stream and of every group in it, the outer first.
pub fn each_level(stream: TokenStream, visit: &mut impl FnMut(&[TokenTree])) {
    let level: Vec<TokenTree> = stream.into_iter().collect();
    visit(&level);
    for token in level {
        if let TokenTree::Group(group) = token {
            each_level(group.stream(), visit);
        }
    }
}

pub fn ident(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

pub fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

pub fn line(token: &TokenTree) -> usize {
    token.span().start().line
}

/// The macros called anywhere in the file, with their lines.
pub fn macro_calls(file: &RustFile) -> Vec<(String, usize)> {
    let mut calls = Vec::new();
    each_level(file.tokens.clone(), &mut |level| {
        for (at, token) in level.iter().enumerate() {
            let bang = matches!(level.get(at + 1), Some(TokenTree::Punct(punct))
                if punct.as_char() == '!' && punct.spacing() == Spacing::Alone);
            if let (true, Some(name)) = (bang, ident(Some(token))) {
                calls.push((name, line(token)));
            }
        }
    });
    calls
}

/// The attributes anywhere in the file, each as its tokens inside the brackets.
pub fn attributes(file: &RustFile) -> Vec<(TokenStream, usize)> {
    let mut found = Vec::new();
    each_level(file.tokens.clone(), &mut |level| {
        for (at, token) in level.iter().enumerate() {
            let hash = is_punct(Some(token), '#');
            let open = at + if is_punct(level.get(at + 1), '!') { 2 } else { 1 };
            if let (true, Some(TokenTree::Group(group))) = (hash, level.get(open)) {
                if group.delimiter() == Delimiter::Bracket {
                    found.push((group.stream(), line(token)));
                }
            }
        }
    });
    found
}

/// The modules of `std` that the file's code outside its tests names: `std::env::var` and `use std::{env, fs}` alike.
pub fn std_modules(file: &RustFile) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    each_level(without_tests(&file.ast), &mut |level| {
        for (at, token) in level.iter().enumerate() {
            let path = ident(Some(token)).as_deref() == Some("std")
                && is_punct(level.get(at + 1), ':')
                && is_punct(level.get(at + 2), ':');
            match level.get(at + 3) {
                Some(TokenTree::Ident(module)) if path => found.push((module.to_string(), line(token))),
                Some(TokenTree::Group(group)) if path => {
                    let listed: Vec<TokenTree> = group.stream().into_iter().collect();
                    let firsts =
                        listed.iter().enumerate().filter(|(at, _)| *at == 0 || is_punct(listed.get(at - 1), ','));
                    found.extend(firsts.filter_map(|(_, first)| Some((ident(Some(first))?, line(first)))));
                }
                _ => {}
            }
        }
    });
    found
}

fn without_tests(file: &syn::File) -> TokenStream {
    let is_test = |attr: &syn::Attribute| {
        attr.path().is_ident("cfg") && attr.parse_args::<syn::Ident>().is_ok_and(|cfg| cfg == "test")
    };
    let mut stream = TokenStream::new();
    for item in &file.items {
        let attrs: &[syn::Attribute] = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            _ => &[],
        };
        if !attrs.iter().any(is_test) {
            item.to_tokens(&mut stream);
        }
    }
    stream
}
