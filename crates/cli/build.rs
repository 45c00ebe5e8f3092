//! Tells the binary which commit it is built from, when it is built from a checkout, and which crates: the registry keeps
//! their sources on every machine that has built it, and `hymo demo` learns from them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    crates();
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

/// `crates.txt`: the registry's crates in Cargo.lock's order, a folder's name a line.
fn crates() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    // A package has its own; in the workspace there is one for all.
    let lock = [here.join("Cargo.lock"), here.join("../../Cargo.lock")].into_iter().find(|path| path.is_file());
    let text = lock.map(|path| {
        println!("cargo:rerun-if-changed={}", path.display());
        fs::read_to_string(path).expect("Cargo.lock is text")
    });
    let out = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("crates.txt");
    fs::write(out, text.map_or_else(String::new, |text| names(&text))).expect("OUT_DIR can be written");
}

fn names(lock: &str) -> String {
    let mut names = String::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
            line.map(|value| value.trim_matches('"'))
        };
        // Without a source it is a member of the workspace.
        if let (Some(name), Some(version), Some(_)) = (field("name"), field("version"), field("source")) {
            names += &format!("{name}-{version}\n");
        }
    }
    names
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    out.status.success().then(|| text.trim().to_owned())
}
