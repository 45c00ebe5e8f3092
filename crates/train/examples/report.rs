//! Draws `report.html` of a run's log: `cargo run -p hymo-train --example report -- runs/a/log.jsonl report.html`.

use hymo_train::report::Report;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [log, page] = &paths[..] else { return Err("two paths: the log and the page".into()) };
    Ok(Report::from_log(Path::new(log))?.write(Path::new(page))?)
}
