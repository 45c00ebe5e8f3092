//! Device memory from a pool, and copies to and from it.
#![allow(unsafe_code)]

use crate::gpu::{check, lock};
use crate::{Error, Gpu, Result};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::c_void;

/// Free memory by capacity. In steady state nothing is asked of the driver.
#[derive(Default)]
pub(crate) struct Pool {
    free: BTreeMap<usize, Vec<u64>>,
    stats: Stats,
}

/// What a GPU's pool has handed out, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// What live buffers asked for.
    pub asked: usize,
    /// What they hold, capacities rounded up.
    pub live: usize,
    /// The most ever held at once.
    pub peak: usize,
    /// Taken from the driver and not given back.
    pub fresh: usize,
}

/// Every capacity is a multiple of this: as the driver aligns.
const GRAIN: usize = 512;
/// From here on capacities are multiples of 2 MiB, the driver's own page.
const LARGE: usize = 16 << 20;

/// Rounds up to three significant bits, so that near sizes share memory; large ones to whole pages, where a quarter more
/// would hurt.
fn capacity(bytes: usize) -> usize {
    if bytes >= LARGE {
        return bytes.next_multiple_of(2 << 20);
    }
    let step = (bytes.max(1).next_power_of_two() / 8).max(GRAIN);
    bytes.max(1).next_multiple_of(step)
}

impl Pool {
    fn take(&mut self, bytes: usize) -> Result<(u64, usize)> {
        let capacity = capacity(bytes);
        let found = self.free.get_mut(&capacity).and_then(Vec::pop);
        let address = match found {
            Some(address) => address,
            None => self.fresh(capacity)?,
        };
        self.stats.asked += bytes;
        self.stats.live += capacity;
        self.stats.peak = self.stats.peak.max(self.stats.live);
        Ok((address, capacity))
    }

    /// From the driver. When it has no room, what lies free here goes back to it first.
    fn fresh(&mut self, capacity: usize) -> Result<u64> {
        let mut address = 0;
        for attempt in 0..2 {
            // SAFETY: the pointer is to an integer of this frame; the context is current.
            let status = unsafe { sys::cuMemAlloc_v2(&mut address, capacity) };
            match status {
                sys::CUresult::CUDA_SUCCESS => {
                    self.stats.fresh += capacity;
                    return Ok(address);
                }
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY if attempt == 0 => self.release(),
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => break,
                other => return check("cuMemAlloc", other).map(|()| 0),
            }
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to integers of this frame.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Err(Error::OutOfMemory { asked: capacity, live: self.stats.live, free, total })
    }

    /// Gives everything that lies free back to the driver, which waits for work that still uses it.
    pub fn release(&mut self) {
        for (capacity, list) in std::mem::take(&mut self.free) {
            for address in list {
                self.stats.fresh -= capacity;
                // SAFETY: nobody holds this memory, and the address is one that cuMemAlloc gave.
                unsafe { sys::cuMemFree_v2(address) };
            }
        }
    }
}

/// Device memory that returns to its GPU's pool. Its contents are arbitrary at first.
#[derive(Debug)]
pub struct Buffer {
    gpu: Gpu,
    address: u64,
    bytes: usize,
    capacity: usize,
}

/// A place in device memory, as kernels and products are given it. Only a [`Buffer`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ptr(pub(crate) u64);

impl Ptr {
    /// No memory: for an argument that a kernel is told not to use.
    pub const NULL: Ptr = Ptr(0);

    /// `bytes` further on, which the caller has found to be inside the same buffer.
    #[must_use]
    pub fn plus(self, bytes: usize) -> Ptr {
        Ptr(self.0 + bytes as u64)
    }

    /// The address as a number, for tables of places that a kernel reads.
    #[must_use]
    pub fn address(self) -> u64 {
        self.0
    }

    /// The largest power of two up to 256 that the address is a multiple of.
    #[must_use]
    pub fn alignment(self) -> u32 {
        1 << self.0.trailing_zeros().min(8)
    }
}

impl Buffer {
    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The GPU that it lies on.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The place `offset` bytes in, of which at least `bytes` follow.
    ///
    /// # Errors
    /// A range that the buffer does not have.
    pub fn at(&self, offset: usize, bytes: usize) -> Result<Ptr> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Ptr(self.address + offset as u64)),
            _ => Err(Error::Range { what: "buffer", offset, bytes, len: self.bytes }),
        }
    }

    /// Copies `data` to `offset`. The slice may be changed as soon as this returns.
    ///
    /// # Errors
    /// A range that the buffer does not have; what went wrong on the GPU.
    pub fn upload(&self, offset: usize, data: &[u8]) -> Result<()> {
        let to = self.at(offset, data.len())?;
        self.gpu.enter()?;
        let mut staging = lock(&self.gpu.0.staging);
        let mut done = 0;
        for part in data.chunks(STAGING) {
            let from = staging.take(&self.gpu, part.len())?;
            // SAFETY: `from` has room for the part and no copy from it is under way; the target is in range.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), from, part.len());
                let status = sys::cuMemcpyHtoDAsync_v2(to.0 + done, from.cast(), part.len(), self.gpu.0.stream);
                check("cuMemcpyHtoDAsync", status)?;
            }
            done += part.len() as u64;
        }
        Ok(())
    }

    /// Copies `to.len()` bytes from `offset`, after everything asked for so far.
    ///
    /// # Errors
    /// As [`Buffer::upload`].
    pub fn download(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        self.gpu.enter()?;
        let mut staging = lock(&self.gpu.0.staging);
        let mut done = 0;
        for part in to.chunks_mut(STAGING) {
            let pinned = staging.take(&self.gpu, part.len())?;
            // SAFETY: the source is in range, `pinned` has room for the part, and the copy is over before it is read.
            unsafe {
                let status = sys::cuMemcpyDtoHAsync_v2(pinned.cast(), from.0 + done, part.len(), self.gpu.0.stream);
                check("cuMemcpyDtoHAsync", status)?;
                self.gpu.synchronize()?;
                std::ptr::copy_nonoverlapping(pinned, part.as_mut_ptr(), part.len());
            }
            done += part.len() as u64;
        }
        Ok(())
    }

    /// Fills `count` elements of `size` bytes (1, 2 or 4) from `offset` with the low bits of `value`.
    ///
    /// # Errors
    /// As [`Buffer::upload`].
    pub fn fill(&self, offset: usize, count: usize, size: usize, value: u32) -> Result<()> {
        let to = self.at(offset, count * size)?;
        self.gpu.enter()?;
        if count == 0 {
            return Ok(());
        }
        let stream = self.gpu.0.stream;
        // SAFETY: the range is the buffer's.
        let status = unsafe {
            match size {
                1 => sys::cuMemsetD8Async(to.0, value as u8, count, stream),
                2 => sys::cuMemsetD16Async(to.0, value as u16, count, stream),
                _ => sys::cuMemsetD32Async(to.0, value, count, stream),
            }
        };
        check("cuMemsetAsync", status)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut pool = lock(&self.gpu.0.pool);
        pool.stats.asked -= self.bytes;
        pool.stats.live -= self.capacity;
        pool.free.entry(self.capacity).or_default().push(self.address);
    }
}

impl Gpu {
    /// Memory with arbitrary contents.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what would have to fit.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer> {
        self.enter()?;
        let (address, capacity) = lock(&self.0.pool).take(bytes)?;
        Ok(Buffer { gpu: self.clone(), address, bytes, capacity })
    }

    /// Copies rows of `row_bytes` from one place to another, rows `strides` bytes apart: from, to.
    ///
    /// # Errors
    /// What went wrong on the GPU.
    pub fn copy_rows(&self, to: Ptr, from: Ptr, rows: usize, row_bytes: usize, strides: [usize; 2]) -> Result<()> {
        self.enter()?;
        if rows == 0 || row_bytes == 0 {
            return Ok(());
        }
        let stream = self.0.stream;
        if strides == [row_bytes; 2] || rows == 1 {
            // SAFETY: both places were checked when they were made, by the caller's tensors.
            let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, rows * row_bytes, stream) };
            return check("cuMemcpyDtoDAsync", status);
        }
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: strides[0],
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: strides[1],
            WidthInBytes: row_bytes,
            Height: rows,
        };
        // SAFETY: as above.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) })
    }

    /// Bytes held, peak and taken from the driver.
    #[must_use]
    pub fn stats(&self) -> Stats {
        lock(&self.0.pool).stats
    }

    /// Starts a new peak at what is held now.
    pub fn reset_peak(&self) {
        let mut pool = lock(&self.0.pool);
        pool.stats.peak = pool.stats.live;
    }
}

/// Bytes of pinned memory that copies go through.
const STAGING: usize = 16 << 20;

/// Pinned memory, handed out from front to back; at its end the stream is waited for and it begins again.
pub(crate) struct Staging {
    base: *mut u8,
    used: usize,
}

impl Default for Staging {
    fn default() -> Self {
        Staging { base: std::ptr::null_mut(), used: 0 }
    }
}

impl Staging {
    /// `bytes` (at most [`STAGING`]) that no copy uses.
    fn take(&mut self, gpu: &Gpu, bytes: usize) -> Result<*mut u8> {
        if self.base.is_null() {
            let mut base: *mut c_void = std::ptr::null_mut();
            // SAFETY: the pointer is to a value of this frame; the context is current.
            check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut base, STAGING, 0) })?;
            (self.base, self.used) = (base.cast(), 0);
        }
        if self.used + bytes > STAGING {
            gpu.synchronize()?;
            self.used = 0;
        }
        // SAFETY: `used + bytes` stays within the allocation.
        let at = unsafe { self.base.add(self.used) };
        self.used += bytes.next_multiple_of(64);
        Ok(at)
    }

    pub fn release(&mut self) {
        if !self.base.is_null() {
            // SAFETY: allocated by cuMemHostAlloc, and nothing on the stream uses it any more.
            unsafe { sys::cuMemFreeHost(self.base.cast()) };
            self.base = std::ptr::null_mut();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_waste_little() {
        for bytes in [0, 1, 511, 512, 513, 4000, 100_000, (16 << 20) - 1, 16 << 20, (1 << 30) + 1] {
            let capacity = capacity(bytes);
            assert!(capacity >= bytes && capacity % GRAIN == 0, "{bytes}: {capacity}");
            assert!(capacity <= bytes + (bytes / 4).max(512), "{bytes}: {capacity}");
            assert_eq!(super::capacity(capacity), capacity);
        }
    }

    #[test]
    fn alignment_is_the_addresss_own() {
        assert_eq!([Ptr(0x1000), Ptr(0x1010), Ptr(0x1002)].map(Ptr::alignment), [256, 16, 2]);
    }
}
