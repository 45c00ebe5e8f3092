//! `hymo generate`: text out of a model.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;

use hymo_infer::{Constraint, Grammars, Request};
use hymo_tokenizer::Tokenizer;

use crate::decoding::{Decoding, Loaded, Sampling, infer_error, load, read, report, stream, summary};
use crate::stop::Stop;
use crate::threads::on_threads;

/// Writes text with a trained model
///
/// The text streams to standard output, a line about speed and drafts to standard error. Ctrl-C ends the text.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo generate runs/first --prompt 'Once upon a time'
  hymo generate runs/first --prompt-file question.txt -t 0 --stop '\n\n' --json
  hymo generate exported --dtype int8 --mtp on --gates 0.5,0.5 -n 1000
  hymo generate exported --prompt 'Name and age: ' --regex '[A-Z][a-z]+, [0-9]{1,2}'")]
pub struct Args {
    /// A run's folder, a checkpoint, or an exported folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// The text to go on from [default: none, a new document]
    #[arg(long, short, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,

    /// A file with the text to go on from; - is standard input
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// The output is JSON that fits this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", conflicts_with = "regex")]
    json_schema: Option<String>,

    /// The output is text that this regular expression matches as a whole
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,

    #[command(flatten)]
    sampling: Sampling,

    #[command(flatten)]
    decoding: Decoding,

    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    on_threads(args.decoding.threads, || generate(args, out))
}

fn generate(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(path)) => read(path)?,
        (None, None) => Vec::new(),
    };
    let Loaded { mut generator, tokenizer } = load(&args.model, &args.decoding, 0)?;
    let mut ids = tokenizer.encode(&prompt)?;
    if ids.is_empty() {
        ids.push(tokenizer.end_of_text());
    }
    let constraint = constraint(args, &tokenizer)?;
    let request = Request { constraint, ..Request::new(&ids, &args.sampling.options()) };
    let stop = Stop::listen("ending the text")?;
    let told = stream(&mut generator, request, Some(&stop), |token| match args.json {
        true => Ok(()),
        false => out.write_all(&token.bytes).and_then(|()| out.flush()),
    });
    let (output, seconds) = told.map_err(infer_error)?.context("the text")?;
    if args.json {
        return Ok(writeln!(out, "{:#}", report(&output, seconds))?);
    }
    writeln!(out)?;
    out.flush()?;
    // Where standard error is closed, the text has been told all the same.
    let _ = writeln!(io::stderr(), "{}", summary(&output, seconds));
    Ok(())
}

/// What the output must be.
fn constraint(args: &Args, tokenizer: &Tokenizer) -> anyhow::Result<Option<Box<dyn Constraint>>> {
    let grammars = || Grammars::new(tokenizer).map_err(infer_error);
    let made = match (&args.json_schema, &args.regex) {
        (Some(schema), _) if schema.trim_start().starts_with('{') => grammars()?.json_schema(schema),
        (Some(path), _) => grammars()?.json_schema(&String::from_utf8_lossy(&read(&PathBuf::from(path))?)),
        (None, Some(pattern)) => grammars()?.regex(pattern),
        (None, None) => return Ok(None),
    };
    Ok(Some(made.map_err(infer_error)?))
}
