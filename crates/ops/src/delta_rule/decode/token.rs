//! One token on one head's state, in registers. A column's sums run over the rows of the state in order, each product fused
//! into them, whatever stands beside it.

// Loops over registers are counted: a closure of an adapter would not be compiled for the vector units.
#![allow(clippy::needless_range_loop)]

use pulp::{Simd, WithSimd};

/// u = β (v - α k H), H ← α H + kᵀ u, o = q H.
pub(super) struct Step<'a> {
    /// H [K, V].
    pub state: &'a mut [f32],
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub alpha: f32,
    pub beta: f32,
    pub u: &'a mut [f32],
    pub o: &'a mut [f32],
}

impl WithSimd for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<V: Simd>(mut self, v: V) {
        let (width, lanes) = (self.v.len(), V::F32_LANES);
        let mut at = 0;
        // As many columns as hide that a sum waits for its last product.
        if V::REGISTER_COUNT >= 32 {
            while at + 8 * lanes <= width {
                self.columns::<V, 8>(v, at);
                at += 8 * lanes;
            }
        }
        while at + 4 * lanes <= width {
            self.columns::<V, 4>(v, at);
            at += 4 * lanes;
        }
        while at + lanes <= width {
            self.columns::<V, 1>(v, at);
            at += lanes;
        }
        if at < width {
            self.last(v, at);
        }
    }
}

impl Step<'_> {
    /// C registers of columns.
    #[inline(always)]
    fn columns<V: Simd, const C: usize>(&mut self, v: V, at: usize) {
        let (width, n) = (self.v.len(), C * V::F32_LANES);
        let mut sums = [v.splat_f32s(0.); C];
        for (row, &k) in self.state.chunks_exact(width).zip(self.k) {
            let (row, k) = (&V::as_simd_f32s(&row[at..at + n]).0[..C], v.splat_f32s(k));
            for c in 0..C {
                sums[c] = v.mul_add_e_f32s(k, row[c], sums[c]);
            }
        }
        let (alpha, beta) = (v.splat_f32s(self.alpha), v.splat_f32s(self.beta));
        let target = &V::as_simd_f32s(&self.v[at..at + n]).0[..C];
        let kept = &mut V::as_mut_simd_f32s(&mut self.u[at..at + n]).0[..C];
        let (mut u, mut o) = ([v.splat_f32s(0.); C], [v.splat_f32s(0.); C]);
        for c in 0..C {
            u[c] = v.mul_f32s(beta, v.sub_f32s(target[c], v.mul_f32s(alpha, sums[c])));
            kept[c] = u[c];
        }
        for ((row, &k), &q) in self.state.chunks_exact_mut(width).zip(self.k).zip(self.q) {
            let row = &mut V::as_mut_simd_f32s(&mut row[at..at + n]).0[..C];
            let (k, q) = (v.splat_f32s(k), v.splat_f32s(q));
            for c in 0..C {
                row[c] = v.mul_add_e_f32s(k, u[c], v.mul_f32s(alpha, row[c]));
                o[c] = v.mul_add_e_f32s(q, row[c], o[c]);
            }
        }
        V::as_mut_simd_f32s(&mut self.o[at..at + n]).0[..C].copy_from_slice(&o);
    }

    /// The columns from `at` on that fill no register.
    #[inline(always)]
    fn last<V: Simd>(&mut self, v: V, at: usize) {
        let width = self.v.len();
        let mut sums = v.splat_f32s(0.);
        for (row, &k) in self.state.chunks_exact(width).zip(self.k) {
            sums = v.mul_add_e_f32s(v.splat_f32s(k), v.partial_load_f32s(&row[at..]), sums);
        }
        let (alpha, beta) = (v.splat_f32s(self.alpha), v.splat_f32s(self.beta));
        let target = v.partial_load_f32s(&self.v[at..]);
        let u = v.mul_f32s(beta, v.sub_f32s(target, v.mul_f32s(alpha, sums)));
        v.partial_store_f32s(&mut self.u[at..width], u);
        let mut o = v.splat_f32s(0.);
        for ((row, &k), &q) in self.state.chunks_exact_mut(width).zip(self.k).zip(self.q) {
            let row = &mut row[at..];
            let h = v.mul_f32s(alpha, v.partial_load_f32s(row));
            let h = v.mul_add_e_f32s(v.splat_f32s(k), u, h);
            v.partial_store_f32s(row, h);
            o = v.mul_add_e_f32s(v.splat_f32s(q), h, o);
        }
        v.partial_store_f32s(&mut self.o[at..width], o);
    }
}

/// H ← α H + kᵀ u: what [`Step`] did to a state, to the bit.
pub(super) struct Again<'a> {
    /// H [K, V].
    pub state: &'a mut [f32],
    pub k: &'a [f32],
    pub u: &'a [f32],
    pub alpha: f32,
}

impl WithSimd for Again<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<V: Simd>(self, v: V) {
        let (us, u_last) = V::as_simd_f32s(self.u);
        let alpha = v.splat_f32s(self.alpha);
        for (row, &k) in self.state.chunks_exact_mut(self.u.len()).zip(self.k) {
            let (hs, last) = V::as_mut_simd_f32s(row);
            let k = v.splat_f32s(k);
            for (h, &u) in hs.iter_mut().zip(us) {
                *h = v.mul_add_e_f32s(k, u, v.mul_f32s(alpha, *h));
            }
            if !last.is_empty() {
                let h = v.mul_f32s(alpha, v.partial_load_f32s(last));
                v.partial_store_f32s(last, v.mul_add_e_f32s(k, v.partial_load_f32s(u_last), h));
            }
        }
    }
}
