//! One GPU: its context, its stream, what it is.
#![allow(unsafe_code)]

use crate::kernel::Modules;
use crate::memory::{Pool, Staging};
use crate::products::Products;
use crate::profile::Profile;
use crate::{Error, Result, Toolkit, toolkit};
use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A GPU with the stream that all of its work goes through, in order. Cloning shares it.
///
/// One stream for kernels, products and copies: what is handed back to the pool may be handed out again at once, since
/// whoever writes to it comes later on the same stream.
#[derive(Clone)]
pub struct Gpu(pub(crate) Arc<Inner>);

/// What the driver says of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Compute capability: 9, 0.
    pub capability: (u32, u32),
    /// What kernels are compiled for: `sm_90a`.
    pub arch: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may ask for.
    pub shared_per_block: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// The driver's CUDA version: 13000.
    pub driver: u32,
}

pub(crate) struct Inner {
    pub device: c_int,
    pub context: sys::CUcontext,
    pub stream: sys::CUstream,
    pub info: Info,
    pub toolkit: Toolkit,
    pub pool: Mutex<Pool>,
    pub staging: Mutex<Staging>,
    pub modules: Mutex<Modules>,
    pub products: Mutex<Option<Products>>,
    pub profile: Mutex<Profile>,
}

// SAFETY: handles of a context may be used from any thread that has made it current, which every call does first; all
// state that this process keeps beside them is behind mutexes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.0.device, self.0.info.name)
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gpu {}

/// The driver's answer as a result.
pub(crate) fn check(call: &'static str, status: sys::CUresult) -> Result<()> {
    match status {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Error::Driver { call, problem: format!("{other:?}") }),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// How many GPUs there are; 0 without a driver.
    #[must_use]
    pub fn count() -> usize {
        if toolkit::driver().is_err() {
            return 0;
        }
        let mut count = 0;
        // SAFETY: the library is there, and the pointer is to an integer of this frame.
        let status = unsafe {
            match sys::cuInit(0) {
                sys::CUresult::CUDA_SUCCESS => sys::cuDeviceGetCount(&mut count),
                failed => failed,
            }
        };
        if status == sys::CUresult::CUDA_SUCCESS { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    /// Opens GPU number `index`.
    ///
    /// # Errors
    /// No driver, no such GPU, or one that is older than sm_80.
    pub fn open(index: usize, toolkit: Toolkit) -> Result<Self> {
        toolkit::driver()?;
        let refused = |problem: String| Error::Device { index, problem };
        let number = c_int::try_from(index).map_err(|_| refused("no such number".to_owned()))?;
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the library is there; every pointer is to a value of this frame; the context is retained before it is
        // made current, and kept for as long as this handle lives.
        unsafe {
            let ok = |status: sys::CUresult| match status {
                sys::CUresult::CUDA_SUCCESS => Ok(()),
                other => Err(refused(format!("{other:?}"))),
            };
            ok(sys::cuInit(0))?;
            ok(sys::cuDeviceGet(&mut device, number))?;
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            ok(sys::cuCtxSetCurrent(context))?;
            ok(sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        }
        let info = info(device)?;
        if info.capability.0 < 8 {
            return Err(refused(format!(
                "{} has compute capability {:?}, want 8.0 or newer",
                info.name, info.capability
            )));
        }
        Ok(Gpu(Arc::new(Inner {
            device,
            context,
            stream,
            info,
            toolkit,
            pool: Mutex::default(),
            staging: Mutex::default(),
            modules: Mutex::default(),
            products: Mutex::default(),
            profile: Mutex::default(),
        })))
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &Info {
        &self.0.info
    }

    /// Begins a range of this thread's time that profilers show under `name`.
    pub fn range(&self, name: &str) -> crate::Range {
        crate::Range::begin(&self.0.toolkit, name)
    }

    /// Bytes that this process may still have here, with those that its pool has already.
    ///
    /// # Errors
    /// What the driver says.
    pub fn available(&self) -> Result<usize> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to integers of this frame.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free + self.stats().fresh)
    }

    /// Makes the context this thread's: first in every call.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as this handle.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Waits until everything asked for so far is done. An error of any kernel before shows here at the latest.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as this handle.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.stream) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone, so nothing of this context is used any more; failures leave nothing to do.
        unsafe {
            if sys::cuCtxSetCurrent(self.context) == sys::CUresult::CUDA_SUCCESS {
                sys::cuStreamSynchronize(self.stream);
                lock(&self.pool).release();
                lock(&self.staging).release();
                if let Some(products) = lock(&self.products).take() {
                    products.release();
                }
                lock(&self.modules).release();
                sys::cuStreamDestroy_v2(self.stream);
            }
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn info(device: c_int) -> Result<Info> {
    let (mut name, mut memory, mut driver) = ([0i8; 256], 0usize, 0);
    // SAFETY: the device is one the driver gave; the buffer's length is given; pointers are to values of this frame.
    unsafe {
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, device))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
        check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut driver))?;
    }
    let attribute = |which: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: as above.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: the driver ends the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr().cast()) }.to_string_lossy().into_owned();
    // From 9.0 on the instructions of one generation alone are in `a`.
    let own = if major >= 9 { "a" } else { "" };
    Ok(Info {
        name,
        capability: (major, minor),
        arch: format!("sm_{major}{minor}{own}"),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        memory,
        driver: u32::try_from(driver).unwrap_or(0),
    })
}
