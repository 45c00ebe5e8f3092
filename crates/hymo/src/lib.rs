//! HyMo as a library: build, train, evaluate, generate. What most programs need stands here; every part's own crate is a
//! module with all of it ([`model`], [`train`], [`infer`], ..).
//!
//! # A model from a preset
//! ```
//! use hymo::{Cost, CostOptions, Ctx, HyMo, Params, presets};
//!
//! let config = presets::hymo_nano();
//! let cost = Cost::new(&config, CostOptions { context: 512, batch: 1 })?;
//! assert_eq!(cost.params.active, 3_177_728);
//! let (model, params) = (HyMo::new(&config)?, Params::init(&Ctx::cpu(), &config, 1)?);
//! # let _ = (model, params);
//! # Ok::<(), hymo::model::Error>(())
//! ```
//!
//! # A training step by hand
//! ```
//! use hymo::{Batch, Ctx, HyMo, Optimizer, Options, Params, Tape, optim, presets, wsd};
//!
//! let (ctx, config) = (Ctx::cpu(), presets::hymo_nano());
//! let (model, mut params) = (HyMo::new(&config)?, Params::init(&ctx, &config, 1)?);
//! let (options, schedule) = (optim(2e-3), wsd(100)?);
//! let mut optimizer = Optimizer::new(&ctx, &params, &options)?;
//!
//! // One row of 16 positions, and the tokens that its last targets need; one document.
//! let tokens: Vec<i32> = (0..19).map(|i| 7 * i % 100).collect();
//! let batch = Batch::new(1, 16, config.mtp.n_modules, &tokens, &[0; 19])?;
//! let mut tape = Tape::training(&ctx, params.zero_grads(&ctx)?);
//! let losses = model.loss(&mut tape, &params, &batch, &Options::default())?;
//! let grads = tape.backward(&losses.seeds())?.into_params().expect("a training tape has them");
//! let lr = options.lr * schedule.factor(optimizer.steps() + 1);
//! optimizer.step(&ctx, params.flats_mut(), grads.flats(), lr)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A whole run: text to a trained model
//! ```
//! use hymo::data::{prep::{PrepOptions, prepare}, source::{Format, Inputs}};
//! use hymo::tokenizer::train::{TrainOptions, Trainer as Learner};
//! use hymo::train::run::{Ending, Resume, Run, RunOptions};
//! use hymo::{Ctx, RunConfig, Tokenizer, presets};
//!
//! # let dir = tempfile::tempdir()?;
//! # let at = |name: &str| dir.path().join(name);
//! // Documents, a vocabulary, shards.
//! let texts: Vec<String> = (0..40).map(|i| format!("the {i}th cat sees the moon, and the moon sees the {i}th cat. ").repeat(9)).collect();
//! let mut learner = Learner::new(TrainOptions { vocab_size: 600, ..TrainOptions::default() })?;
//! learner.feed(texts.iter().map(|t| Ok::<_, hymo::tokenizer::Error>(t.clone().into_bytes())), &mut |_| ())?;
//! let (json, _) = learner.finish(&mut |_, _| ())?;
//! for (i, text) in texts.iter().enumerate() {
//!     std::fs::write(at(&format!("{i:02}.txt")), text)?;
//! }
//! let inputs = Inputs::find(&[format!("{}/*.txt", dir.path().display())], Format::Text)?;
//! let mut options = PrepOptions::default();
//! options.shaping.val_fraction = 0.1;
//! prepare(&inputs, (&Tokenizer::from_json(&json)?, &json), &at("data"), &options, &mut |_| ())?;
//!
//! // A small model, four steps. The folder has checkpoints, log and report; the same lines go on where a run was stopped.
//! let mut config = RunConfig::new(presets::hymo_nano());
//! (config.model.vocab_size, config.model.context_length) = (600, 64);
//! (config.train.rows, config.train.micro_rows, config.schedule.num_steps) = (2, 2, 4);
//! config.data.shards = vec![at("data").display().to_string()];
//! let options = RunOptions::new(at("run"), "cats").resume(Resume::Auto);
//! let mut run = Run::open(&Ctx::cpu(), &config, options)?;
//! assert_eq!(run.go(&mut ())?, Ending::Finished);
//! assert!(at("run/report.html").is_file());
//!
//! // A model out, and in again: one safetensors file with config.json and tokenizer.json.
//! use hymo::{Generator, Model, SampleOptions, WeightDtype};
//! use hymo::train::exchange::{Precision, export};
//! export(&Model::load(&Ctx::cpu(), &at("run"))?, &at("exported"), Precision::F32)?;
//! let model = Model::load(&Ctx::cpu(), &at("exported"))?;
//!
//! // Text from it, with the prediction modules' drafts: the same bytes as without them.
//! use hymo::infer::{Gates, Mtp};
//! use std::{ops::ControlFlow, sync::Arc};
//! let tokenizer = Arc::new(model.tokenizer.ok_or("exports have one")?.0);
//! let write = |mtp| -> Result<Vec<u8>, hymo::infer::Error> {
//!     let generator = Generator::new(&model.config, &model.params, WeightDtype::F32)?;
//!     let mut generator = generator.with_tokenizer(Arc::clone(&tokenizer)).with_mtp(mtp, Gates::default());
//!     let options = SampleOptions { max_tokens: 12, ..SampleOptions::default() };
//!     Ok(generator.generate_text(b"the 7th cat", &options, |_| ControlFlow::Continue(()))?.text)
//! };
//! assert_eq!(write(Mtp::On)?, write(Mtp::Off)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use hymo_data as data;
pub use hymo_infer as infer;
pub use hymo_model as model;
pub use hymo_ops as ops;
pub use hymo_optim as optimizers;
pub use hymo_tape as tape;
pub use hymo_tensor as tensor;
pub use hymo_tokenizer as tokenizer;
pub use hymo_train as train;

pub use hymo_infer::{Engine, Generator, SampleOptions, WeightDtype};
pub use hymo_model::config::{AdamWConfig as CautiousAdamW, NorMuonConfig as NorMuon, OptimConfig, ScheduleConfig};
pub use hymo_model::{Batch, Cost, CostOptions, HyMo, ModelConfig, Options, Params, RunConfig, presets};
pub use hymo_optim::{Optimizer, Schedule};
pub use hymo_tape::Tape;
pub use hymo_tensor::{Ctx, Tensor};
pub use hymo_tokenizer::Tokenizer;
pub use hymo_train::{Model, Trainer};

use hymo_model::config::ScheduleKind;

/// NorMuon and Cautious AdamW with their defaults, at a learning rate. Each one's options are fields: [`NorMuon`],
/// [`CautiousAdamW`].
#[must_use]
pub fn optim(lr: f64) -> OptimConfig {
    OptimConfig { lr, ..OptimConfig::default() }
}

/// Warm-up, stable, decay: 2% of the steps rise, the last 20% fall as 1 - sqrt.
///
/// # Errors
/// No steps, or more than 2,000,000,000.
pub fn wsd(num_steps: u64) -> Result<Schedule, hymo_model::Problems> {
    of_kind(ScheduleKind::Wsd, num_steps)
}

/// Warm-up in 2% of the steps, then half a cosine to 0.
///
/// # Errors
/// As [`wsd`].
pub fn cosine(num_steps: u64) -> Result<Schedule, hymo_model::Problems> {
    of_kind(ScheduleKind::Cosine, num_steps)
}

/// Warm-up in 2% of the steps, then the same rate to the end.
///
/// # Errors
/// As [`wsd`].
pub fn constant(num_steps: u64) -> Result<Schedule, hymo_model::Problems> {
    of_kind(ScheduleKind::Constant, num_steps)
}

fn of_kind(kind: ScheduleKind, num_steps: u64) -> Result<Schedule, hymo_model::Problems> {
    Schedule::new(&ScheduleConfig { kind, num_steps, ..ScheduleConfig::default() })
}

#[cfg(test)]
mod tests {
    #[test]
    fn schedules_are_what_they_are_called() {
        let factors = |s: crate::Schedule| [1, 50, 100].map(|step| s.factor(step));
        assert_eq!(factors(crate::constant(100).unwrap()), [0.5, 1., 1.]);
        assert_eq!(factors(crate::wsd(100).unwrap()), [0.5, 1., 0.]);
        let cosine = factors(crate::cosine(100).unwrap());
        assert!(cosine[1] > 0.5 && cosine[1] < 0.55 && cosine[2].abs() < 1e-12, "{cosine:?}");
        assert!(crate::wsd(0).is_err());
    }
}
