//! The page's text: the template with style, program and data put in.

use super::evals::{Point, Written};
use super::track::{Track, Which};
use super::{Report, table};
use crate::record::{Note, StepReport};
use serde::Serialize;
use serde_json::{Value, json};

const TEMPLATE: &str = include_str!("page.html");
/// Without scripts a browser follows the run by this.
const REFRESH: &str = "<noscript><meta http-equiv=\"refresh\" content=\"30\"></noscript>\n";
const STYLE: &str = include_str!("page.css");
/// Charts, then what is specific to this page.
const PROGRAM: &[&str] = &[include_str!("chart.js"), include_str!("heat.js"), include_str!("page.js")];

type Column = (&'static str, fn(&StepReport) -> f64);

/// The curves that every run has. The losses follow behind them, the head's first.
pub(super) const SCALARS: &[Column] = &[
    ("total", |step| step.total),
    ("balance", |step| step.balance),
    ("lr", |step| step.lr),
    ("grad_norm", |step| step.grad_norm),
    ("tokens_per_second", StepReport::tokens_per_second),
    ("mfu", |step| step.mfu.unwrap_or(f64::NAN)),
    ("waiting", |step| step.data_seconds / step.seconds.max(1e-9)),
];

/// Curves over common steps.
#[derive(Debug, Serialize)]
struct Curves {
    width: u64,
    step: Vec<u64>,
    tokens: Vec<u64>,
    curves: Vec<Curve>,
}

#[derive(Debug, Serialize)]
struct Curve {
    name: String,
    mean: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    min: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    max: Vec<f64>,
}

/// What `page.js` draws from.
#[derive(Debug, Serialize)]
struct Data<'r> {
    run: Value,
    state: Value,
    scalars: Curves,
    violation: Curves,
    logits: Curves,
    load: Load,
    evals: &'r [Point],
    written: Vec<&'r Written>,
    notes: Vec<&'r Note>,
    notes_dropped: u64,
    refused: &'r [u64],
}

/// The experts' shares over steps: a character a field.
#[derive(Debug, Serialize)]
struct Load {
    step: Vec<u64>,
    tokens: Vec<u64>,
    experts: Vec<usize>,
    /// By layer, expert after expert, column after column.
    layers: Vec<String>,
}

pub(super) fn render(report: &Report) -> String {
    let data = Data {
        run: run(report),
        state: state(report),
        scalars: scalars(&report.scalars),
        violation: layers(&report.violation),
        logits: layers(&report.logits),
        load: load(report),
        evals: &report.evals.points,
        written: report.evals.written(),
        notes: report.notes.latest(),
        notes_dropped: report.notes.dropped,
        refused: &report.refused,
    };
    // Nothing in these types can fail to be written as JSON: keys are strings, and NaN is null.
    let data = serde_json::to_string(&data).unwrap_or_default();
    let parts = [
        ("{title}", escape_html(name(report))),
        ("{refresh}", if report.ended { String::new() } else { REFRESH.to_owned() }),
        ("{style}", STYLE.to_owned()),
        ("{latest}", table::latest(report)),
        ("{program}", PROGRAM.concat()),
        ("{data}", escape_script(&data)),
    ];
    fill(TEMPLATE, &parts)
}

fn name(report: &Report) -> &str {
    report.start.as_ref().map_or(&report.title, |start| &start.name)
}

/// Puts the parts into the template in one pass, so that no part's own text is taken for a place to fill.
fn fill(template: &str, parts: &[(&str, String)]) -> String {
    let mut page = String::with_capacity(template.len() + parts.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut rest = template;
    while let Some((at, key, text)) =
        parts.iter().filter_map(|(key, text)| Some((rest.find(key)?, key, text))).min_by_key(|(at, ..)| *at)
    {
        page.push_str(&rest[..at]);
        page.push_str(text);
        rest = &rest[at + key.len()..];
    }
    page.push_str(rest);
    page
}

fn run(report: &Report) -> Value {
    let start = report.start.as_ref();
    json!({
        "name": name(report),
        "version": start.map(|start| &start.version),
        "device": start.map(|start| &start.device),
        "params": start.map(|start| start.params),
        "num_steps": start.map(|start| start.num_steps),
        "tokens_per_step": start.map(|start| start.tokens_per_step),
        "flops_per_token": start.map(|start| start.flops_per_token),
        "peak_flops": start.and_then(|start| start.peak_flops),
        "starts": report.starts,
    })
}

fn state(report: &Report) -> Value {
    let left = report.start.as_ref().map(|start| start.num_steps.saturating_sub(report.step()));
    let per_step = report.clock.seconds_per_step();
    let last = report.last.as_ref();
    json!({
        "step": report.step(),
        "tokens": report.scalars.last_tokens(),
        "epoch": last.map(|last| last.epoch),
        "time": report.clock.latest(),
        "elapsed": report.clock.elapsed(),
        "left": left.zip(per_step).map(|(steps, seconds)| steps as f64 * seconds),
        "ended": report.ended,
        "complete": report.reached_the_end(),
        "unread": report.unread,
        "loss": last.and_then(|last| last.losses.first()),
        "tokens_per_second": last.map(StepReport::tokens_per_second),
        "mfu": last.and_then(|last| last.mfu),
    })
}

fn curves(track: &Track, curves: Vec<Curve>) -> Curves {
    Curves { width: track.width(), step: track.steps(), tokens: track.tokens(), curves }
}

fn column(track: &Track, at: usize, which: Which) -> Vec<f64> {
    track.column(at, which).map(rounded).collect()
}

fn scalars(track: &Track) -> Curves {
    let named = |at: usize| match (SCALARS.get(at), at - at.min(SCALARS.len())) {
        (Some((name, _)), _) => (*name).to_owned(),
        (None, 0) => "main".to_owned(),
        (None, module) => format!("mtp{module}"),
    };
    let curve = |at| {
        let name = named(at);
        // The ends are drawn where a single step matters, and only once a point is more than a step.
        let ends = track.width() > 1 && ["main", "grad_norm"].contains(&name.as_str());
        let end = |which| if ends { column(track, at, which) } else { Vec::new() };
        Curve { name, mean: column(track, at, Which::Mean), min: end(Which::Min), max: end(Which::Max) }
    };
    curves(track, (0..track.columns()).map(curve).collect())
}

fn layers(track: &Track) -> Curves {
    let curve = |at| Curve {
        name: format!("layer {at}"),
        mean: column(track, at, Which::Mean),
        min: Vec::new(),
        max: Vec::new(),
    };
    curves(track, (0..track.columns()).map(curve).collect())
}

fn load(report: &Report) -> Load {
    let track = &report.load;
    let mut first = 0;
    let layer = |experts: &usize| {
        let columns = first..first + experts;
        first = columns.end;
        columns.flat_map(|at| track.column(at, Which::Mean)).map(|share| level(share * *experts as f64)).collect()
    };
    let layers = report.experts.iter().map(layer).collect();
    Load { step: track.steps(), tokens: track.tokens(), experts: report.experts.clone(), layers }
}

/// A load relative to the mean as one of 64 characters: the middle is an equal share, both ends are 4 times off or more.
/// Levels are closer around the middle, where balanced experts are: 0.1% there, 9% at the ends.
fn level(load: f64) -> char {
    const LEVELS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if load.is_nan() {
        return ' ';
    }
    let doublings = load.log2().clamp(-2., 2.);
    let at = (doublings.signum() * (doublings.abs() / 2.).sqrt() * 31. + 32.).round();
    char::from(LEVELS[(at as usize).min(63)])
}

/// Five digits: more than a chart shows, and half the bytes.
fn rounded(x: f64) -> f64 {
    if x == 0. || !x.is_finite() {
        return x;
    }
    let digits = 4 - x.abs().log10().floor() as i32;
    // Powers of ten with a negative exponent are not exact; their inverses are.
    let scale = 10f64.powi(digits.abs().min(300));
    if digits < 0 { (x / scale).round() * scale } else { (x * scale).round() / scale }
}

/// JSON inside a `<script>`: no text in it may end the element or open a comment (HTML), or end a line (scripts of old).
fn escape_script(json: &str) -> String {
    let mut out = String::with_capacity(json.len() + json.len() / 16);
    for c in json.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            c => out.push(c),
        }
    }
    out
}

/// Text inside an element or a quoted attribute.
pub(super) fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
