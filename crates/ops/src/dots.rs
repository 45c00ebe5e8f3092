//! Dot products of rows with rows in tiles of registers.

// Loops over registers are counted: a closure of an adapter would not be compiled for the vector units.
#![allow(clippy::needless_range_loop)]

use pulp::Simd;

/// sums + x wᵀ over rows of one length, unfolded: R rows with S rows. A sum runs along its rows in as many lanes as a register
/// has, each product fused into it, the last registers filled up with zeros: one order, whatever R and S are.
#[inline(always)]
pub(crate) fn add<V: Simd, const R: usize, const S: usize>(
    v: V,
    mut sums: [[V::f32s; S]; R],
    x: [&[f32]; R],
    w: [&[f32]; S],
) -> [[V::f32s; S]; R] {
    let len = x[0].len();
    let whole = len / V::F32_LANES * V::F32_LANES;
    let (mut xs, mut ws) = ([&[] as &[V::f32s]; R], [&[] as &[V::f32s]; S]);
    for r in 0..R {
        xs[r] = &V::as_simd_f32s(&x[r][..whole]).0[..whole / V::F32_LANES];
    }
    for s in 0..S {
        ws[s] = &V::as_simd_f32s(&w[s][..whole]).0[..whole / V::F32_LANES];
    }
    for i in 0..whole / V::F32_LANES {
        let mut w = [v.splat_f32s(0.); S];
        for s in 0..S {
            w[s] = ws[s][i];
        }
        for r in 0..R {
            let x = xs[r][i];
            for s in 0..S {
                sums[r][s] = v.mul_add_e_f32s(x, w[s], sums[r][s]);
            }
        }
    }
    if whole < len {
        let mut rest = [v.splat_f32s(0.); S];
        for s in 0..S {
            rest[s] = v.partial_load_f32s(&w[s][whole..len]);
        }
        for r in 0..R {
            let x = v.partial_load_f32s(&x[r][whole..]);
            for s in 0..S {
                sums[r][s] = v.mul_add_e_f32s(x, rest[s], sums[r][s]);
            }
        }
    }
    sums
}
