//! What a run writes down: a line of `log.jsonl` each, and what the report and the TensorBoard files are drawn from.

use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// A line of `log.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// The run began, or went on.
    Start(Start),
    /// A step was taken.
    Step(StepReport),
    /// The model was evaluated.
    Eval(Evaluation),
    /// Something else that a reader of the log should know: a checkpoint, a step that was refused, a way back.
    Note(Note),
}

/// The beginning of a run, or of its continuation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Seconds since 1970.
    pub time: f64,
    /// What the run is called.
    pub name: String,
    /// Version and commit of the program.
    pub version: String,
    /// The last step of what it goes on from; 0 for a new run.
    pub step: u64,
    /// Steps of the schedule.
    pub num_steps: u64,
    /// What computes.
    pub device: String,
    /// Parameters that a token meets, and all that are stored.
    pub params: (u64, u64),
    /// Tokens of a step.
    pub tokens_per_step: u64,
    /// FLOPs of a token in training, forward and backward.
    pub flops_per_token: f64,
    /// FLOP/s of this device at dense matrix products, which MFU is relative to.
    pub peak_flops: Option<f64>,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Its number, from 1.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// Loss of the head and of each prediction module, each the mean over its valid targets, nats a token. A
    /// number that is not finite is `null` in JSON, and NaN again when it is read.
    #[serde(deserialize_with = "numbers")]
    pub losses: Vec<f64>,
    /// Weighted sum of the losses, and the balance loss.
    #[serde(deserialize_with = "number")]
    pub total: f64,
    /// Balance losses of all layers.
    #[serde(deserialize_with = "number")]
    pub balance: f64,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Whether the parameters moved: a gradient that is not finite moves nothing.
    pub stepped: bool,
    /// Why they did not, and where the step's batch is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Largest load of an expert over the mean load, less 1, by layer with experts.
    pub max_violation: Vec<f64>,
    /// Each expert's share of the layer's choices, by layer with experts.
    pub expert_load: Vec<Vec<f32>>,
    /// Largest attention logit of all heads, by attention layer.
    #[serde(deserialize_with = "numbers")]
    pub max_logits: Vec<f64>,
    /// Tokens of this step, padding left out.
    pub tokens: u64,
    /// Tokens of the run so far.
    pub total_tokens: u64,
    /// Times the data has been read before.
    pub epoch: u64,
    /// Wall time, s.
    pub seconds: f64,
    /// Of it, waiting for data.
    pub data_seconds: f64,
    /// Model FLOPs over what the device could have done meanwhile, 0 to 1; nothing where its rate is not known.
    pub mfu: Option<f64>,
}

impl StepReport {
    /// Tokens a second, all of the step's time counted.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

/// An evaluation on held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps taken before it.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// Mean loss of the head, nats a token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// The same text's cost in bits a byte, which compares across tokenizers.
    #[serde(deserialize_with = "number")]
    pub bits_per_byte: f64,
    /// Loss of each prediction module.
    #[serde(deserialize_with = "numbers")]
    pub mtp_losses: Vec<f64>,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes that they stand for.
    pub bytes: u64,
    /// Whether it is the best so far.
    pub best: bool,
    /// What the model writes.
    pub samples: Vec<Sample>,
    /// Wall time, s.
    pub seconds: f64,
}

/// What a model wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// What it was given.
    pub prompt: String,
    /// How it went on.
    pub text: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// Steps taken before it.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// What.
    pub text: String,
}

/// Seconds since 1970.
#[must_use]
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0., |t| t.as_secs_f64())
}

/// JSON has no NaN: `null` stands for it.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    Ok(Vec::<Option<f64>>::deserialize(from)?.into_iter().map(|n| n.unwrap_or(f64::NAN)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_nan_is_read_again() {
        let note = Record::Note(Note { step: 3, time: 1.5, text: "checkpoint".into() });
        assert_eq!(serde_json::from_str::<Record>(&serde_json::to_string(&note).unwrap()).unwrap(), note);
        let eval = Evaluation {
            step: 1,
            time: 0.,
            loss: f64::NAN,
            bits_per_byte: 2.,
            mtp_losses: vec![1., f64::NAN],
            tokens: 1,
            bytes: 3,
            best: false,
            samples: vec![Sample { prompt: "a".into(), text: "b".into() }],
            seconds: 0.,
        };
        let line = serde_json::to_string(&Record::Eval(eval)).unwrap();
        let Record::Eval(back) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert!(back.loss.is_nan() && back.mtp_losses[1].is_nan() && back.mtp_losses[0] == 1.);
    }
}
