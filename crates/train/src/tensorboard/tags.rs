//! What a record is in TensorBoard: tags and their values.

use super::wire::Value;
use crate::record::{Evaluation, Note, Sample, Start, StepReport};

pub(super) type Values = Vec<(String, Value)>;

/// Tags while they are collected.
#[derive(Default)]
struct Tags(Values);

impl Tags {
    fn scalar(&mut self, tag: impl Into<String>, value: f64) {
        self.0.push((tag.into(), Value::Scalar(value as f32)));
    }

    /// One tag a layer or module: what `name` makes of its number.
    fn scalars(&mut self, values: &[f64], name: impl Fn(usize) -> String) {
        values.iter().enumerate().for_each(|(at, value)| self.scalar(name(at), *value));
    }

    fn text(&mut self, tag: impl Into<String>, markdown: String) {
        self.0.push((tag.into(), Value::Text(markdown)));
    }
}

pub(super) fn step(step: &StepReport) -> Values {
    let mut tags = Tags::default();
    if let [main, modules @ ..] = &step.losses[..] {
        tags.scalar("loss/main", *main);
        tags.scalars(modules, |at| format!("loss/mtp{}", at + 1));
    }
    tags.scalar("loss/total", step.total);
    tags.scalar("loss/balance", step.balance);
    tags.scalar("optim/lr", step.lr);
    tags.scalar("optim/grad_norm", step.grad_norm);
    tags.scalar("speed/tokens_per_second", step.tokens_per_second());
    if let Some(mfu) = step.mfu {
        tags.scalar("speed/mfu", mfu);
    }
    tags.scalars(&step.max_violation, |at| format!("moe/max_violation/layer_{at}"));
    tags.scalars(&step.max_logits, |at| format!("attention/max_logit/layer_{at}"));
    tags.0
}

pub(super) fn evaluation(eval: &Evaluation) -> Values {
    let mut tags = Tags::default();
    tags.scalar("eval/loss", eval.loss);
    tags.scalar("eval/bits_per_byte", eval.bits_per_byte);
    tags.scalars(&eval.mtp_losses, |at| format!("eval/mtp{}", at + 1));
    for (at, Sample { prompt, text }) in eval.samples.iter().enumerate() {
        let markdown = format!("**Given**\n\n{}\n**Written**\n\n{}", as_code(prompt), as_code(text));
        tags.text(format!("eval/sample_{at}"), markdown);
    }
    tags.0
}

pub(super) fn start(start: &Start) -> Values {
    let mut tags = Tags::default();
    let (active, stored) = start.params;
    let lines = [
        ("name", start.name.clone()),
        ("version", start.version.clone()),
        ("device", start.device.clone()),
        ("parameters of a token", active.to_string()),
        ("parameters stored", stored.to_string()),
        ("steps", start.num_steps.to_string()),
        ("tokens of a step", start.tokens_per_step.to_string()),
        ("FLOPs of a token", start.flops_per_token.to_string()),
    ];
    let text: String = lines.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    tags.text("run", as_code(&text));
    tags.0
}

pub(super) fn note(note: &Note) -> Values {
    let mut tags = Tags::default();
    tags.text("notes", as_code(&note.text));
    tags.0
}

/// Shown as it is: what a model writes may look like Markdown. An indented block cannot be closed from inside, as a fenced
/// one can.
fn as_code(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
