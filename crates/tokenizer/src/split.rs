//! Cuts text into pre-tokens by the pattern of the file.
//!
//! The pattern ends in `|\s+(?!\S)|\s+`: of white space before a word, all but the last character, which the word takes.
//! The look-ahead keeps DFAs out, and it need not: matched as plain `\s+`, the run is known, and so is what follows it. So
//! the part before is compiled as one regular expression, `\s+` as a second one of lower priority, and the rule is applied
//! to what the second one matches. A test compares the result with the `tokenizers` crate's own on arbitrary text.

use regex_automata::Anchored;
use regex_automata::hybrid::dfa::{Cache, Config, DFA};
use regex_automata::{HalfMatch, Input, MatchError, MatchKind};

use crate::{Error, Result};

/// How the pattern may end; stands here because its meaning is implemented here.
const LOOK_AHEAD_TAIL: &str = r"|\s+(?!\S)|\s+";
const SPACES: &str = r"\s+";
/// Bytes for the states of a lazy DFA. Text of many scripts visits a few megabytes of them.
const STATE_BYTES: usize = 16 << 20;

/// The compiled pattern. Shared between threads; each has its own [`SplitCache`].
#[derive(Debug)]
pub struct Splitter {
    pattern: String,
    dfa: DFA,
    tail: bool,
}

/// The states that one thread has visited.
#[derive(Debug, Clone)]
pub struct SplitCache(Cache);

impl Splitter {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// The pattern is not one that a DFA can run.
    pub fn new(pattern: &str) -> Result<Self> {
        let head = pattern.strip_suffix(LOOK_AHEAD_TAIL);
        let parts = head.map_or(vec![pattern], |head| vec![head, SPACES]);
        let config = Config::new().match_kind(MatchKind::LeftmostFirst).cache_capacity(STATE_BYTES);
        let dfa = DFA::builder().configure(config).build_many(&parts);
        let dfa = dfa.map_err(|e| Error::Pattern { why: chain(&e) })?;
        Ok(Splitter { pattern: pattern.to_owned(), dfa, tail: head.is_some() })
    }

    /// The pattern as the file has it.
    #[must_use]
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// A cache for one thread.
    #[must_use]
    pub fn cache(&self) -> SplitCache {
        SplitCache(self.dfa.create_cache())
    }

    /// Calls `piece` with every pre-token, in order. Together they are the text; what the pattern does not match is a
    /// pre-token too.
    ///
    /// # Errors
    /// Those of `piece`.
    pub fn each<'t, E>(
        &self,
        cache: &mut SplitCache,
        text: &'t str,
        mut piece: impl FnMut(&'t str) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = 0;
        while at < text.len() {
            let end = self.end(cache, text, at);
            piece(&text[at..end])?;
            at = end;
        }
        Ok(())
    }

    /// Where the pre-token that begins at `at` ends.
    fn end(&self, cache: &mut SplitCache, text: &str, at: usize) -> usize {
        match self.search(cache, text, at) {
            Some(found) if found.offset() > at => self.shortened(text, at, &found),
            // Nothing matches here. The pre-token lasts until something does.
            _ => {
                let starts = text[at..].char_indices().map(|(offset, _)| at + offset).skip(1);
                let matches = |&start: &usize| self.search(cache, text, start).is_some_and(|m| m.offset() > start);
                starts.into_iter().find(matches).unwrap_or(text.len())
            }
        }
    }

    fn search(&self, cache: &mut SplitCache, text: &str, at: usize) -> Option<HalfMatch> {
        let input = Input::new(text).anchored(Anchored::Yes).range(at..);
        let found: Result<_, MatchError> = self.dfa.try_search_fwd(&mut cache.0, &input);
        found.expect("invariant: no quit bytes and no limit on clearing the cache are set")
    }

    /// White space in front of a word leaves its last character to the word.
    fn shortened(&self, text: &str, at: usize, found: &HalfMatch) -> usize {
        let end = found.offset();
        if !self.tail || found.pattern().as_usize() == 0 || end == text.len() {
            return end;
        }
        match text[at..end].char_indices().next_back() {
            Some((last, _)) if last > 0 => at + last,
            _ => end,
        }
    }
}

/// An error with its causes, as one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}").replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::PATTERN;
    use proptest::prelude::*;
    use std::sync::LazyLock;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    fn ours(splitter: &Splitter, text: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        let done: Result<()> = splitter.each(&mut splitter.cache(), text, |piece| {
            pieces.push(piece.to_owned());
            Ok(())
        });
        done.unwrap();
        pieces
    }

    /// Compiling a pattern takes longer than most texts.
    static SPLITTER: LazyLock<Splitter> = LazyLock::new(|| Splitter::new(PATTERN).unwrap());
    static SPLIT: LazyLock<Split> = LazyLock::new(|| split(PATTERN));

    fn split(pattern: &str) -> Split {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    fn theirs(pattern: &str, text: &str) -> Vec<String> {
        let other = (pattern != PATTERN).then(|| split(pattern));
        let split = other.as_ref().unwrap_or(&SPLIT);
        let mut string = PreTokenizedString::from(text);
        split.pre_tokenize(&mut string).unwrap();
        let pieces = string.get_splits(OffsetReferential::Original, OffsetType::Byte);
        pieces.into_iter().map(|(piece, ..)| piece.to_owned()).filter(|piece| !piece.is_empty()).collect()
    }

    #[test]
    fn words_numbers_marks_and_spaces() {
        let cut = |text| ours(&SPLITTER, text);
        assert_eq!(cut("Hello, world's end"), ["Hello", ",", " world's", " end"]);
        assert_eq!(cut("camelCase HTTPServer"), ["camel", "Case", " HTTPServer"]);
        assert_eq!(cut("12345 \u{663}\u{664}"), ["123", "45", " ", "\u{663}\u{664}"]);
        assert_eq!(cut("  two\n\n  lines \r\n"), [" ", " two", "\n\n", " ", " lines", " \r\n"]);
        assert_eq!(cut("if x:\n    return"), ["if", " x", ":\n", "   ", " return"]);
        assert_eq!(cut("tail   "), ["tail", "   "]);
        assert_eq!(cut("a\u{0}b"), ["a", "\u{0}b"]);
        assert_eq!(cut(""), [""; 0]);
    }

    #[test]
    fn what_the_pattern_leaves_out_is_a_pre_token_too() {
        for pattern in ["[a-z]+", r"[a-z]+|\s+(?!\S)|\s+"] {
            let splitter = Splitter::new(pattern).unwrap();
            for text in ["ab12cd34", "12", "1 2  x\u{e9}\u{e9}y  ", "ab"] {
                assert_eq!(ours(&splitter, text), theirs(pattern, text), "{pattern} on {text:?}");
            }
        }
        let error = Splitter::new(r"(?=a)b").unwrap_err().to_string();
        assert!(error.contains("look-around"), "{error}");
    }

    /// Pieces of text that the alternatives of the pattern quarrel about.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            "[ \t\r\n\u{a0}\u{2003}]{1,4}",
            "[A-Za-z\u{17f}']{1,6}",
            "[0-9\u{663}\u{96f}]{1,5}",
            "[\u{300}\u{301}\u{200d}\u{fe0f}]{1,2}",
            "[\u{4e00}-\u{4e20}\u{d55c}\u{1c5}\u{2b0}]{1,3}",
            "[./\\-_(){}\u{2019}\u{1F600}-\u{1F610}]{1,4}",
            "\\PC{0,5}",
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn pre_tokens_are_those_of_the_crate(text in text()) {
            prop_assert_eq!(ours(&SPLITTER, &text), theirs(PATTERN, &text));
        }
    }
}
