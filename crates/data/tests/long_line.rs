//! A line of a gigabyte, a third of it one pre-token: right, in bounded time and memory.

use std::fs::File;
use std::io::{BufWriter, Write};

use hymo_data::corpus::Dataset;
use hymo_data::prep::{PrepOptions, prepare};
use hymo_data::source::{Format, Inputs};
use hymo_tokenizer::Tokenizer;

const JSON: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");
const WORDS: &str = "A line without an end, of words and numbers like 1234, goes on and on; ";
const GIGABYTE: usize = 1 << 30;

fn text() -> Vec<u8> {
    let mut text = WORDS.repeat(GIGABYTE / 3 * 2 / WORDS.len()).into_bytes();
    text.resize(GIGABYTE, b'=');
    text
}

#[test]
fn a_line_of_a_gigabyte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    file.write_all(b"{\"text\": \"").unwrap();
    file.write_all(&text()).unwrap();
    file.write_all(b"\"}\n{\"text\": \"short\"}\n").unwrap();
    file.into_inner().unwrap().sync_all().unwrap();
    let tokenizer = Tokenizer::from_json(JSON).unwrap();
    let inputs = Inputs::find(&[path.display().to_string()], Format::Text).unwrap();
    let out = folder.path().join("out");
    let outcome = prepare(&inputs, (&tokenizer, JSON), &out, &PrepOptions::default(), &mut |_| ()).unwrap();
    assert_eq!(outcome.manifest.splits[0].text_bytes as usize, GIGABYTE + 5);
    let dataset = Dataset::open(&out, "train").unwrap();
    let mut want = text();
    want.extend_from_slice(b"<|endoftext|>short<|endoftext|>");
    let mut at = 0;
    for document in 0..dataset.documents() {
        for id in dataset.tokens_of(document).unwrap() {
            let bytes = tokenizer.bytes(id.into()).unwrap();
            assert!(want[at..].starts_with(bytes), "byte {at}");
            at += bytes.len();
        }
    }
    assert_eq!(at, want.len());
}
