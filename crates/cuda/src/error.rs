/// What can go wrong between this process and a GPU.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library that is opened at run time is not there.
    #[error("{library} is not on this machine: {fix}")]
    Missing {
        /// The library.
        library: &'static str,
        /// What would help.
        fix: &'static str,
    },
    /// No GPU of this number.
    #[error("GPU {index}: {problem}")]
    Device {
        /// The number asked for.
        index: usize,
        /// What the driver said.
        problem: String,
    },
    /// A call of the driver failed.
    #[error("{call}: {problem}")]
    Driver {
        /// The call.
        call: &'static str,
        /// What the driver said.
        problem: String,
    },
    /// The GPU has no room.
    #[error(
        "GPU memory: {asked} bytes do not fit: {live} bytes are in use, {free} of {total} are free. Use fewer rows or shorter rows a micro-batch, or recompute layers (train.recompute)"
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// Bytes that live buffers hold.
        live: usize,
        /// Bytes the driver has left.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A kernel does not compile.
    #[error("{source_name} does not compile for {arch}:\n{log}")]
    Compile {
        /// The source's name.
        source_name: String,
        /// The architecture.
        arch: String,
        /// The compiler's messages.
        log: String,
    },
    /// A kernel is given other arguments than it declares.
    #[error("kernel {kernel}: argument sizes {got:?}, it declares {want:?}")]
    Arguments {
        /// The kernel.
        kernel: String,
        /// Bytes of each argument given.
        got: Vec<usize>,
        /// Bytes of each parameter.
        want: Vec<usize>,
    },
    /// A range of a buffer that it does not have.
    #[error("{what}: {bytes} bytes from {offset} of a buffer of {len}")]
    Range {
        /// The call.
        what: &'static str,
        /// Where the range begins.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The buffer's length.
        len: usize,
    },
    /// A matrix product that cuBLASLt refuses.
    #[error("matrix product {product}: {problem}")]
    Product {
        /// Shapes, strides and types.
        product: String,
        /// What the library said.
        problem: String,
    },
    /// The kernel cache on disk cannot be used.
    #[error("kernel cache {path}: {problem}")]
    Cache {
        /// The file.
        path: String,
        /// What the system said.
        problem: String,
    },
}

/// Shorthand for a result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
