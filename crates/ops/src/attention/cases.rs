use super::{Args, Latent, absorbed, apply, cached};
use crate::Docs;
use crate::bench::Bench;
use crate::check::{Case, Noise};
use crate::linear;
use hymo_tape::Var;
use hymo_tensor::{Ctx, DType, Path, Real, Result, Tensor};

/// Heads H on groups G with the usual scale.
pub(super) fn args(n_heads: usize, n_groups: usize, [d_nope, d_rope, d_v]: [usize; 3]) -> Args {
    Args { n_heads, n_groups, d_nope, d_rope, d_v, scale: ((d_nope + d_rope) as f64).powf(-0.5) }
}

/// Document ids of a row of `len` tokens, documents of the given lengths by turns.
pub(super) fn ids(len: usize, lengths: &[usize]) -> Vec<i32> {
    let each = lengths.iter().cycle().enumerate().flat_map(|(i, &n)| std::iter::repeat_n(i as i32, n));
    each.take(len).collect()
}

/// Every output and gradient, documents of the given lengths in each of `batch` rows of `len`.
pub(super) fn training(batch: usize, len: usize, lengths: &[usize], args: Args) -> Case {
    let seg: Vec<i32> = (0..batch).flat_map(|_| ids(len, lengths)).collect();
    let docs = Docs::new(batch, len, &seg);
    let Args { n_heads: h, n_groups: g, d_nope, d_rope, d_v, .. } = args;
    let n = batch * len;
    let mut noise = Noise::new((n * 100 + h) as u64);
    let mut leaf = |cols: usize| (vec![n, cols], noise.normals(n * cols));
    let (q, kv, k_r) = (leaf(h * (d_nope + d_rope)), leaf(g * (d_nope + d_v)), leaf(g * d_rope));
    Case::new(format!("attention {batch} x {len}, {h}/{g} heads of {d_nope}+{d_rope}/{d_v}"), &["o", "lse", "max"])
        .leaf("q", &q.0, q.1)
        .leaf("kv", &kv.0, kv.1)
        .leaf("k_r", &k_r.0, k_r.1)
        .bound("o", 3e-7)
        .bound("lse", 2e-7)
        .bound("max", 2e-7)
        .bound("d_q", 6e-7)
        .bound("d_kv", 7e-7)
        .bound("d_k_r", 8e-7)
        .difference(1e-8)
        .apply(move |tape, v| {
            let out = apply(tape, &v[0], &v[1], &v[2], docs.as_ref().map_err(Clone::clone)?, args)?;
            Ok(vec![out.o, Var::constant(out.lse), Var::constant(out.max_logit)])
        })
}

/// The absorbed form against keys and values made from the latents, which the oracle's path takes.
fn latent(m: usize, l: usize, width: usize, args: Args) -> Case {
    let Args { n_heads: h, n_groups: g, d_nope, d_rope, d_v, .. } = args;
    let mut noise = Noise::new((m * 100 + l) as u64);
    let scale = (width as f64).powf(-0.5);
    let mut map = |rows: usize| noise.normals(rows * width).into_iter().map(|x| x * scale).collect();
    let (w_uk, w_uv) = (map(g * d_nope), map(g * d_v));
    // The second half of the queries belongs to a document that begins among the cached tokens.
    let from: Vec<usize> = (0..m).map(|i| if i < m / 2 { 0 } else { (l - m) / 2 }).collect();
    Case::new(format!("attention absorbed, {m} over {l}, latent {width}"), &["o"])
        .constant("q", &[m, h * (d_nope + d_rope)], noise.normals(m * h * (d_nope + d_rope)))
        .constant("c", &[l, width], noise.normals(l * width))
        .constant("k_r", &[l, g * d_rope], noise.normals(l * g * d_rope))
        .constant("w_uk", &[g * d_nope, width], w_uk)
        .constant("w_uv", &[g * d_v, width], w_uv)
        .bound("o", 5e-7)
        .apply(move |tape, v| {
            let [q, c, k_r, w_uk, w_uv] = std::array::from_fn(|i| v[i].value());
            let latent = Latent { c, k_r, w_uk, w_uv };
            let ctx = tape.ctx();
            let o = match ctx.path() {
                Path::Fast => absorbed(ctx, q, latent, &from, args)?,
                Path::Oracle => cached(ctx, q, &materialise(ctx, latent)?, k_r, &from, args)?.o,
            };
            Ok(vec![Var::constant(o)])
        })
}

/// Content keys and values of every cached token [L, G D + G V].
pub(super) fn materialise(ctx: &Ctx, latent: Latent<'_>) -> Result<Tensor> {
    let parts = [linear::forward(ctx, latent.c, latent.w_uk)?, linear::forward(ctx, latent.c, latent.w_uv)?];
    let widths = [parts[0].cols(), parts[1].cols()];
    let mut kv = ctx.zeros_real(latent.c.dtype(), &[latent.c.rows(), widths[0] + widths[1]])?;
    match kv.dtype() {
        DType::F64 => join::<f64>(&mut kv, &parts)?,
        _ => join::<f32>(&mut kv, &parts)?,
    }
    Ok(kv)
}

fn join<T: Real>(to: &mut Tensor, parts: &[Tensor; 2]) -> Result<()> {
    let mut to = to.view_mut::<T>()?;
    let (left, right) = (parts[0].view::<T>()?, parts[1].view::<T>()?);
    for i in 0..to.rows() {
        let (l, r) = to.row_mut(i).split_at_mut(left.cols());
        l.copy_from_slice(left.row(i));
        r.copy_from_slice(right.row(i));
    }
    Ok(())
}

/// Lengths around the tiles, short documents, one head and many, no rotary part and nothing else, the latent form.
pub fn cases() -> Vec<Case> {
    vec![
        training(1, 1, &[1], args(2, 1, [4, 2, 3])),
        training(2, 63, &[1, 3, 2, 40], args(4, 2, [6, 2, 5])),
        training(1, 64, &[64], args(1, 1, [4, 0, 4])),
        training(1, 65, &[2, 65], args(2, 2, [0, 4, 3])),
        training(1, 130, &[130], args(3, 1, [3, 2, 4])),
        // Enough rows and groups for the backward that takes each of them whole.
        training(4, 135, &[40, 95], args(2, 2, [3, 2, 4])),
        training(9, 5, &[2, 3], args(2, 1, [2, 2, 3])),
        latent(1, 130, 16, args(4, 2, [6, 2, 5])),
        latent(65, 200, 12, args(2, 2, [4, 4, 6])),
    ]
}

/// Every length around the tiles, the presets' heads, thousands of documents.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_cases() -> Vec<Case> {
    let mut out: Vec<Case> = (1..=130).map(|t| training(1, t, &[t.div_ceil(2)], args(4, 2, [6, 2, 5]))).collect();
    out.push(training(1, 1000, &[1, 300, 1, 600], args(4, 1, [96, 32, 128])));
    out.push(training(1, 300, &[300], args(3, 1, [24, 8, 32])));
    out.push(training(1, 300, &[300], args(2, 2, [48, 16, 64])));
    out.push(training(1, 10_000, &[1, 2, 3], args(1, 1, [6, 2, 5])));
    out
}

/// At hymo-nano's sizes, 4 x 512 tokens, and at hymo-30m's, 1 x 1024.
pub fn benches() -> Vec<Bench> {
    let bench = |batch: usize, len: usize, n_heads: usize, n_groups: usize, [nope, rope, d_v]: [usize; 3]| {
        // Half of the scores are in a token's future. Backward makes the scores again and four more products.
        let pairs = batch * n_heads * len * len / 2;
        let forward = (2 * pairs * (nope + rope + d_v)) as u64;
        let case = training(batch, len, &[len], args(n_heads, n_groups, [nope, rope, d_v]));
        Bench::new(case).flops(forward, forward + forward * 3 / 2)
    };
    vec![bench(4, 512, 6, 2, [24, 8, 32]), bench(1, 1024, 6, 2, [48, 16, 64])]
}
