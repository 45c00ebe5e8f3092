//! `hymo doctor`: is this machine computing the right numbers?

use std::io::Write;
use std::time::Instant;

use hymo_model::config::one_line;
use hymo_model::{Params, presets};
use hymo_ops::check::{Deviation, Report};
use hymo_ops::gemm;
use hymo_ops::registry::{OPS, OpInfo};
use hymo_tensor::{Ctx, Device};
use serde_json::{Value, json};

use crate::device::Compute;
use crate::exit::Usage;

/// Checks every operation and its gradients on this machine
///
/// The fast path of every operation is compared with plain loops in double precision, those with central differences, on
/// memory filled with NaN, twice; then a whole small model, packed and not, and the optimizers. A small model's decay
/// parameters are scanned. Exit code 1 when anything is off.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo doctor
  hymo doctor --op delta_rule --verbose
  hymo doctor --json > doctor.json")]
pub struct Args {
    /// Check only this operation, or `model` or `optim` (may be given several times)
    #[arg(long, value_name = "NAME")]
    op: Vec<String>,

    #[command(flatten)]
    compute: Compute,

    /// On a GPU: small cases only, for tools that slow it down
    #[arg(long)]
    small: bool,

    /// Print every comparison, not only those that fail
    #[arg(long, short)]
    verbose: bool,

    /// Print one JSON object in place of the table
    #[arg(long, conflicts_with = "verbose")]
    json: bool,
}

/// One operation's findings.
struct Finding {
    name: &'static str,
    reports: Vec<Report>,
    seconds: f64,
}

impl Finding {
    fn ok(&self) -> bool {
        self.reports.iter().all(Report::ok)
    }

    fn comparisons(&self) -> impl Iterator<Item = (&Report, &Deviation)> {
        self.reports.iter().flat_map(|r| r.deviations.iter().map(move |d| (r, d)))
    }

    /// The largest share of its bound that any comparison used; NaN when a value was not finite.
    fn margin(&self) -> f64 {
        let share = |d: &Deviation| if d.bound > 0. { d.error / d.bound } else { d.error };
        self.comparisons()
            .map(|(_, d)| share(d))
            .fold(0., |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
    }
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let chosen = parts(&args.op)?;
    let ctx = args.compute.ctx()?;
    if !args.json {
        writeln!(out, "{}\n", machine(&ctx))?;
        writeln!(out, "{:<16} {:>5} {:>11} {:>13} {:>8}", "part", "cases", "comparisons", "of its bound", "seconds")?;
    }
    let mut findings = Vec::new();
    for part in chosen {
        let start = Instant::now();
        let Some(reports) = part.check(&ctx, args.small)? else { continue };
        let finding = Finding { name: part.name(), reports, seconds: start.elapsed().as_secs_f64() };
        if !args.json {
            print(&finding, args.verbose, out)?;
        }
        findings.push(finding);
    }
    let dead = Params::init(&Ctx::cpu(), &presets::hymo_nano(), 0)?.scan()?;
    let failed: Vec<&str> = findings.iter().filter(|f| !f.ok()).map(|f| f.name).collect();
    if args.json {
        writeln!(out, "{:#}", object(&ctx, &findings, dead.len()))?;
    } else {
        let heads = if dead.is_empty() { "all heads of hymo-nano start alive".into() } else { format!("{dead:?}") };
        writeln!(out, "\ndecay parameters: {heads}")?;
    }
    anyhow::ensure!(failed.is_empty(), "wrong numbers on this machine: {}", failed.join(", "));
    anyhow::ensure!(dead.is_empty(), "{} dead heads in fresh parameters", dead.len());
    if !args.json {
        let parts = if findings.len() == 1 { "part computes" } else { "parts compute" };
        writeln!(out, "{} {parts} the right numbers here.", findings.len())?;
    }
    Ok(())
}

/// What is checked on its own.
#[derive(Clone, Copy)]
enum Part {
    Op(&'static OpInfo),
    Model,
    Optim,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Op(op) => op.name,
            Part::Model => "model",
            Part::Optim => "optim",
        }
    }

    /// Its comparisons; `None` where it is not for this device.
    fn check(self, ctx: &Ctx, small: bool) -> anyhow::Result<Option<Vec<Report>>> {
        let whole = match self {
            Part::Op(op) => return Ok(check(op, ctx, small)?),
            Part::Model => |ctx: &Ctx| Ok::<_, anyhow::Error>(hymo_model::check::check(ctx)?),
            Part::Optim => |ctx: &Ctx| Ok(hymo_optim::check::check(ctx)?),
        };
        let mut contexts = vec![ctx.clone()];
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = ctx.device() {
            contexts = vec![Ctx::cuda(gpu.clone()), Ctx::cuda(gpu.clone()).bf16()];
        }
        // Memory filled beforehand would hide from a checker of memory what is never written.
        let fill = |ctx: Ctx| if small { ctx } else { ctx.poisoned() };
        let reports = contexts.into_iter().map(|ctx| whole(&fill(ctx))).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Some(reports.concat()))
    }
}

/// The parts of these names, each once; all without names.
fn parts(names: &[String]) -> Result<Vec<Part>, Usage> {
    let all: Vec<Part> = OPS.iter().map(Part::Op).chain([Part::Model, Part::Optim]).collect();
    named(names, &all, "there are", |part| part.name())
}

/// The operations of these names, each once; all without names.
pub(super) fn choose(names: &[String]) -> Result<Vec<&'static OpInfo>, Usage> {
    let all: Vec<&OpInfo> = OPS.iter().collect();
    named(names, &all, "operations", |op| op.name)
}

/// Those of `all` with these names, each once; all without names.
fn named<T: Copy>(names: &[String], all: &[T], known: &str, of: fn(T) -> &'static str) -> Result<Vec<T>, Usage> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let mut chosen: Vec<T> = Vec::new();
    for name in names {
        let Some(&one) = all.iter().find(|&&one| of(one) == name) else {
            let list: Vec<&str> = all.iter().map(|&one| of(one)).collect();
            let name = one_line(name, 80);
            return Err(Usage(format!("no operation is called \"{name}\"; {known}: {}", list.join(", "))));
        };
        // Asked for twice, checked once.
        if !chosen.iter().any(|&c| of(c) == of(one)) {
            chosen.push(one);
        }
    }
    Ok(chosen)
}

/// Runs an operation's cases; `None` where it is not for this device.
fn check(op: &OpInfo, ctx: &Ctx, small: bool) -> hymo_tensor::Result<Option<Vec<Report>>> {
    match ctx.device() {
        Device::Cpu => {
            let _ = small;
            op.check(ctx).map(Some)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => op.check_gpu(gpu, small),
    }
}

/// What the numbers were computed on.
fn machine(ctx: &Ctx) -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    if *ctx.device() != Device::Cpu {
        return format!("device: {}", ctx.describe());
    }
    format!("device: cpu ({}, {threads} threads)\nmatrix kernels: {}", std::env::consts::ARCH, gemm::kernels())
}

fn print(f: &Finding, verbose: bool, out: &mut dyn Write) -> std::io::Result<()> {
    let (cases, comparisons) = (f.reports.len(), f.comparisons().count());
    let margin = format!("{:.0}%", 100. * f.margin());
    writeln!(out, "{:<16} {cases:>5} {comparisons:>11} {margin:>13} {:>8.2}", f.name, f.seconds)?;
    for (report, d) in f.comparisons().filter(|(_, d)| verbose || !d.ok()) {
        let mark = if d.ok() { "ok  " } else { "FAIL" };
        writeln!(out, "  {mark} {}: {} {:.2e} (bound {:.0e})", report.case, d.what, d.error, d.bound)?;
    }
    out.flush()
}

fn object(ctx: &Ctx, findings: &[Finding], dead_heads: usize) -> Value {
    let comparison = |(r, d): (&Report, &Deviation)| json!({ "case": r.case, "what": d.what, "error": d.error, "bound": d.bound, "ok": d.ok() });
    let op = |f: &Finding| {
        let comparisons: Vec<Value> = f.comparisons().map(comparison).collect();
        json!({ "name": f.name, "ok": f.ok(), "seconds": f.seconds, "comparisons": comparisons })
    };
    let ok = findings.iter().all(Finding::ok) && dead_heads == 0;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    json!({
        "ok": ok,
        "device": ctx.describe(),
        "arch": std::env::consts::ARCH,
        "threads": threads,
        "matrix_kernels": gemm::kernels(),
        "dead_heads": dead_heads,
        "ops": findings.iter().map(op).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(args: &Args) -> String {
        let mut out = Vec::new();
        run(args, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn checks_the_operations_asked_for() {
        let op = ["rms_norm", "optim", "rms_norm"].map(String::from).to_vec();
        let args = Args { op, compute: Compute::CPU, small: false, verbose: true, json: false };
        let text = said(&args);
        assert!(text.contains("2 parts compute the right numbers here."), "{text}");
        assert!(text.contains("ok   rms_norm") && text.contains("d_w by differences"), "{text}");
        let json: Value = serde_json::from_str(&said(&Args { verbose: false, json: true, ..args })).unwrap();
        assert_eq!((&json["ok"], &json["ops"][1]["name"]), (&json!(true), &json!("optim")));
    }

    #[test]
    fn an_unknown_operation_is_wrong_usage() {
        let args =
            Args { op: vec!["rmsnorm".into()], compute: Compute::CPU, small: false, verbose: false, json: false };
        let error = run(&args, &mut Vec::new()).unwrap_err();
        assert!(
            error.is::<Usage>()
                && error.to_string().contains("there are: embedding, rms_norm")
                && error.to_string().contains("model, optim"),
            "{error}"
        );
    }

    /// A wrong number anywhere must show: the largest share is NaN when any error is.
    #[test]
    fn what_is_not_finite_is_not_ok() {
        let bad = Deviation { what: "y".into(), error: f64::NAN, bound: 1e-6 };
        let good = Deviation { what: "d_x".into(), error: 0., bound: 1e-6 };
        let report = Report { case: "case".into(), deviations: vec![bad, good] };
        let f = Finding { name: "op", reports: vec![report], seconds: 0. };
        assert!(!f.ok() && f.margin().is_nan());
        let mut out = Vec::new();
        print(&f, false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("FAIL case: y") && !text.contains("d_x"), "{text}");
    }
}
