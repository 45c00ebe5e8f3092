//! Where a step's time goes: a trace that Chrome (`chrome://tracing`) and Perfetto (<https://ui.perfetto.dev>) show.
//!
//! One row of nested spans: the step, its phases, in them every operation with its layer. An operation's forward span
//! reaches back to the end of the operation before it, since the tape sees only ends. Times are the caller's thread's.

use crate::Error;
use hymo_tape::Observer;
use hymo_tensor::Ctx;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Which steps of a run are traced, and where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileOptions {
    /// The trace's file.
    pub path: PathBuf,
    /// Steps of this start that go by first: they fill caches and pools.
    pub skip: u64,
    /// Steps traced, from 1.
    pub steps: u64,
}

/// A trace as it grows.
#[derive(Debug)]
pub struct Profile {
    origin: Instant,
    layers: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    events: Vec<Value>,
    /// When the last operation ended.
    last: f64,
    /// Beginnings of backward passes under way.
    begun: Vec<f64>,
}

impl Profile {
    /// An empty trace of a model of so many layers.
    #[must_use]
    pub fn new(layers: usize) -> Arc<Self> {
        Arc::new(Profile { origin: Instant::now(), layers, inner: Mutex::default() })
    }

    /// Microseconds since the trace began.
    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64() * 1e6
    }

    fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `work` as a span of the trace, and as a range of the GPU's own profilers.
    pub(crate) fn span<T>(ctx: &Ctx, this: Option<&Arc<Self>>, name: &str, work: impl FnOnce() -> T) -> T {
        let Some(profile) = this else { return ctx.range(name, work) };
        let begun = profile.now();
        profile.with(|inner| inner.last = begun);
        let done = ctx.range(name, work);
        let ended = profile.now();
        profile.with(|inner| inner.events.push(span(name, "phase", (begun, ended), json!({}))));
        done
    }

    fn part(&self, scope: usize) -> Value {
        match scope {
            0 => json!({ "part": "embedding and head" }),
            n if n <= self.layers => json!({ "part": format!("layer {}", n - 1) }),
            n => json!({ "part": format!("prediction module {}", n - self.layers) }),
        }
    }

    /// Steps in the trace.
    #[must_use]
    pub fn steps(&self) -> usize {
        let is_step = |event: &&Value| event["name"].as_str().is_some_and(|name| name.starts_with("step "));
        self.with(|inner| inner.events.iter().filter(is_step).count())
    }

    /// The trace as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        self.with(|inner| json!({ "displayTimeUnit": "ms", "traceEvents": inner.events }))
    }

    /// Writes the trace.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        std::fs::write(path, self.to_json().to_string()).map_err(|e| Error::io("write", path, e))
    }
}

fn span(name: &str, kind: &str, (begun, ended): (f64, f64), args: Value) -> Value {
    json!({ "name": name, "cat": kind, "ph": "X", "ts": begun, "dur": ended - begun, "pid": 1, "tid": 1, "args": args })
}

impl Observer for Profile {
    fn forward(&self, name: &'static str, scope: usize) {
        let (now, args) = (self.now(), self.part(scope));
        self.with(|inner| {
            let event = span(name, "forward", (inner.last, now), args);
            inner.events.push(event);
            inner.last = now;
        });
    }

    fn backward_begins(&self, _: &'static str, _: usize) {
        let now = self.now();
        self.with(|inner| {
            inner.begun.push(now);
            inner.last = now;
        });
    }

    fn backward_ends(&self, name: &'static str, scope: usize) {
        let (now, args) = (self.now(), self.part(scope));
        self.with(|inner| {
            let begun = inner.begun.pop().unwrap_or(now);
            let event = span(&format!("{name} backward"), "backward", (begun, now), args);
            inner.events.push(event);
            inner.last = now;
        });
    }
}
