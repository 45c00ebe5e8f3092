//! Short causal convolution, one filter a channel, then SiLU.
//! p_t = Σ_j w_j ⊙ x_{t-(Kc-1)+j} over j in 0..Kc,  y = silu(p).
//!
//! x [N, C] (N = B T; may be columns of a wider projection), w [C, Kc], no bias, y [N, C]; all in one dtype, at least
//! f32. A term is dropped where its token lies before the document; where the document goes on from an earlier piece
//! (`Docs::carried`), it comes from the tail [B, Kc-1, C]: the rows of x that precede this piece, the newest last.
//! Forward also gives the next piece's tail. Saves x; p is recomputed. With d_p = d_y ⊙ silu'(p):
//! d_x_s = Σ_j w_j ⊙ d_p_{s+(Kc-1)-j}, same document only, following its slot (write or add);
//! d_w_j += Σ_t d_p_t ⊙ x_{t-(Kc-1)+j}, tokens in fixed blocks. The tail is a constant and has no gradient.
//! Deterministic. A document gives the same bits of y and d_x wherever it lies, however it is cut into pieces.
//! Source: MATH 1.7, 1.9.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod decode;
mod fast;

use crate::Docs;
use crate::bench::Bench;
use crate::check::{Case, Noise};
use hymo_tape::{GradSlot, Tape, Var};
use hymo_tensor::{Ctx, DType, Device, Error, Real, Result, Tensor};
use std::sync::Arc;

const OP: &str = "short_conv";

/// What the backward needs beside the weight.
#[derive(Debug, Clone)]
pub struct Saved {
    x: Tensor,
    tail: Option<Tensor>,
    docs: Arc<Docs>,
}

impl Saved {
    fn bytes(&self) -> usize {
        self.x.bytes() + self.tail.as_ref().map_or(0, Tensor::bytes)
    }
}

/// y [N, C], the next tail [B, Kc-1, C] and what the backward needs, of x [N, C], w [C, Kc] and, where a row of `docs`
/// is continued, the tail that the earlier piece gave.
pub fn forward(
    ctx: &Ctx,
    x: &Tensor,
    w: &Tensor,
    docs: &Arc<Docs>,
    tail: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Saved)> {
    let k = expect_filter(x, w)?;
    docs.expect(OP, "x", x.rows())?;
    match tail {
        Some(tail) => expect_tail(tail, x, docs.batch(), k)?,
        None if k > 1 && (0..docs.batch()).any(|b| docs.continued(b)) => {
            return Err(Error::value(OP, "tail", "missing", "the earlier piece's tail, as a row is continued"));
        }
        None => {}
    }
    let saved = Saved { x: x.clone(), tail: tail.cloned(), docs: Arc::clone(docs) };
    let (y, next) = match ctx.device() {
        Device::Cpu => (
            on_cpu!(ctx, x.dtype(), "short_conv", fast: fast::forward(ctx, &saved, w), oracle: cpu::oracle, (ctx, &saved, w))?,
            match x.dtype() {
                DType::F64 => cpu::next_tail::<f64>(ctx, &saved, k),
                _ => cpu::next_tail::<f32>(ctx, &saved, k),
            }?,
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(ctx, gpu, &saved, w)?,
    };
    Ok((y, next, saved))
}

/// Kc, when w [C, Kc] fits x [.., C].
fn expect_filter(x: &Tensor, w: &Tensor) -> Result<usize> {
    let [c, k] = w.dims2(OP, "w")?;
    if c != x.cols() || k == 0 {
        return Err(Error::Shape { op: OP, arg: "w", got: w.shape(), want: format!("[{}, 1 or more]", x.cols()) });
    }
    if !crate::goes_with(w, x) {
        return Err(Error::DType { op: OP, arg: "w", got: w.dtype(), want: "the dtype of x" });
    }
    Ok(k)
}

fn expect_tail(tail: &Tensor, x: &Tensor, batch: usize, k: usize) -> Result<()> {
    tail.expect(OP, "tail", &[batch, k - 1, x.cols()])?;
    if tail.dtype() != x.dtype() {
        return Err(Error::DType { op: OP, arg: "tail", got: tail.dtype(), want: "the dtype of x" });
    }
    Ok(())
}

/// d_x and d_w from d_y.
pub fn backward(
    ctx: &Ctx,
    saved: &Saved,
    w: &Tensor,
    d_y: &Tensor,
    d_x: &mut GradSlot<'_>,
    d_w: &mut GradSlot<'_>,
) -> Result<()> {
    match ctx.device() {
        Device::Cpu => on_cpu!(
            ctx, d_y.dtype(), "short_conv",
            fast: fast::backward(ctx, saved, w, d_y, d_x, d_w),
            oracle: cpu::oracle_backward, (ctx, saved, w, d_y, d_x, d_w)
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(ctx, gpu, saved, w, d_y, d_x, d_w),
    }
}

/// On the tape: y and the next piece's tail.
pub fn apply(tape: &mut Tape, x: &Var, w: &Var, docs: &Arc<Docs>, tail: Option<&Tensor>) -> Result<(Var, Tensor)> {
    let (y, next, saved) = forward(tape.ctx(), x.value(), w.value(), docs, tail)?;
    let (w_value, bytes) = (w.value().clone(), saved.bytes());
    let [y] = tape.record(OP, [x, w], [y], bytes, move |ctx, [d_y], [d_x, d_w]| {
        let Some(d_y) = d_y else { return Ok(()) };
        backward(ctx, &saved, &w_value, &d_y, d_x, d_w)
    });
    Ok((y, next))
}

/// One token of each of B sequences while decoding: y [B, C] of x [B, C] and w [C, Kc]. The tail [B, Kc-1, C] (zeros
/// before a document's first token) moves on by one in place, so no other tensor may hold its storage. The same bits
/// as [`forward`] over all tokens at once.
pub fn step(ctx: &Ctx, x: &Tensor, w: &Tensor, tail: &mut Tensor) -> Result<Tensor> {
    fn go<T: Real>(ctx: &Ctx, x: &Tensor, w: &Tensor, tail: &mut Tensor) -> Result<Tensor> {
        let mut y = ctx.empty::<T>(x.dims())?;
        cpu::step::<T>(x.view()?, w.view()?, tail.view_mut()?, y.view_mut()?);
        Ok(y)
    }
    let [batch, _] = x.dims2(OP, "x")?;
    let k = expect_filter(x, w)?;
    expect_tail(tail, x, batch, k)?;
    match (ctx.device(), x.dtype()) {
        (Device::Cpu, DType::F64) => go::<f64>(ctx, x, w, tail),
        (Device::Cpu, _) => go::<f32>(ctx, x, w, tail),
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), _) => Err(crate::gpu::missing(OP, "step of decoding")),
    }
}

/// Documents of 1, 2, 3, .. tokens (`lens` in turn) over rows of `len`.
fn documents(batch: usize, len: usize, lens: &[usize], continued: bool) -> Arc<Docs> {
    let mut seg = Vec::with_capacity(batch * len);
    for b in 0..batch {
        let mut id = 0;
        while seg.len() < (b + 1) * len {
            let n = lens[id as usize % lens.len()].min((b + 1) * len - seg.len());
            seg.extend(std::iter::repeat_n(id, n));
            id += 1;
        }
    }
    let continued: Vec<bool> = (0..batch).map(|b| continued && b % 2 == 0).collect();
    Arc::new(Docs::continuing(batch, len, &seg, &continued).expect("invariant: one id a token"))
}

fn case(name: &str, docs: Arc<Docs>, c: usize, k: usize) -> Case {
    let n = docs.tokens();
    let mut noise = Noise::new((n * 10 + c + k) as u64);
    let tail = noise.normals(docs.batch() * (k - 1) * c);
    let dims = [docs.batch(), (k - 1).max(1), c];
    let tail = if k == 1 { vec![0.; docs.batch() * c] } else { tail };
    Case::new(format!("short_conv {name}, {n} x {c}, kernel {k}"), &["y"])
        .leaf("x", &[n, c], noise.normals(n * c))
        .param("w", &[c, k], noise.normals(c * k))
        .constant("tail", &dims, tail)
        .bound("y", 1.6e-7)
        .bound("d_x", 2e-7)
        .bound("d_w", if n < 200 { 5e-7 } else { 1.1e-6 }) // the oracle's is one long sum
        .apply(move |tape, v| {
            let tail = (k > 1).then(|| v[2].value());
            Ok(vec![apply(tape, &v[0], &v[1], &docs, tail)?.0])
        })
}

/// Documents of 1 to 3 tokens, rows across the blocks, carried rows, kernels of 1 to 5.
pub fn cases() -> Vec<Case> {
    vec![
        case("one token", documents(1, 1, &[1], false), 1, 4),
        case("tiny documents", documents(2, 31, &[1, 2, 3], true), 5, 4),
        case("carried rows", documents(3, 43, &[70], true), 7, 4),
        case("block edges", documents(1, 65, &[64, 1], true), 64, 4),
        case("rows across blocks", documents(7, 143, &[61, 4, 3], true), 9, 4),
        case("kernel 1", documents(2, 33, &[3, 9], true), 9, 1),
        case("kernel 2", documents(2, 33, &[3, 9], true), 3, 2),
        case("kernel 5", documents(2, 70, &[3, 9, 40], true), 3, 5),
    ]
}

/// Every length of a row around the kernels' blocks, and thousands of documents.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_cases() -> Vec<Case> {
    let mut out: Vec<Case> = (1..=130).map(|t| case("tail", documents(1, t, &[7, 1, 40], true), 3, 4)).collect();
    out.push(case("long", documents(1, 1000, &[300, 1, 640], false), 8, 4));
    out.push(case("5,000 documents", documents(1, 10_000, &[1, 2, 3], false), 8, 4));
    out
}

/// At hymo-nano's sizes, 4 x 512 tokens.
pub fn benches() -> Vec<Bench> {
    vec![Bench::new(case("training", documents(4, 512, &[512], false), 512, 4))]
}

#[cfg(test)]
mod tests;
