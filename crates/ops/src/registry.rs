//! Every operation, for whoever wants them all: `hymo doctor`, the op tests, the benches. `xtask tidy` keeps the list
//! and the folders equal.

use crate::bench::Bench;
use crate::check::{Case, Report};
use hymo_tensor::{Ctx, Result};

/// What the project knows of an operation beside its code.
pub struct OpInfo {
    /// The folder's name.
    pub name: &'static str,
    /// Cases small enough to run on a user's machine in moments.
    pub cases: fn() -> Vec<Case>,
    /// The sizes at which it is timed.
    pub benches: fn() -> Vec<Bench>,
}

/// All operations, in the order of a layer.
pub const OPS: &[OpInfo] = &[
    OpInfo { name: "embedding", cases: crate::embedding::cases, benches: crate::embedding::benches },
    OpInfo { name: "rms_norm", cases: crate::rms_norm::cases, benches: crate::rms_norm::benches },
    OpInfo { name: "linear", cases: crate::linear::cases, benches: crate::linear::benches },
    OpInfo { name: "short_conv", cases: crate::short_conv::cases, benches: crate::short_conv::benches },
    OpInfo { name: "decay_gate", cases: crate::decay_gate::cases, benches: crate::decay_gate::benches },
    OpInfo { name: "delta_rule", cases: crate::delta_rule::cases, benches: crate::delta_rule::benches },
    OpInfo { name: "gated_norm", cases: crate::gated_norm::cases, benches: crate::gated_norm::benches },
    OpInfo { name: "rotary", cases: crate::rotary::cases, benches: crate::rotary::benches },
    OpInfo { name: "attention", cases: crate::attention::cases, benches: crate::attention::benches },
    OpInfo { name: "residual", cases: crate::residual::cases, benches: crate::residual::benches },
    OpInfo { name: "router", cases: crate::router::cases, benches: crate::router::benches },
    OpInfo { name: "experts", cases: crate::experts::cases, benches: crate::experts::benches },
    OpInfo { name: "swiglu", cases: crate::swiglu::cases, benches: crate::swiglu::benches },
    OpInfo { name: "concat", cases: crate::concat::cases, benches: crate::concat::benches },
    OpInfo { name: "packed_linear", cases: crate::packed_linear::cases, benches: crate::packed_linear::benches },
    OpInfo { name: "cross_entropy", cases: crate::cross_entropy::cases, benches: crate::cross_entropy::benches },
];

impl OpInfo {
    /// Runs the operation's cases on a context.
    pub fn check(&self, ctx: &Ctx) -> Result<Vec<Report>> {
        (self.cases)().into_iter().map(|case| case.check(ctx)).collect()
    }
}

#[cfg(feature = "cuda")]
impl OpInfo {
    /// Runs the operation's cases on a GPU in f32 and in bf16 and, unless only what is small shall run, every length of a
    /// row around its tiles, extreme gates and thousands of documents, where it has such. `None`: the operation is not for GPUs.
    ///
    /// # Errors
    /// What goes wrong on the GPU.
    pub fn check_gpu(&self, gpu: &hymo_cuda::Gpu, small: bool) -> Result<Option<Vec<Report>>> {
        use hymo_tensor::{DType, Error};
        // Weights in bf16 or int8 are read by the processor's decoder only.
        if self.name == "packed_linear" {
            return Ok(None);
        }
        let mut reports = Vec::new();
        for (ctx, dtype) in [(Ctx::cuda(gpu.clone()), DType::F32), (Ctx::cuda(gpu.clone()).bf16(), DType::BF16)] {
            for case in self.gpu_cases(small) {
                // Memory filled beforehand would hide from a checker of memory what is never written.
                let ctx = if small { ctx.clone() } else { ctx.clone().poisoned() };
                match case.check_on(&ctx, dtype) {
                    Ok(report) => reports.push(report),
                    Err(Error::Unsupported { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((!reports.is_empty()).then_some(reports))
    }

    /// What [`OpInfo::check_gpu`] runs.
    fn gpu_cases(&self, small: bool) -> Vec<Case> {
        let mut cases = (self.cases)();
        if !small {
            cases.extend(match self.name {
                "delta_rule" => crate::delta_rule::gpu_cases(),
                "attention" => crate::attention::gpu_cases(),
                "short_conv" => crate::short_conv::gpu_cases(),
                _ => Vec::new(),
            });
        }
        cases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_passes() {
        for op in OPS {
            let reports = op.check(&Ctx::cpu()).unwrap();
            assert!(!reports.is_empty(), "{} has no case", op.name);
            reports.iter().for_each(Report::assert);
        }
    }

    /// HAZARD 1: on a user's own GPU every operation is checked with every gradient it has, and those that cut a row into
    /// tiles at every length around two of them. (`packed_linear`, the processor's decoder, has neither gradient nor kernel.)
    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_is_asked_for_every_gradient_at_every_length() {
        for op in OPS.iter().filter(|op| op.name != "packed_linear") {
            let tokens: Vec<usize> = op.gpu_cases(false).iter().filter_map(Case::tokens_differentiated).collect();
            assert!(!tokens.is_empty(), "{}", op.name);
            let rows = match op.name {
                "delta_rule" => 2,
                "attention" | "short_conv" => 1,
                _ => continue,
            };
            for len in (1..=130).chain([1000]) {
                assert!(tokens.contains(&(rows * len)), "{} at {len}", op.name);
            }
        }
    }

    /// Any number of threads gives the same bits: every case against a single thread.
    #[cfg(feature = "rayon")]
    #[test]
    fn thread_count_changes_no_bit() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                OPS.iter().flat_map(|op| (op.cases)()).map(|c| c.bits(&Ctx::cpu()).unwrap()).collect::<Vec<_>>()
            })
        };
        let one = run(1);
        for threads in [2, 3, 8] {
            assert!(run(threads) == one, "{threads} threads");
        }
    }
}
