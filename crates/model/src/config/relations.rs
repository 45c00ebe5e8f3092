//! The rules between fields. Ranges of single fields are the schema's.

use super::{
    DataConfig, GdnConfig, GdnFfn, LayerKind, MlaConfig, MlaFfn, ModelConfig, MoeConfig, Rope, RunConfig,
    ScheduleConfig, ScheduleKind, TrainConfig,
};
use crate::params;

/// Receives a broken rule: the field to change, the other fields it rests on, what was found, what would be right.
pub(super) type Sink<'s> = dyn FnMut(&str, &[&str], String, String) + 's;

/// Most numbers that a model may store: offsets and byte counts stay far from the limits of their types, on 32-bit
/// platforms too.
const MOST_PARAMETERS: f64 = if cfg!(target_pointer_width = "32") { (1u64 << 32) as f64 } else { (1u64 << 40) as f64 };

/// Most parameter tensors, so that the table itself stays small.
const MOST_TENSORS: f64 = 1e6;

pub(super) fn check(run: &RunConfig, sink: &mut Sink<'_>) {
    check_model(&run.model, sink);
    check_schedule(&run.schedule, sink);
    check_train(&run.train, sink);
    check_data(&run.data, sink);
}

fn check_data(data: &DataConfig, sink: &mut Sink<'_>) {
    let (folders, weights) = (data.shards.len(), data.weights.len());
    if weights != 0 && weights != folders {
        let expected = format!("one for each of data.shards, {folders}, or none");
        sink("data.weights", &["data.shards"], format!("a list of {weights}"), expected);
    }
    if let Some(i) = data.weights.iter().position(|w| *w == 0.0) {
        let found = format!("0 as element {} of {weights}", i + 1);
        sink("data.weights", &[], found, "shares above 0".to_owned());
    }
}

fn check_train(train: &TrainConfig, sink: &mut Sink<'_>) {
    if !divides(train.micro_rows, train.rows) {
        let expected = format!("a multiple of train.micro_rows, {}", train.micro_rows);
        sink("train.rows", &["train.micro_rows"], train.rows.to_string(), expected);
    }
}

fn check_model(model: &ModelConfig, sink: &mut Sink<'_>) {
    if !divides(model.pattern.len(), model.n_layers) {
        let (length, found) = (model.pattern.len(), model.n_layers.to_string());
        sink("model.n_layers", &["model.pattern"], found, format!("a multiple of the pattern's length, {length}"));
    }
    let uses = |kind| model.pattern.contains(&kind);
    let uses_gdn = uses(LayerKind::Gdn) || model.mtp.n_modules > 0;
    let on = &["model.pattern", "model.mtp.n_modules"];
    presence("model.gdn", on, model.gdn.is_some(), uses_gdn, "the pattern or the prediction modules use gdn", sink);
    let on = &["model.pattern"];
    presence("model.mla", on, model.mla.is_some(), uses(LayerKind::Mla), "the pattern has mla", sink);
    let uses_moe = model.mla.as_ref().is_some_and(|m| m.ffn == MlaFfn::Moe);
    let on = &["model.mla.ffn"];
    presence("model.moe", on, model.moe.is_some(), uses_moe, "model.mla.ffn is \"moe\"", sink);
    if let Some(gdn) = &model.gdn {
        check_gdn(gdn, sink);
    }
    if let Some(mla) = &model.mla {
        check_mla(mla, model.context_length, sink);
    }
    if let Some(moe) = &model.moe {
        check_moe(moe, sink);
    }
    check_rest(model, sink);
    check_size(model, sink);
}

/// A section must be there when it is used, and must not when nothing would read it.
fn presence(path: &str, on: &[&str], there: bool, used: bool, because: &str, sink: &mut Sink<'_>) {
    match (there, used) {
        (false, true) => sink(path, on, "absent".to_owned(), format!("a section [{path}], as {because}")),
        (true, false) => sink(path, on, "a section".to_owned(), format!("none: it is read only when {because}")),
        _ => {}
    }
}

fn hidden_width(section: &str, d_ff: Option<usize>, used: bool, sink: &mut Sink<'_>) {
    let (path, on) = (format!("{section}.d_ff"), format!("{section}.ffn"));
    match (d_ff, used) {
        (None, true) => sink(&path, &[&on], "absent".to_owned(), format!("a width, as {on} is \"swiglu\"")),
        (Some(width), false) => {
            sink(&path, &[&on], width.to_string(), format!("none: it is read only when {on} is \"swiglu\""));
        }
        _ => {}
    }
}

fn check_gdn(gdn: &GdnConfig, sink: &mut Sink<'_>) {
    if !gdn.chunk_size.is_power_of_two() {
        let found = gdn.chunk_size.to_string();
        sink("model.gdn.chunk_size", &[], found, "a power of two from 16 to 256".to_owned());
    }
    hidden_width("model.gdn", gdn.d_ff, gdn.ffn == GdnFfn::Swiglu, sink);
}

fn check_mla(mla: &MlaConfig, context_length: usize, sink: &mut Sink<'_>) {
    if !divides(mla.n_kv_groups, mla.n_heads) {
        let (found, heads) = (mla.n_kv_groups.to_string(), mla.n_heads);
        let on = &["model.mla.n_heads"];
        sink("model.mla.n_kv_groups", on, found, format!("a divisor of model.mla.n_heads, {heads}"));
    }
    let (d_rope, found) = ("model.mla.d_rope", mla.d_rope.to_string());
    if mla.d_rope % 2 != 0 {
        sink(d_rope, &[], found, "an even number, as the numbers turn in pairs".to_owned());
    } else if mla.d_rope == 0 && mla.rope != Rope::None {
        sink(d_rope, &["model.mla.rope"], found, "at least 2, or model.mla.rope = \"none\"".to_owned());
    }
    hidden_width("model.mla", mla.d_ff, mla.ffn == MlaFfn::Swiglu, sink);
    let Some(yarn) = &mla.yarn else { return };
    if mla.rope == Rope::None {
        sink("model.mla.yarn", &["model.mla.rope"], "a section".to_owned(), "none, as nothing turns".to_owned());
    }
    let reach = yarn.factor * yarn.original_context as f64;
    if context_length as f64 > reach {
        let on = &["model.mla.yarn.factor", "model.mla.yarn.original_context"];
        let expected = format!("at most factor * original_context of model.mla.yarn, {reach}");
        sink("model.context_length", on, context_length.to_string(), expected);
    }
}

fn check_moe(moe: &MoeConfig, sink: &mut Sink<'_>) {
    if moe.top_k > moe.n_routed {
        let (found, routed) = (moe.top_k.to_string(), moe.n_routed);
        sink("model.moe.top_k", &["model.moe.n_routed"], found, format!("at most model.moe.n_routed, {routed}"));
    }
}

fn check_rest(model: &ModelConfig, sink: &mut Sink<'_>) {
    let (weights, modules) = (model.mtp.loss_weights.len(), model.mtp.n_modules);
    if weights != modules {
        let found = format!("a list of {weights}");
        let expected = format!("one weight for each of model.mtp.n_modules, {modules}");
        sink("model.mtp.loss_weights", &["model.mtp.n_modules"], found, expected);
    }
    let cut = model.init.truncate;
    if cut != 0.0 && cut < 1.0 {
        sink("model.init.truncate", &[], cut.to_string(), "0, or a number from 1 to 10".to_owned());
    }
}

fn check_size(model: &ModelConfig, sink: &mut Sink<'_>) {
    let (parameters, tensors) = params::estimate(model);
    if parameters > MOST_PARAMETERS {
        let (found, most) = (format!("sizes that make {parameters:.1e} parameters"), MOST_PARAMETERS);
        sink("model.d_model", &[], found, format!("at most {most:.1e} in all"));
    }
    if tensors > MOST_TENSORS {
        let found = format!("layers and experts that make {tensors:.1e} tensors");
        sink("model.n_layers", &[], found, format!("at most {MOST_TENSORS:.0e}"));
    }
}

fn check_schedule(schedule: &ScheduleConfig, sink: &mut Sink<'_>) {
    let ScheduleConfig { kind, num_steps, warmup, decay, .. } = *schedule;
    let Some(from) = schedule.decay_from else {
        if kind == ScheduleKind::Wsd && warmup + decay > 1.0 {
            let on = &["schedule.warmup", "schedule.kind"];
            let rest = 1.0 - warmup;
            sink("schedule.decay", on, decay.to_string(), format!("at most what schedule.warmup leaves, {rest}"));
        }
        return;
    };
    if kind != ScheduleKind::Wsd {
        let expected = "none: it is read only when schedule.kind is \"wsd\"".to_owned();
        return sink("schedule.decay_from", &["schedule.kind"], from.to_string(), expected);
    }
    let warm = schedule.warmup_steps();
    if from < warm || from >= num_steps {
        let on = &["schedule.num_steps", "schedule.warmup"];
        let expected = format!("from {warm}, where the warm-up ends, to below schedule.num_steps, {num_steps}");
        sink("schedule.decay_from", on, from.to_string(), expected);
    }
}

fn divides(divisor: usize, number: usize) -> bool {
    divisor != 0 && number % divisor == 0
}
