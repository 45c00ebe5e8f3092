//! What can go wrong in this crate.

use hymo_model::Unit;

/// An error of the optimizers.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter that no group moves.
    #[error("no optimizer group has \"{name}\": it would never move")]
    NotCovered {
        /// The parameter.
        name: String,
    },
    /// A parameter that two groups move, or one group twice.
    #[error("\"{name}\" is in the optimizer groups {first} and {second}: it would move twice")]
    CoveredTwice {
        /// The parameter.
        name: String,
        /// A group that has it.
        first: String,
        /// The other one.
        second: String,
    },
    /// A group names a parameter that does not exist.
    #[error("optimizer group {group} has \"{name}\", and no parameter is called so")]
    UnknownParam {
        /// The group.
        group: String,
        /// The name.
        name: String,
    },
    /// A group has a parameter that its optimizer is not for.
    #[error("optimizer group {group}: \"{name}\" {why}")]
    NotOrthogonal {
        /// The group.
        group: String,
        /// The parameter.
        name: String,
        /// What about it does not fit.
        why: String,
    },
    /// Two parameters share memory, or one lies outside its buffer.
    #[error("\"{name}\" takes elements {start}..{end} of {unit}, which has {len}, the first {taken} of them taken")]
    Place {
        /// The parameter.
        name: String,
        /// Its buffer.
        unit: Unit,
        /// Its first element.
        start: usize,
        /// One past its last.
        end: usize,
        /// One past the last element of the parameters before it.
        taken: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// Flat buffers that are not those the optimizer was made for: another model's, or a shard of its rows, which must not
    /// be orthogonalised as if it were the matrix.
    #[error("{what}: unit {unit} has {found}, the optimizer was made for {want}; a shard is not its matrix")]
    Layout {
        /// Parameters or gradients.
        what: &'static str,
        /// Index of the unit: the root, then the layers.
        unit: usize,
        /// What was given.
        found: String,
        /// What it must be.
        want: String,
    },
    /// A saved state that does not fit this optimizer; nothing of it was taken over.
    #[error("the saved optimizer state does not fit:{}", list(problems))]
    State {
        /// Everything wrong with it.
        problems: Vec<String>,
    },
    /// A decay branch from a step at which the learning rate is not at its stable value.
    #[error("a decay branch from step {step}: this schedule is stable from {from} to {to}")]
    NotStable {
        /// The step asked for.
        step: u64,
        /// First stable step.
        from: u64,
        /// Last stable step; before `from` when there is none.
        to: u64,
    },
    /// A model that cannot be made.
    #[error(transparent)]
    Model(#[from] hymo_model::Error),
    /// A number out of its range, or an operation refused its input.
    #[error(transparent)]
    Op(#[from] hymo_tensor::Error),
}

/// Most problems that a message lists.
const SHOWN: usize = 20;

fn list(problems: &[String]) -> String {
    let mut text: String = problems.iter().take(SHOWN).map(|p| format!("\n  {p}")).collect();
    if problems.len() > SHOWN {
        text += &format!("\n  and {} more", problems.len() - SHOWN);
    }
    text
}
