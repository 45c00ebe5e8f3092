//! What the operations' CUDA sides share: launching, element types by name, sums of shares, and the list of all kernels.

use hymo_cuda::{Arg, Gpu, Launch, Source};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, DType, Error, GpuMat, Result, Tensor};

/// A kernel's arguments, each converted by [`Arg::from`].
macro_rules! args {
    ($($x:expr),* $(,)?) => { &[$(hymo_cuda::Arg::from($x)),*] };
}
pub(crate) use args;

/// What every source begins with: element types and sums in a fixed order.
pub const PRELUDE: (&str, &str) = ("prelude.cuh", include_str!("prelude.cuh"));

/// The source of an operation: the prelude, then its own file.
macro_rules! source {
    ($name:literal $(, $file:literal)+) => {
        hymo_cuda::Source {
            name: $name,
            parts: &[$crate::gpu::PRELUDE $(, ($file, include_str!($file)))+],
        }
    };
}

pub(crate) const COLUMNS: Source = source!("columns", "columns.cu");
pub(crate) const ATTENTION: Source = source!("attention", "mma.cuh", "attention/attention.cu");
pub(crate) const CROSS_ENTROPY: Source = source!("cross_entropy", "cross_entropy/cross_entropy.cu");
pub(crate) const DECAY_GATE: Source = source!("decay_gate", "decay_gate/decay_gate.cu");
pub(crate) const DELTA_RULE: Source = source!("delta_rule", "mma.cuh", "delta_rule/delta_rule.cu");
pub(crate) const EMBEDDING: Source = source!("embedding", "embedding/embedding.cu");
pub(crate) const EXPERTS: Source = source!("experts", "experts/experts.cu");
pub(crate) const GATED_NORM: Source = source!("gated_norm", "gated_norm/gated_norm.cu");
pub(crate) const RESIDUAL: Source = source!("residual", "residual/residual.cu");
pub(crate) const RMS_NORM: Source = source!("rms_norm", "rms_norm/rms_norm.cu");
pub(crate) const ROTARY: Source = source!("rotary", "rotary/rotary.cu");
pub(crate) const ROUTER: Source = source!("router", "router/router.cu");
pub(crate) const SHORT_CONV: Source = source!("short_conv", "short_conv/short_conv.cu");
pub(crate) const SWIGLU: Source = source!("swiglu", "swiglu/swiglu.cu");

/// A kernel source as it is compiled: with the values of its `#define`s.
pub type Variant = (Source, Vec<(&'static str, &'static str)>);

/// Every kernel source in the ways in which the presets need it: what is compiled without a GPU to see that it does.
#[must_use]
pub fn sources() -> Vec<Variant> {
    let mut all = vec![(COLUMNS, Vec::new())];
    all.extend(hymo_tensor::kernel_sources());
    for t in ["float", "bf16"] {
        let with = |more: &[(&'static str, &'static str)]| [&[("T", t)], more].concat();
        let plain = [CROSS_ENTROPY, DECAY_GATE, EMBEDDING, RESIDUAL, RMS_NORM, ROTARY, ROUTER, SWIGLU];
        all.extend(plain.map(|s| (s, with(&[]))));
        all.push((EXPERTS, with(&[("Z", t)])));
        all.extend(["0", "1"].map(|silu| (GATED_NORM, with(&[("SILU", silu)]))));
        all.extend(["1", "2", "4", "5"].map(|k| (SHORT_CONV, with(&[("KC", k)]))));
        let [keys, queries] = if t == "bf16" { ["64", "32"] } else { ["32", "16"] };
        for [d, r, v] in HEADS {
            let sizes = [("D", *d), ("R", *r), ("V", *v), ("KEYS", keys), ("QUERIES", queries)];
            all.push((ATTENTION, with(&sizes)));
        }
        let [wide, forward, backward, stages] =
            if t == "bf16" { ["64", "32", "64", "2"] } else { ["32", "32", "32", "1"] };
        for dk in ["16", "32", "64", "128"] {
            for across in if forward == backward { vec![forward] } else { vec![forward, backward] } {
                let sizes = vec![("S", t), ("DK", dk), ("BV", wide), ("BW", across), ("STAGES", stages)];
                all.push((DELTA_RULE, sizes));
            }
        }
    }
    all.push((EXPERTS, vec![("T", "bf16"), ("Z", "float")]));
    all.extend(products());
    all
}

/// Content, rotary and value numbers of heads: those of the presets, then those of the cases.
const HEADS: &[[&str; 3]] = &[
    ["24", "8", "32"],
    ["48", "16", "64"],
    ["96", "32", "128"],
    ["4", "2", "3"],
    ["6", "2", "5"],
    ["4", "0", "4"],
    ["0", "4", "3"],
    ["3", "2", "4"],
    ["2", "2", "3"],
    ["16", "2", "16"],
    ["12", "4", "12"],
];

fn products() -> Vec<Variant> {
    use crate::matmul::{MATMUL, PANELS};
    let types = ["float", "bf16"];
    let mut all = Vec::new();
    let forms = [("0", "0", "0"), ("0", "0", "1"), ("0", "1", "0"), ("1", "0", "0"), ("1", "0", "1"), ("2", "1", "0")];
    for (mode, a_t, b_t) in forms {
        for i in 0..8 {
            let [ta, tb, tc] = [i & 1, i >> 1 & 1, i >> 2].map(|bit| types[bit]);
            let both = if ta == "bf16" && tb == "bf16" { "bf16" } else { "float" };
            let defines = [("MODE", mode), ("TA", ta), ("TB", tb), ("TC", tc), ("S", both), ("A_T", a_t), ("B_T", b_t)];
            // Groups are of one type on both sides.
            if mode == "0" || ta == tb {
                all.push((MATMUL, defines.to_vec()));
            }
        }
        if mode != "0" {
            all.extend(types.map(|tc| (PANELS, vec![("MODE", mode), ("TC", tc), ("A_T", a_t), ("B_T", b_t)])));
        }
    }
    all
}

/// The name of an element type in kernels.
pub(crate) fn c_type(op: &'static str, dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float"),
        DType::BF16 => Ok("bf16"),
        got => Err(Error::DType { op, arg: "input", got, want: "f32 or bf16 on a GPU" }),
    }
}

/// What a GPU has no kernel for yet; nothing runs on the processor in its place.
pub(crate) fn missing(op: &'static str, what: &'static str) -> Error {
    Error::Unsupported { op, what, device: "a GPU" }
}

/// Fails unless a tensor that is f32 whatever the activations are, is.
pub(crate) fn expect_f32(op: &'static str, arg: &'static str, t: &Tensor) -> Result<GpuMat> {
    match t.dtype() {
        DType::F32 => t.gpu(),
        got => Err(Error::DType { op, arg, got, want: "f32" }),
    }
}

/// A launch of one block a unit of work, over threads of one dimension.
pub(crate) struct Run<'a> {
    pub gpu: &'a Gpu,
    pub source: &'a Source,
    pub defines: &'a [(&'a str, &'a str)],
}

impl Run<'_> {
    /// One thread an element.
    pub fn each(&self, kernel: &'static str, n: usize, args: &[Arg]) -> Result<()> {
        self.grid(kernel, [n.div_ceil(256).min(1 << 18), 1, 1], 256, 0, args)
    }

    /// A warp a row, eight of them a block.
    pub fn warps(&self, kernel: &'static str, rows: usize, args: &[Arg]) -> Result<()> {
        self.grid(kernel, [rows.div_ceil(8), 1, 1], 256, 0, args)
    }

    /// Any grid.
    pub fn grid(
        &self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: &[Arg],
    ) -> Result<()> {
        let (source, defines) = (self.source, self.defines);
        let most = self.gpu.info().shared_per_block as usize;
        if shared > most {
            let got = format!("{shared} bytes of shared memory");
            return Err(Error::value(kernel, "shapes", got, format!("at most the {most} of this GPU's blocks")));
        }
        Ok(self.gpu.launch(&Launch { source, defines, kernel, grid, threads, shared }, args)?)
    }
}

/// Rows that one block adds up before its share is written: part of the result, so one number for all operations.
pub(crate) const SHARE: usize = 64;

/// Adds the shares `[parts, cols]` of a parameter's gradient into its slot, in order.
pub(crate) fn sum_shares(ctx: &Ctx, gpu: &Gpu, slot: &mut GradSlot<'_>, shares: &Tensor) -> Result<()> {
    let Some((to, add)) = slot.gpu(ctx)? else { return Ok(()) };
    if to.dtype() != DType::F32 || (to.rows() > 1 && to.stride() != to.cols()) {
        return Err(Error::DType { op: "sum_shares", arg: "gradient", got: to.dtype(), want: "f32 without gaps" });
    }
    let [parts, cols] = shares.dims2("sum_shares", "shares")?;
    let run = Run { gpu, source: &COLUMNS, defines: &[] };
    run.each("sum_partials", cols, args![to.at(), shares.gpu()?.at(), parts, cols, add])
}

/// A copy on a GPU of something that the processor holds, made once and shared by clones.
#[derive(Debug, Clone)]
pub(crate) struct OnGpu<T>(std::sync::OnceLock<(Gpu, T)>);

impl<T> Default for OnGpu<T> {
    fn default() -> Self {
        OnGpu(std::sync::OnceLock::new())
    }
}

/// A copy says nothing of what it was made from.
impl<T> PartialEq for OnGpu<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for OnGpu<T> {}

impl<T: Clone> OnGpu<T> {
    /// The copy on `gpu`. On a second GPU it is made anew each time.
    pub fn get(&self, gpu: &Gpu, make: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.0.get() {
            Some((on, made)) if on == gpu => Ok(made.clone()),
            Some(_) => make(),
            None => {
                let made = make()?;
                Ok(self.0.get_or_init(|| (gpu.clone(), made)).1.clone())
            }
        }
    }
}

/// A batch's documents on a GPU, both `[N]` i32.
#[derive(Debug, Clone)]
pub(crate) struct GpuDocs {
    /// First token of each token's document, in its row.
    pub start: Tensor,
    /// 1 where the document goes on from an earlier piece, 2 where it is padding, added up.
    pub flags: Tensor,
}

impl GpuDocs {
    pub fn new(ctx: &Ctx, docs: &crate::Docs) -> Result<Self> {
        let tokens = || (0..docs.batch()).flat_map(|b| (0..docs.len()).map(move |t| (b, t)));
        let start: Vec<i32> = tokens().map(|(b, t)| docs.start(b, t) as i32).collect();
        let flag = |(b, t)| i32::from(docs.carried(b, t)) + 2 * i32::from(docs.padding(b, t));
        let flags: Vec<i32> = tokens().map(flag).collect();
        let n = docs.tokens();
        Ok(GpuDocs { start: Tensor::from_slice(ctx, &[n], &start)?, flags: Tensor::from_slice(ctx, &[n], &flags)? })
    }
}
