//! What computes: the processor, or a GPU where this build and this machine have one.

use hymo_tensor::Ctx;

use crate::exit::Usage;

/// What computes, and in which numbers.
#[derive(clap::Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// What computes
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub device: Device,

    /// Activations on a GPU [default: bf16]; the processor's are f32
    #[arg(long, value_enum)]
    pub dtype: Option<Numbers>,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// The best there is
    Auto,
    /// The processor
    Cpu,
    /// A CUDA GPU
    Cuda,
}

/// What activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Numbers {
    /// Single precision
    F32,
    /// Brain float
    Bf16,
}

impl Compute {
    /// The processor.
    #[cfg(test)]
    pub const CPU: Compute = Compute { device: Device::Cpu, dtype: None };

    /// The context to compute on.
    ///
    /// # Errors
    /// A GPU that is asked for and not there; numbers that the processor does not compute in.
    pub fn ctx(self) -> anyhow::Result<Ctx> {
        let gpu = match self.device {
            Device::Cpu => false,
            Device::Auto => gpu::there(),
            Device::Cuda => true,
        };
        match (gpu, self.dtype) {
            (true, dtype) => gpu::ctx(dtype != Some(Numbers::F32)),
            (false, Some(Numbers::Bf16)) => {
                Err(Usage("--dtype bf16: the processor trains in f32; a GPU is asked for by --device cuda".to_owned())
                    .into())
            }
            (false, _) => Ok(Ctx::cpu()),
        }
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use anyhow::Context as _;
    use hymo_cuda::{Gpu, Toolkit};
    use std::path::PathBuf;

    pub fn there() -> bool {
        Gpu::count() > 0
    }

    /// Libraries from HYMO_CUDA_LIB first, then a toolkit's, then those of Python's packages; compiled kernels in HYMO_KERNEL_CACHE, or in the user's cache folder.
    fn toolkit() -> Toolkit {
        let mut toolkit = Toolkit::standard();
        if let Some(paths) = std::env::var_os("HYMO_CUDA_LIB") {
            toolkit.libraries.splice(0..0, std::env::split_paths(&paths));
        }
        let roots = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
        let own = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
        let usual = [".venv", "/usr/local", "/usr"].map(PathBuf::from);
        toolkit.search_wheels(roots.chain(own).chain(usual));
        let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        toolkit.cache = folder("HYMO_KERNEL_CACHE").or_else(|| Some(user()?.join("hymo").join("kernels")));
        toolkit
    }

    pub fn ctx(half: bool) -> anyhow::Result<Ctx> {
        let gpu = Gpu::open(0, toolkit()).context("--device cuda")?;
        let ctx = Ctx::cuda(gpu);
        Ok(if half { ctx.bf16() } else { ctx })
    }
}

#[cfg(not(feature = "cuda"))]
mod gpu {
    use super::*;

    pub fn there() -> bool {
        false
    }

    pub fn ctx(_: bool) -> anyhow::Result<Ctx> {
        let problem = "--device cuda: this build has no GPU support (cargo feature `cuda`)";
        Err(Usage(problem.to_owned()).into())
    }
}
