//! `hymo completions`: what a shell needs to complete the commands.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::{Shell, generate};

/// Prints completions for a shell
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo completions bash > ~/.local/share/bash-completion/completions/hymo
  hymo completions zsh > ~/.zfunc/_hymo
  hymo completions fish > ~/.config/fish/completions/hymo.fish")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    // Into memory first: clap's writer panics where this one returns an error.
    let mut text = Vec::new();
    generate(args.shell, &mut crate::Hymo::command(), "hymo", &mut text);
    Ok(out.write_all(&text)?)
}
