//! The GPU's side: launches of `delta_rule.cu`. Chunks are of 64 tokens whatever [`super::Args::chunk`] says. g, β and states of
//! the caller's are f32 whatever qkv is.

use super::{Dims, Inputs, OP, Saved, Upstream};
use crate::gpu::{DELTA_RULE, Run, args, c_type, expect_f32};
use hymo_cuda::{Arg, Gpu, Ptr};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, DType, Error, GpuMat, Result, Tensor};

/// Tokens of a chunk.
const CHUNK: usize = 64;
/// Bytes of a chunk's gates in shared memory: `Gates`.
const GATES: usize = 1552;

/// What the kernels are compiled for, and what follows from it.
struct Shape {
    /// K and V, padded.
    dk: usize,
    dv: usize,
    /// Columns of V in a tile of the parallel kernels, and of the sequential ones: forward, backward.
    wide: usize,
    across: [usize; 2],
    /// Chunks in shared memory of the sequential kernels.
    stages: usize,
    size: usize,
    chunks: usize,
    c_type: &'static str,
}

impl Shape {
    fn new(dtype: DType, d: Dims) -> Result<Self> {
        let c_type = c_type(OP, dtype)?;
        let dk = [16, 32, 64, 128].into_iter().find(|&n| n >= d.d_k);
        let dk = dk.ok_or_else(|| Error::value(OP, "d_k", d.d_k, "at most 128 on a GPU"))?;
        let half = dtype == DType::BF16;
        let (wide, across, stages) = if half { (64, [32, 64], 2) } else { (32, [32, 32], 1) };
        let chunks = d.len.div_ceil(CHUNK);
        Ok(Shape { dk, dv: d.d_v.next_multiple_of(64), wide, across, stages, size: dtype.size(), chunks, c_type })
    }

    /// Elements of a row in shared memory: eight more keep its neighbours out of each other's banks.
    fn rows(&self, rows: usize, width: usize) -> usize {
        rows * (width + 8) * self.size
    }

    fn of_k(&self, many: usize) -> usize {
        self.rows(many * CHUNK, self.dk)
    }

    fn prepare_bytes(&self) -> usize {
        let pairs = CHUNK * (CHUNK + 4) * 4 + CHUNK * (CHUNK + 8) * 4;
        GATES + self.of_k(2) + self.rows(CHUNK, CHUNK) + self.rows(CHUNK, self.wide) + pairs
    }

    fn states_bytes(&self) -> usize {
        let w = self.across[0];
        self.stages * (self.of_k(2) + self.rows(CHUNK, w)) + self.rows(self.dk + CHUNK, w)
    }

    fn output_bytes(&self) -> usize {
        self.of_k(1) + self.rows(CHUNK, CHUNK) + self.rows(self.dk + CHUNK, self.wide)
    }

    fn bwd_states_bytes(&self) -> usize {
        let w = self.across[1];
        self.stages * (self.of_k(3) + self.rows(CHUNK, CHUNK) + self.rows(CHUNK, w)) + self.rows(self.dk + CHUNK, w)
    }

    fn bwd_grads_bytes(&self) -> usize {
        let rows = (8 * CHUNK + 40) * 4;
        let tiles = self.rows(4 * CHUNK, self.wide);
        let pairs = CHUNK * (CHUNK + 1) * 4 + self.rows(2 * CHUNK, CHUNK);
        GATES + rows + self.of_k(3) + self.rows(CHUNK, CHUNK) + self.rows(2 * self.dk, self.wide) + tiles.max(pairs)
    }

    fn launch(
        &self,
        gpu: &Gpu,
        kernel: &'static str,
        across: usize,
        (grid, threads, shared): ([usize; 3], usize, usize),
        list: &[Arg],
    ) -> Result<()> {
        let [dk, wide, across, stages] = [self.dk, self.wide, across, self.stages].map(|n| n.to_string());
        let defines = [("S", self.c_type), ("DK", &dk), ("BV", &wide), ("BW", &across), ("STAGES", &stages)];
        Run { gpu, source: &DELTA_RULE, defines: &defines }.grid(kernel, grid, threads, shared, list)
    }
}

/// What `prepare` leaves for the other kernels, `[B H chunks, ..]`.
struct Prepared {
    w: Tensor,
    u: Tensor,
    kd: Tensor,
    qe: Tensor,
    p: Tensor,
    inverse: Option<Tensor>,
    keep: Tensor,
}

/// The caller's inputs as every kernel takes them: qkv, gates and documents.
fn inputs_of(ctx: &Ctx, gpu: &Gpu, inputs: Inputs<'_>) -> Result<Vec<Arg>> {
    let (qkv, g, beta) = (inputs.qkv.gpu()?, expect_f32(OP, "g", inputs.g)?, expect_f32(OP, "beta", inputs.beta)?);
    let docs = inputs.docs.on_gpu(ctx, gpu)?;
    let (start, flags) = (docs.start.gpu()?.at(), docs.flags.gpu()?.at());
    Ok(args![qkv.at(), qkv.stride(), g.at(), g.stride(), beta.at(), beta.stride(), start, flags].to_vec())
}

fn at(t: &Tensor) -> Result<Ptr> {
    Ok(t.gpu()?.at())
}

fn prepare(ctx: &Ctx, gpu: &Gpu, inputs: Inputs<'_>, d: Dims, s: &Shape, backward: bool) -> Result<Prepared> {
    let (n, dtype) = (d.batch * d.heads * s.chunks, inputs.qkv.dtype());
    let of = |width| ctx.empty_real(dtype, &[n * CHUNK, width]);
    let inverse = if backward { Some(of(CHUNK)?) } else { None };
    let keep = ctx.empty::<f32>(&[n])?;
    let out = Prepared { w: of(s.dk)?, u: of(s.dv)?, kd: of(s.dk)?, qe: of(s.dk)?, p: of(CHUNK)?, inverse, keep };
    let mut list = inputs_of(ctx, gpu, inputs)?;
    let inverse = out.inverse.as_ref().map_or(Ok(Ptr::NULL), at)?;
    list.extend_from_slice(args![
        at(&out.w)?,
        at(&out.u)?,
        at(&out.kd)?,
        at(&out.qe)?,
        at(&out.p)?,
        inverse,
        at(&out.keep)?,
        d.len,
        d.heads,
        d.d_k,
        d.d_v,
        s.dv,
        s.chunks,
        d.l2norm,
        d.scale as f32
    ]);
    s.launch(gpu, "delta_rule_prepare", s.across[0], ([s.chunks, d.heads, d.batch], 128, s.prepare_bytes()), &list)?;
    Ok(out)
}

pub(super) fn forward(
    ctx: &Ctx,
    gpu: &Gpu,
    inputs: Inputs<'_>,
    d: Dims,
    keep: bool,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let (s, dtype) = (Shape::new(inputs.qkv.dtype(), d)?, inputs.qkv.dtype());
    let mut o = ctx.empty_real(dtype, &[inputs.qkv.rows(), d.heads * d.d_v])?;
    if d.len == 0 {
        let h_t = match inputs.h0 {
            Some(h0) => h0.copy(ctx)?,
            None => ctx.zeros::<f32>(&[d.batch, d.heads, d.d_k, d.d_v])?,
        };
        return Ok((o, h_t, None));
    }
    let mut h_t = ctx.empty::<f32>(&[d.batch, d.heads, d.d_k, d.d_v])?;
    let made = prepare(ctx, gpu, inputs, d, &s, false)?;
    let n = d.batch * d.heads * s.chunks;
    let states = ctx.empty_real(dtype, &[n * s.dk, s.dv])?;
    let v_new = ctx.empty_real(dtype, &[n * CHUNK, s.dv])?;
    let h0 = inputs.h0.map_or(Ok(Ptr::NULL), |t| expect_f32(OP, "h0", t).map(|m| m.at()))?;
    let flags = at(&inputs.docs.on_gpu(ctx, gpu)?.flags)?;
    let sizes = args![d.len, d.heads, d.d_k, d.d_v, s.dv, s.chunks].to_vec();
    let mut list = args![
        at(&made.w)?,
        at(&made.u)?,
        at(&made.kd)?,
        at(&made.keep)?,
        h0,
        flags,
        at(&states)?,
        at(&v_new)?,
        h_t.gpu_mut()?.at()
    ]
    .to_vec();
    list.extend(&sizes);
    let across = s.across[0];
    s.launch(gpu, "delta_rule_states", across, ([s.dv / across, d.heads, d.batch], 128, s.states_bytes()), &list)?;
    let to = o.gpu_mut()?;
    let list = args![
        at(&made.qe)?,
        at(&made.p)?,
        at(&states)?,
        at(&v_new)?,
        to.at(),
        to.stride(),
        d.len,
        d.heads,
        d.d_v,
        s.dv,
        s.chunks
    ];
    s.launch(gpu, "delta_rule_output", across, ([s.chunks, d.heads, d.batch], 128, s.output_bytes()), list)?;
    Ok((o, h_t, keep.then_some(states)))
}

// tidy: long, a kernel's launches in order
pub(super) fn backward(
    ctx: &Ctx,
    gpu: &Gpu,
    saved: &Saved,
    upstream: Upstream<'_>,
    d: Dims,
    [d_qkv, d_g, d_beta, d_h0]: &mut [GradSlot<'_>; 4],
) -> Result<()> {
    let (inputs, dtype) = (saved.inputs(), saved.qkv.dtype());
    let s = Shape::new(dtype, d)?;
    let Some(states) = &saved.states else {
        return Err(Error::value(OP, "saved", "no chunk states", "what a forward with `keep` saves"));
    };
    let made = prepare(ctx, gpu, inputs, d, &s, true)?;
    let zeros = match upstream.d_o {
        Some(_) => None,
        None => Some(ctx.zeros_real(dtype, &[saved.qkv.rows(), d.heads * d.d_v])?),
    };
    let d_o = upstream.d_o.or(zeros.as_ref()).expect("invariant: one of the two").gpu()?;
    let d_ht = upstream.d_h_t.map_or(Ok(Ptr::NULL), |t| expect_f32(OP, "d_h_t", t).map(|m| m.at()))?;
    let flags = at(&inputs.docs.on_gpu(ctx, gpu)?.flags)?;
    let n = d.batch * d.heads * s.chunks;
    let d_states = ctx.empty_real(dtype, &[n * s.dk, s.dv])?;
    let d_vnew = ctx.empty_real(dtype, &[n * CHUNK, s.dv])?;
    let mut d_start = match d_h0.wanted() {
        true => Some(ctx.empty::<f32>(&[d.batch, d.heads, d.d_k, d.d_v])?),
        false => None,
    };
    let to_start = d_start.as_mut().map_or(Ok(Ptr::NULL), |t| t.gpu_mut().map(|m| m.at()))?;
    let list = args![
        at(&made.w)?,
        at(&made.kd)?,
        at(&made.qe)?,
        at(&made.p)?,
        at(&made.keep)?,
        d_o.at(),
        d_o.stride(),
        d_ht,
        flags,
        at(&d_states)?,
        at(&d_vnew)?,
        to_start,
        d.len,
        d.heads,
        d.d_k,
        d.d_v,
        s.dv,
        s.chunks
    ];
    let across = s.across[1];
    let grid = [s.dv / across, d.heads, d.batch];
    s.launch(gpu, "delta_rule_bwd_states", across, (grid, 128, s.bwd_states_bytes()), list)?;

    let place =
        |t: &Option<(GpuMat, bool)>| t.as_ref().map_or((Ptr::NULL, 0, false), |(m, add)| (m.at(), m.stride(), *add));
    let (of_qkv, of_g, of_beta) = (place(&d_qkv.gpu(ctx)?), place(&d_g.gpu(ctx)?), place(&d_beta.gpu(ctx)?));
    let inverse = made.inverse.as_ref().map_or(Ok(Ptr::NULL), at)?;
    let mut list = inputs_of(ctx, gpu, inputs)?;
    list.extend_from_slice(args![
        at(&made.w)?,
        at(&made.u)?,
        inverse,
        at(states)?,
        at(&d_states)?,
        at(&d_vnew)?,
        d_o.at(),
        d_o.stride(),
        of_qkv.0,
        of_qkv.1,
        of_qkv.2,
        of_g.0,
        of_g.2,
        of_beta.0,
        of_beta.2,
        d.len,
        d.heads,
        d.d_k,
        d.d_v,
        s.dv,
        s.chunks,
        d.l2norm,
        d.scale as f32
    ]);
    let grid = [s.chunks, d.heads, d.batch];
    s.launch(gpu, "delta_rule_bwd_grads", across, (grid, 256, s.bwd_grads_bytes()), &list)?;
    d_start.map_or(Ok(()), |t| d_h0.give(ctx, t))
}
