//! Tells the binary which commit it is built from, when it is built from a checkout.

use std::process::Command;

fn main() {
    // Asking for a tracked file keeps a copy of the sources inside some other repository from taking that one's commit.
    let commit =
        git(&["ls-files", "--error-unmatch", "Cargo.toml"]).and_then(|_| git(&["rev-parse", "--short=12", "HEAD"]));
    println!("cargo:rustc-env=HYMO_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rerun-if-changed=build.rs");
    // HEAD names the branch, the reflog beside it changes with every commit. In a worktree neither is where one would guess.
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", path]).filter(|p| std::path::Path::new(p).exists()) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    out.status.success().then(|| text.trim().to_owned())
}
