//! `hymo inspect` as a user calls it: output, exit codes, messages.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn hymo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hymo")).args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let out = hymo(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// What is said on standard error by a call that exits with 2 and prints nothing else.
fn refused(args: &[&str]) -> String {
    let out = hymo(args);
    assert_eq!(out.status.code(), Some(2), "{args:?}");
    assert!(out.stdout.is_empty(), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

/// A file of this test run, in the folder that cargo gives tests.
fn file(name: &str, content: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, content).unwrap();
    path
}

#[test]
fn the_report_of_the_full_model() {
    let expected = include_str!("expected/inspect-hymo-434m.txt");
    let found = stdout(&["inspect", "hymo-434m", "--context", "32768"]);
    let how = "`hymo inspect hymo-434m --context 32768 > crates/cli/tests/expected/inspect-hymo-434m.txt`";
    assert!(found == expected, "the report changed; if it should have, run {how}\n{found}");
}

#[test]
fn json_for_programs() {
    let text = stdout(&["inspect", "hymo-434m", "--json", "--context", "32768", "--batch", "2"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |path: &str| json.pointer(path).and_then(serde_json::Value::as_u64);
    assert_eq!(json["model"], "hymo-434m");
    assert_eq!(number("/params/active"), Some(433_708_992));
    assert_eq!(number("/params/stored"), Some(1_127_342_016));
    assert_eq!(number("/params/normuon"), Some(226_164_736));
    assert_eq!(number("/options/batch"), Some(2));
    assert_eq!(number("/cache/bytes_at_context"), Some(128 << 20));
    assert_eq!(number("/cache/mha_bytes_at_context"), Some(8 << 30));
    assert_eq!(json["params"]["parts"][0]["part"], "embedding");
    assert!(number("/flops_per_token/training") > number("/flops_per_token/forward"));
}

#[test]
fn a_printed_preset_is_a_configuration_file() {
    let printed = stdout(&["inspect", "hymo-nano", "--print-config"]);
    let path = file("printed.toml", printed.as_bytes());
    let path = path.to_str().unwrap();
    let body = |text: &str| text[text.find("[model]").unwrap()..].to_owned();
    assert_eq!(body(&stdout(&["inspect", path, "--print-config"])), body(&printed));
    let numbers = |text: String| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(numbers(stdout(&["inspect", path])), numbers(stdout(&["inspect", "hymo-nano"])));
}

#[test]
fn unknown_presets_are_answered_with_the_known() {
    let said = refused(&["inspect", "hymo-434"]);
    assert!(said.contains("no preset is called \"hymo-434\"; did you mean \"hymo-434m\"?"), "{said}");
    assert!(said.contains("presets: hymo-434m, hymo-120m, hymo-30m, hymo-nano, gpt-434m"), "{said}");
    let said = refused(&["inspect", "llama"]);
    assert!(!said.contains("did you mean"), "{said}");
}

#[test]
fn every_problem_of_a_file_is_listed() {
    let printed = stdout(&["inspect", "hymo-nano", "--print-config"]);
    let broken = printed.replace("n_kv_groups = 2", "n_kv_groups = 4").replace("top_k = 2", "top_kk = 2");
    let said = refused(&["inspect", file("broken.toml", broken.as_bytes()).to_str().unwrap()]);
    assert!(said.contains("broken.toml: 3 problems in the configuration:"), "{said}");
    assert!(
        said.contains("model.moe.top_kk: found an unknown field, set to 2, expected a known field; did you mean"),
        "{said}"
    );
    assert!(said.contains("model.moe.top_k: found absent"), "{said}");
    assert!(said.contains("model.mla.n_kv_groups: found 4, expected a divisor of model.mla.n_heads, 6"), "{said}");
}

#[test]
fn files_that_are_no_configuration() {
    let said = refused(&["inspect", "nowhere/there.toml"]);
    assert!(said.contains("nowhere/there.toml: no such file"), "{said}");
    let said = refused(&["inspect", env!("CARGO_TARGET_TMPDIR")]);
    assert!(said.contains("a folder, not a configuration file"), "{said}");
    let said = refused(&["inspect", file("latin1.toml", b"# caf\xe9\n").to_str().unwrap()]);
    assert!(said.contains("not UTF-8 text (byte 5)"), "{said}");
    let said = refused(&["inspect", file("prose.toml", b"[model\nd_model is 896").to_str().unwrap()]);
    assert!(said.contains("not TOML: ") && said.contains("line 1"), "{said}");
}

#[test]
fn wrong_flags_are_wrong_usage() {
    refused(&["inspect"]);
    refused(&["inspekt", "hymo-nano"]);
    refused(&["inspect", "hymo-nano", "--context", "0"]);
    refused(&["inspect", "hymo-nano", "--json", "--print-config"]);
}

#[test]
fn version_and_help() {
    let version = stdout(&["--version"]);
    assert!(version.starts_with(concat!("hymo ", env!("CARGO_PKG_VERSION"), " (commit ")), "{version}");
    let built =
        [("rayon", cfg!(feature = "rayon")), ("avx512", cfg!(feature = "avx512")), ("cuda", cfg!(feature = "cuda"))];
    let built: Vec<&str> = built.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    assert!(version.contains(&format!(", features: {})", built.join(", "))), "{version}");
    assert!(stdout(&["--help"]).contains("Example: hymo demo"));
    assert!(stdout(&["inspect", "--help"]).contains("hymo inspect configs/hymo-nano.toml --json"));
}

#[test]
fn a_closed_pipe_ends_the_command_quietly() {
    for flag in ["--json", "--print-config", "--batch=1"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hymo"));
        command.args(["inspect", "hymo-434m", flag]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr).as_ref()), (Some(0), ""), "{flag}");
    }
}

#[test]
fn numbers_outside_their_range_are_answered_with_it() {
    for (flag, value) in [("--context", "-1"), ("--batch", "-3"), ("--context", "4294967296"), ("--batch", "0")] {
        let said = refused(&["inspect", "hymo-nano", flag, value]);
        assert!(said.contains(&format!("{value} is not in 1..=4294967295")), "{said}");
    }
    let said = stdout(&["inspect", "hymo-nano", "--context", "4294967295", "--batch", "4294967295"]);
    assert!(said.contains("> 16777216.00 TiB"), "{said}");
}

#[test]
fn a_preset_mistaken_for_a_file_or_written_large_is_found() {
    let said = refused(&["inspect", "hymo-434m.toml"]);
    assert!(said.contains("hymo-434m.toml: no such file; did you mean the preset \"hymo-434m\"?"), "{said}");
    let said = refused(&["inspect", "HYMO-434M"]);
    assert!(said.contains("did you mean \"hymo-434m\"?"), "{said}");
}

/// What is read is bounded, and nothing that might never end is opened.
#[test]
fn files_too_long_are_refused() {
    let longest = file("long.toml", &vec![b'#'; 1 << 20]);
    assert!(refused(&["inspect", longest.to_str().unwrap()]).contains("1 problem in the configuration"));
    let longer = file("longer.toml", &vec![b'#'; (1 << 20) + 1]);
    assert!(refused(&["inspect", longer.to_str().unwrap()]).contains("more than 1 MiB: not a configuration file"));
}

#[cfg(unix)]
#[test]
fn devices_and_pipes_are_not_read() {
    assert!(refused(&["inspect", "/dev/zero"]).contains("/dev/zero: not a regular file"));
    let fifo = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fifo.toml");
    let _ = std::fs::remove_file(&fifo);
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(refused(&["inspect", fifo.to_str().unwrap()]).contains("fifo.toml: not a regular file"));
}

/// Standard input may be a pipe, and is bounded like a file.
#[cfg(target_os = "linux")]
#[test]
fn standard_input_may_be_a_pipe() {
    use std::io::Write;
    let ask = |text: &[u8]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hymo"));
        command.args(["inspect", "/dev/stdin"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It may stop reading before the end.
        let _ = child.stdin.take().unwrap().write_all(text);
        child.wait_with_output().unwrap()
    };
    let printed = stdout(&["inspect", "hymo-nano", "--print-config"]);
    let out = ask(printed.as_bytes());
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let out = ask(&vec![b'#'; 8 << 20]);
    assert!(out.status.code() == Some(2) && String::from_utf8_lossy(&out.stderr).contains("more than 1 MiB"));
}

#[cfg(target_os = "linux")]
#[test]
fn paths_are_bytes() {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(b"latin-\xe9.toml");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, stdout(&["inspect", "hymo-nano", "--print-config"])).unwrap();
    for flag in ["--json", "--batch=1"] {
        let out = Command::new(env!("CARGO_BIN_EXE_hymo")).arg("inspect").arg(&path).arg(flag).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    }
}

/// What a file or a name holds reaches the terminal without its control characters.
#[test]
fn messages_carry_no_control_characters() {
    let bad = file("escape.toml", "[model]\n\"\\u001b[2J\" = \"\\u001b[2J\"\nx = \u{1b}[2J".as_bytes());
    for name in [bad.to_str().unwrap(), "hymo\u{1b}[2J", "no/\u{1b}[2J\nfile.toml"] {
        let said = refused(&["inspect", name]);
        assert!(said.chars().all(|c| c == '\n' || !c.is_control()), "{said:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_to_be_one() {
    for args in [&["inspect", "hymo-nano"] as &[&str], &["inspect", "hymo-nano", "--print-config"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = Command::new(env!("CARGO_BIN_EXE_hymo")).args(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("hymo: standard output cannot be written: No space left"), "{said}");
    }
}

/// The kernels that doctor names are those that are built in and that this processor has.
#[test]
fn doctor_names_the_kernels_that_run() {
    let text = stdout(&["doctor", "--op", "residual", "--op", "residual", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["ops"].as_array().map(Vec::len), Some(1));
    let said = json["matrix_kernels"].as_str().unwrap();
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = cfg!(feature = "avx512") && std::arch::is_x86_feature_detected!("avx512f");
        assert_eq!(said == "AVX-512", avx512, "{said}");
        assert_eq!(said.starts_with("AVX2"), !avx512 && std::arch::is_x86_feature_detected!("fma"), "{said}");
    }
    assert!(stdout(&["doctor", "--op", "residual"]).contains(&format!("matrix kernels: {said}\n")));
}
