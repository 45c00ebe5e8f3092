//! Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether an end was asked for.
#[derive(Debug, Clone)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens from now on. `after` is what the first signal says is being done.
    pub fn listen(after: &'static str) -> anyhow::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&asked);
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::SeqCst) {
                // As a shell tells of a command that an interrupt ended.
                std::process::exit(130);
            }
            let _ = writeln!(io::stderr(), "\nhymo: {after}; once more to end at once");
        })?;
        Ok(Stop(asked))
    }

    /// Whether an end was asked for.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
