use super::window::Window;
use super::{Args, OP};
use hymo_tensor::{Error, Mat, Real, Result, Tensor};

/// What attention reads, one row a token: handles on the caller's tensors.
#[derive(Debug, Clone)]
pub(super) struct Operands {
    /// [N, H (D + R)]
    pub q: Tensor,
    /// Content keys [N, G D], or [N, D] when shared.
    pub k_n: Tensor,
    /// Rotary keys [N, G R].
    pub k_r: Tensor,
    /// [N, G V], or [N, V] when shared.
    pub v: Tensor,
    /// Whether all groups read the same content keys and the same values: a latent cache.
    pub shared: bool,
}

/// [`Operands`] as matrices.
#[derive(Clone, Copy)]
pub(super) struct Views<'a, T> {
    pub q: Mat<'a, T>,
    k_n: Mat<'a, T>,
    k_r: Mat<'a, T>,
    v: Mat<'a, T>,
    shared: bool,
    args: Args,
}

impl Operands {
    /// Keys and values of every group.
    pub fn grouped(q: &Tensor, kv: &Tensor, k_r: &Tensor, window: &Window, args: Args) -> Result<Self> {
        let Args { n_heads, n_groups, d_v, .. } = args;
        args.check()?;
        let (queries, keys) = (window.batch * window.queries, window.batch * window.keys);
        let k = n_groups * args.d_nope;
        q.expect(OP, "q", &[queries, n_heads * args.d_k()])?;
        kv.expect(OP, "kv", &[keys, k + n_groups * d_v])?;
        k_r.expect(OP, "k_r", &[keys, n_groups * args.d_rope])?;
        for (arg, t) in [("kv", kv), ("k_r", k_r)] {
            if t.dtype() != q.dtype() {
                return Err(Error::DType { op: OP, arg, got: t.dtype(), want: "the dtype of q" });
            }
        }
        let (k_n, v) = (kv.slice_cols(0..k)?, kv.slice_cols(k..kv.cols())?);
        Ok(Operands { q: q.clone(), k_n, k_r: k_r.clone(), v, shared: false })
    }

    /// The latent cache `c` as every group's content keys and as its values; shapes are the caller's to check.
    pub fn latent(q: Tensor, c: &Tensor, k_r: &Tensor) -> Self {
        Operands { q, k_n: c.clone(), k_r: k_r.clone(), v: c.clone(), shared: true }
    }

    pub fn views<T: Real>(&self, args: Args) -> Result<Views<'_, T>> {
        let (q, k_n, k_r, v) = (self.q.view()?, self.k_n.view()?, self.k_r.view()?, self.v.view()?);
        Ok(Views { q, k_n, k_r, v, shared: self.shared, args })
    }

    pub fn bytes(&self) -> usize {
        self.q.bytes() + self.k_n.bytes() + self.k_r.bytes() + self.v.bytes()
    }
}

impl<'a, T: Real> Views<'a, T> {
    /// Group `g`'s content key at row `n`.
    pub fn content(&self, g: usize, n: usize) -> &'a [T] {
        part(self.k_n, n, if self.shared { 0 } else { g }, self.args.d_nope)
    }

    /// Group `g`'s rotary key at row `n`.
    pub fn rotary(&self, g: usize, n: usize) -> &'a [T] {
        part(self.k_r, n, g, self.args.d_rope)
    }

    /// Group `g`'s values at `len` rows from `n`.
    pub fn values(&self, g: usize, n: usize, len: usize) -> Mat<'a, T> {
        let d_v = self.args.d_v;
        self.v.rows_at(n, len).cols_at(if self.shared { 0 } else { g * d_v }, d_v)
    }
}

/// Part `i` of the parts of `width` columns in row `n`. A matrix of no columns has no rows to ask for.
fn part<T>(m: Mat<'_, T>, n: usize, i: usize, width: usize) -> &[T] {
    if width == 0 { &[] } else { &m.row(n)[i * width..(i + 1) * width] }
}
