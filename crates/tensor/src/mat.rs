//! Strided matrices over borrowed memory. This is the only module of the crate with `unsafe`: splitting a matrix into
//! disjoint column blocks cannot be said with slices, and every parallel operation writes through such blocks.
#![allow(unsafe_code)]

use std::{fmt, marker::PhantomData};

/// A read-only matrix: `rows` rows of `cols` elements, `stride` elements apart.
pub struct Mat<'a, T> {
    ptr: *const T,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a [T]>,
}

/// A writable matrix: `rows` rows of `cols` elements, `stride` elements apart, overlapping no other.
pub struct MatMut<'a, T> {
    ptr: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Mat<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Mat<'_, T> {}

impl<T> fmt::Debug for Mat<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mat({} x {}, stride {})", self.rows, self.cols, self.stride)
    }
}

impl<T> fmt::Debug for MatMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MatMut({} x {}, stride {})", self.rows, self.cols, self.stride)
    }
}

// SAFETY: a Mat gives out shared references to its rows only, as `&[T]` would.
unsafe impl<T: Sync> Send for Mat<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mat<'_, T> {}
// SAFETY: a MatMut is the only way to its elements while it lives, as `&mut [T]` would be.
unsafe impl<T: Send> Send for MatMut<'_, T> {}
// SAFETY: through `&MatMut` only shared references can be had.
unsafe impl<T: Sync> Sync for MatMut<'_, T> {}

/// Panics unless the last row ends inside `len` elements: everything below relies on it.
fn check(len: usize, rows: usize, cols: usize, stride: usize) {
    let end = rows.checked_sub(1).map_or(Some(0), |r| r.checked_mul(stride).and_then(|x| x.checked_add(cols)));
    assert!(
        end.is_some_and(|e| e <= len) && (rows <= 1 || stride >= cols),
        "matrix of {rows} x {cols}, stride {stride}, over {len} elements"
    );
}

impl<'a, T> Mat<'a, T> {
    /// Over a slice, whose length must hold the last row.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        Mat { ptr: data.as_ptr(), rows, cols, stride, life: PhantomData }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first element's address.
    pub fn as_ptr(&self) -> *const T {
        self.ptr
    }

    /// Row `i`.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: `check` at construction keeps every row inside the borrowed memory.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.cols) }
    }

    /// Columns `from..from + n` as a matrix.
    pub fn cols_at(&self, from: usize, n: usize) -> Mat<'a, T> {
        assert!(from + n <= self.cols, "columns {from}..{} of {}", from + n, self.cols);
        // SAFETY: within every row by the assertion.
        Mat { ptr: unsafe { self.ptr.add(from) }, cols: n, ..*self }
    }

    /// Rows `from..from + n` as a matrix.
    pub fn rows_at(&self, from: usize, n: usize) -> Mat<'a, T> {
        assert!(from + n <= self.rows, "rows {from}..{} of {}", from + n, self.rows);
        let skip = if n == 0 { 0 } else { from * self.stride };
        // SAFETY: the first row kept is one of ours by the assertion.
        Mat { ptr: unsafe { self.ptr.add(skip) }, rows: n, ..*self }
    }
}

impl<'a, T> MatMut<'a, T> {
    /// Over a slice, whose length must hold the last row.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        MatMut { ptr: data.as_mut_ptr(), rows, cols, stride, life: PhantomData }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first element's address.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }

    /// The same matrix for a shorter while.
    pub fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut { ptr: self.ptr, rows: self.rows, cols: self.cols, stride: self.stride, life: PhantomData }
    }

    /// The same matrix, read-only.
    pub fn as_mat(&self) -> Mat<'_, T> {
        Mat { ptr: self.ptr, rows: self.rows, cols: self.cols, stride: self.stride, life: PhantomData }
    }

    /// Row `i`.
    #[inline]
    pub fn row(&self, i: usize) -> &[T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: `check` at construction keeps every row inside the borrowed memory.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.cols) }
    }

    /// Row `i`, writable.
    #[inline]
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: as in `row`; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.stride), self.cols) }
    }

    /// The first `at` columns and the rest.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "column {at} of {}", self.cols);
        // SAFETY: `at` is within every row; the two halves share no column, hence no element.
        let right = MatMut { ptr: unsafe { self.ptr.add(at) }, cols: self.cols - at, ..self };
        (MatMut { cols: at, ..self }, right)
    }

    /// The first `at` rows and the rest.
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "row {at} of {}", self.rows);
        let skip = if at == self.rows { 0 } else { at * self.stride };
        // SAFETY: row `at` is ours, or the second half has no row; the halves share no row, hence no element.
        let below = MatMut { ptr: unsafe { self.ptr.add(skip) }, rows: self.rows - at, ..self };
        (MatMut { rows: at, ..self }, below)
    }

    /// Tiles of at most `row_block` x `col_block`, row-major: what parallel work is handed out in.
    pub fn grid(self, row_block: usize, col_block: usize) -> Vec<Self> {
        assert!(row_block > 0 && col_block > 0, "empty blocks");
        let mut tiles = Vec::with_capacity(self.rows.div_ceil(row_block) * self.cols.div_ceil(col_block));
        let mut below = self;
        while below.rows > 0 {
            let band;
            let n = row_block.min(below.rows);
            (band, below) = below.split_rows(n);
            let mut right = band;
            while right.cols > 0 {
                let tile;
                let n = col_block.min(right.cols);
                (tile, right) = right.split_cols(n);
                tiles.push(tile);
            }
        }
        tiles
    }

    /// Blocks of at most `n` whole rows.
    pub fn row_blocks(self, n: usize) -> Vec<Self> {
        let cols = self.cols.max(1);
        self.grid(n, cols)
    }

    /// All elements as one slice, when rows follow each other without a gap.
    pub fn into_slice(self) -> Option<&'a mut [T]> {
        if self.rows > 1 && self.stride != self.cols {
            return None;
        }
        // SAFETY: the rows are adjacent, so rows * cols elements from `ptr` are ours for 'a.
        Some(unsafe { std::slice::from_raw_parts_mut(self.ptr, self.rows * self.cols) })
    }

    /// Sets every element.
    pub fn fill(&mut self, value: T)
    where
        T: Copy,
    {
        for i in 0..self.rows {
            self.row_mut(i).fill(value);
        }
    }
}
