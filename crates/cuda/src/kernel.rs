//! Kernels: found by module and name, launched with arguments that are held against what they declare.
#![allow(unsafe_code)]

use crate::gpu::{check, lock};
use crate::{Error, Gpu, Ptr, Result, Source, compile};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::{CString, c_void};

/// Loaded modules and the kernels found in them.
#[derive(Default)]
pub(crate) struct Modules {
    modules: HashMap<String, sys::CUmodule>,
    kernels: HashMap<(String, &'static str), Kernel>,
}

#[derive(Clone)]
struct Kernel {
    function: sys::CUfunction,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
    /// Dynamic shared memory that it may already ask for.
    shared: u32,
}

impl Modules {
    pub fn release(&mut self) {
        self.kernels.clear();
        for (_, module) in self.modules.drain() {
            // SAFETY: the module was loaded by this context, which is current, and no kernel of it runs any more.
            unsafe { sys::cuModuleUnload(module) };
        }
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// Device memory.
    Ptr(Ptr),
    /// `int`.
    I32(i32),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl Arg {
    fn size(&self) -> usize {
        match self {
            Arg::I32(_) | Arg::F32(_) => 4,
            Arg::Ptr(_) | Arg::I64(_) | Arg::F64(_) => 8,
        }
    }

    fn address(&mut self) -> *mut c_void {
        match self {
            Arg::Ptr(x) => (&raw mut x.0).cast(),
            Arg::I32(x) => (x as *mut i32).cast(),
            Arg::I64(x) => (x as *mut i64).cast(),
            Arg::F32(x) => (x as *mut f32).cast(),
            Arg::F64(x) => (x as *mut f64).cast(),
        }
    }
}

impl From<Ptr> for Arg {
    fn from(x: Ptr) -> Self {
        Arg::Ptr(x)
    }
}
impl From<i32> for Arg {
    fn from(x: i32) -> Self {
        Arg::I32(x)
    }
}
/// Sizes and strides are `long long` in kernels.
impl From<usize> for Arg {
    fn from(x: usize) -> Self {
        Arg::I64(x as i64)
    }
}
impl From<bool> for Arg {
    fn from(x: bool) -> Self {
        Arg::I32(i32::from(x))
    }
}
impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        Arg::F32(x)
    }
}
impl From<f64> for Arg {
    fn from(x: f64) -> Self {
        Arg::F64(x)
    }
}

/// Which kernel runs, and over what grid.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The module's source.
    pub source: &'a Source,
    /// What is `#define`d in it.
    pub defines: &'a [(&'a str, &'a str)],
    /// The kernel (`extern "C"`).
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

impl Gpu {
    /// Puts a kernel on the stream. A grid without blocks is nothing to do.
    ///
    /// The kernel's code is trusted as this process's own is: it reads and writes where its arguments point, inside memory
    /// that only the GPU's pool hands out. That its parameters are as many and as large as the arguments is checked.
    ///
    /// # Errors
    /// A source that does not compile; arguments that the kernel does not declare; what the driver refuses.
    pub fn launch(&self, launch: &Launch<'_>, args: &[Arg]) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.enter()?;
        let kernel = self.kernel(launch)?;
        let got: Vec<usize> = args.iter().map(Arg::size).collect();
        if got != kernel.parameters {
            return Err(Error::Arguments { kernel: launch.kernel.to_owned(), got, want: kernel.parameters });
        }
        let mut args = args.to_vec();
        let mut pointers: Vec<*mut c_void> = args.iter_mut().map(Arg::address).collect();
        let [x, y, z] = launch.grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let (threads, shared) = (launch.threads as u32, launch.shared as u32);
        let grid = launch.grid;
        self.measured(
            || (launch.kernel.to_owned(), 0),
            || {
                // SAFETY: the function belongs to this context, the parameters match what it declares, and the driver
                // copies them before it returns.
                let status = unsafe {
                    let (stream, params) = (self.0.stream, pointers.as_mut_ptr());
                    let function = kernel.function;
                    sys::cuLaunchKernel(function, x, y, z, threads, 1, 1, shared, stream, params, std::ptr::null_mut())
                };
                let refused = |other| Error::Driver {
                    call: launch.kernel,
                    problem: format!("{other:?}, grid {grid:?}, {threads} threads, {shared} bytes of shared memory"),
                };
                match status {
                    sys::CUresult::CUDA_SUCCESS => Ok(()),
                    other => Err(refused(other)),
                }
            },
        )
    }

    fn kernel(&self, launch: &Launch<'_>) -> Result<Kernel> {
        let mut modules = lock(&self.0.modules);
        let defines: String = launch.defines.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        let key = (format!("{}{defines}", launch.source.name), launch.kernel);
        if let Some(kernel) = modules.kernels.get(&key) {
            if launch.shared as u32 <= kernel.shared {
                return Ok(kernel.clone());
            }
        }
        let module = match modules.modules.get(&key.0) {
            Some(&module) => module,
            None => {
                let compiled = compile(&self.0.toolkit, launch.source, launch.defines, &self.0.info.arch)?;
                let mut module = std::ptr::null_mut();
                // SAFETY: the image is whole, as NVRTC or the cache gave it, and is copied by the driver.
                check("cuModuleLoadData", unsafe {
                    sys::cuModuleLoadData(&mut module, compiled.cubin.as_ptr().cast())
                })?;
                modules.modules.insert(key.0.clone(), module);
                module
            }
        };
        let kernel = find(module, launch)?;
        modules.kernels.insert(key, kernel.clone());
        Ok(kernel)
    }
}

fn find(module: sys::CUmodule, launch: &Launch<'_>) -> Result<Kernel> {
    let name = CString::new(launch.kernel).unwrap_or_default();
    let mut function = std::ptr::null_mut();
    let mut parameters = Vec::new();
    // SAFETY: the module is loaded; every pointer is to a value of this frame; asking for a parameter past the last one
    // is how their number is found.
    unsafe {
        match sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) {
            sys::CUresult::CUDA_SUCCESS => {}
            other => return Err(Error::Driver { call: launch.kernel, problem: format!("{other:?}") }),
        }
        let (mut offset, mut size) = (0, 0);
        while sys::cuFuncGetParamInfo(function, parameters.len(), &mut offset, &mut size) == sys::CUresult::CUDA_SUCCESS
        {
            parameters.push(size);
        }
        // What every kernel may have without asking.
        if launch.shared > 48 << 10 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, most, launch.shared as i32))?;
        }
    }
    Ok(Kernel { function, parameters, shared: (launch.shared as u32).max(48 << 10) })
}
