//! A model from wherever one can lie: a run's folder, one of its checkpoints, an exported folder.

use crate::checkpoint::{self, Checkpoint};
use crate::{Error, exchange};
use hymo_model::{ModelConfig, Params, RunConfig};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// A model to evaluate, to write with or to export.
#[derive(Debug)]
pub struct Model {
    /// Its configuration.
    pub config: ModelConfig,
    /// Its weights: the average of a run's where one is kept.
    pub params: Params,
    /// Its tokenizer and that one's file, where there is one.
    pub tokenizer: Option<(Tokenizer, Vec<u8>)>,
    /// Steps it was trained for.
    pub step: u64,
    /// Where it was found.
    pub path: PathBuf,
    /// Damaged checkpoints that were passed over.
    pub passed_over: Vec<String>,
}

impl Model {
    /// Loads the model at `path`: a run's folder (its newest checkpoint that verifies), a checkpoint, an exported folder.
    ///
    /// # Errors
    /// None of these; a file that is damaged; a tensor that is missing, of another shape, or one too many.
    pub fn load(ctx: &Ctx, path: &Path) -> Result<Self, Error> {
        if path.join(exchange::CONFIG).is_file() {
            return exchange::load(ctx, path);
        }
        if path.join("manifest.json").is_file() {
            return Model::of(ctx, Checkpoint::open(path)?, Vec::new());
        }
        let dir = path.join("checkpoints");
        let begun = dir.is_dir() || path.join("run.toml").is_file();
        let found = if begun { checkpoint::newest(&dir)? } else { return Err(no_model(path)) };
        let problems: Vec<String> = found.refused.iter().map(|(_, error)| error.to_string()).collect();
        match found.checkpoint {
            Some(checkpoint) => Model::of(ctx, checkpoint, problems),
            None if problems.is_empty() => Err(unreadable(
                path,
                "a run without a checkpoint yet: the first is written after checkpoint.every steps, or when it is stopped",
            )),
            None => Err(Error::NoneVerifies { dir, problems: problems.join("; ") }),
        }
    }

    fn of(ctx: &Ctx, mut from: Checkpoint, passed_over: Vec<String>) -> Result<Self, Error> {
        let path = from.path().to_owned();
        let config = run_config(&from)?.model;
        let params = params(ctx, &config, &mut from)?;
        // step-N stands in checkpoints, and that beside the tokenizer.
        let beside = path.parent().and_then(Path::parent).map(|run| run.join(hymo_data::prep::TOKENIZER));
        let tokenizer = beside.filter(|file| file.is_file()).map(|file| read_tokenizer(&file)).transpose()?;
        fits(tokenizer.as_ref().map(|(tokenizer, _)| tokenizer), &config)?;
        Ok(Model { config, params, tokenizer, step: from.step(), path, passed_over })
    }
}

/// Fails where a tokenizer has ids that the model has not.
pub(crate) fn fits(tokenizer: Option<&Tokenizer>, model: &ModelConfig) -> Result<(), Error> {
    match tokenizer.filter(|tokenizer| tokenizer.vocab_size() > model.vocab_size) {
        None => Ok(()),
        Some(tokenizer) => Err(Error::Config {
            field: "model.vocab_size",
            found: model.vocab_size.to_string(),
            expected: format!("at least {}, the vocabulary of its tokenizer", tokenizer.vocab_size()),
        }),
    }
}

fn no_model(path: &Path) -> Error {
    let reason = "no model: neither a run's folder (with checkpoints/), nor a checkpoint (with manifest.json), nor an \
                  exported folder (with config.json)";
    unreadable(path, reason)
}

fn unreadable(path: &Path, reason: &str) -> Error {
    checkpoint::Error::Unreadable { path: path.to_owned(), reason: reason.to_owned() }.into()
}

/// The configuration that a checkpoint was made with.
pub(crate) fn run_config(from: &Checkpoint) -> Result<RunConfig, Error> {
    let wrong = |problem: String| Error::State { path: from.path().to_owned(), problem };
    let config: RunConfig = serde_json::from_value(from.config().clone()).map_err(|e| wrong(e.to_string()))?;
    config.validate().map_err(|e| wrong(e.to_string()))?;
    Ok(config)
}

/// The weights of a checkpoint, averaged where an average was kept.
pub(crate) fn params(ctx: &Ctx, model: &ModelConfig, from: &mut Checkpoint) -> Result<Params, Error> {
    let mut failed = None;
    let params = Params::from_fn(ctx, model, |spec| {
        let taken = from.take(&format!("model.{}", spec.name), &spec.shape);
        Ok(taken.unwrap_or_else(|error| {
            failed.get_or_insert(error);
            vec![0.; spec.numel()]
        }))
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let mut params = params;
    for spec in params.table().buffers().to_vec() {
        from.take_into(&format!("model.{}", spec.name), params.buffer_mut(&spec.name)?)?;
    }
    if !from.tensors().contains_key("ema.0") {
        return Ok(params);
    }
    let mut flats = Vec::new();
    for (unit, flat) in params.flats().iter().enumerate() {
        let mut average = flat.copy(ctx)?;
        from.take_into(&format!("ema.{unit}"), &mut average)?;
        flats.push(average);
    }
    Ok(params.with_flats(flats)?)
}

/// A tokenizer's file.
pub(crate) fn read_tokenizer(path: &Path) -> Result<(Tokenizer, Vec<u8>), Error> {
    let json = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let tokenizer = Tokenizer::from_json(&json).map_err(|source| Error::Tokenizer { path: path.to_owned(), source })?;
    Ok((tokenizer, json))
}
