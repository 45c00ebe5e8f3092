//! The latest values as a table: for those who do not see the charts, or run no scripts.

use super::Report;
use super::page::escape_html;

/// Rows of the table.
pub(super) fn latest(report: &Report) -> String {
    let mut rows = Rows::default();
    if let Some(start) = &report.start {
        let (active, stored) = start.params;
        rows.add("Program", &start.version);
        rows.add("Device", &start.device);
        rows.add("Parameters, of a token", active);
        rows.add("Parameters, stored", stored);
        rows.add("Tokens of a step", start.tokens_per_step);
        rows.add("FLOPs of a token", format!("{:.4e}", start.flops_per_token));
        if let Some(peak) = start.peak_flops {
            rows.add("Device's FLOP/s, which MFU is relative to", format!("{peak:.4e}"));
        }
        rows.add("Steps of the schedule", start.num_steps);
    }
    rows.add("Step", report.step());
    rows.add("Tokens", report.scalars.last_tokens());
    if let Some(last) = &report.last {
        rows.add("Epoch", last.epoch);
        for (depth, loss) in last.losses.iter().enumerate() {
            let name = if depth == 0 { "Loss".to_owned() } else { format!("Loss, prediction module {depth}") };
            rows.add(&name, number(*loss));
        }
        rows.add("Loss, weighted sum", number(last.total));
        rows.add("Balance loss", number(last.balance));
        rows.add("Learning rate", number(last.lr));
        rows.add("Gradient norm", number(last.grad_norm));
        rows.add("Tokens a second", format!("{:.0}", last.tokens_per_second()));
        if let Some(mfu) = last.mfu {
            rows.add("MFU", format!("{:.1} %", 100. * mfu));
        }
        rows.layers("Expert load over the mean, less 1", &last.max_violation);
        rows.layers("Largest attention logit", &last.max_logits);
    }
    if let Some(eval) = report.evals.points.last() {
        rows.add(&format!("Evaluation at step {}, loss", eval.step), number(eval.loss));
        rows.add(&format!("Evaluation at step {}, bits per byte", eval.step), number(eval.bits_per_byte));
    }
    rows.0
}

#[derive(Default)]
struct Rows(String);

impl Rows {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let (name, value) = (escape_html(name), escape_html(&value.to_string()));
        self.0.push_str(&format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>\n"));
    }

    fn layers(&mut self, name: &str, values: &[f64]) {
        if !values.is_empty() {
            let values: Vec<String> = values.iter().map(|value| number(*value)).collect();
            self.add(&format!("{name}, by layer"), values.join("  "));
        }
    }
}

fn number(x: f64) -> String {
    match x.abs() {
        _ if x.is_nan() => "not a number".to_owned(),
        size if size == 0. || (1e-3..1e5).contains(&size) => format!("{x:.4}"),
        _ => format!("{x:.3e}"),
    }
}
