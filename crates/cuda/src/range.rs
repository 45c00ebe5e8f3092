//! Named ranges of a thread's time for NVIDIA's profilers (NVTX): there when the library is, nothing without it.
#![allow(unsafe_code)]

use crate::Toolkit;
use std::ffi::{CString, c_char, c_int};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Names of the library, the newest first.
const NAMES: [&str; 3] = ["libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so.1"];

struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

static NVTX: OnceLock<Option<Nvtx>> = OnceLock::new();

/// Opens the library where the system or a folder of the toolkit has it.
fn open(toolkit: &Toolkit) -> Option<Nvtx> {
    let in_folders = toolkit.libraries.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    let by_name = NAMES.map(std::path::PathBuf::from);
    by_name.into_iter().chain(in_folders).find_map(|file| {
        // SAFETY: NVIDIA's library, whose initialisers only set up itself; both symbols have these signatures in every
        // version, and the library is kept open for good.
        unsafe {
            let library = libloading::Library::new(file).ok()?;
            let (push, pop) = (*library.get(b"nvtxRangePushA\0").ok()?, *library.get(b"nvtxRangePop\0").ok()?);
            std::mem::forget(library);
            Some(Nvtx { push, pop })
        }
    })
}

/// A range that ends when it is dropped, on the thread that began it.
#[derive(Debug)]
#[must_use = "a range ends when it is dropped"]
pub struct Range(PhantomData<*const ()>);

impl Range {
    pub(crate) fn begin(toolkit: &Toolkit, name: &str) -> Range {
        if let (Some(nvtx), Ok(name)) = (NVTX.get_or_init(|| open(toolkit)), CString::new(name)) {
            // SAFETY: the name lives beyond the call, which copies it.
            unsafe { (nvtx.push)(name.as_ptr()) };
        }
        Range(PhantomData)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(Some(nvtx)) = NVTX.get() {
            // SAFETY: ends the range that this thread began last; one too many is ignored.
            unsafe { (nvtx.pop)() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_nest_with_and_without_the_library() {
        let toolkit = Toolkit::standard();
        let outer = Range::begin(&toolkit, "step");
        drop(Range::begin(&toolkit, "a name with a \0 byte is left out"));
        drop(outer);
    }
}
