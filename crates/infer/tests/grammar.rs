//! Output under a grammar, with and without drafts.
#![cfg(feature = "grammar")]

#[path = "../../model/tests/small/mod.rs"]
mod small;

use hymo_infer::{Finish, Gates, Generator, Grammars, Mtp, Request, SampleOptions, WeightDtype};
use hymo_model::ModelConfig;
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use std::ops::ControlFlow;
use std::sync::Arc;

const FILE: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");

const SCHEMA: &str = r#"{
    "type": "object", "additionalProperties": false, "required": ["name", "sizes"],
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
    }
}"#;

#[test]
fn json_fits_its_schema_with_and_without_drafts() {
    let tokenizer = Arc::new(Tokenizer::from_json(FILE).unwrap());
    let config = ModelConfig { vocab_size: tokenizer.vocab_size(), ..small::config() };
    let params = small::params(&Ctx::cpu(), &config, 4);
    let grammars = Grammars::new(&tokenizer).unwrap();
    let generator = |mtp| {
        let generator = Generator::new(&config, &params, WeightDtype::F32).unwrap();
        generator.with_tokenizer(Arc::clone(&tokenizer)).with_mtp(mtp, Gates::new(&[0.]).unwrap())
    };
    let (mut plain, mut drafting) = (generator(Mtp::Off), generator(Mtp::On));
    for seed in 0..12 {
        let options = SampleOptions { max_tokens: 200, temperature: 1., seed, ..SampleOptions::default() };
        let run = |generator: &mut Generator| {
            let constraint = Some(grammars.json_schema(SCHEMA).unwrap());
            let request = Request { constraint, ..Request::new(&[5, 6], &options) };
            generator.run(request, |_| ControlFlow::Continue(())).unwrap()
        };
        let (a, b) = (run(&mut plain), run(&mut drafting));
        assert_eq!((&a.tokens, &a.text, a.finish), (&b.tokens, &b.text, b.finish));
        if a.finish == Finish::Length {
            // White space may go on for ever.
            continue;
        }
        let value: serde_json::Value =
            serde_json::from_slice(&a.text).unwrap_or_else(|e| panic!("{e}: {}", a.text_lossy()));
        assert!(value["name"].as_str().unwrap().chars().count() <= 4, "{value}");
        let sizes = value["sizes"].as_array().unwrap();
        assert!(sizes.len() <= 3 && sizes.iter().all(|s| s.as_u64().unwrap() < 100), "{value}");
    }
}

#[test]
fn what_is_no_grammar_is_refused() {
    let tokenizer = Tokenizer::from_json(FILE).unwrap();
    let grammars = Grammars::new(&tokenizer).unwrap();
    for error in [
        grammars.regex("(a").unwrap_err(),
        grammars.json_schema("{").unwrap_err(),
        grammars.json_schema(r#"{"type": "nothing"}"#).unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("the grammar: ") && error.to_string().len() > 20, "{error}");
    }
}
