//! `hymo bench ops`: every operation forward and backward, against what this machine can do.

use std::fmt::Write as _;

use hymo_ops::bench::{Bench, Product, Work};
use hymo_tensor::Ctx;
use serde_json::{Value, json};

use super::{Common, checked, choose};
use crate::ceilings::Ceilings;
use crate::clock::{self, Times};

/// Every operation at the sizes of a training step: time, FLOP/s, bytes/s, percent of what the machine can do
#[derive(clap::Args)]
#[command(after_help = "Example: hymo bench ops --op linear --op experts --reps 30

The ceilings are measured first: a large product by the `gemm` crate, and a copy larger than the caches. `of gemm` holds
an operation against its own products, alone, by the `gemm` crate; `of copy` its least traffic against the copy.")]
pub struct Args {
    /// Time only this operation (may be given several times)
    #[arg(long, value_name = "NAME")]
    op: Vec<String>,

    #[command(flatten)]
    pub(super) common: Common,
}

/// One direction of one operation.
struct Line {
    bench: String,
    direction: &'static str,
    times: Times,
    work: Work,
    /// The same products by the `gemm` crate alone, ms.
    products_ms: f64,
}

impl Line {
    fn seconds(&self) -> f64 {
        self.times.median() * 1e-3
    }

    /// How much of the time its products alone would take.
    fn of_gemm(&self) -> Option<f64> {
        (!self.work.products.is_empty()).then(|| self.products_ms / self.times.median())
    }
}

/// Runs the bench and gives its text.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let ops = choose(&args.op)?;
    checked(&ops)?;
    let facts = clock::circumstances();
    let ceilings = Ceilings::measure();
    let mut lines = Vec::new();
    for bench in ops.iter().flat_map(|op| (op.benches)()) {
        lines.extend(time(&bench, &args.common)?);
    }
    if args.common.json { Ok(format!("{:#}\n", object(facts, ceilings, &lines))) } else { table(ceilings, &lines) }
}

fn time(bench: &Bench, common: &Common) -> anyhow::Result<[Line; 2]> {
    let ctx = Ctx::cpu();
    let mut trial = bench.trial(&ctx)?;
    let (mut forward, mut backward) = (Times::default(), Times::default());
    let [there, back] = trial.work();
    let mut products = [Products::new(&there), Products::new(&back)];
    // In turns, so that whatever else the machine does falls on all alike.
    for round in 0..common.warmup + common.reps {
        if round == common.warmup {
            (forward, backward) = Default::default();
            products.iter_mut().for_each(|p| p.times = Times::default());
        }
        forward.add(|| trial.forward())?;
        backward.add(|| trial.backward())?;
        products.iter_mut().for_each(Products::run);
    }
    let [one, two] = products.map(|p| p.times.median());
    let name = || bench.name().to_owned();
    Ok([
        Line { bench: name(), direction: "forward", times: forward, work: there, products_ms: one },
        Line { bench: name(), direction: "backward", times: backward, work: back, products_ms: two },
    ])
}

/// An operation's products on matrices of their own.
struct Products {
    products: Vec<Product>,
    memory: [Vec<f32>; 3],
    times: Times,
}

impl Products {
    fn new(work: &Work) -> Self {
        let most = |x: usize, y: usize| work.products.iter().map(|p| p.times * p.mnk[x] * p.mnk[y]).max().unwrap_or(0);
        let memory = [most(0, 2), most(1, 2), most(0, 1)].map(|n| vec![0.5; n]);
        Products { products: work.products.clone(), memory, times: Times::default() }
    }

    fn run(&mut self) {
        let [a, b, c] = &mut self.memory;
        let products = &self.products;
        self.times.add(|| products.iter().for_each(|p| p.run(a, b, c)));
    }
}

fn table(ceilings: Ceilings, lines: &[Line]) -> anyhow::Result<String> {
    let mut text = format!(
        "ceilings here: {:.1} GFLOP/s in matrix products, {:.1} GB/s in copies\n\n{:<62} {:<9} {:>9} {:>9} {:>8} {:>8} {:>8}\n",
        ceilings.flops * 1e-9,
        ceilings.bytes * 1e-9,
        "operation",
        "",
        "ms",
        "GFLOP/s",
        "GB/s",
        "of gemm",
        "of copy"
    );
    for line in lines {
        let seconds = line.seconds();
        let of_gemm = line.of_gemm().map_or(String::new(), |x| format!("{:.0}%", 100. * x));
        let rate = line.work.bytes as f64 / seconds;
        writeln!(
            text,
            "{:<62} {:<9} {:>9.3} {:>9.1} {:>8.1} {of_gemm:>8} {:>7.0}%",
            line.bench,
            line.direction,
            line.times.median(),
            line.work.flops as f64 / seconds * 1e-9,
            rate * 1e-9,
            100. * rate / ceilings.bytes,
        )?;
    }
    Ok(text)
}

fn object(mut facts: Value, ceilings: Ceilings, lines: &[Line]) -> Value {
    let line = |line: &Line| {
        let seconds = line.seconds();
        json!({
            "bench": line.bench, "direction": line.direction, "ms_median": line.times.median(), "ms_min": line.times.min(),
            "flops": line.work.flops, "bytes": line.work.bytes, "flops_a_second": line.work.flops as f64 / seconds,
            "bytes_a_second": line.work.bytes as f64 / seconds, "of_gemm_alone": line.of_gemm(),
            "of_copy": line.work.bytes as f64 / seconds / ceilings.bytes, "raw_ms": line.times.0,
        })
    };
    facts["gemm_flops_a_second"] = json!(ceilings.flops);
    facts["copy_bytes_a_second"] = json!(ceilings.bytes);
    facts["load_after"] = json!(clock::load());
    facts["ops"] = lines.iter().map(line).collect();
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HAZARD 28: every time that a figure rests on is in the result, with the command and the commit.
    #[test]
    fn an_operation_is_timed_both_ways() {
        let common = Common { reps: 1, warmup: 0, threads: Some(1), json: true };
        let args = Args { op: vec!["residual".into(), "linear".into()], common };
        let result: Value = serde_json::from_str(&run(&args).unwrap()).unwrap();
        let ops = result["ops"].as_array().unwrap();
        assert_eq!((&ops[0]["bench"], &ops[0]["direction"]), (&json!("residual 2048 x 192"), &json!("forward")));
        assert_eq!(ops[0]["raw_ms"].as_array().map(Vec::len), Some(1));
        assert!(result["command"].is_string() && result["commit"].is_string() && result["processor"].is_string());
        // Two inputs and an output.
        assert_eq!(ops[0]["bytes"], json!(3 * 2048 * 192 * 4));
        let linear = ops.iter().find(|o| o["bench"].as_str().unwrap().starts_with("linear")).unwrap();
        assert!(linear["of_gemm_alone"].as_f64().unwrap() > 0.);
        assert_eq!(linear["flops"], json!(2u64 * 2048 * 192 * 776));
    }
}
