use std::fmt;

/// Up to four dimensions, outermost first. The last one is the row; all before it number the rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Shape::MAX],
    rank: usize,
}

impl Shape {
    /// The largest rank.
    pub const MAX: usize = 4;

    /// A shape of 1 to 4 dimensions; `None` for any other rank or when the element count overflows.
    pub fn new(dims: &[usize]) -> Option<Self> {
        if dims.is_empty() || dims.len() > Self::MAX {
            return None;
        }
        dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let mut out = [1; Self::MAX];
        out[..dims.len()].copy_from_slice(dims);
        Some(Shape { dims: out, rank: dims.len() })
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Elements in all.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.dims[self.rank - 1]
    }

    /// The product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.dims[..self.rank - 1].iter().product()
    }

    /// The same rows with another last dimension.
    pub fn with_cols(mut self, cols: usize) -> Self {
        self.dims[self.rank - 1] = cols;
        self
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}
