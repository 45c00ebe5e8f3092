//! Speed of `hymo data prep` against the `tokenizers` crate alone, and of the loader.
//!
//! ```sh
//! cargo bench -p hymo-data --bench data -- books.jsonl.zst [--vocab 64256] [--repeats 5] [--out bench/results/data-cpu-DATE.json]
//! ```
//!
//! In one run on the same cores: the crate encodes all documents from memory in batches on all threads (`encode_batch_fast`,
//! its quickest call, its cache on); `prepare` reads the file, unpacks it, encodes, and writes and flushes shards. Before
//! anything is timed, every document's ids are compared. Figures are medians; raw seconds stand in the file.

// A bench is a program: it prints.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hymo_data::corpus::{Corpus, Dataset};
use hymo_data::loader::{Loader, LoaderOptions, Prefetch};
use hymo_data::prep::{PrepOptions, prepare};
use hymo_data::source::{Format, Inputs, ReadOptions, Records};
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::{TrainOptions, Trainer};
use serde_json::{Value, json};

/// Documents that the crate is handed at once.
const BATCH: usize = 256;
/// What the loader is timed on: steps of 64 rows of 4096 tokens.
const STEPS: u64 = 800;
const STEP_ROWS: usize = 64;
const TOKENS: u64 = STEPS * STEP_ROWS as u64 * 4096;

struct Args {
    inputs: Vec<String>,
    vocab: usize,
    repeats: usize,
    out: Option<PathBuf>,
}

fn main() {
    let Some(args) = args() else {
        println!("usage: cargo bench -p hymo-data --bench data -- INPUT.. [--vocab N] [--repeats N] [--out FILE]");
        return;
    };
    let inputs = Inputs::find(&args.inputs, Format::Text).expect("inputs");
    let texts = texts(&inputs);
    let bytes: usize = texts.iter().map(String::len).sum();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{} documents, {:.1} MB, {threads} threads", texts.len(), bytes as f64 / 1e6);

    let (json, training) = seconds(|| train(&texts, args.vocab));
    let tokenizer = Tokenizer::from_json(&json).expect("our own file");
    let peer = tokenizers::Tokenizer::from_bytes(&json).expect("our own file");
    same_ids(&tokenizer, &peer, &texts);
    println!("the ids of all documents are those of the crate; learned in {training:.1} s");

    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut runs = Runs::default();
    for repeat in 0..args.repeats {
        runs.crate_alone.push(seconds(|| peer_encodes(&peer, &texts)).1);
        runs.encoder.push(seconds(|| we_encode(&tokenizer, &texts, threads)).1);
        let out = folder.path().join(repeat.to_string());
        let done = seconds(|| prepare(&inputs, (&tokenizer, &json), &out, &PrepOptions::default(), &mut |_| ()));
        done.0.expect("prepared");
        runs.prep.push(done.1);
        let corpus = Arc::new(Corpus::of(Dataset::open(&out, "train").expect("prepared"), Some(1)).expect("a corpus"));
        runs.loader.push(load(&corpus, None));
        runs.prefetch.push(load(&corpus, Some(2)));
        runs.waits.push(waits(&corpus));
    }
    let cases = runs.report(bytes);
    let Some(out) = args.out else { return };
    let result = json!({
        "command": format!("cargo bench -p hymo-data --bench data -- INPUT --vocab {} --repeats {}", args.vocab, args.repeats),
        "commit": commit(),
        "device": "cpu",
        "threads": threads,
        "documents": texts.len(),
        "text_bytes": bytes,
        "vocab": args.vocab,
        "training_seconds": training,
        "cases": cases,
    });
    hymo_data::write_whole(&out, format!("{result:#}\n").as_bytes()).expect("the result's file");
}

/// Seconds of each run of each case; `waits` are shares of a step.
#[derive(Default)]
struct Runs {
    crate_alone: Vec<f64>,
    encoder: Vec<f64>,
    prep: Vec<f64>,
    loader: Vec<f64>,
    prefetch: Vec<f64>,
    waits: Vec<f64>,
}

impl Runs {
    /// Prints the medians, and gives them with the raw seconds.
    fn report(&self, bytes: usize) -> Value {
        let mut cases = Vec::new();
        let peer = bytes as f64 / 1e6 / median(&self.crate_alone);
        for (case, seconds) in
            [("tokenizers crate alone", &self.crate_alone), ("encoder alone", &self.encoder), ("prep", &self.prep)]
        {
            let rate = bytes as f64 / 1e6 / median(seconds);
            println!("{case:<24} {rate:>8.1} MB/s, {:>5.0}% of the crate alone", 100. * rate / peer);
            cases.push(json!({ "case": case, "mb_per_s": rate, "ratio_to_crate": rate / peer, "seconds": seconds }));
        }
        for (case, seconds) in [("loader", &self.loader), ("loader with prefetch", &self.prefetch)] {
            let rate = TOKENS as f64 / median(seconds);
            println!("{case:<24} {:>8.1} million tokens/s", rate / 1e6);
            cases.push(json!({ "case": case, "tokens": TOKENS, "tokens_per_s": rate, "seconds": seconds }));
        }
        let waited = median(&self.waits);
        println!("{:<24} {:>8.3}% of a step of 20 ms", "step wait", 100. * waited);
        cases.push(json!({ "case": "step wait, share of a step of 20 ms", "share": waited, "shares": self.waits }));
        Value::Array(cases)
    }
}

fn texts(inputs: &Inputs) -> Vec<String> {
    let options = ReadOptions::default();
    Records::new(inputs, options.clone())
        .filter_map(|record| record.and_then(|r| r.text(inputs, &options)).expect("a document"))
        .map(|text| String::from_utf8(text).expect("the peer takes UTF-8 only"))
        .collect()
}

fn args() -> Option<Args> {
    let mut args = Args { inputs: Vec::new(), vocab: 64_256, repeats: 5, out: None };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        match &*word {
            "--vocab" => args.vocab = words.next()?.parse().ok()?,
            "--repeats" => args.repeats = words.next()?.parse().ok()?,
            "--out" => args.out = Some(words.next()?.into()),
            _ => args.inputs.push(word),
        }
    }
    (!args.inputs.is_empty()).then_some(args)
}

fn seconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let value = work();
    (value, start.elapsed().as_secs_f64())
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn train(texts: &[String], vocab_size: usize) -> Vec<u8> {
    let mut trainer = Trainer::new(TrainOptions { vocab_size, ..TrainOptions::default() }).expect("options");
    let documents = texts.iter().map(|text| Ok::<_, hymo_tokenizer::Error>(text.clone().into_bytes()));
    trainer.feed(documents, &mut |_| ()).expect("documents");
    trainer.finish(&mut |_, _| ()).expect("text").0
}

fn same_ids(ours: &Tokenizer, peer: &tokenizers::Tokenizer, texts: &[String]) {
    let (mut encoder, mut ids) = (ours.encoder(), Vec::new());
    for text in texts {
        ids.clear();
        encoder.encode(text.as_bytes(), &mut ids).expect("a text");
        assert!(peer.encode_fast(text.as_str(), false).expect("a text").get_ids() == ids, "ids differ");
    }
}

fn peer_encodes(peer: &tokenizers::Tokenizer, texts: &[String]) -> usize {
    let batches = texts.chunks(BATCH).map(|batch| {
        let batch: Vec<&str> = batch.iter().map(String::as_str).collect();
        peer.encode_batch_fast(batch, false).expect("texts").iter().map(tokenizers::Encoding::len).sum::<usize>()
    });
    batches.sum()
}

fn we_encode(tokenizer: &Tokenizer, texts: &[String], threads: usize) -> usize {
    let next = AtomicUsize::new(0);
    let one = || {
        let (mut encoder, mut ids, mut sum) = (tokenizer.encoder(), Vec::new(), 0);
        while let Some(text) = texts.get(next.fetch_add(1, Ordering::Relaxed)) {
            ids.clear();
            encoder.encode(text.as_bytes(), &mut ids).expect("a text");
            sum += ids.len();
        }
        sum
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).sum()
    })
}

fn loader(corpus: &Arc<Corpus>) -> Loader {
    let options = LoaderOptions { micro_rows: 8, ..LoaderOptions::new(4096, 2, STEP_ROWS) };
    Loader::new(Arc::clone(corpus), options, None).expect("options")
}

/// Seconds of [`STEPS`] steps.
fn load(corpus: &Arc<Corpus>, prefetch: Option<usize>) -> f64 {
    let mut loader = loader(corpus);
    let mut sum = 0;
    let ((), time) = match prefetch {
        None => seconds(|| {
            for _ in 0..STEPS {
                sum += loader.next_step().expect("a step").map_or(0, |step| step.tokens);
            }
        }),
        Some(depth) => {
            let mut ahead = Prefetch::new(loader, depth).expect("a thread");
            seconds(|| {
                for _ in 0..STEPS {
                    sum += ahead.next_step().expect("a step").map_or(0, |step| step.tokens);
                }
            })
        }
    };
    assert_eq!(sum, TOKENS);
    time
}

/// The share of its time that a trainer waits whose steps take 20 ms.
fn waits(corpus: &Arc<Corpus>) -> f64 {
    let mut ahead = Prefetch::new(loader(corpus), 2).expect("a thread");
    let start = Instant::now();
    let mut waited = 0.;
    for _ in 0..100 {
        waited += seconds(|| ahead.next_step().expect("a step")).1;
        std::thread::sleep(Duration::from_millis(20));
    }
    waited / start.elapsed().as_secs_f64()
}

fn commit() -> String {
    let git = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    git.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned()).unwrap_or_default()
}
