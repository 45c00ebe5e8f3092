//! From text to a tree of values: what is not TOML at all, in one line, and numbers that no type here holds.
//!
//! The parser is asked for numbers as they are written, since it would stop at the first that does not fit, and the other
//! problems of the file would stay unsaid.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::problems::{LONGEST, Problem, one_line};
use super::schema::{FIELDS, Kind};
use crate::Error;

/// Numbers that are out of any range, as written, by path (of an element: `path[index]`). In the tree each is NaN, which
/// fits no field.
pub(super) type Beyond = BTreeMap<String, String>;

pub(super) fn read(text: &str) -> Result<(Table, Beyond), Error> {
    let document = DeTable::parse(text).map_err(|e| not_toml(text, &e))?;
    let mut reader = Reader { text, beyond: Beyond::new() };
    let tree = reader.table(document.get_ref(), "");
    Ok((tree, reader.beyond))
}

/// Puts `path=value` over what a file says. A value that is not TOML is a text: `schedule.kind=cosine` needs no quotes.
pub(super) fn set(tree: &mut Table, beyond: &mut Beyond, assignment: &str) -> Result<(), Problem> {
    let wrong = |found: String| Problem::new(one_line(assignment, LONGEST), found, "section.field=value");
    let Some((path, value)) = assignment.split_once('=') else { return Err(wrong("no \"=\"".to_owned())) };
    let (path, value) = (path.trim(), value.trim());
    if path.split('.').any(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')) {
        return Err(wrong("no name of a field before \"=\"".to_owned()));
    }
    let literal = Value::String(value.to_owned());
    let text = match FIELDS.iter().find(|f| f.path == path).map(|f| f.kind) {
        Some(Kind::Texts) if !value.starts_with('[') => format!("{path} = [{literal}]"),
        Some(Kind::Choice(_)) if !value.starts_with(['"', '\'']) => format!("{path} = {literal}"),
        // A second line would be a second field.
        _ if value.contains(['\n', '\r']) => format!("{path} = {literal}"),
        _ => format!("{path} = {value}"),
    };
    let (over, more) =
        read(&text).or_else(|_| read(&format!("{path} = {literal}"))).map_err(|e| wrong(e.to_string()))?;
    // What stood there before is gone, with its numbers out of range.
    beyond.retain(|at, _| at != path && !at.starts_with(&format!("{path}[")));
    beyond.extend(more);
    merge(tree, over);
    Ok(())
}

fn merge(tree: &mut Table, over: Table) {
    for (key, value) in over {
        match (tree.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(value)) => merge(inner, value),
            (_, value) => drop(tree.insert(key, value)),
        }
    }
}

fn not_toml(text: &str, error: &toml::de::Error) -> Error {
    let what = one_line(error.message(), 2 * LONGEST);
    let Some(at) = error.span().map(|s| s.start.min(text.len())) else { return Error::Toml { message: what } };
    // The span may point into a character.
    let before = String::from_utf8_lossy(&text.as_bytes()[..at]);
    let (line, column) = (before.matches('\n').count(), before.chars().rev().take_while(|&c| c != '\n').count());
    let source = one_line(text.split('\n').nth(line).unwrap_or(""), LONGEST);
    Error::Toml { message: format!("line {}, column {}: {what}, in: {source}", line + 1, column + 1) }
}

struct Reader<'t> {
    text: &'t str,
    beyond: Beyond,
}

impl Reader<'_> {
    fn table(&mut self, table: &DeTable<'_>, prefix: &str) -> Table {
        let mut out = Table::new();
        for (key, value) in table {
            let key = key.get_ref().to_string();
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            out.insert(key, self.value(value, &path));
        }
        out
    }

    fn value(&mut self, value: &Spanned<DeValue<'_>>, path: &str) -> Value {
        let number = match value.get_ref() {
            DeValue::String(s) => return Value::String(s.to_string()),
            DeValue::Boolean(b) => return Value::Boolean(*b),
            DeValue::Datetime(d) => return Value::Datetime(*d),
            DeValue::Table(table) => return Value::Table(self.table(table, path)),
            DeValue::Array(list) => {
                let items = list.iter().enumerate();
                return Value::Array(items.map(|(i, v)| self.value(v, &format!("{path}[{i}]"))).collect());
            }
            DeValue::Integer(n) => i64::from_str_radix(n.as_str(), n.radix()).ok().map(Value::Integer),
            DeValue::Float(x) => {
                // A number too large reads as infinity, which is written in letters where it is meant.
                let fits = |f: &f64| f.is_finite() || !x.as_str().contains(|c: char| c.is_ascii_digit());
                x.as_str().parse().ok().filter(fits).map(Value::Float)
            }
        };
        number.unwrap_or_else(|| {
            let written = self.text.get(value.span()).unwrap_or("a number");
            self.beyond.insert(path.to_owned(), format!("{} (number out of range)", one_line(written, LONGEST / 2)));
            Value::Float(f64::NAN)
        })
    }
}
