//! Runs the commands that README.md gives a newcomer, as they stand there.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tidy::marked_block;

/// The README's own test command is what runs this.
const TESTS: &str = "cargo xtask ci";

pub fn run(root: &Path) -> Result<()> {
    let text = std::fs::read_to_string(root.join("README.md")).context("README.md")?;
    let commands = commands(&text)?;
    ensure!(commands.contains(&TESTS), "README.md does not give `{TESTS}` among its commands");
    for command in commands.into_iter().filter(|command| *command != TESTS) {
        println!("$ {command}");
        let status = Command::new("bash").args(["-euc", command]).current_dir(root).status().context("bash")?;
        ensure!(status.success(), "README's `{command}` failed: {status}");
    }
    Ok(())
}

/// The lines of the block `commands`, without their trailing comments.
fn commands(text: &str) -> Result<Vec<&str>> {
    let block = marked_block(text, "commands")
        .context("README.md has no fenced block between <!-- commands:begin --> and <!-- commands:end -->")?;
    Ok(block.into_iter().map(|(_, line)| line.split_once("  #").map_or(line, |(command, _)| command).trim()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_no_part_of_a_command() {
        let text = "<!-- commands:begin -->\n```sh\na --b '#c'   # what it does\nd\n```\n<!-- commands:end -->\n";
        assert_eq!(commands(text).unwrap(), ["a --b '#c'", "d"]);
        assert!(commands("nothing").is_err());
    }
}
