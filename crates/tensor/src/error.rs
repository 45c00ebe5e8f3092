use crate::{DType, Shape};

/// What can be wrong with a tensor handed to an operation. Every variant names the operation and the argument.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape other than the operation needs.
    #[error("{op}: {arg} has shape {got}, want {want}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Its argument.
        arg: &'static str,
        /// The shape found.
        got: Shape,
        /// The shape needed, in words or numbers.
        want: String,
    },
    /// A dtype other than the operation needs.
    #[error("{op}: {arg} is {got}, want {want}")]
    DType {
        /// The operation.
        op: &'static str,
        /// Its argument.
        arg: &'static str,
        /// The dtype found.
        got: DType,
        /// The dtype needed, in words.
        want: &'static str,
    },
    /// A number outside the range that the operation accepts.
    #[error("{op}: {arg} is {got}, want {want}")]
    Value {
        /// The operation.
        op: &'static str,
        /// Its argument.
        arg: &'static str,
        /// The value found.
        got: String,
        /// What would be right.
        want: String,
    },
    /// Writing to storage that another tensor also holds.
    #[error("{op}: writing to a tensor of shape {shape} whose storage is shared")]
    Shared {
        /// The operation.
        op: &'static str,
        /// The tensor's shape.
        shape: Shape,
    },
    /// A tensor that lies in another memory than the work is done in.
    #[error("{op}: the tensor lies in {place}, want {want}")]
    Elsewhere {
        /// The operation.
        op: &'static str,
        /// Where the tensor lies.
        place: &'static str,
        /// Where it should.
        want: &'static str,
    },
    /// What a device cannot do.
    #[error("{op}: there is no {what} on {device}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// What it was asked for.
        what: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The GPU or its libraries.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] hymo_cuda::Error),
    /// A view that the row stride cannot express.
    #[error("{op}: {shape} with row stride {row_stride} is not contiguous")]
    NotContiguous {
        /// The operation.
        op: &'static str,
        /// The tensor's shape.
        shape: Shape,
        /// Elements from one row to the next.
        row_stride: usize,
    },
}

/// Shorthand for a result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A [`Error::Value`]; the arguments are only formatted when there is an error.
    pub fn value(op: &'static str, arg: &'static str, got: impl ToString, want: impl ToString) -> Self {
        Error::Value { op, arg, got: got.to_string(), want: want.to_string() }
    }
}
