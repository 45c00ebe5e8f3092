//! Text in and out: prompts of every length, stop strings and characters cut between tokens, and where an output ends.

#[path = "../../model/tests/small/mod.rs"]
mod small;

use hymo_infer::{Constraint, Error, Finish, Generator, Output, Request, Result, SampleOptions, WeightDtype};
use hymo_model::ModelConfig;
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::{TrainOptions, Trainer};
use proptest::prelude::*;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

const VOCAB: usize = 530;

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let mut trainer = Trainer::new(TrainOptions { vocab_size: VOCAB, ..TrainOptions::default() }).unwrap();
    let text =
        "stop stopping the top of the stack, \u{1F600} \u{1F600} \u{4f60}\u{597d} \u{4f60}\u{597d} and so on".repeat(3);
    trainer.feed([Ok::<_, hymo_tokenizer::Error>(text.into_bytes())], &mut |_| ()).unwrap();
    Arc::new(Tokenizer::from_json(&trainer.finish(&mut |_, _| ()).unwrap().0).unwrap())
});

fn config() -> ModelConfig {
    ModelConfig { vocab_size: VOCAB, context_length: 24, ..small::config() }
}

fn generator() -> Generator {
    let config = config();
    let params = small::params(&Ctx::cpu(), &config, 4);
    let generator = Generator::new(&config, &params, WeightDtype::F32).unwrap();
    generator.with_tokenizer(Arc::clone(&TOKENIZER))
}

/// The tokens of a script, one after the other.
#[derive(Debug)]
struct Script(Vec<u32>, usize);

impl Constraint for Script {
    fn restrict(&mut self, logits: &mut [f32]) -> Result<()> {
        let kept = logits[self.0[self.1] as usize];
        logits.fill(f32::NEG_INFINITY);
        logits[self.0[self.1] as usize] = kept;
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        assert_eq!(token, self.0[self.1]);
        self.1 += 1;
        Ok(())
    }

    fn finished(&self) -> bool {
        self.1 == self.0.len()
    }
}

/// What comes out, piece by piece, when the model says exactly these tokens.
fn says(tokens: &[u32], stop: &[&[u8]]) -> (Vec<Vec<u8>>, Output) {
    let stop = stop.iter().map(|s| s.to_vec()).collect();
    let options = SampleOptions { max_tokens: 1000, stop, ..SampleOptions::default() };
    let constraint: Box<dyn Constraint> = Box::new(Script(tokens.to_vec(), 0));
    let request = Request { constraint: Some(constraint), ..Request::new(&[1], &options) };
    let mut pieces = Vec::new();
    let output = generator().run(request, |token| {
        pieces.push(token.bytes.clone());
        ControlFlow::Continue(())
    });
    (pieces, output.unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// HAZARD 23: emoji, CJK and damaged bytes come out byte for byte, never cut inside a character, and nothing of a stop
    /// string.
    #[test]
    fn text_is_exact(
        words in prop::collection::vec(prop_oneof![
            Just("\u{1F600}".as_bytes().to_vec()), Just("\u{4f60}\u{597d}".as_bytes().to_vec()), Just(b" stop".to_vec()),
            Just(b"st".to_vec()), Just(b"op".to_vec()), Just(b"\xf0\x9f".to_vec()), Just(b"\xff".to_vec()), Just(b"e\n".to_vec()),
        ], 1..5),
    ) {
        // Single bytes: every character is cut, and so is every stop string.
        let text = words.concat();
        let tokens: Vec<u32> = text.iter().flat_map(|b| TOKENIZER.encode(&[*b]).unwrap()).take(23).collect();
        let text = &text[..tokens.len()];
        let (pieces, output) = says(&tokens, &[b"stop", "\u{597d}".as_bytes()]);
        let at = |stop: &[u8]| text.windows(stop.len()).position(|w| w == stop).map(|at| (at + stop.len(), at));
        let end = [at(b"stop"), at("\u{597d}".as_bytes())].into_iter().flatten().min();
        let want = end.map_or(text, |(_, begin)| &text[..begin]);
        prop_assert_eq!(&output.text, want);
        prop_assert_eq!(output.finish, end.map_or(Finish::Constraint, |_| Finish::StopString));
        prop_assert_eq!(pieces.concat(), want);
        // Read piece by piece, a screen shows what it would show of the whole.
        let shown: String = pieces.iter().map(|piece| String::from_utf8_lossy(piece).into_owned()).collect();
        prop_assert_eq!(shown, String::from_utf8_lossy(want));
    }
}

#[test]
fn stop_strings_across_tokens_and_inside_one() {
    let encode = |text: &str| TOKENIZER.encode(text.as_bytes()).unwrap();
    let (_, output) = says(&[encode("the s"), encode("top of")].concat(), &[b"stop"]);
    assert_eq!((output.text_lossy().as_ref(), output.finish), ("the ", Finish::StopString));
    let (_, output) = says(&encode("stopping"), &[b"opp"]);
    assert_eq!((output.text_lossy().as_ref(), output.finish), ("st", Finish::StopString));
    let (_, output) = says(&encode("the sto"), &[b"stop"]);
    assert_eq!((output.text_lossy().as_ref(), output.finish), ("the sto", Finish::Constraint));
    let end = TOKENIZER.end_of_text();
    let (_, output) = says(&[encode("so"), vec![end, end]].concat(), &[]);
    assert_eq!((output.text_lossy().as_ref(), output.finish), ("so", Finish::StopToken(end)));
}

/// Prompts of 0, 1 and as many tokens as the context holds, and of one more.
#[test]
fn prompts_of_every_length() {
    let mut generator = generator();
    let options = SampleOptions { max_tokens: 100, ignore_end: true, ..SampleOptions::default() };
    let mut run = |prompt: &[u32]| generator.generate(prompt, &options, |_| ControlFlow::Continue(()));
    assert_eq!(run(&[]), Err(Error::EmptyPrompt));
    for n in [1, 23, 24] {
        let output = run(&vec![7; n]).unwrap();
        // The last token drawn needs no place of its own.
        assert_eq!((output.tokens.len(), output.finish), (24 - n + 1, Finish::Context), "{n}");
    }
    assert_eq!(run(&[7; 25]), Err(Error::PromptTooLong { tokens: 25, context: 24 }));
    assert_eq!(run(&[7, VOCAB as u32]), Err(Error::Token { id: VOCAB as u32, at: 1, vocab_size: VOCAB }));
    let output = generator.generate_text(b"", &options, |_| ControlFlow::Break(())).unwrap();
    assert_eq!((output.stats.prompt_tokens, output.finish), (1, Finish::Cancelled));
    let other = small::config();
    let other = Generator::new(&other, &small::params(&Ctx::cpu(), &other, 4), WeightDtype::F32).unwrap();
    let mut other = other.with_tokenizer(Arc::clone(&TOKENIZER));
    let error = other.generate_text(b"a", &options, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert_eq!(error, "tokenizer is one of 530 ids, want the model's 50 ids");
}

/// Untrained slots, padding and reserved special tokens are never drawn, however likely.
#[test]
fn what_no_text_has_is_never_drawn() {
    let mut generator = generator();
    let options = SampleOptions { temperature: 100., max_tokens: 20, ignore_end: true, ..SampleOptions::default() };
    for seed in 0..20 {
        let options = SampleOptions { seed, ..options.clone() };
        let output = generator.generate(&[3], &options, |_| ControlFlow::Continue(())).unwrap();
        for id in output.tokens {
            let name = String::from_utf8_lossy(TOKENIZER.bytes(id).unwrap()).into_owned();
            assert!(!name.starts_with("<|reserved") && !name.starts_with("<|pad") && !name.starts_with("<|unused"));
        }
    }
}

/// HAZARD 18: a model with a weight that is NaN ends with an error that says where.
#[test]
fn numbers_that_are_not_finite_end_the_request() {
    let config = config();
    let mut params = small::params(&Ctx::cpu(), &config, 4);
    let spec = params.table().params().iter().find(|spec| spec.name == "layers.0.gdn.A_log").unwrap().clone();
    params.flats_mut()[small::unit(&spec)].flat_mut::<f32>().unwrap()[spec.range()][0] = f32::NAN;
    let mut generator = Generator::new(&config, &params, WeightDtype::F32).unwrap();
    let found = generator.generate(&[1, 2], &SampleOptions::default(), |_| ControlFlow::Continue(()));
    assert!(matches!(found, Err(Error::NotFinite { position: 2, .. })), "{found:?}");
}
