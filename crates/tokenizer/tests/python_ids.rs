//! The same file, the same text: the ids of Python's `tokenizers` and `transformers` (fixtures/make_tokenizer.py).

use hymo_tokenizer::train::{TrainOptions, Trainer};
use hymo_tokenizer::{Error, N_SPECIAL, Tokenizer, specials};

const FILE: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");
const CORPUS: &[u8] = include_bytes!("../../../fixtures/tokenizer/corpus.txt");
const IDS: &[u8] = include_bytes!("../../../fixtures/tokenizer/ids.json");

#[test]
fn training_again_gives_the_same_bytes() {
    let mut trainer = Trainer::new(TrainOptions { vocab_size: 1024, ..TrainOptions::default() }).unwrap();
    trainer.feed([Ok::<_, Error>(CORPUS.to_vec())], &mut |_| ()).unwrap();
    let (json, report) = trainer.finish(&mut |_, _| ()).unwrap();
    assert_eq!(report.merges, 512);
    assert!(json == FILE, "train again: see fixtures/README.md");
}

#[test]
fn ids_and_text_are_those_of_python() {
    let tokenizer = Tokenizer::from_json(FILE).unwrap();
    let fixture: serde_json::Value = serde_json::from_slice(IDS).unwrap();
    assert_eq!(fixture["vocab_size"], tokenizer.vocab_size());
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u64> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let got = tokenizer.encode(text.as_bytes()).unwrap();
        assert_eq!(got.iter().map(|&id| u64::from(id)).collect::<Vec<_>>(), want, "{text:?}");
        assert_eq!(tokenizer.decode(&got).unwrap(), text.as_bytes());
    }
}

#[test]
fn special_tokens_are_the_last_ids() {
    let tokenizer = Tokenizer::from_json(FILE).unwrap();
    let fixture: serde_json::Value = serde_json::from_slice(IDS).unwrap();
    for (index, name) in fixture["specials"].as_array().unwrap().iter().enumerate() {
        let name = name.as_str().unwrap();
        assert_eq!(name, specials::name(index));
        assert_eq!(tokenizer.special(name).unwrap() as usize, tokenizer.vocab_size() - N_SPECIAL + index);
    }
    assert_eq!(tokenizer.special("<|endoftext|>"), Ok(tokenizer.end_of_text()));
    assert!(tokenizer.special("<|nobody|>").unwrap_err().to_string().contains("\"<|nobody|>\""));
}
