//! Multiple choice: which of some endings a model finds likeliest.
//!
//! A question is a line of JSON: `{"context": "The sky is", "choices": [" blue", " loud"], "answer": 0}`, and a `"task"`
//! where a file holds several. An ending costs Σ -ln p of its tokens behind the context. Endings of different lengths are
//! compared by cost and by cost for each of their bytes (`acc` and `acc_norm` of lm-evaluation-harness), which does not
//! depend on the tokenizer.

use crate::Error;
use hymo_model::{HyMo, Params, State};
use hymo_tensor::{Ctx, Tensor};
use hymo_tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Longest line of a file of questions, bytes.
const LINE: usize = 16 << 20;
/// Tokens of a context computed at once; the sum does not depend on it but for rounding.
const CHUNK: usize = 256;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// What is tallied apart.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub task: String,
    /// What comes before every ending.
    pub context: String,
    /// The endings: at least two, none empty.
    pub choices: Vec<String>,
    /// Index of the right one.
    pub answer: usize,
}

/// What a model makes of a question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Σ ln p of each ending.
    pub logprobs: Vec<f64>,
    /// The likeliest ending.
    pub likeliest: usize,
    /// The likeliest for each of its bytes.
    pub likeliest_by_length: usize,
    /// Whether the context had to lose its beginning.
    pub cut: bool,
    /// Whether an ending alone is longer than the model's context.
    pub beyond: bool,
}

/// How many answers were right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Questions.
    pub questions: u64,
    /// Right by likelihood.
    pub right: u64,
    /// Right by likelihood for each byte.
    pub right_by_length: u64,
    /// Contexts that lost their beginning.
    pub cut: u64,
    /// Questions with an ending longer than the model's context.
    pub beyond: u64,
}

impl Tally {
    /// Counts an answer.
    pub fn add(&mut self, question: &Question, answer: &Answer) {
        self.questions += 1;
        self.right += u64::from(answer.likeliest == question.answer);
        self.right_by_length += u64::from(answer.likeliest_by_length == question.answer);
        self.cut += u64::from(answer.cut);
        self.beyond += u64::from(answer.beyond);
    }

    /// Share right, by likelihood; NaN without questions.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.questions as f64
    }

    /// Share right, by likelihood for each byte; NaN without questions.
    #[must_use]
    pub fn accuracy_by_length(&self) -> f64 {
        self.right_by_length as f64 / self.questions as f64
    }

    /// Standard error of a share of right answers; NaN with fewer than two questions.
    #[must_use]
    pub fn standard_error(&self, share: f64) -> f64 {
        if self.questions < 2 { f64::NAN } else { (share * (1. - share) / (self.questions - 1) as f64).sqrt() }
    }
}

/// Tallies by task.
pub type Tallies = BTreeMap<String, Tally>;

/// Reads a file of questions, a JSON object a line.
///
/// # Errors
/// A line that is no question, by its number.
pub fn read(path: &Path) -> Result<Vec<Question>, Error> {
    let failed = |e| Error::io("read", path, e);
    let wrong = |line: usize, problem: String| Error::Question { path: path.to_owned(), line, problem };
    let mut lines = BufReader::new(File::open(path).map_err(failed)?);
    let (mut questions, mut line) = (Vec::new(), Vec::new());
    for number in 1.. {
        line.clear();
        let mut limited = std::io::Read::take(&mut lines, LINE as u64 + 1);
        if limited.read_until(b'\n', &mut line).map_err(failed)? == 0 {
            break;
        }
        if line.len() > LINE {
            return Err(wrong(number, format!("longer than {LINE} bytes")));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let question: Question = serde_json::from_slice(&line).map_err(|e| wrong(number, at_column(&e)))?;
        question.check().map_err(|problem| wrong(number, problem))?;
        questions.push(question);
    }
    if questions.is_empty() {
        return Err(wrong(1, "no question in it".to_owned()));
    }
    Ok(questions)
}

/// A JSON error without its line, which is always 1 here: the file's line is told before it.
fn at_column(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let bare = text.rsplit_once(" at line ").map_or(text.as_str(), |(bare, _)| bare);
    format!("{bare} at column {}", error.column())
}

impl Question {
    fn check(&self) -> Result<(), String> {
        let n = self.choices.len();
        if n < 2 {
            return Err(format!("choices: found {n}, expected at least 2"));
        }
        if let Some(at) = self.choices.iter().position(String::is_empty) {
            return Err(format!("choices: number {at} is empty"));
        }
        if self.answer >= n {
            return Err(format!("answer: found {}, expected 0 to {}", self.answer, n - 1));
        }
        Ok(())
    }
}

/// Answers a question.
///
/// # Errors
/// A tokenizer of another vocabulary than the model's; likelihoods that are not finite.
pub fn answer(
    ctx: &Ctx,
    net: &HyMo,
    params: &Params,
    tokenizer: &Tokenizer,
    question: &Question,
) -> Result<Answer, Error> {
    let encode = |text: &str| tokenizer.encode(text.as_bytes()).map_err(hymo_data::Error::from);
    let alone = encode(&question.context)?;
    // Context and ending are one text, as in training: where a token spans the seam, it belongs to the ending.
    let whole = question.choices.iter().map(|choice| encode(&format!("{}{choice}", question.context)));
    let whole = whole.collect::<Result<Vec<_>, _>>()?;
    let common = |ids: &Vec<u32>| ids.iter().zip(&alone).take_while(|(a, b)| a == b).count().min(ids.len() - 1);
    let shared = whole.iter().map(common).min().unwrap_or(0);
    // Something must come before the first token that is judged.
    let before: Vec<u32> = if shared == 0 { vec![tokenizer.end_of_text()] } else { alone[..shared].to_vec() };
    let longest = whole.iter().map(|ids| ids.len() - shared).max().unwrap_or(1);
    let room = net.config().context_length.saturating_sub(longest).max(1);
    let cut = before.len() > room;
    let (state, logits) = prefill(ctx, net, params, &before[before.len() - room.min(before.len())..])?;
    let cost = |ids: &Vec<u32>| ending(ctx, net, params, (&state, &logits), &ids[shared..]);
    let logprobs = whole.iter().map(cost).collect::<Result<Vec<_>, _>>()?;
    if let Some(at) = logprobs.iter().position(|logprob| !logprob.is_finite()) {
        return Err(Error::NotFinite {
            what: format!("the likelihood of ending {at} of \"{}\"", short(&question.context)),
        });
    }
    let each = logprobs.iter().zip(&question.choices).map(|(logprob, choice)| logprob / choice.len() as f64);
    let beyond = longest > net.config().context_length;
    Ok(Answer {
        beyond,
        likeliest: largest(logprobs.iter().copied()),
        likeliest_by_length: largest(each),
        logprobs,
        cut,
    })
}

/// The end of a context, for a message.
fn short(context: &str) -> String {
    let chars: Vec<char> = context.chars().collect();
    chars[chars.len().saturating_sub(40)..].iter().filter(|c| !c.is_control()).collect()
}

/// The first of the largest.
fn largest(values: impl Iterator<Item = f64>) -> usize {
    let best = values.enumerate().fold((0, f64::NEG_INFINITY), |best, (i, v)| if v > best.1 { (i, v) } else { best });
    best.0
}

/// The state behind some tokens, and the last one's logits [1, V].
fn prefill(ctx: &Ctx, net: &HyMo, params: &Params, tokens: &[u32]) -> Result<(State, Tensor), Error> {
    let mut state = State::new(net.config());
    let mut last = None;
    for piece in tokens.chunks(CHUNK) {
        let logits = net.extend(ctx, params, &signed(piece), &mut state)?;
        last = Some(logits.slice_rows(piece.len() - 1..piece.len())?);
    }
    Ok((state, last.expect("invariant: at least one token")))
}

/// Σ ln p of tokens behind a state. The last token is judged and not read.
fn ending(
    ctx: &Ctx,
    net: &HyMo,
    params: &Params,
    (state, logits): (&State, &Tensor),
    tokens: &[u32],
) -> Result<f64, Error> {
    let mut state = state.clone();
    let mut sum = logprob(logits, 0, tokens[0])?;
    let mut at = 0;
    for piece in tokens[..tokens.len() - 1].chunks(CHUNK) {
        let logits = net.extend(ctx, params, &signed(piece), &mut state)?;
        for row in 0..piece.len() {
            at += 1;
            sum += logprob(&logits, row, tokens[at])?;
        }
    }
    Ok(sum)
}

fn signed(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|&id| i32::try_from(id).unwrap_or(i32::MAX)).collect()
}

/// ln softmax of a row at a token, in f64.
fn logprob(logits: &Tensor, row: usize, token: u32) -> Result<f64, Error> {
    let logits = logits.view::<f32>()?;
    let row = logits.row(row);
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&l| f64::from(l - most).exp()).sum();
    let at = row.get(token as usize).copied().unwrap_or(f32::NAN);
    Ok(f64::from(at - most) - sum.ln())
}
