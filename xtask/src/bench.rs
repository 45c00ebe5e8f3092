//! `cargo xtask bench`: times HyMo on this machine and keeps the raw results; with `--peer`, PyTorch beside it.
//!
//! The peers run by turns with HyMo, several rounds in one call, so that whatever else the machine does falls on all of
//! them. A ratio is the better of PyTorch eager and compiled over HyMo, medians of each one's best round. `hymo bench`
//! checks its operations before it times them, so no speed-up is printed for wrong numbers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Args {
    /// Only `ops` or only `train` (both without)
    what: Option<What>,

    /// PyTorch beside HyMo: bench/peer, eager and compiled (its environment is made on first use)
    #[arg(long)]
    peer: bool,

    /// Rounds of HyMo and its peers by turns
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Threads of each
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,

    /// Print only, keep no results
    #[arg(long)]
    dry: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    Ops,
    Train,
}

/// Configuration, rows, tokens of a row, repetitions, the ratio to reach.
const TRAINING: &[(&str, u32, u32, u32, f64)] =
    &[("configs/hymo-nano.toml", 4, 512, 10, 2.0), ("configs/hymo-30m.toml", 1, 1024, 5, 1.5)];

/// Tokens of a whole training step, which the optimizers' step is spread over.
const STEP_TOKENS: u32 = 8192;

/// HyMo's bench, how it is called by the peer (name and sizes), the ratio to reach.
const OPERATIONS: &[(&str, &str, &str, f64)] = &[
    ("delta_rule training, 4 x 512", "delta_rule", "B=4,T=512,H=4,dk=32,dv=64", 3.0),
    ("delta_rule training, 1 x 1024", "delta_rule", "B=1,T=1024,H=6,dk=64,dv=128", 3.0),
];

pub fn run(root: &Path, args: &Args) -> Result<()> {
    let build = Command::new("cargo").args(["build", "--release", "--package", "hymo-cli"]).current_dir(root).status();
    ensure!(build.context("cargo does not start")?.success(), "the build failed");
    let bench = Bench { root, args, python: args.peer.then(|| python(root)).transpose()? };
    if args.what != Some(What::Train) {
        bench.ops()?;
    }
    if args.what != Some(What::Ops) {
        bench.train()?;
    }
    Ok(())
}

/// The peer's interpreter, its packages installed.
fn python(root: &Path) -> Result<PathBuf> {
    let script = root.join("bench/peer/setup.sh");
    let out = Command::new("bash").arg(script).stderr(Stdio::inherit()).output().context("bash is not on the PATH")?;
    ensure!(out.status.success(), "bench/peer/setup.sh failed: is there a Python 3.11 with venv?");
    Ok(PathBuf::from(String::from_utf8(out.stdout)?.trim()))
}

struct Bench<'a> {
    root: &'a Path,
    args: &'a Args,
    python: Option<PathBuf>,
}

impl Bench<'_> {
    fn hymo(&self, args: &[&str]) -> Result<Value> {
        let mut command = Command::new(self.root.join("target/release/hymo"));
        command.arg("bench").args(args).args(["--json", "--threads", &self.args.threads.to_string()]);
        let out = command.current_dir(self.root).stderr(Stdio::inherit()).output().context("target/release/hymo")?;
        ensure!(out.status.success(), "hymo bench {} failed: nothing is compared", args.join(" "));
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    /// Eager, then compiled; empty without `--peer`.
    fn peers(&self, args: &[&str]) -> Result<Vec<(&'static str, Value)>> {
        let Some(python) = &self.python else { return Ok(Vec::new()) };
        let json = self.root.join("target/peer.json");
        let mut out = Vec::new();
        for mode in ["eager", "compile"] {
            let mut command = Command::new(python);
            command.arg("bench/peer/time_cpu.py").args(args).args(["--mode", mode]);
            command.args(["--threads", &self.args.threads.to_string()]).arg("--json").arg(&json);
            command.current_dir(self.root).stdout(Stdio::null());
            let done = command.status().context("the peer's Python")?;
            ensure!(done.success(), "bench/peer/time_cpu.py {} failed", args.join(" "));
            out.push((mode, serde_json::from_slice(&std::fs::read(&json)?)?));
        }
        Ok(out)
    }

    fn train(&self) -> Result<()> {
        let mut cases = Vec::new();
        for &(config, batch, len, reps, bar) in TRAINING {
            let micro = STEP_TOKENS / (batch * len);
            let [batch, len, reps, micro] = [batch, len, reps, micro].map(|n| n.to_string());
            let sizes = ["--batch", &batch, "--len", &len, "--reps", &reps, "--accumulate", &micro];
            let mut rounds = Rounds::default();
            for _ in 0..self.args.rounds {
                rounds.add("hymo", self.hymo(&[&["train", config], &sizes[..]].concat())?);
                for (mode, result) in self.peers(&[&["--config", config], &sizes[..]].concat())? {
                    rounds.add(mode, result);
                }
            }
            println!("{config}, {batch} x {len} tokens, forward and backward, {} threads", self.args.threads);
            let mut case = rounds.report(config, "step_ms_median", bar)?;
            println!("{config}, a training step of {STEP_TOKENS} tokens, optimizers and all");
            case["whole_step"] = rounds.report(config, "whole_step_ms", bar)?["ratio"].take();
            case["results"] = rounds.raw();
            cases.push(case);
        }
        self.keep("train", cases)
    }

    fn ops(&self) -> Result<()> {
        let mut rounds = Vec::new();
        let mut own = Vec::new();
        for _ in 0..self.args.rounds {
            let result = self.hymo(&["ops", "--reps", "30"])?;
            rounds.push(result);
            let peers = OPERATIONS.iter().map(|&(_, op, size, _)| self.peers(&["--op", op, "--size", size]));
            own.push(peers.collect::<Result<Vec<_>>>()?);
        }
        table(&rounds)?;
        let mut cases = Vec::new();
        for (i, &(name, _, _, bar)) in OPERATIONS.iter().enumerate().filter(|_| self.args.peer) {
            let mut both = Rounds::default();
            for (hymo, peers) in rounds.iter().zip(&own) {
                both.add("hymo", json!({ "step_ms_median": both_ways(hymo, name)? }));
                peers[i].iter().for_each(|(mode, result)| both.add(mode, result.clone()));
            }
            println!("{name}, forward and backward; the peer is transformers' form");
            let mut case = both.report(name, "step_ms_median", bar)?;
            case["results"] = both.raw();
            cases.push(case);
        }
        cases.push(json!({ "hymo": rounds }));
        self.keep("ops", cases)
    }

    /// Writes `bench/results/<what>-cpu-<date>.json`.
    fn keep(&self, what: &str, cases: Vec<Value>) -> Result<()> {
        if self.args.dry {
            return Ok(());
        }
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let folder = self.root.join("bench/results");
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{what}-cpu-{}.json", &date[..10]));
        let peer = if self.args.peer { " --peer" } else { "" };
        let Args { rounds, threads, .. } = self.args;
        let command = format!("cargo xtask bench {what}{peer} --rounds {rounds} --threads {threads}");
        let text = json!({ "command": command, "date": date, "cases": cases });
        std::fs::write(&path, format!("{text:#}\n")).with_context(|| path.display().to_string())?;
        println!("raw results: {}", path.strip_prefix(self.root).unwrap_or(&path).display());
        Ok(())
    }
}

/// Results of several rounds, by who was timed.
#[derive(Default)]
struct Rounds(Vec<(&'static str, Vec<Value>)>);

impl Rounds {
    fn add(&mut self, who: &'static str, result: Value) {
        match self.0.iter_mut().find(|(name, _)| *name == who) {
            Some((_, results)) => results.push(result),
            None => self.0.push((who, vec![result])),
        }
    }

    /// The best round's figure.
    fn best(&self, who: &str, figure: &str) -> Option<f64> {
        let (_, results) = self.0.iter().find(|(name, _)| *name == who)?;
        results.iter().filter_map(|r| r[figure].as_f64()).min_by(f64::total_cmp)
    }

    /// Every result of every round.
    fn raw(self) -> Value {
        let all = self.0.into_iter().map(|(who, results)| (who.to_owned(), Value::Array(results)));
        Value::Object(all.collect())
    }

    /// Prints the table and gives the ratio.
    fn report(&self, case: &str, figure: &str, bar: f64) -> Result<Value> {
        let own = self.best("hymo", figure).context("hymo's result has no time")?;
        println!("  {:<8} {own:>9.2} ms{}", "hymo", self.memory("hymo"));
        let mut best_peer = f64::INFINITY;
        for who in ["eager", "compile"] {
            if let Some(time) = self.best(who, figure) {
                println!("  {who:<8} {time:>9.2} ms{}   {:.2}x", self.memory(who), time / own);
                best_peer = best_peer.min(time);
            }
        }
        let ratio = best_peer.is_finite().then(|| best_peer / own);
        if let Some(ratio) = ratio {
            let verdict = if ratio >= bar { "reached" } else { "MISSED" };
            println!("  {ratio:.2}x the better of the two; bar {bar:.1}x {verdict}");
        }
        Ok(json!({ "case": case, "ratio": ratio, "bar": bar }))
    }

    fn memory(&self, who: &str) -> String {
        self.best(who, "peak_resident_mib").map_or(String::new(), |mib| format!(" {mib:>7.0} MiB"))
    }
}

/// Forward plus backward of an operation, ms.
fn both_ways(result: &Value, name: &str) -> Result<f64> {
    let ops = result["ops"].as_array().context("hymo bench ops printed no operations")?;
    let mine = ops.iter().filter(|op| op["bench"].as_str().is_some_and(|bench| bench.starts_with(name)));
    let times: Vec<f64> = mine.filter_map(|op| op["ms_median"].as_f64()).collect();
    ensure!(times.len() == 2, "hymo bench ops has {} lines that begin with {name}, not 2", times.len());
    Ok(times.iter().sum())
}

/// The best round of every operation, against what this machine can do.
fn table(rounds: &[Value]) -> Result<()> {
    let most = |figure: &str| rounds.iter().filter_map(|r| r[figure].as_f64()).fold(0., f64::max);
    let (flops, bytes) = (most("gemm_flops_a_second"), most("copy_bytes_a_second"));
    println!("ceilings here: {:.1} GFLOP/s in products, {:.1} GB/s in copies", flops * 1e-9, bytes * 1e-9);
    println!(
        "{:<54} {:<9} {:>9} {:>9} {:>8} {:>8} {:>8}",
        "operation", "", "ms", "GFLOP/s", "GB/s", "of gemm", "of copy"
    );
    let first = rounds[0]["ops"].as_array().context("hymo bench ops printed no operations")?;
    for i in 0..first.len() {
        let time = |r: &&Value| r["ops"][i]["ms_median"].as_f64().unwrap_or(f64::INFINITY);
        let best = rounds.iter().min_by(|a, b| time(a).total_cmp(&time(b))).map(|r| &r["ops"][i]).unwrap_or(&first[i]);
        let number = |figure: &str| best[figure].as_f64();
        let percent = |x: Option<f64>| x.map_or(String::new(), |x| format!("{:.0}%", 100. * x));
        let name: String = best["bench"].as_str().unwrap_or_default().chars().take(54).collect();
        println!(
            "{name:<54} {:<9} {:>9.3} {:>9.1} {:>8.1} {:>8} {:>8}",
            best["direction"].as_str().unwrap_or_default(),
            number("ms_median").unwrap_or(f64::NAN),
            number("flops_a_second").unwrap_or(f64::NAN) * 1e-9,
            number("bytes_a_second").unwrap_or(f64::NAN) * 1e-9,
            percent(number("of_gemm_alone")),
            percent(number("bytes_a_second").map(|b| b / bytes)),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_round_counts_and_the_better_peer_is_compared() {
        let mut rounds = Rounds::default();
        for (who, ms) in [("hymo", 3.), ("eager", 9.), ("compile", 4.), ("hymo", 2.), ("eager", 8.), ("compile", 5.)] {
            rounds.add(who, json!({ "step_ms_median": ms }));
        }
        assert_eq!(rounds.best("hymo", "step_ms_median"), Some(2.));
        let report = rounds.report("case", "step_ms_median", 2.).unwrap();
        assert_eq!((&report["ratio"], rounds.raw()["eager"].as_array().unwrap().len()), (&json!(2.0), 2));
    }

    #[test]
    fn an_operation_is_both_its_lines() {
        let line = |ms: f64| json!({ "bench": "delta_rule training, 4 x 512, H 4", "ms_median": ms });
        let result = json!({ "ops": [line(1.), line(2.5), { "bench": "linear", "ms_median": 9. }] });
        assert_eq!(both_ways(&result, "delta_rule training, 4 x 512").unwrap(), 3.5);
        assert!(both_ways(&result, "experts").unwrap_err().to_string().contains("0 lines"));
    }
}
