use crate::pool::{Buf, Pool, Shelf};
use crate::tensor::Storage;
use std::{fmt, iter::Sum, sync::Arc};

/// What a tensor's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision: master weights, gradients, statistics, all of CPU training.
    F32,
    /// IEEE double precision: the oracle's arithmetic.
    F64,
    /// Brain float: weights and activations of GPU GEMMs, weights at decoding.
    BF16,
    /// Token ids, document ids, expert ids.
    I32,
    /// Weight-only quantisation at decoding.
    I8,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
            DType::I8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I8 => "i8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that tensors can hold.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Copy + Send + Sync + Default + PartialEq + fmt::Debug + 'static
{
    /// The matching dtype.
    const DTYPE: DType;
    /// What poisoned buffers are filled with, so that an output never written shows itself.
    const POISON: Self;
    #[doc(hidden)]
    fn shelf(pool: &Pool) -> &Shelf<Self>;
    #[doc(hidden)]
    fn wrap(buf: Arc<Buf<Self>>) -> Storage;
    #[doc(hidden)]
    fn unwrap(storage: &Storage) -> Option<&Arc<Buf<Self>>>;
    #[doc(hidden)]
    fn unwrap_mut(storage: &mut Storage) -> Option<&mut Arc<Buf<Self>>>;
}

macro_rules! element {
    ($t:ty, $v:ident, $field:ident, $poison:expr) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$v;
            const POISON: Self = $poison;
            fn shelf(pool: &Pool) -> &Shelf<Self> {
                &pool.$field
            }
            fn wrap(buf: Arc<Buf<Self>>) -> Storage {
                Storage::$v(buf)
            }
            fn unwrap(storage: &Storage) -> Option<&Arc<Buf<Self>>> {
                if let Storage::$v(b) = storage { Some(b) } else { None }
            }
            fn unwrap_mut(storage: &mut Storage) -> Option<&mut Arc<Buf<Self>>> {
                if let Storage::$v(b) = storage { Some(b) } else { None }
            }
        }
    };
}
element!(f32, F32, f32, f32::NAN);
element!(f64, F64, f64, f64::NAN);
element!(half::bf16, BF16, bf16, half::bf16::NAN);
element!(i32, I32, i32, i32::MIN);
element!(i8, I8, i8, i8::MIN);

/// `f32` or `f64`: what the oracles are generic over.
pub trait Real: Element + num_traits::Float + num_traits::NumAssign + Sum + fmt::Display {
    /// From a double, rounded.
    fn of(x: f64) -> Self;
    /// To a double, exact.
    fn f64(self) -> f64;
    /// The slice of this type among two.
    fn pick<'a>(single: Option<&'a mut [f32]>, double: Option<&'a mut [f64]>) -> Option<&'a mut [Self]>;
}

impl Real for f32 {
    fn of(x: f64) -> Self {
        x as f32
    }
    fn f64(self) -> f64 {
        f64::from(self)
    }
    fn pick<'a>(single: Option<&'a mut [f32]>, _: Option<&'a mut [f64]>) -> Option<&'a mut [Self]> {
        single
    }
}

impl Real for f64 {
    fn of(x: f64) -> Self {
        x
    }
    fn f64(self) -> f64 {
        self
    }
    fn pick<'a>(_: Option<&'a mut [f32]>, double: Option<&'a mut [f64]>) -> Option<&'a mut [Self]> {
        double
    }
}
