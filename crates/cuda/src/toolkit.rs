//! What is opened at run time, and where it is looked for. The environment is the binary's to read: it hands paths in.
#![allow(unsafe_code)]

use crate::{Error, Result};
use cudarc::{cublaslt, driver, nvrtc};
use std::path::{Path, PathBuf};

/// Where NVRTC and cuBLASLt may lie beside the system's own library path, and where compiled kernels are kept.
#[derive(Debug, Clone, Default)]
pub struct Toolkit {
    /// Folders with `libnvrtc.so.*` and `libcublasLt.so.*`, those of a toolkit or of the Python wheels.
    pub libraries: Vec<PathBuf>,
    /// Folder of compiled kernels; nothing is kept without.
    pub cache: Option<PathBuf>,
}

/// Library file names that a toolkit's folder is searched for, each before those that need it.
const PRELOAD: &[&str] = &["libnvrtc-builtins.so", "libnvrtc.so", "libcublasLt.so"];

const NVRTC_FIX: &str = "install a CUDA toolkit, or `pip install nvidia-cuda-nvrtc==13.0.*` into the active Python environment; HYMO_CUDA_LIB names any other folder";
const LT_FIX: &str = "install a CUDA toolkit, or `pip install nvidia-cublas==13.*` into the active Python environment; HYMO_CUDA_LIB names any other folder";
const DRIVER_FIX: &str = "install NVIDIA's driver, or use --device cpu";

impl Toolkit {
    /// The usual folders of an installed toolkit.
    #[must_use]
    pub fn standard() -> Self {
        let usual = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64"];
        Toolkit { libraries: usual.iter().map(PathBuf::from).collect(), cache: None }
    }

    /// Adds the folders of NVIDIA's Python packages under each of these installations (a virtual environment, `/usr`, ..),
    /// `<root>/lib/python3*/{site,dist}-packages/nvidia/*/lib`, in order.
    pub fn search_wheels(&mut self, roots: impl IntoIterator<Item = PathBuf>) {
        for root in roots {
            for python in matching(&root.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"].map(|name| python.join(name).join("nvidia")) {
                    let lib = |package: PathBuf| package.join("lib");
                    self.libraries.extend(matching(&packages, "").into_iter().map(lib).filter(|lib| lib.is_dir()));
                }
            }
        }
    }

    /// Opens every library of the folders under its full path, so that a later look-up by name finds it. The system's own
    /// path comes first for what is already known there.
    fn preload(&self) {
        for folder in &self.libraries {
            for name in PRELOAD {
                for file in matching(folder, name) {
                    // SAFETY: these are NVIDIA's libraries, whose initialisers do nothing but set up themselves.
                    let opened = unsafe { libloading::Library::new(&file) };
                    // Kept open for good, as cudarc keeps what it opens.
                    opened.map(std::mem::forget).ok();
                }
            }
        }
    }

    /// Makes NVRTC callable, or says what to install.
    pub(crate) fn nvrtc(&self) -> Result<()> {
        self.preload();
        // SAFETY: looks a library up and calls nothing in it.
        match unsafe { nvrtc::sys::is_culib_present() } {
            true => Ok(()),
            false => Err(Error::Missing { library: "NVRTC (libnvrtc)", fix: NVRTC_FIX }),
        }
    }

    /// Makes cuBLASLt callable, or says what to install.
    pub(crate) fn cublaslt(&self) -> Result<()> {
        self.preload();
        // SAFETY: looks a library up and calls nothing in it.
        match unsafe { cublaslt::sys::is_culib_present() } {
            true => Ok(()),
            false => Err(Error::Missing { library: "cuBLASLt (libcublasLt)", fix: LT_FIX }),
        }
    }
}

/// Makes the driver callable, or says what to install.
pub(crate) fn driver() -> Result<()> {
    // SAFETY: looks a library up and calls nothing in it.
    match unsafe { driver::sys::is_culib_present() } {
        true => Ok(()),
        false => Err(Error::Missing { library: "the CUDA driver (libcuda)", fix: DRIVER_FIX }),
    }
}

/// Files of `folder` whose names begin with `name` and go on with a version, in order.
fn matching(folder: &Path, name: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    let named = |p: &Path| p.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(name));
    found.retain(|p| named(p));
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_install() {
        let error = Error::Missing { library: "NVRTC (libnvrtc)", fix: NVRTC_FIX }.to_string();
        assert!(error.contains("pip install nvidia-cuda-nvrtc"), "{error}");
        assert!(matching(Path::new("there is no such folder"), "lib").is_empty());
    }

    /// `pip install nvidia-cuda-nvrtc` into an environment is enough: its folders are found without being named.
    #[test]
    fn pythons_packages_are_found() {
        let root = std::env::temp_dir().join(format!("hymo-wheels-{}", std::process::id()));
        let at = |name: &str| root.join("lib/python3.12/site-packages/nvidia").join(name);
        for name in ["cu13/lib", "cuda_nvrtc/lib", "cuda_runtime/include"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        let mut toolkit = Toolkit::default();
        toolkit.search_wheels([root.clone(), root.join("no such environment")]);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(toolkit.libraries, [at("cu13/lib"), at("cuda_nvrtc/lib")]);
    }
}
