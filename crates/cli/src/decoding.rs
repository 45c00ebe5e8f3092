//! What `hymo generate`, `hymo chat` and others that put out text have in common: flags, loading, the report.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use hymo_infer::{
    CacheDtype, Clock, EngineOptions, Gates, Generator, Mtp, Output, Request, SampleOptions, Token, WeightDtype,
    Weights,
};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::exit::Usage;
use crate::source::{shown, trained};
use crate::stop::Stop;

/// How a model is loaded and run.
#[derive(clap::Args, Clone)]
pub struct Decoding {
    /// What the weights are kept as: f32 as trained, bf16 half of it, int8 a quarter
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,

    /// Whether the prediction modules draft: changes the speed and no output; auto measures both ways
    #[arg(long, value_enum, default_value_t = Predict::Auto)]
    pub mtp: Predict,

    /// Least probabilities of drafts that are tried, by depth
    #[arg(long, value_name = "P,P", value_delimiter = ',', default_values_t = [0.80, 0.75])]
    pub gates: Vec<f32>,

    /// What the attention cache is kept as
    #[arg(long, value_enum, default_value_t = Cache::F32)]
    pub cache: Cache,

    /// Most tokens of prompt and output together [default: the model's context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,

    /// Tokens of a prompt in one pass: memory and speed, no output
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk: u32,

    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// What weights are kept as.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Dtype {
    /// As trained
    F32,
    /// Half
    Bf16,
    /// A quarter, weights only
    Int8,
}

/// Whether to draft.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Predict {
    /// Always
    On,
    /// Never
    Off,
    /// When it pays
    Auto,
}

/// What the attention cache is kept as.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// As computed
    F32,
    /// Half
    Bf16,
}

impl From<Dtype> for WeightDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => WeightDtype::F32,
            Dtype::Bf16 => WeightDtype::Bf16,
            Dtype::Int8 => WeightDtype::Int8,
        }
    }
}

/// How tokens are chosen.
#[derive(clap::Args, Clone)]
pub struct Sampling {
    /// Most tokens to generate
    #[arg(long, short = 'n', value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,

    /// 0 takes the likeliest token, 1 the model's own distribution
    #[arg(long, short = 't', value_name = "T", default_value_t = 0.8)]
    pub temperature: f32,

    /// Only the K likeliest tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,

    /// Only the fewest tokens that hold this share of the probability
    #[arg(long, value_name = "P", default_value_t = 1.)]
    pub top_p: f32,

    /// Only tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "P", default_value_t = 0.)]
    pub min_p: f32,

    /// Divides the logits of tokens that came before; 1: no penalty
    #[arg(long, value_name = "X", default_value_t = 1.)]
    pub repetition_penalty: f32,

    /// Subtracted from a token's logit for every time it was generated
    #[arg(long, value_name = "X", default_value_t = 0., allow_negative_numbers = true)]
    pub frequency_penalty: f32,

    /// Subtracted from a token's logit if it was generated
    #[arg(long, value_name = "X", default_value_t = 0., allow_negative_numbers = true)]
    pub presence_penalty: f32,

    /// Added to a token's logit; -inf forbids it; may be given again
    #[arg(long, value_name = "ID=X", value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,

    /// What chance follows from: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Text that ends the output, and is no part of it; may be given again
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,

    /// A token that ends the output; may be given again
    #[arg(long, value_name = "ID")]
    pub stop_token: Vec<u32>,

    /// Go on past the end of a document
    #[arg(long)]
    pub ignore_end: bool,

    /// Log-probabilities, with the N likeliest tokens beside each
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("want ID=NUMBER, such as 17=-1.5")?;
    Ok((id.parse().map_err(|e| format!("{id}: {e}"))?, bias.parse().map_err(|e| format!("{bias}: {e}"))?))
}

impl Sampling {
    /// As the library takes it.
    pub fn options(&self) -> SampleOptions {
        SampleOptions {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
            stop: self.stop.iter().map(|s| s.clone().into_bytes()).collect(),
            stop_tokens: self.stop_token.clone(),
            ignore_end: self.ignore_end,
            logprobs: self.logprobs,
        }
    }
}

/// A clock for passes.
pub fn clock() -> Clock {
    let start = Instant::now();
    Clock::new(move || start.elapsed().as_secs_f64())
}

impl Decoding {
    /// As the library takes it.
    pub fn options(&self) -> anyhow::Result<EngineOptions> {
        Ok(EngineOptions {
            context: self.context.map_or(0, |n| n as usize),
            prefill_chunk: self.prefill_chunk as usize,
            cache: match self.cache {
                Cache::F32 => CacheDtype::F32,
                Cache::Bf16 => CacheDtype::Bf16,
            },
            mtp: match self.mtp {
                Predict::On => Mtp::On,
                Predict::Off => Mtp::Off,
                Predict::Auto => Mtp::Auto,
            },
            gates: Gates::new(&self.gates).map_err(infer_error)?,
            clock: Some(clock()),
            ..EngineOptions::default()
        })
    }
}

/// A model that is ready, and its tokenizer.
pub struct Loaded {
    pub generator: Generator,
    pub tokenizer: Arc<Tokenizer>,
}

/// Loads the model at `path` with its tokenizer. `snapshots` are bytes for turns to begin from.
pub fn load(path: &Path, decoding: &Decoding, snapshots: u64) -> anyhow::Result<Loaded> {
    let (ctx, model) = (Ctx::cpu(), trained(path)?);
    let Some((tokenizer, _)) = model.tokenizer else {
        let what = format!(
            "{}: there is no tokenizer.json beside the model; text needs the one it was trained with",
            shown(path)
        );
        return Err(Usage(what).into());
    };
    let weights = Weights::new(&ctx, &model.config, &model.params, decoding.dtype.into())?;
    let options = EngineOptions { snapshots, ..decoding.options()? };
    let generator = Generator::over(&ctx, Arc::new(weights), options).map_err(infer_error)?;
    let tokenizer = Arc::new(tokenizer);
    let generator = generator.with_tokenizer(Arc::clone(&tokenizer));
    Ok(Loaded { generator, tokenizer })
}

/// Runs a request and says every token as it comes, until it ends, `stop` is asked for, or it cannot be said any more (the
/// inner error). Gives the output and its seconds.
pub fn stream(
    generator: &mut Generator,
    request: Request,
    stop: Option<&Stop>,
    mut say: impl FnMut(&Token) -> io::Result<()>,
) -> Result<io::Result<(Output, f64)>, hymo_infer::Error> {
    let (start, mut failed) = (Instant::now(), None);
    let output = generator.run(request, |token| {
        failed = say(token).err();
        let leave = failed.is_some() || stop.is_some_and(Stop::asked);
        if leave { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    Ok(failed.map_or(Ok((output, start.elapsed().as_secs_f64())), Err))
}

/// An error of decoding; what only the caller can put right is wrong usage.
pub fn infer_error(error: hymo_infer::Error) -> anyhow::Error {
    use hymo_infer::Error;
    match error {
        Error::EmptyPrompt | Error::PromptTooLong { .. } | Error::Token { .. } | Error::Option { .. } => {
            Usage(error.to_string()).into()
        }
        Error::Memory { .. } | Error::Grammar { .. } => Usage(error.to_string()).into(),
        _ => error.into(),
    }
}

/// Reads text from a file, or from standard input where it is called `-`.
pub fn read(path: &PathBuf) -> anyhow::Result<Vec<u8>> {
    if path.as_os_str() == "-" {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin(), &mut text).context("standard input")?;
        return Ok(text);
    }
    std::fs::read(path).map_err(|e| Usage(format!("{}: not readable: {e}", shown(path))).into())
}

/// Text that cannot move a terminal's cursor, whatever a model wrote.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '?' } else { c }).collect()
}

/// Tokens, time, and what drafts did, on a line.
pub fn summary(output: &Output, seconds: f64) -> String {
    let (stats, spec) = (&output.stats, &output.stats.speculation);
    let rate = stats.generated as f64 / seconds;
    let mut text = format!("{} tokens in {seconds:.2} s, {rate:.1} tokens/s", stats.generated);
    text += &format!(" ({} of the prompt, {} from a snapshot)", stats.prompt_tokens, stats.cached_tokens);
    if spec.cycles > 0 {
        let shares: Vec<String> = spec.acceptance().iter().map(|a| format!("{:.0}%", 100. * a)).collect();
        text += &format!(
            "; drafts accepted {}, {:.2} tokens a cycle, {:.1} ms a cycle, {:.1} ms a plain pass",
            shares.join(" then "),
            spec.tokens_per_cycle(),
            spec.ms_per_cycle(),
            spec.ms_per_plain_pass()
        );
    }
    text
}

/// The same for programs.
pub fn report(output: &Output, seconds: f64) -> Value {
    let (stats, spec) = (&output.stats, &output.stats.speculation);
    let logprobs: Vec<Value> = output.logprobs.iter().map(|l| json!({ "logprob": l.logprob, "top": l.top })).collect();
    json!({
        "text": output.text_lossy(),
        "tokens": output.tokens,
        "logprobs": logprobs,
        "finish": format!("{:?}", output.finish),
        "seconds": seconds,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "passes": stats.passes,
        "mtp": {
            "cycles": spec.cycles,
            "drafted": spec.drafted,
            "accepted": spec.accepted,
            "acceptance": spec.acceptance(),
            "tokens_per_cycle": spec.tokens_per_cycle(),
            "ms_per_cycle": spec.ms_per_cycle(),
            "ms_per_plain_pass": spec.ms_per_plain_pass(),
        },
    })
}
