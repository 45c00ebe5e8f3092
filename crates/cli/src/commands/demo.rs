//! `hymo demo`: everything at once, small, on real text.

mod text;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hymo_data::prep::{PrepOptions, TOKENIZER};
use hymo_data::source::ReadOptions;
use hymo_infer::{Gates, Generator, Mtp, Request, SampleOptions, WeightDtype};
use hymo_model::RunConfig;
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::TrainOptions;
use hymo_train::run::{Resume, Run, RunOptions};

use super::data::prep::encode;
use super::tokenizer::train::learn;
use super::train::{Style, follow};
use crate::ceilings;
use crate::decoding::{clock, plain, stream, summary};
use crate::exit::{Usage, train_error};
use crate::numbers::{bytes, grouped, time};
use crate::source::run_config;
use crate::stop::Stop;
use crate::threads::{on_threads, threads};
use text::Text;

/// Tokens of the vocabulary: the preset's.
const VOCAB: usize = 4096;
/// Texts at the end, and their length in tokens.
const WRITTEN: (usize, usize) = (2, 160);

/// Text to a trained model in a few minutes: tokenizer, shards, training, evaluation, writing
///
/// Without --text it reads Rust: the sources of the crates that HyMo is built from, which a build leaves in cargo's
/// registry. Nothing is downloaded. Stopped (Ctrl-C), the same command goes on.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo demo
  hymo demo --text books/ --out runs/books
  hymo demo --text war-and-peace.txt --steps 1000 --out runs/tolstoy")]
pub struct Args {
    /// The folder for everything
    #[arg(long, short, value_name = "DIR", default_value = "runs/demo")]
    out: PathBuf,

    /// Text to learn from: files, folders, patterns, as `hymo data prep` takes them; may be given again
    #[arg(long, value_name = "PATH", num_args = 1..)]
    text: Vec<String>,

    /// Training steps of 1,024 tokens
    #[arg(long, value_name = "N", default_value_t = 450, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,

    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    on_threads(args.threads, || demo(args, out))
}

fn demo(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let begun = Instant::now();
    let stop = Stop::listen("saving, then leaving")?;
    let data = data(args, out)?;
    let mut run = open(args, &data)?;
    let (active, stored) = run.trainer().params_count();
    let tokens = u64::from(args.steps) * 1024;
    heading(
        out,
        4,
        "training",
        &format!(
            "hymo-nano, {} active of {} parameters, {} tokens in {} steps, on {} threads",
            grouped(active),
            grouped(stored),
            grouped(tokens),
            args.steps,
            threads()
        ),
    )?;
    let done = run.trainer().done();
    if !done {
        follow(&mut run, Style::Every(20), Some(stop.clone()), out)?;
    }
    if stop.asked() {
        return Ok(());
    }
    if done {
        writeln!(out, "    done before; --out another folder begins anew")?;
    }
    heading(out, 5, "writing", "what it learned, from beginnings that it never saw, at temperature 0.7")?;
    write(&run, out)?;
    let dir = run.dir().display();
    writeln!(
        out,
        "\nin {}: {dir}/report.html has the curves, open it in a browser; what to try next:",
        time(begun.elapsed().as_secs_f64())
    )?;
    writeln!(
        out,
        "  hymo eval {dir} --data {dir}/data\n  hymo export {dir} {dir}/exported\n  hymo train hymo-nano --set data.shards={dir}/data --out runs/longer"
    )?;
    Ok(())
}

fn heading(out: &mut dyn Write, number: u32, what: &str, more: &str) -> anyhow::Result<()> {
    writeln!(out, "[{number}/5] {what}: {more}")?;
    Ok(out.flush()?)
}

/// Text to shards. What is there already is not made again.
fn data(args: &Args, out: &mut dyn Write) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(&args.out).map_err(|e| Usage(format!("--out {}: {e}", args.out.display())))?;
    let Text { inputs, what, held_out } = match args.text.as_slice() {
        [] => text::of_crates()?,
        paths => text::of_paths(paths, &args.out.join("text.jsonl"))?,
    };
    heading(out, 1, "text", &format!("{what}, {}", bytes(inputs.bytes())))?;
    let folder = args.out.join("data");
    let (tokenizer, json) = vocabulary(&folder, &inputs, out)?;
    let mut options = PrepOptions { threads: threads(), ..PrepOptions::default() };
    options.shaping.val_fraction = held_out;
    let encoded = encode(&inputs, (&tokenizer, &json), &folder, &options)?;
    let of = |name: &str| encoded.outcome.manifest.split(name).map_or(0, |split| split.tokens);
    heading(
        out,
        3,
        "shards",
        &format!(
            "{} tokens to learn from, {} held out, in {:.1} s",
            grouped(of("train")),
            grouped(of("val")),
            encoded.seconds
        ),
    )?;
    Ok(folder)
}

fn vocabulary(
    folder: &Path,
    inputs: &hymo_data::source::Inputs,
    out: &mut dyn Write,
) -> anyhow::Result<(Tokenizer, Vec<u8>)> {
    let there = folder.join(TOKENIZER);
    if there.is_file() {
        heading(out, 2, "tokenizer", "there from an earlier start")?;
        return super::tokenizer::load(&there);
    }
    let options = TrainOptions { vocab_size: VOCAB, ..TrainOptions::default() };
    let learned = learn(inputs, &ReadOptions::default(), options)?;
    let tokenizer = Tokenizer::from_json(&learned.json)?;
    let report = &learned.report;
    heading(
        out,
        2,
        "tokenizer",
        &format!(
            "{} tokens, {} of them learned from {} words, in {:.1} s",
            grouped(report.vocab_size as u64),
            grouped(report.merges as u64),
            grouped(report.words),
            learned.reading + learned.merging
        ),
    )?;
    Ok((tokenizer, learned.json))
}

/// The preset with a schedule of minutes.
fn config(args: &Args, data: &Path) -> anyhow::Result<RunConfig> {
    let (mut config, _) = run_config(Path::new("hymo-nano"), &[])?;
    let Some(data) = data.to_str() else { return Err(Usage("--out: not UTF-8".to_owned()).into()) };
    config.data.shards = vec![data.to_owned()];
    (config.schedule.num_steps, config.train.rows, config.train.micro_rows) = (u64::from(args.steps), 2, 2);
    (config.eval.every, config.eval.tokens, config.eval.samples, config.eval.sample_tokens) = (100, 16_384, 2, 64);
    (config.checkpoint.every, config.checkpoint.keep_last, config.checkpoint.keep_best) = (100, 1, false);
    (config.optim.lr, config.optim.adamw.lr_mult) = (LR, ADAMW);
    Ok(config)
}

/// The best of a sweep of short runs (LOG.md, 2026-12-01): they want larger steps than the preset's long one, the matrices
/// more so than the embedding.
const LR: f64 = 0.01;
const ADAMW: f64 = 0.25;

fn open(args: &Args, data: &Path) -> anyhow::Result<Run> {
    let options = RunOptions {
        dir: args.out.clone(),
        resume: Resume::Auto,
        name: "demo".to_owned(),
        version: crate::version().to_owned(),
        peak_flops: Some(ceilings::products(&Ctx::cpu())?),
        profile: None,
        dry: false,
    };
    Run::open(&Ctx::cpu(), &config(args, data)?, options).map_err(train_error)
}

fn write(run: &Run, out: &mut dyn Write) -> anyhow::Result<()> {
    let params = run.trainer().averaged().map_err(train_error)?;
    let model = &run.trainer().config().model;
    let tokenizer = run.tokenizer();
    let generator = Generator::new(model, &params, WeightDtype::F32)?.with_tokenizer(tokenizer.clone());
    let mut generator = generator.with_clock(clock()).with_mtp(Mtp::Auto, Gates::default());
    let mut prompts = run.beginnings(WRITTEN.0).map_err(train_error)?;
    if prompts.is_empty() {
        // So little text that nothing of it could be held out: a new document.
        prompts.push(vec![tokenizer.end_of_text()]);
    }
    for (n, prompt) in prompts.iter().enumerate() {
        let options = SampleOptions {
            max_tokens: WRITTEN.1,
            temperature: 0.7,
            top_p: 0.95,
            seed: n as u64,
            stop_tokens: vec![tokenizer.end_of_text()],
            ..SampleOptions::default()
        };
        writeln!(out, "\n---- {} ----", n + 1)?;
        write!(out, "{}", plain(&String::from_utf8_lossy(&tokenizer.decode(prompt)?)))?;
        write!(out, " >>> ")?;
        let told = stream(&mut generator, Request::new(prompt, &options), None, |token| {
            out.write_all(plain(&String::from_utf8_lossy(&token.bytes)).as_bytes()).and_then(|()| out.flush())
        });
        let (output, seconds) = told??;
        writeln!(out, "\n---- {} ----", summary(&output, seconds))?;
    }
    Ok(())
}
