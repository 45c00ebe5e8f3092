//! Every byte string comes back, never by way of a special token, with the ids of the `tokenizers` crate where it is text.

use std::sync::LazyLock;

use hymo_tokenizer::train::{TrainOptions, Trainer};
use hymo_tokenizer::{Error, Kind, StreamDecoder, Tokenizer};
use proptest::prelude::*;

const FILE: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");
static OURS: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_json(FILE).unwrap());
static CRATE: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(FILE).unwrap();
    tokenizer.set_encode_special_tokens(true);
    tokenizer
});

/// Text of many kinds, whole and damaged.
fn any_text() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        "[a-zA-Z ']{0,20}".prop_map(String::into_bytes),
        "[\u{4e00}-\u{4eff}\u{3040}-\u{30ff}\u{ac00}-\u{acff}]{0,6}".prop_map(String::into_bytes),
        "[\u{1F300}-\u{1F6FF}\u{200d}\u{fe0f}]{0,5}".prop_map(String::into_bytes),
        "[\u{0}-\u{1f}\u{7f}-\u{a0}]{0,5}".prop_map(String::into_bytes),
        "\\PC{0,8}".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..8),
        Just(b"<|endoftext|>".to_vec()),
        Just(b"<|unused_0|>".to_vec()),
        Just(b"\xf0\x9f\x98".to_vec()),
    ];
    proptest::collection::vec(piece, 0..10).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn decoding_gives_back_what_was_encoded(bytes in any_text()) {
        let ids = OURS.encode(&bytes).unwrap();
        prop_assert_eq!(&OURS.decode(&ids).unwrap(), &bytes);
        prop_assert!(ids.iter().all(|&id| OURS.kind(id) == Some(Kind::Text)));
        let mut stream = StreamDecoder::new();
        let mut said = String::new();
        let mut streamed = Vec::new();
        for &id in &ids {
            let piece = stream.push(&OURS, id).unwrap();
            streamed.extend_from_slice(piece);
            said += &String::from_utf8_lossy(piece);
        }
        let rest = stream.finish();
        streamed.extend_from_slice(rest);
        said += &String::from_utf8_lossy(rest);
        prop_assert_eq!(&streamed, &bytes);
        prop_assert_eq!(said, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn text_has_the_ids_of_the_crate(text in "\\PC{0,60}", more in any_text()) {
        let text = text + &String::from_utf8_lossy(&more);
        let theirs = CRATE.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(OURS.encode(text.as_bytes()).unwrap(), theirs.get_ids());
    }
}

#[test]
fn bytes_outside_utf8_are_single_tokens() {
    let ids = OURS.encode(b"a\xff\xc3(\xe2\x82").unwrap();
    assert_eq!(ids.len(), 6);
    assert!(ids.iter().all(|&id| id < 256));
    assert_eq!(OURS.bytes(ids[1]), Some(&b"\xff"[..]));
    assert_eq!(OURS.encode(b"").unwrap(), [0; 0]);
}

#[test]
fn special_tokens_only_where_allowed() {
    let text = b"<|user|>hi<|endoftext|><|user|>";
    let (user, end) = (OURS.special("<|user|>").unwrap(), OURS.end_of_text());
    assert!(OURS.encode(text).unwrap().iter().all(|&id| id < end));
    let ids = OURS.encode_with(text, &["<|user|>"]).unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (user, user));
    assert!(!ids.contains(&end));
    assert_eq!(OURS.decode(&ids).unwrap(), text);
    assert!(OURS.encode_with(text, &["<|x|>"]).is_err());
}

#[test]
fn ids_outside_the_vocabulary_are_errors() {
    let error = Error::Id { id: 1024, size: 1024 };
    assert_eq!(OURS.decode(&[1024]), Err(error.clone()));
    assert_eq!(StreamDecoder::new().push(&OURS, 1024), Err(error));
    assert_eq!((OURS.kind(1024), OURS.bytes(1024)), (None, None));
}

/// Repeating what was remembered, forgetting it, and texts of one long pre-token change nothing.
#[test]
fn an_encoder_says_the_same_every_time() {
    let mut encoder = OURS.encoder();
    let word = "W".repeat(600) + " " + &"antidisestablishmentarianism ".repeat(3);
    let mut first = Vec::new();
    encoder.encode(word.as_bytes(), &mut first).unwrap();
    let mut second = Vec::new();
    encoder.encode(word.as_bytes(), &mut second).unwrap();
    assert_eq!(first, second);
    assert_eq!(first, CRATE.encode(word.as_str(), false).unwrap().get_ids());
}

#[test]
fn unused_slots_are_never_encoded() {
    let mut trainer = Trainer::new(TrainOptions { vocab_size: 1024, ..TrainOptions::default() }).unwrap();
    trainer.feed([Ok::<_, Error>(b"tiny tiny".to_vec())], &mut |_| ()).unwrap();
    let small = Tokenizer::from_json(&trainer.finish(&mut |_, _| ()).unwrap().0).unwrap();
    let unused = small.n_text() as u32;
    assert_eq!((small.kind(unused), small.bytes(unused)), (Some(Kind::Unused), Some(&b"<|unused_0|>"[..])));
    assert!(small.encode(b"<|unused_0|>").unwrap().iter().all(|&id| id < unused));
    assert_eq!(small.kind(small.end_of_text() - 1), Some(Kind::Unused));
}

#[test]
fn files_of_another_kind_are_refused_by_name() {
    let text = String::from_utf8(FILE.to_vec()).unwrap();
    let refused = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Tokenizer::from_json(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string()
    };
    assert!(Tokenizer::from_json(b"{}").unwrap_err().to_string().starts_with("not a tokenizer.json"));
    assert!(Tokenizer::from_json(&FILE[..5000]).unwrap_err().to_string().starts_with("not a tokenizer.json"));
    assert!(refused("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}").contains("the normalizer is set"));
    assert!(refused("\"Isolated\"", "\"Removed\"").contains("the pre-tokenizer is another"));
    assert!(refused("\"ignore_merges\": false", "\"ignore_merges\": true").contains("the model is BPE with further"));
    assert!(refused("<|endoftext|>", "<|end|>").contains("the first special token is <|end|>"));
    // Without its first merge, the tokens built on it are not what their bytes encode to.
    let merge = text.find("\"merges\": [").unwrap() + 11;
    let end = merge + text[merge..].find("],").unwrap() + 2;
    let cut = [&text[..merge], &text[end..]].concat();
    assert!(Tokenizer::from_json(cut.as_bytes()).unwrap_err().to_string().contains("its own bytes encode to"));
}
