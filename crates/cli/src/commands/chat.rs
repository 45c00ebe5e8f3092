//! `hymo chat`: turns in the terminal.

mod history;

use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use hymo_infer::Request;

use crate::decoding::{Decoding, Loaded, Sampling, infer_error, load, stream, summary};
use crate::exit::Usage;
use crate::source::shown;
use crate::stop::Stop;
use crate::threads::on_threads;
use history::{History, Role};

/// Bytes for the states that later turns begin from.
const SNAPSHOTS: u64 = 1 << 30;

/// Talks with a model
///
/// Every turn goes on from the state of the one before. /reset forgets the turns, /save FILE keeps them as JSON, /quit or the
/// end of input leaves. Ctrl-C ends the chat.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  hymo chat runs/first
  hymo chat exported --system 'Answer in one sentence.' --dtype int8
  hymo chat exported --template turns.jinja")]
pub struct Args {
    /// A run's folder, a checkpoint, or an exported folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// What the model is told before the first turn
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// How turns become text, in Jinja [default: chat_template.jinja beside the model, or HyMo's own turns]
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,

    #[command(flatten)]
    sampling: Sampling,

    #[command(flatten)]
    decoding: Decoding,
}

/// Runs the command.
pub fn run(args: &Args, out: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    on_threads(args.decoding.threads, || chat(args, out))
}

fn chat(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let template = template(args)?;
    let mut loaded = load(&args.model, &args.decoding, SNAPSHOTS)?;
    if template.is_none() {
        writeln!(
            out,
            "no chat template lies beside this model: it was probably not trained to chat, and only goes on with text"
        )?;
    }
    let mut history = History::new(template.as_deref(), args.system.as_deref())?;
    let stop = Stop::listen("leaving")?;
    let mut lines = io::stdin().lock().split(b'\n');
    loop {
        write!(out, "> ")?;
        out.flush()?;
        let line = match lines.next() {
            Some(line) if !stop.asked() => line.context("standard input")?,
            _ => return Ok(writeln!(out)?),
        };
        let line = line.trim_ascii();
        match command(line, &mut history, out)? {
            Said::Leave => return Ok(()),
            Said::Nothing => {}
            Said::Text => turn(args, &mut loaded, &mut history, line, (out, &stop))?,
        }
    }
}

/// What a line asks for.
enum Said {
    Leave,
    Nothing,
    Text,
}

/// Does what a line asks for. A turn may be any bytes: the model reads bytes, and a file piped in need not be UTF-8.
fn command(line: &[u8], history: &mut History, out: &mut dyn Write) -> anyhow::Result<Said> {
    if !line.is_empty() && !line.starts_with(b"/") {
        return Ok(Said::Text);
    }
    let Ok(line) = std::str::from_utf8(line) else {
        writeln!(out, "{}: a command is UTF-8; want /reset, /save FILE or /quit", String::from_utf8_lossy(line))?;
        return Ok(Said::Nothing);
    };
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    match word {
        "" => Ok(Said::Nothing),
        "/quit" | "/exit" => Ok(Said::Leave),
        "/reset" => {
            history.reset();
            writeln!(out, "forgotten")?;
            Ok(Said::Nothing)
        }
        "/save" if !rest.is_empty() => {
            let path = Path::new(rest.trim());
            let done = std::fs::write(path, format!("{:#}\n", history.json()));
            match done {
                Ok(()) => writeln!(out, "saved {} messages to {}", history.len(), shown(path))?,
                Err(error) => writeln!(out, "{}: cannot be written: {error}", shown(path))?,
            }
            Ok(Said::Nothing)
        }
        word => {
            writeln!(out, "{word}: want /reset, /save FILE or /quit")?;
            Ok(Said::Nothing)
        }
    }
}

fn turn(
    args: &Args,
    loaded: &mut Loaded,
    history: &mut History,
    text: &[u8],
    (out, stop): (&mut dyn Write, &Stop),
) -> anyhow::Result<()> {
    let Loaded { generator, tokenizer } = loaded;
    history.push(Role::User, text.to_vec(), tokenizer.encode(text)?);
    let prompt = history.tokens(tokenizer)?;
    let mut options = args.sampling.options();
    options.stop_tokens.push(tokenizer.special(history::END_OF_TURN)?);
    let told = stream(generator, Request::new(&prompt, &options), Some(stop), |token| {
        out.write_all(&token.bytes).and_then(|()| out.flush())
    });
    let (output, seconds) = match told.map_err(infer_error) {
        Ok(told) => told.context("the text")?,
        // A turn that cannot be is no end of the chat.
        Err(error) => {
            history.pop();
            return Ok(writeln!(out, "{error:#}")?);
        }
    };
    let mut tokens = output.tokens.clone();
    if let hymo_infer::Finish::StopToken(_) = output.finish {
        tokens.pop();
    }
    history.push(Role::Assistant, output.text.clone(), tokens);
    writeln!(out)?;
    out.flush()?;
    let _ = writeln!(io::stderr(), "{}", summary(&output, seconds));
    Ok(())
}

/// The template asked for, or the one beside the model.
fn template(args: &Args) -> anyhow::Result<Option<String>> {
    let beside = args.model.join("chat_template.jinja");
    let path = match &args.template {
        Some(path) => path,
        None if beside.is_file() => &beside,
        None => return Ok(None),
    };
    let text = std::fs::read_to_string(path);
    Ok(Some(text.map_err(|e| Usage(format!("{}: not readable: {e}", shown(path))))?))
}
