//! How a run begins, or goes on.

use super::folder::Folder;
use super::{Resume, Run, RunOptions, data};
use crate::checkpoint::{Checkpoint, Found, Keep, Saver, newest};
use crate::evaluate::TokenBytes;
use crate::{Error, Trainer, load};
use hymo_data::corpus::Corpus;
use hymo_model::RunConfig;
use hymo_tensor::Ctx;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

impl Run {
    /// Opens a run's folder, its data and, where it goes on, its checkpoint.
    ///
    /// # Errors
    /// A configuration that is none or does not fit the data or the checkpoint; a folder that is in use, or that has
    /// checkpoints when a new run was asked for; checkpoints none of which verifies.
    pub fn open(ctx: &Ctx, config: &RunConfig, options: RunOptions) -> Result<Self, Error> {
        config.validate().map_err(hymo_model::Error::from)?;
        let corpus = data::corpus(&config.data)?;
        let (tokenizer, json) = data::tokenizer(&corpus)?;
        let held_out = data::held_out(&config.data)?;
        let folder = if options.dry { Folder::look(&options.dir)? } else { Folder::open(&options.dir)? };
        let mut notes = Vec::new();
        let from = beginning(&folder, &options.resume, &mut notes)?;
        let saved = from.as_ref().filter(|from| from.path().starts_with(folder.checkpoints())).map(Checkpoint::step);
        let mut trainer = match from {
            None => Trainer::new(ctx, config, Arc::clone(&corpus))?,
            Some(from) => {
                let path = from.path().to_owned();
                notes.extend(changes(&from, config)?);
                if from.state().is_null() {
                    if path.starts_with(folder.checkpoints()) {
                        return Err(imported(folder.path()));
                    }
                    notes.push(format!("begins with the weights of {}", path.display()));
                    with_weights(ctx, config, Arc::clone(&corpus), from)?
                } else {
                    let trainer = Trainer::resume(ctx, config, Arc::clone(&corpus), from)?;
                    notes.push(format!("goes on from {}, step {}", path.display(), trainer.state().step));
                    trainer
                }
            }
        };
        if held_out.is_empty() {
            notes.push("the data has no split `val`: nothing is evaluated (hymo data prep --val-fraction)".to_owned());
        }
        options.peak_flops.into_iter().for_each(|peak| trainer.set_peak_flops(peak));
        let kept = &config.checkpoint;
        let keep = Keep { last: kept.keep_last, every: kept.keep_every, best: kept.keep_best };
        Ok(Run {
            ctx: ctx.clone(),
            bytes: TokenBytes::of(&tokenizer),
            saver: Saver::new(folder.checkpoints(), keep),
            written: None,
            json,
            evaluated: None,
            folder,
            options,
            trainer,
            tokenizer: Arc::new(tokenizer),
            held_out,
            saved,
            notes,
        })
    }
}

/// Its checkpoint would stand beside the run's and, of a later step, before them.
fn imported(dir: &Path) -> Error {
    Error::Config {
        field: "the run's folder",
        found: format!("{}, which holds imported weights", dir.display()),
        expected: format!("another folder, and --resume {} to begin with them", dir.display()),
    }
}

/// A new run from imported weights, which come without moments and a place in the data.
fn with_weights(ctx: &Ctx, config: &RunConfig, corpus: Arc<Corpus>, mut from: Checkpoint) -> Result<Trainer, Error> {
    let params = load::params(ctx, &config.model, &mut from)?;
    from.finish()?;
    Trainer::with_params(ctx, config, corpus, params)
}

/// The checkpoint that a run begins with, if any.
fn beginning(folder: &Folder, resume: &Resume, notes: &mut Vec<String>) -> Result<Option<Checkpoint>, Error> {
    let own = folder.checkpoints();
    match resume {
        Resume::Never => refuse_checkpoints(folder.path(), &own).map(|()| None),
        Resume::Auto => verified(newest(&own)?, &own, notes),
        // A checkpoint of the folder itself may be chosen; with another's, it began.
        Resume::From(path) if path.starts_with(folder.path()) => chosen(path, notes),
        Resume::From(path) => {
            let found = newest(&own)?;
            if found.checkpoint.is_none() {
                return chosen(path, notes);
            }
            // Stopped since, the same command goes on.
            notes.push(format!("{} was begun with before: the run goes on from its own checkpoints", path.display()));
            verified(found, &own, notes)
        }
    }
}

/// The checkpoint at a path, or the newest of the run there.
fn chosen(path: &Path, notes: &mut Vec<String>) -> Result<Option<Checkpoint>, Error> {
    let dir = path.join("checkpoints");
    if !dir.is_dir() {
        return Ok(Some(Checkpoint::open(path)?));
    }
    let found = verified(newest(&dir)?, &dir, notes)?;
    found.map(Some).ok_or_else(|| Error::NoneVerifies { dir, problems: "there are none".to_owned() })
}

/// Fails where there are checkpoints, damaged ones too: what begins anew must not stand beside them.
pub(crate) fn refuse_checkpoints(dir: &Path, checkpoints: &Path) -> Result<(), Error> {
    let found = newest(checkpoints)?;
    if let Some(there) = found.checkpoint {
        return Err(Error::AlreadyThere { dir: dir.to_owned(), step: there.step() });
    }
    verified(found, checkpoints, &mut Vec::new()).map(|_| ())
}

/// A damaged checkpoint is passed over and named; if all are, beginning anew is not ours to choose.
fn verified(found: Found, dir: &Path, notes: &mut Vec<String>) -> Result<Option<Checkpoint>, Error> {
    let problems: Vec<String> = found.refused.iter().map(|(_, error)| error.to_string()).collect();
    if found.checkpoint.is_none() && !problems.is_empty() {
        return Err(Error::NoneVerifies { dir: dir.to_owned(), problems: problems.join("; ") });
    }
    notes.extend(problems.into_iter().map(|problem| format!("a damaged checkpoint is passed over: {problem}")));
    Ok(found.checkpoint)
}

/// What the configuration changes against the checkpoint's. The model cannot change.
fn changes(from: &Checkpoint, config: &RunConfig) -> Result<Option<String>, Error> {
    let (old, new) = (from.config(), serde_json::to_value(config).unwrap_or_default());
    let mut changed = Vec::new();
    if from.state().is_null() {
        // Imported: of a run, it has the model alone.
        differ("model", &old["model"], &new["model"], &mut changed);
    } else {
        differ("", old, &new, &mut changed);
    }
    if let Some(first) = changed.iter().find(|change| change.starts_with("model.")) {
        return Err(Error::Config {
            field: "model",
            found: format!("another model than the checkpoint's: {first}"),
            expected: format!("the model of {}", from.path().display()),
        });
    }
    Ok((!changed.is_empty()).then(|| format!("changed against the checkpoint: {}", changed.join(", "))))
}

fn differ(path: &str, old: &Value, new: &Value, out: &mut Vec<String>) {
    let (Value::Object(before), Value::Object(after)) = (old, new) else {
        if old != new {
            out.push(format!("{path} {old} -> {new}"));
        }
        return;
    };
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    for key in keys {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let side = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or(Value::Null);
        differ(&path, &side(before), &side(after), out);
    }
}
