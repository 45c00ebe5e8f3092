//! `hymo generate` and `hymo chat` as a user calls them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use hymo_model::{ModelConfig, Params, presets};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_train::{Model, exchange};
use serde_json::Value;

const TOKENIZER: &[u8] = include_bytes!("../../../fixtures/tokenizer/tokenizer.json");

/// An untrained model in an exported folder.
static MODEL: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("generate-model");
    let tokenizer = Tokenizer::from_json(TOKENIZER).unwrap();
    let config = ModelConfig { vocab_size: tokenizer.vocab_size(), context_length: 512, ..presets::hymo_nano() };
    let ctx = Ctx::cpu();
    let params = Params::init(&ctx, &config, 3).unwrap();
    let tokenizer = Some((tokenizer, TOKENIZER.to_vec()));
    let model = Model { config, params, tokenizer, step: 0, path: dir.clone(), passed_over: Vec::new() };
    exchange::export(&model, &dir, exchange::Precision::F32).unwrap();
    dir
});

fn hymo(args: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hymo"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_ref()).unwrap();
    child.wait_with_output().unwrap()
}

fn generate(more: &[&str]) -> Output {
    let all =
        [&["generate", MODEL.to_str().unwrap(), "--prompt", "the stop", "-n", "12", "--ignore-end"], more].concat();
    hymo(&all, "")
}

fn told(out: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code().unwrap(), text(&out.stdout), text(&out.stderr))
}

/// HAZARD 17: drafts, pieces of the prompt and threads change no byte of the output.
#[test]
fn flags_of_speed_change_no_byte() {
    for dtype in ["f32", "bf16", "int8"] {
        let base = ["--dtype", dtype, "--mtp", "off", "--seed", "7"];
        let want = told(&generate(&base)).1;
        assert!(want.len() > 12, "{want}");
        for other in
            [&["--mtp", "on", "--gates", "0"][..], &["--prefill-chunk", "1"], &["--threads", "1"], &["--mtp", "auto"]]
        {
            let all = [&["--dtype", dtype, "--seed", "7"], other].concat();
            let (code, got, said) = told(&generate(&all));
            assert_eq!((code, &got), (0, &want), "{other:?}");
            assert!(said.contains("12 tokens in"), "{said}");
        }
    }
}

#[test]
fn json_for_programs() {
    let (code, text, _) = told(&generate(&["--json", "--logprobs", "2", "-t", "0", "--mtp", "on", "--gates", "0"]));
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, found["tokens"].as_array().unwrap().len()), (0, 12));
    assert_eq!(found["logprobs"][0]["top"].as_array().unwrap().len(), 2);
    assert_eq!(found["finish"], "Length");
    assert!(found["mtp"]["cycles"].as_u64().unwrap() > 0 && found["mtp"]["drafted"][0].as_u64().unwrap() > 0);
}

#[test]
fn output_under_a_grammar() {
    let (code, text, said) = told(&generate(&["--regex", "(yes|no), [0-9]{2}"]));
    assert_eq!(code, 0, "{said}");
    assert!(text.starts_with("yes, ") || text.starts_with("no, "), "{text}");
    let (code, _, said) = told(&generate(&["--json-schema", "{\"type\": 3}"]));
    assert!(code == 2 && said.contains("the grammar: "), "{said}");
}

#[test]
fn what_is_wrong_is_said() {
    for (args, want) in [
        (&["--top-p", "1.5"][..], "top_p is 1.5, want above 0, up to 1"),
        (&["--context", "600"], "context is 600, want 1 to the model's 512 tokens"),
        (&["--gates", "2"], "gates is 2, want probabilities from 0 to 1"),
        (&["--logit-bias", "9999999=1"], "logit_bias is 9999999"),
        (&["--context", "1"], "the prompt has"),
    ] {
        let (code, _, said) = told(&generate(args));
        assert!(code == 2 && said.contains(want), "{args:?}: {code} {said}");
    }
    let (code, _, said) = told(&hymo(&["generate", "nowhere"], ""));
    assert!(code == 2 && said.contains("nowhere: no such folder"), "{said}");
}

/// A turn is any bytes, a command is text; neither ends the chat.
#[test]
fn a_chat_of_bytes() {
    let args = ["chat", MODEL.to_str().unwrap(), "-n", "3"];
    let (code, text, said) = told(&hymo(&args, b"caf\xe9 \xff\n/sa\xffve x\nhello\r\n/quit\n"));
    assert_eq!(code, 0, "{said}");
    assert!(text.contains("a command is UTF-8"), "{text}");
    assert_eq!(said.lines().filter(|line| line.contains("from a snapshot")).count(), 2, "{said}");
}

#[test]
fn a_chat_of_two_turns() {
    let saved = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chat.json");
    let input = format!("hello\nand then?\n/what\n/save {}\n/reset\nhello\n/quit\n", saved.display());
    let args = ["chat", MODEL.to_str().unwrap(), "-n", "6", "-t", "0", "--system", "Be brief."];
    let (code, text, said) = told(&hymo(&args, &input));
    assert_eq!(code, 0, "{said}");
    assert!(text.contains("no chat template") && text.contains("/what: want /reset") && text.contains("forgotten"));
    // The second turn begins from the first one's state.
    let turns: Vec<&str> = said.lines().filter(|line| line.contains("from a snapshot")).collect();
    assert_eq!(turns.len(), 3, "{said}");
    assert!(turns[0].contains(" 0 from a snapshot") && !turns[1].contains(" 0 from a snapshot"), "{said}");
    let found: Value = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let roles: Vec<&str> = found.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
}
