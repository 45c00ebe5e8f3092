//! Checks a run file against the schema, then reads it, then checks the rules between fields.
//!
//! serde stops at its first error. So the tree is walked first; every bad value is noted and replaced by a stand-in, which
//! makes the tree readable, and a rule that involves a replaced value is not judged.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::read::Beyond;
use super::schema::{Absent, FIELDS, Field, Kind, LONGEST_LIST};
use super::{Problem, Problems, RunConfig, relations};

/// Sections that must be there. The others have defaults or are needed by a rule.
const REQUIRED_SECTIONS: &[&str] = &["model"];

/// Reads a checked configuration from a tree.
pub(super) fn check(mut tree: Table, beyond: Beyond) -> Result<RunConfig, Problems> {
    let mut walk = Walk { beyond, ..Walk::default() };
    walk.unknown(&mut tree, "");
    for path in REQUIRED_SECTIONS {
        if section(&mut tree, path).is_none() {
            walk.note(path, "absent", format!("a section [{path}]"));
            tree.insert((*path).to_owned(), Value::Table(stand_in(path)));
        }
    }
    for field in FIELDS {
        if let Some(table) = section(&mut tree, field.section()) {
            walk.field(table, field);
        }
    }
    let config = match RunConfig::deserialize_tree(tree) {
        Ok(config) => config,
        // Not reachable as long as the schema and the structs agree, which a test checks.
        Err(message) => {
            walk.note("model", message, "what the documentation of RunConfig says");
            return Err(walk.into_problems());
        }
    };
    relations::check(&config, &mut |path, also, found, expected| walk.relation(path, also, found, expected));
    if walk.problems.is_empty() { Ok(config) } else { Err(walk.into_problems()) }
}

impl RunConfig {
    fn deserialize_tree(tree: Table) -> Result<Self, String> {
        tree.try_into().map_err(|e: toml::de::Error| e.message().to_owned())
    }
}

#[derive(Default)]
struct Walk {
    problems: Vec<Problem>,
    /// Paths whose value in the tree is not what the user wrote.
    replaced: BTreeSet<String>,
    beyond: Beyond,
}

impl Walk {
    fn note(&mut self, path: &str, found: impl std::fmt::Display, expected: impl Into<String>) {
        self.problems.push(Problem::new(path, found, expected));
        self.replaced.insert(path.to_owned());
    }

    /// Notes a broken rule unless a value it rests on has been replaced.
    fn relation(&mut self, path: &str, also: &[&str], found: String, expected: String) {
        let stands = |p: &str| {
            let within = |r: &String| p == r || p.starts_with(&format!("{r}."));
            !self.replaced.iter().any(within)
        };
        if stands(path) && also.iter().all(|p| stands(p)) {
            self.problems.push(Problem::new(path, found, expected));
        }
    }

    /// Removes keys that the schema does not know and values that stand where a section belongs.
    fn unknown(&mut self, table: &mut Table, prefix: &str) {
        let keys: Vec<String> = table.keys().cloned().collect();
        for key in keys {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            let is_field = FIELDS.iter().any(|f| f.path == path);
            let inside = format!("{path}.");
            let is_section = FIELDS.iter().any(|f| f.path.starts_with(&inside));
            match table.get_mut(&key) {
                Some(Value::Table(inner)) if is_section => self.unknown(inner, &path),
                Some(value) if is_section => {
                    let found = self.said(&path, value);
                    *value = Value::Table(stand_in(&path));
                    self.note(&path, found, format!("a section [{path}]"));
                }
                Some(value) if !is_field => {
                    let found = format!("an unknown field, set to {}", self.said(&path, value));
                    table.remove(&key);
                    self.problems.push(Problem::new(path.clone(), found, suggestion(prefix, &key)));
                }
                _ => {}
            }
        }
    }

    fn field(&mut self, table: &mut Table, field: &Field) {
        let Some(value) = table.get(field.name()) else {
            if field.absent == Absent::Wrong {
                // A section that was itself replaced is complete, so this field was really left out.
                self.note(field.path, "absent", field.kind.allowed());
                table.insert(field.name().to_owned(), field.kind.stand_in());
            }
            return;
        };
        if let Some(found) = self.wrong(value, field) {
            self.note(field.path, found, field.kind.allowed());
            table.insert(field.name().to_owned(), field.kind.stand_in());
        }
    }

    /// A value as the user wrote it, or nearly.
    fn said(&self, path: &str, value: &Value) -> String {
        self.beyond.get(path).cloned().unwrap_or_else(|| value.to_string())
    }

    /// What is found when a value does not fit, else nothing. Of a list, its first element that does not.
    fn wrong(&self, value: &Value, field: &Field) -> Option<String> {
        let Field { path, kind, .. } = field;
        if fits(value, kind) {
            return None;
        }
        let element = match (kind, value) {
            (Kind::Choices(words), Value::Array(list)) => Some((list, Kind::Choice(words))),
            (Kind::Nums(min, max), Value::Array(list)) => Some((list, Kind::Num(*min, *max))),
            (Kind::Texts, Value::Array(list)) => Some((list, Kind::Texts)),
            _ => None,
        };
        let Some((list, kind)) = element else { return Some(self.said(path, value) + &meant(value, kind)) };
        let fits = |v: &Value| if kind == Kind::Texts { is_text(v) } else { fits(v, &kind) };
        Some(match list.iter().position(|v| !fits(v)) {
            Some(i) => {
                let said = self.said(&format!("{path}[{i}]"), &list[i]);
                format!("{said} as element {} of {}{}", i + 1, list.len(), meant(&list[i], &kind))
            }
            None => format!("a list of {}", list.len()),
        })
    }

    fn into_problems(mut self) -> Problems {
        let place = |p: &Problem| FIELDS.iter().position(|f| f.path == p.path);
        // Unknown fields and sections have no place in the schema and come first.
        self.problems.sort_by_key(|p| place(p).map_or(0, |i| i + 1));
        match Problems::unless_empty(self.problems) {
            Err(problems) => problems,
            Ok(()) => Problem::new("model", "an unreadable configuration", "a readable one").into(),
        }
    }
}

fn section<'t>(tree: &'t mut Table, path: &str) -> Option<&'t mut Table> {
    path.split('.').try_fold(tree, |table, key| table.get_mut(key).and_then(Value::as_table_mut))
}

/// A section with every field that it cannot do without.
fn stand_in(path: &str) -> Table {
    let required = FIELDS.iter().filter(|f| f.section() == path && f.absent == Absent::Wrong);
    required.map(|f| (f.name().to_owned(), f.kind.stand_in())).collect()
}

/// A guess at what a mistyped word was meant to be.
fn meant(value: &Value, kind: &Kind) -> String {
    let near = match (kind, value) {
        (Kind::Choice(words), Value::String(typed)) => nearest(typed, words.iter().copied()),
        _ => None,
    };
    near.map_or_else(String::new, |word| format!(" (did you mean \"{word}\"?)"))
}

fn fits(value: &Value, kind: &Kind) -> bool {
    match (kind, value) {
        (Kind::Int(min, max), Value::Integer(v)) => (min..=max).contains(&v),
        (Kind::Num(..) | Kind::Above(..), v) => number_fits(v, kind),
        (Kind::Bool, Value::Boolean(_)) => true,
        (Kind::Choice(words), Value::String(v)) => words.contains(&v.as_str()),
        (Kind::Choices(words), Value::Array(list)) => {
            let known = |v: &Value| v.as_str().is_some_and(|v| words.contains(&v));
            !list.is_empty() && list.len() <= LONGEST_LIST && list.iter().all(known)
        }
        (Kind::Nums(min, max), Value::Array(list)) => {
            list.len() <= LONGEST_LIST && list.iter().all(|v| number_fits(v, &Kind::Num(*min, *max)))
        }
        (Kind::Texts, Value::Array(list)) => list.len() <= LONGEST_LIST && list.iter().all(is_text),
        _ => false,
    }
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

/// Whether a number is finite and in range. A whole number may stand for a fractional one, as in TOML files people write.
fn number_fits(value: &Value, kind: &Kind) -> bool {
    let number = match value {
        Value::Float(v) => *v,
        Value::Integer(v) => *v as f64,
        _ => return false,
    };
    match *kind {
        Kind::Above(min, max) => number > min && number <= max,
        Kind::Num(min, max) => number >= min && number <= max,
        _ => false,
    }
}

fn suggestion(section: &str, key: &str) -> String {
    let siblings: BTreeSet<&str> = FIELDS
        .iter()
        .filter_map(|f| if section.is_empty() { Some(f.path) } else { f.path.strip_prefix(section)?.strip_prefix('.') })
        .filter_map(|rest| rest.split('.').next())
        .collect();
    if let Some(near) = nearest(key, siblings.iter().copied()) {
        return format!("a known field; did you mean \"{near}\"?");
    }
    if let Some(elsewhere) = FIELDS.iter().find(|f| f.name() == key) {
        return format!("a field of this section; \"{key}\" belongs to [{}]", elsewhere.section());
    }
    format!("one of {}", siblings.into_iter().collect::<Vec<_>>().join(", "))
}

/// The known name that a mistyped one most likely stands for.
pub(crate) fn nearest<'w>(typed: &str, known: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    const ALIKE: f64 = 0.8;
    let typed = typed.to_lowercase();
    known
        .map(|word| (strsim::jaro_winkler(&typed, &word.to_lowercase()), word))
        .filter(|(score, _)| *score >= ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, word)| word)
}
