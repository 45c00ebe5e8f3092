//! The printed form: what the `toml` crate writes, with the schema's words behind each value.

use super::{FIELDS, RunConfig};

pub(super) fn annotated(config: &RunConfig) -> String {
    let plain = toml::to_string(config).unwrap_or_else(|e| format!("# not printable: {e}\n"));
    let mut section = String::new();
    let mut out = String::with_capacity(2 * plain.len());
    for line in plain.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = name.to_owned();
        }
        out.push_str(line);
        if let Some(comment) = comment(&section, line) {
            let gap = " ".repeat(34usize.saturating_sub(line.chars().count()).max(2));
            out.push_str(&gap);
            out.push_str(&comment);
        }
        out.push('\n');
    }
    out
}

fn comment(section: &str, line: &str) -> Option<String> {
    let (name, _) = line.split_once(" = ")?;
    let field = FIELDS.iter().find(|f| f.section() == section && f.name() == name)?;
    Some(format!("# {} ({})", field.note, field.kind.allowed()))
}
