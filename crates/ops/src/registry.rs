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
