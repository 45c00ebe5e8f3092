//! One harness for every operation: oracle in `f64` against central differences, fast path in `f32` against the oracle,
//! on poisoned memory, run twice (same bits), used twice (gradients add).
//!
//! The op tests and `hymo doctor` run the same [`Case`]s. An error is RMS(got - want) / RMS(want) of one output or one
//! gradient; its bound stands in the case and is only ever tightened.

use hymo_tape::{ParamGrads, Tape, Var};
use hymo_tensor::{Ctx, DType, Element, Error, Result, Tensor};

/// Reproducible noise for tests and checks: not for initialising models.
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Noise(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    /// Uniform in [0, 1) (the splitmix64 generator).
    pub fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An integer in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f64) as usize).min(n.saturating_sub(1))
    }

    /// Normal with mean 0 and deviation 1.
    pub fn normal(&mut self) -> f64 {
        let r = (-2. * (1. - self.uniform()).ln()).sqrt();
        r * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// `n` normals.
    pub fn normals(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.normal()).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Leaf,
    Param,
    Constant,
}

struct Input {
    name: &'static str,
    dims: Vec<usize>,
    values: Vec<f64>,
    kind: Kind,
}

type Apply = Box<dyn Fn(&mut Tape, &[Var]) -> Result<Vec<Var>>>;

/// One operation at one size: its inputs, how to apply it, and the bound of every output and gradient.
pub struct Case {
    name: String,
    inputs: Vec<Input>,
    outputs: Vec<&'static str>,
    bounds: Vec<(String, f64)>,
    difference: f64,
    /// Bounds of outputs and of gradients where activations are bf16.
    half: [f64; 2],
    /// Whether every number is one of bf16.
    rounded: bool,
    upstream_ones: bool,
    apply: Apply,
}

/// Inputs that are f32 also beside bf16 activations, parameters aside.
const FULL: &[&str] = &["E", "beta", "g", "gates", "h0"];
/// What a GPU's `f32` products may lose beside the processor's: they split each operand in two parts.
const GPU_SHARE: f64 = 6.;
/// The least bound in `f32` on a GPU, and the largest.
const GPU_BOUNDS: [f64; 2] = [2e-6, 1e-5];

/// How far one output or gradient was from its reference.
#[derive(Debug, Clone)]
pub struct Deviation {
    /// `y`, `d_x`, `d_x by differences`, ..
    pub what: String,
    /// The error found; NaN when anything was not finite.
    pub error: f64,
    /// The error allowed.
    pub bound: f64,
}

impl Deviation {
    /// Within the bound (NaN is not).
    pub fn ok(&self) -> bool {
        self.error <= self.bound
    }
}

/// What a [`Case`] found.
#[derive(Debug, Clone)]
pub struct Report {
    /// The case.
    pub case: String,
    /// Every comparison made.
    pub deviations: Vec<Deviation>,
}

impl Report {
    /// Whether every comparison is within its bound.
    pub fn ok(&self) -> bool {
        self.deviations.iter().all(Deviation::ok)
    }

    /// Panics with the table of comparisons unless all are within their bounds: for tests.
    #[track_caller]
    pub fn assert(&self) {
        let line = |d: &Deviation| {
            let mark = if d.ok() { "ok  " } else { "FAIL" };
            format!("  {mark} {:<24} {:.3e} (bound {:.0e})\n", d.what, d.error, d.bound)
        };
        assert!(self.ok(), "{}\n{}", self.case, self.deviations.iter().map(line).collect::<String>());
    }
}

/// RMS(got - want) / RMS(want); NaN when either holds a value that is not finite or the lengths differ; RMS(got) when
/// the reference is all zero.
pub fn rms_error(got: &[f64], want: &[f64]) -> f64 {
    let finite = |x: &[f64]| x.iter().all(|v| v.is_finite());
    if got.len() != want.len() || !finite(got) || !finite(want) {
        return f64::NAN;
    }
    let sum = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>();
    let err = sum(&mut got.iter().zip(want).map(|(g, w)| g - w));
    let reference = sum(&mut want.iter().copied());
    let of = if reference == 0. { got.len() as f64 } else { reference };
    if err == 0. { 0. } else { (err / of).sqrt() }
}

struct Run {
    outputs: Vec<Vec<f64>>,
    /// Which outputs have a gradient; the others are statistics, compared and not differentiated.
    tracked: Vec<bool>,
    grads: Vec<Option<Vec<f64>>>,
}

impl Case {
    /// A case of the given name with no inputs yet; `f32` errors are bounded by 1e-6 unless a bound says otherwise.
    pub fn new(name: impl Into<String>, outputs: &[&'static str]) -> Self {
        Case {
            name: name.into(),
            inputs: Vec::new(),
            outputs: outputs.to_vec(),
            bounds: Vec::new(),
            difference: 1e-6,
            half: [5e-3, 8e-3],
            rounded: false,
            upstream_ones: false,
            apply: Box::new(|_, _| Ok(Vec::new())),
        }
    }

    fn input(mut self, name: &'static str, dims: &[usize], values: Vec<f64>, kind: Kind) -> Self {
        // Both precisions must see the same numbers.
        let values = values.into_iter().map(|x| f64::from(x as f32)).collect();
        self.inputs.push(Input { name, dims: dims.to_vec(), values, kind });
        self
    }

    /// An activation: its gradient is checked.
    pub fn leaf(self, name: &'static str, dims: &[usize], values: Vec<f64>) -> Self {
        self.input(name, dims, values, Kind::Leaf)
    }

    /// A parameter in a flat buffer: its gradient is checked.
    pub fn param(self, name: &'static str, dims: &[usize], values: Vec<f64>) -> Self {
        self.input(name, dims, values, Kind::Param)
    }

    /// An input without a gradient.
    pub fn constant(self, name: &'static str, dims: &[usize], values: Vec<f64>) -> Self {
        self.input(name, dims, values, Kind::Constant)
    }

    /// The bound of an output (`"y"`) or of an input's gradient (`"d_x"`) in `f32`.
    pub fn bound(mut self, what: &str, bound: f64) -> Self {
        self.bounds.push((what.into(), bound));
        self
    }

    /// The bound of central differences in `f64` (1e-6 unless set).
    pub fn difference(mut self, bound: f64) -> Self {
        self.difference = bound;
        self
    }

    /// The bounds of outputs and of gradients where activations are bf16 (5e-3 and 8e-3 unless set).
    pub fn half(mut self, outputs: f64, gradients: f64) -> Self {
        self.half = [outputs, gradients];
        self
    }

    /// The outputs are losses: their upstream gradient is 1.
    pub fn losses(mut self) -> Self {
        self.upstream_ones = true;
        self
    }

    /// How the operation is applied to the inputs, in the order in which they were given.
    pub fn apply(mut self, f: impl Fn(&mut Tape, &[Var]) -> Result<Vec<Var>> + 'static) -> Self {
        self.apply = Box::new(f);
        self
    }

    /// What is checked, and at which size.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Rows of its first input, where any has a gradient.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn tokens_differentiated(&self) -> Option<usize> {
        self.inputs.iter().find(|i| i.kind != Kind::Constant)?;
        self.inputs[0].dims.first().copied()
    }

    /// Bytes of all inputs in `f32`.
    pub(crate) fn input_bytes(&self) -> u64 {
        self.inputs.iter().map(|i| 4 * i.values.len() as u64).sum()
    }

    /// The parameters in one flat buffer, and zeros for their gradients.
    pub(crate) fn params(&self, ctx: &Ctx, dtype: DType) -> Result<(Tensor, ParamGrads)> {
        let flat: Vec<f64> =
            self.inputs.iter().filter(|i| i.kind == Kind::Param).flat_map(|i| i.values.iter().copied()).collect();
        let n = flat.len().max(1);
        // Master weights and their gradients are never narrow.
        let dtype = if dtype == DType::BF16 { DType::F32 } else { dtype };
        let params = tensor(ctx, dtype, &[n], &if flat.is_empty() { vec![0.] } else { flat })?;
        Ok((params, ParamGrads::new(vec![ctx.zeros_real(dtype, &[n])?])?))
    }

    /// The upstream gradients of the tracked outputs.
    pub(crate) fn seeds(&self, ctx: &Ctx, outs: &[Var]) -> Result<Vec<Tensor>> {
        let tracked = outs.iter().enumerate().filter(|(_, v)| v.tracked());
        let of = |(i, v): (usize, &Var)| tensor(ctx, v.value().dtype(), v.dims(), &self.upstream(i, v.value().numel()));
        tracked.map(of).collect()
    }

    /// Applies the operation.
    pub(crate) fn apply_to(&self, tape: &mut Tape, vars: &[Var]) -> Result<Vec<Var>> {
        (self.apply)(tape, vars)
    }

    /// The inputs as tensors; parameters are views of one flat buffer.
    pub(crate) fn tensors(&self, ctx: &Ctx, dtype: DType, params: &Tensor) -> Result<Vec<Tensor>> {
        let mut offset = 0;
        let one = |input: &Input| {
            if input.kind != Kind::Param {
                let narrow = dtype == DType::BF16 && !FULL.contains(&input.name);
                let dtype = if dtype == DType::BF16 && !narrow { DType::F32 } else { dtype };
                return tensor(ctx, dtype, &input.dims, &input.values);
            }
            offset += input.values.len();
            params.slice_flat(offset - input.values.len(), &input.dims)
        };
        self.inputs.iter().map(one).collect()
    }

    /// The tensors of [`Case::tensors`] as variables of a tape.
    pub(crate) fn vars(&self, tape: &mut Tape, tensors: &[Tensor]) -> Vec<Var> {
        let mut offset = 0;
        let one = |(input, t): (&Input, &Tensor)| match input.kind {
            Kind::Leaf => tape.leaf(t.clone()),
            Kind::Constant => Var::constant(t.clone()),
            Kind::Param => {
                offset += input.values.len();
                Var::param(t.clone(), 0, offset - input.values.len())
            }
        };
        self.inputs.iter().zip(tensors).map(one).collect()
    }

    /// Upstream gradient of output `i`: fixed noise.
    fn upstream(&self, i: usize, n: usize) -> Vec<f64> {
        if self.upstream_ones {
            return vec![1.; n];
        }
        let round = |x: f64| if self.rounded { bf16(x) } else { f64::from(x as f32) };
        Noise::new(77 + i as u64).normals(n).into_iter().map(round).collect()
    }

    /// Applies the operation `times` times to the same inputs, and runs backwards from all outputs.
    fn run(&self, ctx: &Ctx, dtype: DType, times: usize) -> Result<Run> {
        let (params, grads) = self.params(ctx, dtype)?;
        let mut tape = Tape::training(ctx, grads);
        let vars = self.vars(&mut tape, &self.tensors(ctx, dtype, &params)?);
        let (mut outputs, mut tracked) = (Vec::new(), Vec::new());
        let mut seeds = Vec::new();
        for _ in 0..times {
            let outs = (self.apply)(&mut tape, &vars)?;
            outputs = outs.iter().map(|v| values(v.value())).collect::<Result<_>>()?;
            tracked = outs.iter().map(Var::tracked).collect();
            let upstream = self.seeds(ctx, &outs)?;
            seeds.extend(outs.into_iter().filter(Var::tracked).zip(upstream));
        }
        let mut grads = tape.backward_from(seeds)?;
        let mut found = Vec::new();
        for (input, var) in self.inputs.iter().zip(&vars) {
            found.push((input.kind == Kind::Leaf).then(|| grads.take(var).map(|d| values(&d))).flatten().transpose()?);
        }
        let flat = grads.into_params().map(|p| values(&p.flats()[0])).transpose()?.unwrap_or_default();
        let mut offset = 0;
        for (input, slot) in self.inputs.iter().zip(&mut found).filter(|(i, _)| i.kind == Kind::Param) {
            *slot = Some(flat[offset..offset + input.values.len()].to_vec());
            offset += input.values.len();
        }
        Ok(Run { outputs, tracked, grads: found })
    }

    /// The sum of tracked outputs times their upstream gradients, in `f64`, with one input's element moved.
    fn objective(&mut self, input: usize, element: usize, value: f64, tracked: &[bool]) -> Result<f64> {
        let old = std::mem::replace(&mut self.inputs[input].values[element], value);
        let ctx = Ctx::cpu().oracle();
        let mut tape = Tape::off(&ctx);
        let (params, _) = self.params(&ctx, DType::F64)?;
        let vars = self.vars(&mut tape, &self.tensors(&ctx, DType::F64, &params)?);
        let outs = (self.apply)(&mut tape, &vars)?;
        self.inputs[input].values[element] = old;
        let mut sum = 0.;
        for (i, out) in outs.iter().enumerate().filter(|(i, _)| tracked[*i]) {
            let y = values(out.value())?;
            sum += y.iter().zip(self.upstream(i, y.len())).map(|(y, d)| y * d).sum::<f64>();
        }
        Ok(sum)
    }

    fn bound_of(&self, what: &str) -> f64 {
        self.bounds.iter().rev().find(|(w, _)| w == what).map_or(1e-6, |(_, b)| *b)
    }

    /// Every gradient of the oracle in `f64` against central differences, on up to 24 elements of each input.
    fn differences(&mut self, oracle: &Run, out: &mut Vec<Deviation>) -> Result<()> {
        let mut noise = Noise::new(5);
        for i in 0..self.inputs.len() {
            let Some(grad) = &oracle.grads[i] else { continue };
            let n = grad.len();
            let picks: Vec<usize> = if n <= 24 { (0..n).collect() } else { (0..24).map(|_| noise.below(n)).collect() };
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for e in picks {
                let x = self.inputs[i].values[e];
                let h = 1e-5 * x.abs().max(1.);
                let (above, below) = (x + h, x - h);
                let rise =
                    self.objective(i, e, above, &oracle.tracked)? - self.objective(i, e, below, &oracle.tracked)?;
                want.push(rise / (2. * h));
                got.push(grad[e]);
            }
            let what = format!("d_{} by differences", self.inputs[i].name);
            // Elements whose gradient is far below the input's typical one carry only rounding of the differences.
            let scale = (grad.iter().map(|g| g * g).sum::<f64>() / n as f64).sqrt();
            let error = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / (scale + w.abs() + 1e-3)).fold(0., worst);
            out.push(Deviation { what, error, bound: self.difference });
        }
        Ok(())
    }

    /// Runs all comparisons: `f64` oracle against differences, the context's `f32` path against the oracle, twice
    /// (equal bits) and applied twice (gradients double).
    pub fn check(mut self, ctx: &Ctx) -> Result<Report> {
        let plain = Ctx::cpu().poisoned().oracle();
        let ctx = &ctx.clone().poisoned();
        let oracle = self.run(&plain, DType::F64, 1)?;
        let mut deviations = Vec::new();
        self.differences(&oracle, &mut deviations)?;
        let oracle32 = self.run(&plain, DType::F32, 1)?;
        let fast = self.run(ctx, DType::F32, 1)?;
        let again = self.run(ctx, DType::F32, 1)?;
        let twice = self.run(ctx, DType::F32, 2)?;
        for (i, name) in self.outputs.iter().enumerate() {
            self.compare(name, &fast.outputs[i], &oracle.outputs[i], 1., &mut deviations);
            self.compare(&format!("{name} oracle f32"), &oracle32.outputs[i], &oracle.outputs[i], 1., &mut deviations);
            same_bits(name, &fast.outputs[i], &again.outputs[i], &mut deviations);
        }
        for (i, input) in self.inputs.iter().enumerate() {
            let Some(want) = &oracle.grads[i] else {
                if input.kind == Kind::Leaf {
                    deviations.push(Deviation {
                        what: format!("d_{} missing", input.name),
                        error: f64::NAN,
                        bound: 0.,
                    });
                }
                continue;
            };
            let name = format!("d_{}", input.name);
            let none = Vec::new();
            let of = |run: &Run| run.grads[i].clone().unwrap_or(none.clone());
            let double: Vec<f64> = want.iter().map(|x| 2. * x).collect();
            self.compare(&name, &of(&fast), want, 1., &mut deviations);
            self.compare(&format!("{name} oracle f32"), &of(&oracle32), want, 1., &mut deviations);
            self.compare(&format!("{name} added"), &of(&twice), &double, 2., &mut deviations);
            same_bits(&name, &of(&fast), &of(&again), &mut deviations);
        }
        Ok(Report { case: self.name, deviations })
    }

    /// Another device's path, in `f32` or `bf16`, against the `f64` oracle on the same numbers: twice (equal
    /// bits) and applied twice (gradients double). The oracle itself is what [`Case::check`] checks.
    pub fn check_on(mut self, ctx: &Ctx, dtype: DType) -> Result<Report> {
        let half = dtype == DType::BF16;
        if half {
            self.rounded = true;
            self.inputs.iter_mut().flat_map(|i| &mut i.values).for_each(|x| *x = bf16(*x));
        }
        let [least, most] = GPU_BOUNDS;
        let [of_output, of_gradient] = self.half;
        let bound = |case: &Case, what: &str| match (half, what.starts_with("d_")) {
            (true, false) => of_output,
            (true, true) => of_gradient,
            (false, _) => (GPU_SHARE * case.bound_of(what)).max(least).min(most),
        };
        let oracle = self.run(&Ctx::cpu().poisoned().oracle(), DType::F64, 1)?;
        let [one, again, twice] = [1, 1, 2].map(|times| self.run(ctx, dtype, times));
        let (one, again, twice) = (one?, again?, twice?);
        let mut out = Vec::new();
        let mut compare = |what: &str, base: &str, got: &[f64], want: &[f64], slack: f64| {
            let deviation =
                Deviation { what: what.into(), error: rms_error(got, want), bound: slack * bound(&self, base) };
            out.push(deviation);
        };
        for (i, name) in self.outputs.iter().enumerate() {
            compare(name, name, &one.outputs[i], &oracle.outputs[i], 1.);
        }
        for (i, input) in self.inputs.iter().enumerate().filter(|(_, input)| input.kind != Kind::Constant) {
            let name = format!("d_{}", input.name);
            let of = |run: &Run| run.grads[i].clone().unwrap_or_default();
            let double: Vec<f64> = of(&oracle).iter().map(|x| 2. * x).collect();
            compare(&name, &name, &of(&one), &of(&oracle), 1.);
            compare(&format!("{name} added"), &name, &of(&twice), &double, 2.);
        }
        let all = |run: &Run| [run.outputs.concat(), run.grads.iter().flatten().flatten().copied().collect()].concat();
        same_bits("everything", &all(&one), &all(&again), &mut out);
        Ok(Report { case: format!("{} in {dtype}", self.name), deviations: out })
    }

    /// The bits of every output and gradient of the context's `f32` path, to compare runs by.
    pub fn bits(&self, ctx: &Ctx) -> Result<Vec<u64>> {
        let run = self.run(ctx, DType::F32, 1)?;
        let all = run.outputs.iter().chain(run.grads.iter().flatten());
        Ok(all.flatten().map(|x| x.to_bits()).collect())
    }

    fn compare(&self, what: &str, got: &[f64], want: &[f64], slack: f64, out: &mut Vec<Deviation>) {
        let base = what.split(' ').next().unwrap_or(what);
        out.push(Deviation { what: what.into(), error: rms_error(got, want), bound: slack * self.bound_of(base) });
    }
}

/// The nearest number of bf16.
fn bf16(x: f64) -> f64 {
    f64::from(half::bf16::from_f64(x))
}

/// The larger of two errors, NaN being the largest.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// Adds whether two runs gave the same bits: NaN where they did not.
pub fn same_bits(what: &str, a: &[f64], b: &[f64], out: &mut Vec<Deviation>) {
    let same = a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    out.push(Deviation { what: format!("{what} run twice"), error: if same { 0. } else { f64::NAN }, bound: 0. });
}

fn tensor(ctx: &Ctx, dtype: DType, dims: &[usize], values: &[f64]) -> Result<Tensor> {
    match dtype {
        DType::F64 => Tensor::from_slice(ctx, dims, values),
        f32::DTYPE => Tensor::from_slice(ctx, dims, &values.iter().map(|&x| x as f32).collect::<Vec<_>>()),
        DType::BF16 => {
            Tensor::from_slice(ctx, dims, &values.iter().map(|&x| half::bf16::from_f64(x)).collect::<Vec<_>>())
        }
        got => Err(Error::DType { op: "check", arg: "dtype", got, want: "f32, f64 or bf16" }),
    }
}

/// A tensor's elements as doubles.
pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    match t.dtype() {
        DType::F64 => t.to_vec::<f64>(),
        DType::I32 => Ok(t.to_vec::<i32>()?.into_iter().map(f64::from).collect()),
        DType::BF16 => Ok(t.to_vec::<half::bf16>()?.into_iter().map(f64::from).collect()),
        _ => Ok(t.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
    }
}
