//! How a command ends.

use std::io::{self, Write};
use std::process::ExitCode;

/// The command was asked for something that cannot be: exit code 2. Other errors are failures: exit code 1.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Says what went wrong, if anything did, and with which code to exit.
pub fn code(done: anyhow::Result<()>, err: &mut dyn Write) -> ExitCode {
    let Err(error) = done else {
        return ExitCode::SUCCESS;
    };
    // Who reads the output has seen enough (`hymo inspect .. | head -1`): no fault of this command.
    if error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)) {
        return ExitCode::SUCCESS;
    }
    // Where standard error is closed too, nobody can be told.
    let _ = writeln!(err, "hymo: {}", told(&error));
    if error.chain().any(|e| e.is::<Usage>()) { ExitCode::from(2) } else { ExitCode::FAILURE }
}

/// An error and its causes, leaving out a cause that the message before it has told already.
fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if !text.ends_with(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

/// A writer whose errors say what could not be written.
#[derive(Debug)]
pub struct Named<W> {
    /// What it is, for a message.
    pub name: &'static str,
    /// Where it writes.
    pub to: W,
}

impl<W> Named<W> {
    fn named<T>(&self, done: io::Result<T>) -> io::Result<T> {
        // The kind stays: a closed pipe is still known for one.
        done.map_err(|e| io::Error::new(e.kind(), format!("{} cannot be written: {e}", self.name)))
    }
}

impl<W: Write> Write for Named<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let done = self.to.write(bytes);
        self.named(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        let done = self.to.flush();
        self.named(done)
    }
}

/// An error of the data crate; what only the caller can put right is wrong usage.
pub fn data_error(error: hymo_data::Error) -> anyhow::Error {
    use hymo_data::Error;
    use hymo_tokenizer::Error as Tokenizer;
    match &error {
        Error::NoInput { .. } | Error::Option { .. } | Error::OtherRun { .. } => Usage(error.to_string()).into(),
        Error::Encode(Tokenizer::VocabSize { .. } | Tokenizer::Option { .. } | Tokenizer::Special { .. }) => {
            Usage(error.to_string()).into()
        }
        Error::Encode(Tokenizer::Id { .. }) => Usage(error.to_string()).into(),
        _ => error.into(),
    }
}

/// An error of a run; what only the caller can put right is wrong usage.
pub fn train_error(error: hymo_train::Error) -> anyhow::Error {
    use hymo_train::Error;
    match error {
        Error::Config { .. } | Error::AlreadyThere { .. } | Error::Model(hymo_model::Error::Config(_)) => {
            Usage(error.to_string()).into()
        }
        Error::Data(error) => data_error(error),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(error: anyhow::Error) -> (String, String) {
        let mut said = Vec::new();
        let code = code(Err(error), &mut said);
        (format!("{code:?}"), String::from_utf8(said).unwrap())
    }

    #[test]
    fn wrong_usage_differs_from_failure() {
        let expected = |code: u8, said: &str| (format!("{:?}", ExitCode::from(code)), format!("hymo: {said}\n"));
        assert_eq!(ends(Usage("no such preset".into()).into()), expected(2, "no such preset"));
        assert_eq!(ends(anyhow::anyhow!("disk full").context("run.toml")), expected(1, "run.toml: disk full"));
    }

    /// A typed error says its cause in its own words, and hands it on as well.
    #[test]
    fn a_cause_is_told_once() {
        let cause = io::Error::from(io::ErrorKind::NotFound);
        let text = format!("manifest.json: cannot read: {cause}");
        let error = anyhow::Error::new(cause).context(text.clone()).context("data");
        assert_eq!(ends(error).1, format!("hymo: data: {text}\n"));
    }

    #[test]
    fn a_closed_pipe_is_no_error() {
        let broken = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(ends(broken.into()), (format!("{:?}", ExitCode::SUCCESS), String::new()));
    }
}
