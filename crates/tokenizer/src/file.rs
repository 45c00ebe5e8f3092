//! tokenizer.json: written from merges, read and checked by the `tokenizers` crate.

use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{DecoderWrapper, Model, SplitDelimiterBehavior};

use crate::long::Prefixes;
use crate::specials::{self, N_SPECIAL};
use crate::{Encoder, Error, MAX_VOCAB, MIN_VOCAB, Result, Splitter, alphabet};

/// What an id stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A byte or a merge.
    Text,
    /// A slot that a small corpus left unused. Nothing encodes to it.
    Unused,
    /// One of the last 256 ids.
    Special,
}

/// A tokenizer: what tokenizer.json says. Shared between threads; each encodes with its own [`Encoder`].
#[derive(Debug)]
pub struct Tokenizer {
    pub(crate) model: BPE,
    pub(crate) splitter: Splitter,
    /// The bytes of every id; names for unused and special ids.
    bytes: Vec<Box<[u8]>>,
    /// How many ids are bytes and merges.
    n_text: usize,
    sha256: [u8; 32],
    prefixes: OnceLock<Prefixes>,
}

/// Writes tokenizer.json. `merges` are pairs of ids, in the order learned; there are slots for all of them.
pub(crate) fn write(pattern: &str, merges: &[(u32, u32)], vocab_size: usize) -> Vec<u8> {
    let mut tokens: Vec<String> = alphabet::BY_ID.iter().map(|&byte| alphabet::to_text(&[byte])).collect();
    let mut pairs = Vec::with_capacity(merges.len());
    for &(a, b) in merges {
        let (a, b) = (tokens[a as usize].clone(), tokens[b as usize].clone());
        tokens.push(format!("{a}{b}"));
        pairs.push(json!([a, b]));
    }
    // More than one character and no merge makes it: the model never looks such an entry up.
    let unused = vocab_size - N_SPECIAL - tokens.len();
    tokens.extend((0..unused).map(unused_name));
    let first_special = tokens.len();
    let special = |index: usize| {
        json!({
            "id": first_special + index, "content": specials::name(index),
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    };
    let vocab: Map<String, Value> = tokens.into_iter().zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let split = json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": (0..N_SPECIAL).map(special).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [split, byte_level.clone()] },
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": pairs,
        },
    });
    format!("{file:#}\n").into_bytes()
}

fn unused_name(index: usize) -> String {
    format!("<|unused_{index}|>")
}

impl Tokenizer {
    /// Reads tokenizer.json and checks that it is of HyMo's kind: byte-level BPE without normalisation, one splitting
    /// pattern, the last 256 ids special, and every token what its own bytes encode to.
    ///
    /// # Errors
    /// Whatever is not so.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let file = tokenizers::Tokenizer::from_bytes(json).map_err(|e| Error::Json { why: e.to_string() })?;
        let pattern = pattern(&file)?;
        let ModelWrapper::BPE(mut model) = file.get_model().clone() else {
            return Err(unsupported("the model", "of another kind", "BPE"));
        };
        // Encoders remember pre-tokens themselves.
        model.resize_cache(0);
        let bytes = vocabulary(&file, &model)?;
        let n_text = bytes.len() - N_SPECIAL - unused(&model);
        let splitter = Splitter::new(&pattern)?;
        let sha256 = Sha256::digest(json).into();
        let tokenizer = Tokenizer { model, splitter, bytes, n_text, sha256, prefixes: OnceLock::new() };
        tokenizer.check_reachable()?;
        Ok(tokenizer)
    }

    /// Remembering whole pre-tokens and encoding long ones piece by piece are right only if this holds.
    fn check_reachable(&self) -> Result<()> {
        for (id, bytes) in self.bytes[..self.n_text].iter().enumerate() {
            let found = self.model.tokenize(&alphabet::to_text(bytes)).unwrap_or_default();
            if found.len() != 1 || found[0].id as usize != id {
                return Err(Error::Unreachable { id: id as u32, bytes: String::from_utf8_lossy(bytes).into() });
            }
        }
        Ok(())
    }

    /// How many ids there are, special tokens included: the `vocab_size` of a model.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// How many ids are bytes and merges; they come first.
    #[must_use]
    pub fn n_text(&self) -> usize {
        self.n_text
    }

    /// The splitting pattern of the file.
    #[must_use]
    pub fn pattern(&self) -> &str {
        self.splitter.pattern()
    }

    /// SHA-256 of the file, which shards and checkpoints carry.
    #[must_use]
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    /// The id that ends every document.
    #[must_use]
    pub fn end_of_text(&self) -> u32 {
        (self.bytes.len() - N_SPECIAL) as u32
    }

    /// The id of a special token, by its name.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn special(&self, name: &str) -> Result<u32> {
        let first = self.bytes.len() - N_SPECIAL;
        let found = self.bytes[first..].iter().position(|bytes| **bytes == *name.as_bytes());
        found.map(|index| (first + index) as u32).ok_or_else(|| Error::Special { name: name.to_owned() })
    }

    /// What an id stands for; `None` outside the vocabulary.
    #[must_use]
    pub fn kind(&self, id: u32) -> Option<Kind> {
        let id = id as usize;
        (id < self.bytes.len()).then(|| match id {
            _ if id < self.n_text => Kind::Text,
            _ if id < self.bytes.len() - N_SPECIAL => Kind::Unused,
            _ => Kind::Special,
        })
    }

    /// The bytes of an id: of a special or unused one, its name. `None` outside the vocabulary.
    #[must_use]
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize).map(|bytes| &**bytes)
    }

    /// An encoder for one thread.
    #[must_use]
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder::new(self)
    }

    /// Encodes one text. For many texts, keep an [`Encoder`].
    ///
    /// # Errors
    /// See [`Encoder::encode`].
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encoder().encode(text, &mut ids)?;
        Ok(ids)
    }

    /// Encodes text in which the given special tokens, and no others, are recognised by their names.
    ///
    /// # Errors
    /// A name that is no special token's; see [`Encoder::encode`].
    pub fn encode_with(&self, text: &[u8], allowed: &[&str]) -> Result<Vec<u32>> {
        let allowed: Vec<(&[u8], u32)> =
            allowed.iter().map(|name| Ok((name.as_bytes(), self.special(name)?))).collect::<Result<_>>()?;
        let (mut encoder, mut ids) = (self.encoder(), Vec::new());
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            match allowed.iter().find(|(name, _)| text[at..].starts_with(name)) {
                Some((name, id)) => {
                    encoder.encode(&text[start..at], &mut ids)?;
                    ids.push(*id);
                    at += name.len();
                    start = at;
                }
                None => at += 1,
            }
        }
        encoder.encode(&text[start..], &mut ids)?;
        Ok(ids)
    }

    /// The tokens by their first bytes, made when the first long pre-token comes.
    pub(crate) fn prefixes(&self) -> &Prefixes {
        self.prefixes.get_or_init(|| Prefixes::new(&self.bytes[..self.n_text]))
    }
}

fn unsupported(part: &'static str, got: impl Into<String>, want: &'static str) -> Error {
    Error::Unsupported { part, got: got.into(), want }
}

/// The splitting pattern; everything else about the file's pipeline must be as we write it.
fn pattern(file: &tokenizers::Tokenizer) -> Result<String> {
    const WANT: &str = "a Sequence of one Split by a Regex (Isolated) and ByteLevel without a pattern of its own";
    let got = || unsupported("the pre-tokenizer", "another", WANT);
    if file.get_normalizer().is_some() {
        return Err(unsupported("the normalizer", "set", "none: bytes are encoded as they are"));
    }
    if !matches!(file.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        return Err(unsupported("the decoder", "another", "ByteLevel"));
    }
    let Some(PreTokenizerWrapper::Sequence(sequence)) = file.get_pre_tokenizer() else {
        return Err(got());
    };
    let [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] = sequence.as_ref() else {
        return Err(got());
    };
    let SplitPattern::Regex(pattern) = &split.pattern else { return Err(got()) };
    let isolated = matches!(split.behavior, SplitDelimiterBehavior::Isolated) && !split.invert;
    if !isolated || bytes.add_prefix_space || bytes.use_regex {
        return Err(got());
    }
    Ok(pattern.clone())
}

/// The bytes of every id.
fn vocabulary(file: &tokenizers::Tokenizer, model: &BPE) -> Result<Vec<Box<[u8]>>> {
    let plain = model.dropout.is_none()
        && model.unk_token.is_none()
        && model.continuing_subword_prefix.as_deref().unwrap_or_default().is_empty()
        && model.end_of_word_suffix.as_deref().unwrap_or_default().is_empty()
        && !model.byte_fallback
        && !model.ignore_merges;
    if !plain {
        return Err(unsupported("the model", "BPE with further options", "plain byte-level BPE"));
    }
    let size = file.get_vocab_size(true);
    if !(MIN_VOCAB..=MAX_VOCAB).contains(&size) {
        return Err(Error::VocabSize { size });
    }
    let first_special = size - N_SPECIAL;
    let (added, unused) = (file.get_added_tokens_decoder(), unused(model));
    let token = |id: usize| -> Option<Box<[u8]>> {
        if id >= first_special {
            let token = added.get(&(id as u32))?;
            return (token.special && !token.normalized).then(|| token.content.as_bytes().into());
        }
        let text = model.id_to_token(id as u32)?;
        if id < 256 {
            return (alphabet::to_bytes(&text)? == [alphabet::BY_ID[id]]).then(|| [alphabet::BY_ID[id]].into());
        }
        if id >= first_special - unused {
            return Some(text.into_bytes().into());
        }
        alphabet::to_bytes(&text).map(Into::into)
    };
    if added.len() != N_SPECIAL {
        let got = format!("{} of them", added.len());
        return Err(unsupported("the list of added tokens", got, "256 special tokens, the last ids"));
    }
    let tokens = (0..size).map(|id| {
        token(id).ok_or_else(|| {
            let text = model.id_to_token(id as u32);
            let got = text.map_or("missing".to_owned(), |text| format!("{text:?} (id {id})"));
            unsupported("a token", got, "bytes first, then merges, then unused slots, then 256 special tokens")
        })
    });
    let tokens = tokens.collect::<Result<Vec<_>>>()?;
    if *tokens[first_special] != *specials::END_OF_TEXT.as_bytes() {
        let got = String::from_utf8_lossy(&tokens[first_special]).into_owned();
        return Err(unsupported("the first special token", got, "<|endoftext|>"));
    }
    Ok(tokens)
}

/// How many slots are unused: they have consecutive names.
fn unused(model: &BPE) -> usize {
    (0..).take_while(|&index| model.token_to_id(&unused_name(index)).is_some()).count()
}
