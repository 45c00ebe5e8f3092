//! `hymo eval`: what a model makes of held-out text, and of questions.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use hymo_data::corpus::{Corpus, Dataset};
use hymo_model::HyMo;
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_train::Model;
use hymo_train::choices::{self, Tallies};
use hymo_train::evaluate::{EvalOptions, Scores, TokenBytes, evaluate};
use serde_json::{Value, json};

use crate::exit::{Usage, data_error, train_error};
use crate::numbers::grouped;
use crate::progress::{Progress, Unit};
use crate::source::trained;
use crate::threads::on_threads;

/// Evaluates a model: bits per byte and perplexity of text, accuracy on multiple choice
///
/// MODEL is a run's folder (its newest checkpoint), a checkpoint, or an exported folder. Questions are lines of JSON:
/// {"context": "The sky is", "choices": [" blue", " loud"], "answer": 0}, with a "task" to tally apart. acc takes the
/// likeliest ending, acc_norm the likeliest for each of its bytes.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo eval runs/first --data data/
  hymo eval runs/first/checkpoints/step-4000 --data data/ --split train --tokens 1000000
  hymo eval exported/ --tasks questions.jsonl --json")]
pub struct Args {
    /// A run's folder, a checkpoint, or an exported folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// A folder of shards; may be given again
    #[arg(long, value_name = "DIR", required_unless_present = "tasks")]
    data: Vec<PathBuf>,

    /// Which of its splits
    #[arg(long, value_name = "NAME", default_value = "val")]
    split: String,

    /// Tokens of each folder after which no more is read [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    tokens: Option<u64>,

    /// Rows of the model's context length computed at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    rows: u16,

    /// A file of multiple-choice questions; may be given again
    #[arg(long, value_name = "FILE.jsonl")]
    tasks: Vec<PathBuf>,

    /// The first N questions of each file [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Print one JSON object in place of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    on_threads(args.threads, || go(args, out))
}

fn go(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let model = trained(&args.model)?;
    let texts: Vec<Value> = args.data.iter().map(|folder| text(args, &model, folder)).collect::<Result<_, _>>()?;
    let mut tallies = Tallies::new();
    for path in &args.tasks {
        questions(args, &model, path, &mut tallies)?;
    }
    let tasks: Vec<Value> = tallies
        .iter()
        .map(|(task, tally)| {
            let (acc, acc_norm) = (tally.accuracy(), tally.accuracy_by_length());
            json!({
                "task": task, "questions": tally.questions,
                "acc": acc, "acc_stderr": tally.standard_error(acc),
                "acc_norm": acc_norm, "acc_norm_stderr": tally.standard_error(acc_norm),
                "contexts_cut": tally.cut, "endings_too_long": tally.beyond,
            })
        })
        .collect();
    if args.json {
        let object = json!({ "model": model.path, "step": model.step, "data": texts, "tasks": tasks });
        return Ok(writeln!(out, "{object:#}")?);
    }
    Ok(out.write_all(shown(&model, &texts, &tasks).as_bytes())?)
}

/// What a folder's text costs.
fn text(args: &Args, model: &Model, folder: &Path) -> anyhow::Result<Value> {
    let dataset = Dataset::open(folder, &args.split).map_err(data_error)?;
    let (tokens, read) = (dataset.tokens(), args.tokens.map_or(dataset.tokens(), |most| most.min(dataset.tokens())));
    let corpus = Arc::new(Corpus::of(dataset, None).map_err(data_error)?);
    let (own, _) = hymo_train::run::tokenizer(&corpus).map_err(train_error)?;
    if let Some((tokenizer, _)) = &model.tokenizer {
        if tokenizer.sha256() != own.sha256() {
            let (data, model) = (folder.display(), args.model.display());
            let what = format!(
                "{data} was made with another tokenizer than {model}: the ids of one mean nothing to the other"
            );
            return Err(Usage(what).into());
        }
    }
    let mut progress = Progress::new("evaluating", Unit::Count, Some(read));
    let options = EvalOptions { rows: usize::from(args.rows), tokens: args.tokens.unwrap_or(0) };
    let bytes = TokenBytes::of(&own);
    let scores = evaluate(&Ctx::cpu(), &model.config, &model.params, (&corpus, &bytes), options, &mut |tokens| {
        progress.set(tokens.min(read), || "tokens".to_owned());
    });
    let scores: Scores = scores.map_err(train_error)?;
    let seconds = progress.finish();
    Ok(json!({
        "data": folder, "split": args.split, "tokens": tokens,
        "predicted_tokens": scores.targets.first().copied().unwrap_or(0), "predicted_bytes": scores.bytes,
        "bits_per_byte": scores.bits_per_byte(), "perplexity": scores.perplexity(), "loss": scores.loss(),
        "mtp_losses": scores.mtp_losses(), "seconds": seconds,
    }))
}

/// Answers a file's questions.
fn questions(args: &Args, model: &Model, path: &Path, tallies: &mut Tallies) -> anyhow::Result<()> {
    let tokenizer: &Tokenizer = match &model.tokenizer {
        Some((tokenizer, _)) => tokenizer,
        None => {
            return Err(Usage(format!(
                "{}: no tokenizer.json beside the model, and questions are text",
                args.model.display()
            ))
            .into());
        }
    };
    let questions = choices::read(path).map_err(train_error)?;
    let most = args.limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let questions = &questions[..questions.len().min(most)];
    let net = HyMo::new(&model.config).with_context(|| args.model.display().to_string())?;
    let mut progress = Progress::new("answering", Unit::Count, Some(questions.len() as u64));
    for (n, question) in questions.iter().enumerate() {
        let answer = choices::answer(&Ctx::cpu(), &net, &model.params, tokenizer, question).map_err(train_error)?;
        let task = if question.task.is_empty() {
            path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
        } else {
            question.task.clone()
        };
        tallies.entry(task).or_default().add(question, &answer);
        progress.set(n as u64 + 1, || "questions".to_owned());
    }
    progress.finish();
    Ok(())
}

fn shown(model: &Model, texts: &[Value], tasks: &[Value]) -> String {
    let number = |value: &Value, digits: usize| value.as_f64().map_or("NaN".to_owned(), |x| format!("{x:.digits$}"));
    let mut text = format!("{}, {} steps\n", model.path.display(), grouped(model.step));
    for t in texts {
        let count = |key: &str| grouped(t[key].as_u64().unwrap_or(0));
        text += &format!(
            "{} ({}): {} bits per byte, perplexity {}, loss {} on {} tokens, {} bytes\n",
            t["data"].as_str().unwrap_or(""),
            t["split"].as_str().unwrap_or(""),
            number(&t["bits_per_byte"], 4),
            number(&t["perplexity"], 3),
            number(&t["loss"], 4),
            count("predicted_tokens"),
            count("predicted_bytes"),
        );
        for (k, loss) in t["mtp_losses"].as_array().into_iter().flatten().enumerate() {
            text += &format!("    prediction module {}: loss {}\n", k + 1, number(loss, 4));
        }
    }
    for t in tasks {
        let share = |key: &str| {
            let error = number(&t[format!("{key}_stderr")], 4);
            format!("{} +- {error}", number(&t[key], 4))
        };
        text += &format!(
            "{}: acc {}, acc_norm {} on {} questions\n",
            t["task"].as_str().unwrap_or(""),
            share("acc"),
            share("acc_norm"),
            t["questions"]
        );
        if t["contexts_cut"] != 0 {
            text +=
                &format!("    {} contexts were longer than the model's and lost their beginning\n", t["contexts_cut"]);
        }
        if t["endings_too_long"] != 0 {
            text += &format!(
                "    {} questions have endings longer than the model's context, where it was never trained\n",
                t["endings_too_long"]
            );
        }
    }
    text
}
