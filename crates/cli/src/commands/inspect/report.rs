//! The tables for people.

use std::fmt::Write;

use hymo_model::params::Part;
use hymo_model::{Cost, ModelConfig};

use crate::numbers::{bytes, grouped, or_more, short};

/// A table: the first column to the left, the others to the right, two spaces between.
struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(head: &[&str]) -> Self {
        Table { rows: vec![head.iter().map(|&h| h.to_owned()).collect()] }
    }

    fn row(&mut self, cells: &[String]) {
        self.rows.push(cells.to_vec());
    }

    fn draw(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| self.rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let _ = match column {
                    0 => write!(line, "{cell:<0$}", widths[0]),
                    _ => write!(line, "  {cell:>0$}", widths[column]),
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out.push('\n');
    }
}

/// The whole report.
pub fn text(name: &str, model: &ModelConfig, cost: &Cost) -> String {
    let mut out = String::new();
    let (context, batch) = (cost.options.context, cost.options.batch);
    let params = &cost.params;
    let _ = writeln!(
        out,
        "{name}: {} active of {} parameters, {} layers, d_model {}, vocabulary {}",
        short(params.active),
        short(params.stored),
        model.n_layers,
        model.d_model,
        grouped(model.vocab_size as u64),
    );
    let _ =
        writeln!(out, "figures for {} tokens a sequence, batch {}\n", grouped(context as u64), grouped(batch as u64));
    parameters(cost, &mut out);
    operations(cost, &mut out);
    training(cost, &mut out);
    decoding(cost, &mut out);
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn parameters(cost: &Cost, out: &mut String) {
    let params = &cost.params;
    let mut table = Table::new(&["PARAMETERS", "count", "active", "stored"]);
    for p in &params.parts {
        table.row(&[part(p.part).to_owned(), p.count.to_string(), grouped(p.active), grouped(p.stored)]);
    }
    table.row(&["all".to_owned(), String::new(), grouped(params.active), grouped(params.stored)]);
    table.row(&["moved by NorMuon".to_owned(), String::new(), String::new(), grouped(params.normuon)]);
    table.row(&["moved by Cautious AdamW".to_owned(), String::new(), String::new(), grouped(params.adamw)]);
    table.draw(out);
}

fn operations(cost: &Cost, out: &mut String) {
    let flops = &cost.flops_per_token;
    let mut table = Table::new(&["MFLOP A TOKEN", "forward", "training"]);
    let mut row =
        |name: &str, forward: u64, training: u64| table.row(&[name.to_owned(), mega(forward), mega(training)]);
    for op in &flops.ops {
        row(op.op, op.forward, op.forward + op.backward);
    }
    row("all", flops.forward, flops.training);
    row("all, layers run again", flops.forward, flops.training_checkpointed);
    row("norms, activations, softmax (not in all)", flops.other_forward, flops.other_training);
    table.draw(out);
}

fn training(cost: &Cost, out: &mut String) {
    let (state, saved) = (&cost.training_state, &cost.activations);
    let mut table = Table::new(&["TRAINING MEMORY", "bytes"]);
    let mut row = |name: &str, n: u64| table.row(&[name.to_owned(), bytes(n)]);
    row("master weights, f32", state.master);
    row("gradients, f32", state.gradients);
    row("NorMuon momentum and row moments, f32", state.normuon);
    row("Cautious AdamW moments, f32", state.adamw);
    row("weights for products, bf16", state.bf16_copy);
    row("saved for backward, a token, bf16", saved.per_token_bf16);
    row("saved for backward, a token, f32", saved.per_token_f32);
    row("saved for backward, a token, layers run again, bf16", saved.checkpointed_per_token_bf16);
    row("saved for backward, the batch, bf16", saved.batch_bf16);
    row("saved for backward, the batch, layers run again, bf16", saved.batch_checkpointed_bf16);
    row("state and batch, bf16", state.total.saturating_add(saved.batch_bf16));
    row("state and batch, layers run again, bf16", state.total.saturating_add(saved.batch_checkpointed_bf16));
    table.draw(out);
}

fn decoding(cost: &Cost, out: &mut String) {
    let cache = &cost.cache;
    let context = grouped(cost.options.context as u64);
    let mut table = Table::new(&["DECODING MEMORY", "bytes"]);
    let mut row = |name: &str, n: u64| table.row(&[name.to_owned(), bytes(n)]);
    row("attention cache, a token, bf16", cache.bytes_per_token);
    row(&format!("attention cache, {context} tokens, bf16"), cache.bytes_at_context);
    row("the same with every head's keys and values in every layer", cache.mha_bytes_at_context);
    row("GDN state, f32", cache.gdn_state_bytes);
    row("GDN state of prediction modules, f32", cache.mtp_state_bytes);
    row("convolution tails, bf16", cache.conv_tail_bytes);
    row("all sequences of the batch", cache.batch_bytes);
    table.draw(out);
}

fn part(part: Part) -> &'static str {
    match part {
        Part::Embedding => "embedding = head",
        Part::Gdn => "gdn layers",
        Part::Mla => "mla layers",
        Part::Moe => "experts and routers",
        Part::Ffn => "dense feed-forward",
        Part::FinalNorm => "final norm",
        Part::Mtp => "prediction modules",
    }
}

fn mega(n: u64) -> String {
    format!("{}{:.2}", or_more(n), n as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn millions() {
        assert_eq!((mega(1_500_000).as_str(), &mega(u64::MAX)[..3]), ("1.50", "> 1"));
    }
}
