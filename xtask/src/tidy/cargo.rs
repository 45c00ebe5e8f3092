//! rustfmt and clippy. They print to the terminal themselves; here each is one finding.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::Finding;
use super::long_tests::has_long_tests;

pub fn fmt(root: &Path) -> Result<Vec<Finding>> {
    cargo(root, &["fmt", "--all", "--check"], "run `cargo fmt`")
}

pub fn clippy(root: &Path) -> Result<Vec<Finding>> {
    let mut found =
        cargo(root, &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], "mend what clippy says")?;
    // `--all-targets` leaves out targets with `test = false`.
    if has_long_tests(root) {
        let args = ["clippy", "--workspace", "--test", "long_*", "--", "-D", "warnings"];
        found.extend(cargo(root, &args, "mend what clippy says")?);
    }
    Ok(found)
}

fn cargo(root: &Path, args: &[&str], remedy: &str) -> Result<Vec<Finding>> {
    let status = Command::new("cargo").args(args).current_dir(root).status().context("cargo is not on the PATH")?;
    let failed = (!status.success()).then(|| Finding::new(format!("cargo {}", args.join(" ")), 0, remedy));
    Ok(failed.into_iter().collect())
}
