//! Multiple choice: what an answer is made of, and files of questions that are none.

use hymo_model::{Batch, HyMo, Params, presets};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::{TrainOptions, Trainer};
use hymo_train::choices::{Question, Tally, answer, read};
use proptest::prelude::*;

fn tokenizer() -> Tokenizer {
    let mut learner = Trainer::new(TrainOptions { vocab_size: 540, ..TrainOptions::default() }).unwrap();
    let text = b"the sky is blue and the night is dark and the sea is blue too".to_vec();
    learner.feed([Ok::<_, hymo_tokenizer::Error>(text)], &mut |_| ()).unwrap();
    Tokenizer::from_json(&learner.finish(&mut |_, _| ()).unwrap().0).unwrap()
}

fn model() -> (HyMo, Params) {
    let mut config = presets::hymo_nano();
    (config.vocab_size, config.context_length) = (540, 64);
    (HyMo::new(&config).unwrap(), Params::init(&Ctx::cpu(), &config, 3).unwrap())
}

fn question(context: &str, choices: &[&str]) -> Question {
    let choices = choices.iter().map(|&c| c.to_owned()).collect();
    Question { task: String::new(), context: context.to_owned(), choices, answer: 1 }
}

/// Σ ln p of `text` behind `context`, from one full forward pass.
fn whole(net: &HyMo, params: &Params, tokens: &[u32], from: usize) -> f64 {
    let n = tokens.len();
    let modules = net.config().mtp.n_modules;
    let mut ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    ids.resize(n + modules + 1, 0);
    let mut documents = vec![0; n];
    documents.resize(n + modules + 1, -1);
    let batch = Batch::new(1, n, modules, &ids, &documents).unwrap();
    let logits = net.logits(&Ctx::cpu(), params, &batch).unwrap().remove(0);
    let logits = logits.view::<f32>().unwrap();
    let at = |i: usize| {
        let row: Vec<f64> = logits.row(i - 1).iter().map(|&l| f64::from(l)).collect();
        row[tokens[i] as usize] - row.iter().map(|l| l.exp()).sum::<f64>().ln()
    };
    (from..n).map(at).sum()
}

#[test]
fn an_ending_costs_what_one_pass_over_the_whole_text_says() {
    let (tokenizer, (net, params)) = (tokenizer(), model());
    let q = question("the sky", &[" is blue", " is dark and the night too", "!"]);
    let got = answer(&Ctx::cpu(), &net, &params, &tokenizer, &q).unwrap();
    assert!(!got.cut);
    let context = tokenizer.encode(b"the sky").unwrap();
    for (choice, logprob) in q.choices.iter().zip(&got.logprobs) {
        let tokens = tokenizer.encode(format!("the sky{choice}").as_bytes()).unwrap();
        assert!(tokens.starts_with(&context));
        let want = whole(&net, &params, &tokens, context.len());
        assert!((logprob - want).abs() < 1e-4 * want.abs(), "{choice}: {logprob}, {want}");
    }
    let by = |f: &dyn Fn(usize) -> f64| (0..3).max_by(|&a, &b| f(a).total_cmp(&f(b))).unwrap();
    assert_eq!(got.likeliest, by(&|i| got.logprobs[i]));
    assert_eq!(got.likeliest_by_length, by(&|i| got.logprobs[i] / q.choices[i].len() as f64));
}

/// Without a context, with a token across the seam, with a context that is too long: still one answer.
#[test]
fn seams_and_ends() {
    let (tokenizer, (net, params)) = (tokenizer(), model());
    let go = |q: &Question| answer(&Ctx::cpu(), &net, &params, &tokenizer, q).unwrap();
    let none = go(&question("", &["the", "sky"]));
    assert!(none.logprobs.iter().all(|p| p.is_finite() && *p < 0.));
    let seam = go(&question("the s", &["ky is blue", "ea is blue"]));
    assert!(seam.logprobs.iter().all(|p| p.is_finite() && *p < 0.));
    let long = go(&question(&"the sky is blue. ".repeat(80), &["the", "sky"]));
    assert!(long.cut && long.logprobs.iter().all(|p| p.is_finite()));
    let mut tally = Tally::default();
    assert!(tally.accuracy().is_nan());
    tally.add(&question("", &["the", "sky"]), &none);
    assert_eq!((tally.questions, tally.cut), (1, 0));
    assert!((Tally { questions: 5, right: 1, ..tally }.standard_error(0.2) - 0.2).abs() < 1e-12);
}

/// HAZARD 18: numbers that are not finite choose nothing.
#[test]
fn a_model_of_nan_has_no_answer() {
    let (tokenizer, (net, mut params)) = (tokenizer(), model());
    for flat in params.flats_mut() {
        flat.flat_mut::<f32>().unwrap().fill(f32::NAN);
    }
    let said = answer(&Ctx::cpu(), &net, &params, &tokenizer, &question("the sky", &[" is blue", "!"]));
    assert!(said.unwrap_err().to_string().starts_with("the likelihood of ending 0 of \"the sky\" is not finite"));
}

#[test]
fn lines_that_are_no_questions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("q.jsonl");
    let said = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read(&path).map_or_else(|e| e.to_string(), |q| format!("{} questions", q.len()))
    };
    let good = r#"{"context":"a","choices":["b","c"],"answer":1,"source":"whatever"}"#;
    assert_eq!(said(&format!("{good}\n\n{good}")), "2 questions");
    assert!(said("\n").ends_with("line 1: no question in it"));
    assert!(said(&format!("{good}\nx\n")).ends_with("line 2: expected value at column 1"));
    assert!(said(r#"{"context":"a","choices":["b"],"answer":0}"#).ends_with("choices: found 1, expected at least 2"));
    assert!(said(r#"{"context":"a","choices":["b",""],"answer":0}"#).ends_with("choices: number 1 is empty"));
    assert!(said(r#"{"context":"a","choices":["b","c"],"answer":2}"#).ends_with("answer: found 2, expected 0 to 1"));
    assert!(said(r#"{"context":"a","answer":2}"#).contains("missing field `choices`"));
}

proptest! {
    #[test]
    fn any_bytes_are_questions_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0usize..80) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q.jsonl");
        let mut text = br#"{"context":"a","choices":["b","c"],"answer":1}"#[..cut.min(46)].to_vec();
        text.extend(bytes);
        std::fs::write(&path, text).unwrap();
        let _ = read(&path);
    }
}
