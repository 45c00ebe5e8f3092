//! `hymo train`: a configuration and shards to a model.

mod memory;
mod screen;
mod table;

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use hymo_model::{Cost, CostOptions};
use hymo_tensor::par;
use hymo_train::profile::ProfileOptions;
use hymo_train::run::{Ending, Resume, Run, RunOptions};

use crate::ceilings;
use crate::device::Compute;
use crate::exit::{Usage, train_error};
use crate::numbers::bytes;
use crate::source::run_config;
use crate::stop::Stop;
use crate::threads::on_threads;

pub use screen::{Screen, Style};

/// Trains a model, and goes on with a run that was stopped
///
/// The run's folder gets run.toml, log.jsonl, report.html, TensorBoard files, tokenizer.json and checkpoints. The same
/// command goes on where it was stopped or killed, and comes to the same bits. Ctrl-C saves and leaves.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo train hymo-nano --set data.shards=data --out runs/first
  hymo train my.toml --set optim.lr=0.002 --set schedule.num_steps=5000
  hymo train my.toml --resume runs/first/checkpoints/step-4000 --set schedule.decay_from=4000 --out runs/decayed")]
pub struct Args {
    /// A configuration file, or a preset with data.shards set
    #[arg(value_name = "CONFIG.toml|PRESET")]
    config: PathBuf,

    /// Sets a field over the file; may be given again
    #[arg(long, value_name = "SECTION.FIELD=VALUE")]
    set: Vec<String>,

    /// The run's folder [default: runs/NAME, NAME being the file's or the preset's]
    #[arg(long, short, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Where to begin: auto (the newest checkpoint in the folder, if any), never, or a checkpoint or run's folder
    #[arg(long, value_name = "auto|never|PATH", default_value = "auto")]
    resume: PathBuf,

    #[command(flatten)]
    compute: Compute,

    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Refuse to start where a slower path would compute, in place of saying so in the start-up table
    #[arg(long)]
    require_fast: bool,

    /// Write a trace of a few steps (--profile-steps), for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE.json")]
    profile: Option<PathBuf>,

    /// Steps in the trace; the two before it go by untraced
    #[arg(long, value_name = "N", default_value_t = 3, requires = "profile", value_parser = clap::value_parser!(u16).range(1..=1000))]
    profile_steps: u16,

    /// Check everything, print the start-up tables, train nothing and write nothing
    #[arg(long)]
    dry_run: bool,

    /// Print the lines of log.jsonl in place of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    let slow = slower(par::instructions(), cfg!(feature = "rayon"));
    if let (true, Some(why)) = (args.require_fast, slow) {
        bail!("--require-fast: {why}");
    }
    on_threads(args.threads, || train(args, out))
}

/// Why this build or processor computes on a slower path than there is, if it does.
fn slower(instructions: &str, threads: bool) -> Option<String> {
    if !threads {
        return Some("this hymo is built without threads (the feature rayon)".to_owned());
    }
    let fast = ["AVX-512", "AVX2 and FMA", "NEON"].contains(&instructions);
    (!fast).then(|| format!("this processor runs with {instructions}; want AVX2 and FMA, AVX-512, or NEON"))
}

fn train(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    // Before anything takes long: a signal during the start leaves as orderly as a later one.
    let stop = Stop::listen("saving, then leaving")?;
    let (config, name) = run_config(&args.config, &args.set)?;
    let resume = match args.resume.to_str() {
        Some("auto") => Resume::Auto,
        Some("never") => Resume::Never,
        _ => Resume::From(args.resume.clone()),
    };
    let dir = args.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(&name));
    let ctx = args.compute.ctx()?;
    let peak = ceilings::products(&ctx)?;
    let profile = |path: &PathBuf| ProfileOptions { path: path.clone(), skip: 2, steps: u64::from(args.profile_steps) };
    let options = RunOptions {
        dir,
        resume,
        name,
        version: crate::version().to_owned(),
        peak_flops: Some(peak),
        profile: args.profile.as_ref().map(profile),
        dry: args.dry_run,
    };
    let mut run = Run::open(&ctx, &config, options).map_err(train_error)?;
    let style = if args.json { Style::Json } else { Style::Lines };
    if style == Style::Lines {
        out.write_all(table::start(&run, peak)?.as_bytes())?;
        out.flush()?;
    }
    fits(&run)?;
    if args.dry_run {
        return Ok(());
    }
    follow(&mut run, style, Some(stop), out)
}

/// Refuses what a GPU cannot hold, before it has taken a step.
fn fits(run: &Run) -> anyhow::Result<()> {
    let Some(room) = run.ctx().available_memory()? else { return Ok(()) };
    let config = run.trainer().config();
    let sizes = CostOptions { context: config.model.context_length, batch: config.train.micro_rows };
    let plan = memory::Plan::new(run.trainer(), &Cost::new(&config.model, sizes)?);
    match plan.refusal(room as u64) {
        Some(problem) => Err(Usage(problem).into()),
        None => Ok(()),
    }
}

/// Runs to the end and says where everything is.
pub fn follow(run: &mut Run, style: Style, stop: Option<Stop>, out: &mut dyn Write) -> anyhow::Result<()> {
    let steps = run.trainer().config().schedule.num_steps;
    let mut screen = Screen::new(style, run.trainer().state().step, steps, stop, out);
    let done = run.go(&mut screen);
    screen.finish()?;
    let ending = done.map_err(train_error)?;
    if style == Style::Json {
        return Ok(());
    }
    let (step, dir) = (run.trainer().state().step, run.dir().display());
    if let (Some(peak), true) = (memory::peak(), ending != Ending::WasFinished) {
        writeln!(out, "the process held {} at most", bytes(peak))?;
    }
    match ending {
        Ending::Finished => writeln!(out, "finished {steps} steps; everything is in {dir}")?,
        Ending::WasFinished => writeln!(out, "{dir} has its {steps} steps already: nothing to do")?,
        Ending::Stopped => {
            writeln!(out, "stopped and saved after step {step} of {steps}; the same command goes on from there")?
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// HAZARD 26: a slower path has a name that `--require-fast` refuses; the start-up table prints the path in any case.
    #[test]
    fn a_slower_path_is_refused_on_request() {
        assert_eq!(slower("AVX-512", true), None);
        assert!(slower("AVX2 and FMA", false).unwrap().contains("rayon"));
        let why = slower("no vector units beyond the target's baseline", true).unwrap();
        assert!(why.starts_with("this processor runs with no vector units"), "{why}");
        // Every name that there is, is known here.
        let here = par::instructions();
        assert!(slower(here, true).is_none() || here.starts_with("no vector units"), "{here}");
    }
}
