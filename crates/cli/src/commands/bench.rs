//! `hymo bench`: how fast is this machine, and how much of it do we use?
//!
//! Nothing is timed before its operations have been checked: a wrong answer has no speed.

mod decode;
mod ops;
mod train;

use std::io::Write;

use hymo_ops::check::Report;
use hymo_ops::registry::OpInfo;
use hymo_tensor::Ctx;

use super::doctor::choose;
use crate::threads::on_threads;

/// Time operations, training steps or decoding on this machine
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo bench ops
  hymo bench ops --op delta_rule --json
  hymo bench train hymo-nano --batch 4 --len 512
  hymo bench decode hymo-434m --dtype bf16,int8")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Ops(ops::Args),
    Train(train::Args),
    Decode(decode::Args),
}

/// What all benches are told.
#[derive(clap::Args, Clone)]
pub struct Common {
    /// Timed repetitions
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Repetitions before them that are not counted
    #[arg(long, value_name = "N", default_value_t = 3)]
    warmup: u32,

    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Print one JSON object, raw times included
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let common = match &args.what {
        What::Ops(args) => &args.common,
        What::Train(args) => &args.common,
        What::Decode(args) => &args.common,
    };
    let work = || match &args.what {
        What::Ops(args) => ops::run(args),
        What::Train(args) => train::run(args),
        What::Decode(args) => decode::run(args),
    };
    let text = on_threads(common.threads, work)?;
    Ok(out.write_all(text.as_bytes())?)
}

/// Fails unless the operations compute the right numbers here.
fn checked(ops: &[&OpInfo]) -> anyhow::Result<()> {
    for op in ops {
        let reports = op.check(&Ctx::cpu())?;
        anyhow::ensure!(
            reports.iter().all(Report::ok),
            "{} computes wrong numbers on this machine, so it is not timed: see `hymo doctor --op {0}`",
            op.name
        );
    }
    Ok(())
}
