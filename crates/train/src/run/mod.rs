//! A run from its folder to its last checkpoint: start or go on, step, evaluate, save, write everything down.

mod data;
mod folder;
mod samples;
mod start;
mod views;

use crate::checkpoint::{Saver, newest};
use crate::evaluate::{EvalOptions, Scores, TokenBytes, evaluate};
use crate::profile::{Profile, ProfileOptions};
use crate::record::{Evaluation, Note, Record, Start, now};
use crate::{Error, Trainer};
use folder::{Folder, Log};
use hymo_data::corpus::Corpus;
use hymo_model::config::{EvalConfig, OnNonFinite, RunConfig};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use views::Views;

pub use data::{corpus, held_out, tokenizer};
pub(crate) use start::refuse_checkpoints;

/// Where a run begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At the newest checkpoint of its folder that verifies; where there is none, at the beginning.
    Auto,
    /// At the beginning; a folder with checkpoints is refused.
    Never,
    /// At this checkpoint, or at the newest of this run's folder.
    From(PathBuf),
}

/// What a run is beside its configuration.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Its folder, made when it is not there.
    pub dir: PathBuf,
    /// Where it begins.
    pub resume: Resume,
    /// What it is called in its log.
    pub name: String,
    /// Version and commit of the program, for the log.
    pub version: String,
    /// FLOP/s of the device at dense matrix products, for MFU.
    pub peak_flops: Option<f64>,
    /// Steps to trace.
    pub profile: Option<ProfileOptions>,
    /// The run is only looked at: its folder is neither made nor written to, and [`Run::go`] is refused.
    pub dry: bool,
}

impl RunOptions {
    /// A run in `dir` that goes on where it was stopped.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        RunOptions {
            dir: dir.into(),
            resume: Resume::Auto,
            name: name.into(),
            version,
            peak_flops: None,
            profile: None,
            dry: false,
        }
    }

    /// The same, beginning elsewhere.
    #[must_use]
    pub fn resume(self, resume: Resume) -> Self {
        RunOptions { resume, ..self }
    }
}

/// Who watches a run, and may end it.
pub trait Watch {
    /// Something was written into the log.
    fn record(&mut self, record: &Record);

    /// So many held-out tokens were read, of about so many.
    fn evaluating(&mut self, tokens: u64, of: u64) {
        let _ = (tokens, of);
    }

    /// Asked before every step: whether the run shall save and leave.
    fn stop(&mut self) -> bool {
        false
    }
}

/// Nobody.
impl Watch for () {
    fn record(&mut self, _: &Record) {}
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The schedule's last step is done.
    Finished,
    /// It was, before.
    WasFinished,
    /// It was asked to leave; it goes on from here.
    Stopped,
}

/// A run in its folder.
#[derive(Debug)]
pub struct Run {
    ctx: Ctx,
    folder: Folder,
    options: RunOptions,
    trainer: Trainer,
    tokenizer: Arc<Tokenizer>,
    /// The tokenizer's file.
    json: Vec<u8>,
    bytes: TokenBytes,
    held_out: Vec<Arc<Corpus>>,
    /// Open from the first record on.
    written: Option<(Log, Views)>,
    saver: Saver,
    /// The step of the newest checkpoint in the folder.
    saved: Option<u64>,
    evaluated: Option<u64>,
    /// What the start has to say, until somebody listens.
    notes: Vec<String>,
}

impl Run {
    /// The trainer.
    #[must_use]
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// What computes.
    #[must_use]
    pub fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// The run's folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.folder.path()
    }

    /// The data's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Held-out tokens; 0 when the data has none, and then nothing is evaluated.
    #[must_use]
    pub fn held_out_tokens(&self) -> u64 {
        self.held_out.iter().flat_map(|corpus| corpus.sets()).map(|set| set.dataset.tokens()).sum()
    }

    /// Up to `n` beginnings as evaluations continue them: `eval.prompts`, or those of held-out documents.
    ///
    /// # Errors
    /// Data that cannot be read.
    pub fn beginnings(&self, n: usize) -> Result<Vec<Vec<u32>>, Error> {
        let options = EvalConfig { samples: n, ..self.config().eval.clone() };
        samples::beginnings(&self.tokenizer, &self.held_out, &options, self.config().model.context_length)
    }

    fn config(&self) -> &RunConfig {
        self.trainer.config()
    }

    /// Trains to the end of the schedule, or until `watch` says stop; either way the last step is saved.
    ///
    /// # Errors
    /// A step or a checkpoint that failed. What was saved before stays as it is.
    pub fn go(&mut self, watch: &mut dyn Watch) -> Result<Ending, Error> {
        if self.trainer.done() {
            return Ok(Ending::WasFinished);
        }
        self.write_down()?;
        let start = self.start()?;
        self.put(Record::Start(start), watch)?;
        for note in std::mem::take(&mut self.notes) {
            self.note(note, watch)?;
        }
        if self.config().checkpoint.every > 0 {
            // The memory of all checkpoints, taken now: the first one makes the steps wait no longer than the others.
            self.saver.lend(self.trainer.snapshot()?);
        }
        let done = self.steps(watch).and_then(|ending| self.end(ending, watch));
        self.end_trace(watch)?;
        if let Err(error) = &done {
            self.note(error.to_string(), watch)?;
        }
        let complaint = self.written.as_mut().and_then(|(_, views)| views.finish());
        complaint.map_or(Ok(()), |text| self.note(text, watch))?;
        self.saver.wait()?;
        done
    }

    /// Makes the files of the folder, or takes them up.
    fn write_down(&mut self) -> Result<(), Error> {
        if self.options.dry {
            return Err(Error::Config {
                field: "dry",
                found: "true".to_owned(),
                expected: "false, for a run that trains".to_owned(),
            });
        }
        self.folder.write("run.toml", self.config().to_toml().as_bytes())?;
        self.folder.write(hymo_data::prep::TOKENIZER, &self.json)?;
        // The page takes up the log as it stands before this start.
        let views = Views::open(self.folder.path(), &self.options.name)?;
        self.written = Some((Log::open(self.folder.path())?, views));
        Ok(())
    }

    /// The last step is saved whatever becomes of its evaluation.
    fn end(&mut self, ending: Ending, watch: &mut dyn Watch) -> Result<Ending, Error> {
        let judged = if ending == Ending::Finished { self.evaluate(watch) } else { Ok(false) };
        self.save(watch)?;
        judged.map(|_| ending)
    }

    fn steps(&mut self, watch: &mut dyn Watch) -> Result<Ending, Error> {
        let (every, saves) = (self.config().eval.every, self.config().checkpoint.every);
        let dir = self.folder.path().to_owned();
        for taken in 0.. {
            if watch.stop() {
                break;
            }
            self.trace(taken, watch)?;
            // The stream of a run has no end: it goes on with another epoch.
            let Some(report) = self.trainer.step(&dir)? else { return Ok(Ending::Finished) };
            let (step, refused) = (report.step, report.refused.clone());
            self.put(Record::Step(report), watch)?;
            if let Some(why) = refused {
                self.refused(why, watch)?;
                if self.trainer.state().step < step {
                    continue;
                }
            }
            if self.trainer.done() {
                return Ok(Ending::Finished);
            }
            let best = due(step, every) && self.evaluate(watch)?;
            if due(step, saves) || (best && saves > 0 && self.config().checkpoint.keep_best) {
                self.save(watch)?;
            }
        }
        Ok(Ending::Stopped)
    }

    /// Begins and ends the trace that was asked for, before the step behind `taken` ones of this start.
    fn trace(&mut self, taken: u64, watch: &mut dyn Watch) -> Result<(), Error> {
        let Some(ProfileOptions { skip, steps, .. }) = self.options.profile else { return Ok(()) };
        if taken == skip {
            self.trainer.trace(Some(Profile::new(self.config().model.n_layers)));
        } else if taken == skip + steps {
            self.end_trace(watch)?;
        }
        Ok(())
    }

    /// Writes the trace that was asked for, once.
    fn end_trace(&mut self, watch: &mut dyn Watch) -> Result<(), Error> {
        let Some(ProfileOptions { path, skip, .. }) = self.options.profile.take() else { return Ok(()) };
        let text = match self.trainer.profile.take().map(|profile| (profile.steps(), profile.write(&path))) {
            Some((steps, Ok(()))) => format!("trace of {steps} steps in {}", path.display()),
            // A trace is there to be looked at: the run goes on without.
            Some((_, Err(error))) => format!("there is no trace: {error}"),
            None => format!("there is no trace: the run ended within its first {skip} steps"),
        };
        self.note(text, watch)
    }

    /// A step moved nothing, and the policy is not to stop.
    fn refused(&mut self, why: String, watch: &mut dyn Watch) -> Result<(), Error> {
        let step = self.trainer.state().step;
        self.note(format!("step {step}: {why}"), watch)?;
        if self.config().train.on_non_finite != OnNonFinite::RollBack {
            return Ok(());
        }
        self.saver.wait()?;
        let found = newest(&self.folder.checkpoints())?;
        let Some(checkpoint) = found.checkpoint else {
            return self.note("there is no checkpoint to go back to: the step is skipped".to_owned(), watch);
        };
        self.trainer.roll_back(checkpoint)?;
        let to = self.trainer.state().step;
        self.note(format!("went back from step {step} to step {to}; the data goes on where it was"), watch)
    }

    /// Writes a checkpoint while the next step runs.
    fn save(&mut self, watch: &mut dyn Watch) -> Result<(), Error> {
        let state = self.trainer.state();
        let (step, best) = (state.step, state.best.map(|(step, _)| step));
        if self.saved != Some(step) {
            let begun = std::time::Instant::now();
            let (before, spare) = self.saver.spare()?;
            self.saver.save(self.trainer.snapshot_over(spare)?, best)?;
            let held = begun.elapsed().as_secs_f64();
            self.saved = Some(step);
            let before = before.map_or(String::new(), |b| format!(", the one before took {:.2} s to write", b.seconds));
            self.note(format!("checkpoint of step {step}: the steps waited {held:.3} s{before}"), watch)?;
        }
        Ok(())
    }

    /// Evaluates, and tells whether it is the best so far.
    fn evaluate(&mut self, watch: &mut dyn Watch) -> Result<bool, Error> {
        let step = self.trainer.state().step;
        if self.held_out.is_empty() || self.evaluated == Some(step) {
            return Ok(false);
        }
        let begun = std::time::Instant::now();
        let params = self.trainer.averaged()?;
        let scores = self.score(&params, watch)?;
        let (model, options) = (&self.config().model, &self.config().eval);
        let samples = samples::write((model, &params), &self.tokenizer, &self.held_out, options);
        drop(params);
        // Texts are there to be looked at: a model that cannot write yet goes on learning.
        let (samples, failed) = match samples {
            Ok(samples) => (samples, None),
            Err(error) => (Vec::new(), Some(format!("no text was written: {error}"))),
        };
        self.evaluated = Some(step);
        let best = self.trainer.judge(scores.bits_per_byte());
        let evaluation = Evaluation {
            step,
            time: now(),
            loss: scores.loss(),
            bits_per_byte: scores.bits_per_byte(),
            mtp_losses: scores.mtp_losses(),
            tokens: scores.targets.first().copied().unwrap_or(0),
            bytes: scores.bytes,
            best,
            samples,
            seconds: begun.elapsed().as_secs_f64(),
        };
        self.put(Record::Eval(evaluation), watch)?;
        failed.map_or(Ok(()), |text| self.note(text, watch))?;
        Ok(best)
    }

    fn score(&self, params: &hymo_model::Params, watch: &mut dyn Watch) -> Result<Scores, Error> {
        let RunConfig { model, eval, train, .. } = self.config();
        let options = EvalOptions { rows: train.micro_rows, tokens: eval.tokens };
        let of = |corpus: &Corpus| corpus.sets().iter().map(|set| set.dataset.tokens()).sum::<u64>();
        let planned = |corpus: &Corpus| if eval.tokens == 0 { of(corpus) } else { of(corpus).min(eval.tokens) };
        let total: u64 = self.held_out.iter().map(|corpus| planned(corpus)).sum();
        let (mut scores, mut before) = (Scores::default(), 0);
        for corpus in &self.held_out {
            let mut seen = |tokens: u64| watch.evaluating((before + tokens).min(total), total);
            scores.add(&evaluate(&self.ctx, model, params, (corpus, &self.bytes), options, &mut seen)?);
            before += planned(corpus);
        }
        Ok(scores)
    }

    fn start(&self) -> Result<Start, Error> {
        let (config, params) = (self.config(), self.trainer.params_count());
        Ok(Start {
            time: now(),
            name: self.options.name.clone(),
            version: self.options.version.clone(),
            step: self.trainer.state().step,
            num_steps: config.schedule.num_steps,
            device: self.ctx.describe(),
            params,
            tokens_per_step: (config.train.rows * config.model.context_length) as u64,
            flops_per_token: self.trainer.flops_per_token(),
            peak_flops: self.options.peak_flops,
        })
    }

    fn note(&mut self, text: String, watch: &mut dyn Watch) -> Result<(), Error> {
        let note = Note { step: self.trainer.state().step, time: now(), text };
        self.put(Record::Note(note), watch)
    }

    fn put(&mut self, record: Record, watch: &mut dyn Watch) -> Result<(), Error> {
        let Some((log, views)) = &mut self.written else { return Ok(()) };
        log.push(&record)?;
        watch.record(&record);
        // Views complain once, so that a note about them ends here.
        views.push(&record).map_or(Ok(()), |text| self.note(text, watch))
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step % every == 0
}
