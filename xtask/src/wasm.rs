//! Builds the crates that must run in a browser for wasm32-unknown-unknown, without default features.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

const TARGET: &str = "wasm32-unknown-unknown";
const CRATES: &[&str] = &["hymo-tensor", "hymo-tape", "hymo-ops", "hymo-tokenizer", "hymo-model", "hymo-infer"];
/// rustup waits long where a firewall swallows its packets.
const RUSTUP_PATIENCE: Duration = Duration::from_secs(90);

pub fn run(root: &Path, debian: bool) -> Result<()> {
    let cargo = if !debian && rustup_has_target(root)? {
        println!("wasm: {TARGET} of the installed toolchain");
        PathBuf::from("cargo")
    } else {
        println!("wasm: {TARGET} by Debian's rustc (made once, about two minutes)");
        debian_cargo(root)?
    };
    let mut build = Command::new(cargo);
    // Its own target folder and profile: two compilers' outputs don't mix, and nothing runs what comes out.
    build.args(["build", "--lib", "--locked", "--no-default-features", "--profile", "wasm", "--target", TARGET]);
    build.args(["--target-dir", "target/wasm"]).args(CRATES.iter().flat_map(|name| ["-p", name]));
    let status = build.current_dir(root).status().context("cargo does not start")?;
    ensure!(status.success(), "the build for {TARGET} failed: {status}");
    Ok(())
}

fn rustup_has_target(root: &Path) -> Result<bool> {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).current_dir(root).output();
    let sysroot = String::from_utf8(sysroot.context("rustc is not on the PATH")?.stdout)?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib").join(TARGET);
    if library.is_dir() {
        return Ok(true);
    }
    let add = Command::new("rustup").args(["target", "add", TARGET]).stdin(Stdio::null()).current_dir(root).spawn();
    let Ok(mut add) = add else { return Ok(false) };
    let start = Instant::now();
    while add.try_wait()?.is_none() {
        if start.elapsed() > RUSTUP_PATIENCE {
            add.kill()?;
            add.wait()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(library.is_dir())
}

/// The script's only line on standard output is the cargo to use.
fn debian_cargo(root: &Path) -> Result<PathBuf> {
    let script = root.join("xtask/wasm-toolchain.sh");
    let made =
        Command::new("bash").arg(&script).stderr(Stdio::inherit()).output().context("bash is not on the PATH")?;
    let path = String::from_utf8(made.stdout)?;
    if !made.status.success() {
        bail!(
            "no compiler for {TARGET}: `rustup target add {TARGET}` did not work, and neither did xtask/wasm-toolchain.sh"
        );
    }
    Ok(PathBuf::from(path.trim()))
}
