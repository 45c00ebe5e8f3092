//! `cargo xtask kernels`: every CUDA kernel compiled for every architecture, without a GPU and without a toolkit.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What a change is held to: Ampere, Ada, Hopper, Blackwell.
const ARCHS: &[&str] = &["sm_80", "sm_89", "sm_90a", "sm_100"];
/// NVRTC alone: kernels include no headers.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.*";

#[derive(clap::Args, Default)]
pub struct Args {
    /// Only these architectures (all that are held to without)
    #[arg(value_name = "ARCH")]
    archs: Vec<String>,

    /// Keep the compiled kernels in this folder, as `hymo` looks for them (HYMO_KERNEL_CACHE)
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

impl Args {
    /// What every change compiles: the oldest that we support and the one that we measure on. The rest takes minutes more.
    pub fn every_change() -> Self {
        Args { archs: vec!["sm_80".to_owned(), "sm_90a".to_owned()], cache: None }
    }

    /// One architecture, its kernels kept.
    pub fn one(arch: &str, cache: &Path) -> Self {
        Args { archs: vec![arch.to_owned()], cache: Some(cache.to_owned()) }
    }
}

pub fn run(root: &Path, args: &Args) -> Result<()> {
    let library = nvrtc(root)?;
    let mut command = Command::new("cargo");
    command.args(["run", "--quiet", "--package", "hymo-optim", "--features", "cuda", "--example", "kernels", "--"]);
    command.arg(&library).arg(args.cache.as_deref().unwrap_or(Path::new("-")));
    match args.archs.is_empty() {
        true => command.args(ARCHS),
        false => command.args(&args.archs),
    };
    let status = command.current_dir(root).status().context("cargo is not on the PATH")?;
    ensure!(status.success(), "kernels do not compile: see above");
    Ok(())
}

/// The folder of NVRTC's library: a wheel in a virtual environment of its own, made on first use.
pub fn nvrtc(root: &Path) -> Result<PathBuf> {
    let venv = root.join(".venv/nvrtc");
    let python = venv.join("bin/python3");
    if !python.is_file() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        ensure!(
            made.context("python3 is not on the PATH")?.success(),
            "python3 -m venv failed: is python3-venv there?"
        );
    }
    let find = "import nvidia.cu13, os; print(os.path.join(list(nvidia.cu13.__path__)[0], 'lib'))";
    let found = || -> Result<Option<PathBuf>> {
        let out = Command::new(&python).args(["-c", find]).stderr(Stdio::null()).output()?;
        Ok(out.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&out.stdout).trim())))
    };
    if let Some(folder) = found()? {
        return Ok(folder);
    }
    let done = Command::new(&python).args(["-m", "pip", "install", "--quiet", PACKAGE]).status()?;
    ensure!(done.success(), "pip install {PACKAGE} failed");
    found()?.context("the wheel has no folder nvidia/cu13/lib")
}
