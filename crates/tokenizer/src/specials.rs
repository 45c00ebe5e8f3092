//! The special tokens: the last 256 ids of any vocabulary.
//!
//! Ordinary text never encodes to one of them, even where it spells a name out: a document cannot end another's, and a
//! user cannot speak as the system. Who wants them says which (`Tokenizer::encode_with`).

/// How many ids at the end of every vocabulary are special.
pub const N_SPECIAL: usize = 256;

/// Ends every document.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Fills what no token fills.
pub const PAD: &str = "<|pad|>";

/// The named special tokens, in the order of their ids; the rest are called `<|reserved_i|>`.
pub const NAMED: &[&str] = &[
    END_OF_TEXT,
    PAD,
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end_of_turn|>",
    "<|tool_call|>",
    "<|end_of_tool_call|>",
    "<|tool_result|>",
    "<|end_of_tool_result|>",
];

/// The name of special token `index`, counted from the first.
#[must_use]
pub fn name(index: usize) -> String {
    NAMED.get(index).map_or_else(|| format!("<|reserved_{}|>", index - NAMED.len()), |&name| name.to_owned())
}
