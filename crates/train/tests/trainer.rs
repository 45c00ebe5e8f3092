//! A run is what its configuration and its data say, however it is cut, stopped and started again.

#[path = "../../data/tests/made/mod.rs"]
mod made;

use hymo_data::corpus::Corpus;
use hymo_model::config::{OnNonFinite, RunConfig};
use hymo_model::presets;
use hymo_tensor::Ctx;
use hymo_train::checkpoint::{Checkpoint, Keep, Numbers, Saver, TensorEntry, newest, write};
use hymo_train::{Error, StepReport, Trainer};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Four layers with experts and two prediction modules, as small as they get.
fn config() -> RunConfig {
    let mut model = presets::hymo_nano();
    (model.d_model, model.n_layers, model.context_length) = (24, 4, 20);
    if let (Some(gdn), Some(mla), Some(moe)) = (&mut model.gdn, &mut model.mla, &mut model.moe) {
        (gdn.n_heads, gdn.d_k, gdn.d_v, gdn.chunk_size) = (2, 8, 8, 16);
        (mla.n_heads, mla.n_kv_groups, mla.d_nope, mla.d_rope, mla.d_v, mla.kv_latent) = (2, 1, 6, 2, 8, 8);
        (moe.n_routed, moe.d_ff) = (4, 16);
    }
    let mut run = RunConfig::new(model);
    (run.train.rows, run.train.micro_rows, run.train.recompute) = (4, 2, 2);
    (run.optim.lr, run.optim.ema, run.schedule.num_steps) = (3e-3, 0.9, 100);
    run.validate().unwrap();
    run
}

/// Documents of all lengths, so that rows hold several and cut some.
fn corpus(dir: &Path) -> Arc<Corpus> {
    let folder = dir.join("data");
    std::fs::create_dir_all(&folder).unwrap();
    let document = |d: u16| (0..1 + d * 7 % 50).map(|t| (d * 131 + t * 17) % 4096).collect();
    let dataset = made::dataset(&folder, &(0..60).map(document).collect::<Vec<Vec<u16>>>(), 25);
    Arc::new(Corpus::of(dataset, Some(5)).unwrap())
}

fn steps(trainer: &mut Trainer, n: usize, dir: &Path) -> Vec<StepReport> {
    (0..n).map(|_| trainer.step(dir).unwrap().unwrap()).collect()
}

/// Every number of a run: parameters, biases, moments, averages, and the state beside them.
fn bits(trainer: &Trainer, dir: &Path) -> (Vec<(String, Vec<u32>)>, String) {
    let mut checkpoint = Checkpoint::open(&write(dir, &trainer.snapshot().unwrap()).unwrap()).unwrap();
    let entries = checkpoint.tensors().clone();
    let of = |(name, entry): (String, TensorEntry)| {
        let ctx = Ctx::cpu();
        let mut to = match entry.dtype {
            Numbers::F32 => ctx.zeros::<f32>(&entry.shape).unwrap(),
            Numbers::I32 => ctx.zeros::<i32>(&entry.shape).unwrap(),
        };
        checkpoint.take_into(&name, &mut to).unwrap();
        (name, hymo_ops::check::values(&to).unwrap().iter().map(|x| (*x as f32).to_bits()).collect())
    };
    let tensors = entries.into_iter().map(of).collect();
    (tensors, checkpoint.state().to_string())
}

fn what_counts(reports: &[StepReport]) -> Vec<StepReport> {
    reports.iter().map(|r| StepReport { time: 0., seconds: 0., data_seconds: 0., ..r.clone() }).collect()
}

/// HAZARD 11: twenty steps are ten, a checkpoint, and ten, to the bit.
#[test]
fn resumed_equals_uninterrupted() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, config, corpus) = (Ctx::cpu(), config(), corpus(dir.path()));
    let mut whole = Trainer::new(&ctx, &config, Arc::clone(&corpus)).unwrap();
    let all = steps(&mut whole, 20, dir.path());
    let mut first = Trainer::new(&ctx, &config, Arc::clone(&corpus)).unwrap();
    steps(&mut first, 10, dir.path());
    let path = write(&dir.path().join("checkpoints"), &first.snapshot().unwrap()).unwrap();
    drop(first);
    let saved = Checkpoint::open(&path).unwrap();
    let mut second = Trainer::resume(&ctx, &config, Arc::clone(&corpus), saved).unwrap();
    assert_eq!((second.state().step, second.optimizer().steps()), (10, 10));
    let rest = steps(&mut second, 10, dir.path());
    assert_eq!(what_counts(&rest), what_counts(&all[10..]));
    assert_eq!(bits(&whole, &dir.path().join("a")), bits(&second, &dir.path().join("b")));
    assert!(all.iter().all(|r| r.stepped && r.total.is_finite() && r.losses.len() == 3));
    assert!(
        whole.params().buffer("layers.3.moe.router.bias").unwrap().to_vec::<f32>().unwrap().iter().any(|b| *b != 0.)
    );
}

/// What a killed process is: it starts or resumes, and saves after every step while the next one runs.
fn a_run_to_be_killed(dir: &Path) {
    let (ctx, config, corpus) = (Ctx::cpu(), config(), corpus_of(dir));
    let mut trainer = match newest(&dir.join("checkpoints")).unwrap().checkpoint {
        Some(checkpoint) => Trainer::resume(&ctx, &config, corpus, checkpoint).unwrap(),
        None => Trainer::new(&ctx, &config, corpus).unwrap(),
    };
    let mut saver = Saver::new(dir.join("checkpoints"), Keep { last: 2, every: 0, best: false });
    while trainer.state().step < 40 {
        trainer.step(dir).unwrap().unwrap();
        saver.save(trainer.snapshot().unwrap(), None).unwrap();
    }
    saver.wait().unwrap();
}

fn corpus_of(dir: &Path) -> Arc<Corpus> {
    let dataset = hymo_data::corpus::Dataset::open(&dir.join("data"), "train").unwrap();
    Arc::new(Corpus::of(dataset, Some(5)).unwrap())
}

/// HAZARD 14: SIGKILL at any moment, also while a checkpoint is being written, and the run ends as if nothing had happened.
#[test]
fn killed_at_any_moment() {
    // The process to be killed is this test again.
    if let Some(dir) = std::env::var_os("HYMO_TEST_RUN") {
        return a_run_to_be_killed(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let corpus = corpus(dir.path());
    let mut whole = Trainer::new(&Ctx::cpu(), &config(), corpus).unwrap();
    steps(&mut whole, 40, dir.path());
    let run = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed_at_any_moment"])
            .env("HYMO_TEST_RUN", dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let checkpoints = dir.path().join("checkpoints");
    let mut kills = 0;
    for delay in [0, 3, 11, 24, 37, 55, 70, 90, 110, 150] {
        let mut child = run();
        // From the first step on, wherever the time falls.
        let before = newest_step(&checkpoints);
        for _ in 0..600 {
            if newest_step(&checkpoints) > before || child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(delay));
        kills += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(kills >= 3, "only {kills} of the processes were still running when they were to be killed");
    assert!(run().wait().unwrap().success());
    let found = newest(&checkpoints).unwrap();
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    let end = Trainer::resume(&Ctx::cpu(), &config(), corpus_of(dir.path()), found.checkpoint.unwrap()).unwrap();
    assert_eq!(bits(&whole, &dir.path().join("a")), bits(&end, &dir.path().join("b")));
}

fn newest_step(dir: &Path) -> u64 {
    let steps = std::fs::read_dir(dir).into_iter().flatten().flatten();
    steps.filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).max().unwrap_or(0)
}

/// How rows are put into micro-batches, and what is run again in the backward pass, changes rounding at most.
#[test]
fn micro_batches_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, corpus) = (Ctx::cpu(), corpus(dir.path()));
    let run = |micro_rows, recompute| {
        let mut config = config();
        (config.train.micro_rows, config.train.recompute) = (micro_rows, recompute);
        let mut trainer = Trainer::new(&ctx, &config, Arc::clone(&corpus)).unwrap();
        steps(&mut trainer, 3, dir.path())
    };
    let (one, two, four, again) = (run(1, 0), run(2, 0), run(4, 0), run(4, 1));
    assert_eq!(what_counts(&four), what_counts(&again), "running layers again changes no bit");
    for other in [&two, &four] {
        for (a, b) in one.iter().zip(other.iter()) {
            assert_eq!((a.tokens, a.step, &a.max_violation), (b.tokens, b.step, &b.max_violation));
            assert!(
                (a.total / b.total - 1.).abs() < 1e-5 && (a.grad_norm / b.grad_norm - 1.).abs() < 1e-4,
                "{a:?} {b:?}"
            );
        }
    }
}

/// HAZARD 13: a step that is not finite moves nothing, leaves its batch behind, and stops or is passed over.
#[test]
fn a_step_that_is_not_finite_obeys_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, corpus) = (Ctx::cpu(), corpus(dir.path()));
    let poisoned = |policy| {
        let mut config = config();
        config.train.on_non_finite = policy;
        let mut params = hymo_model::Params::init(&ctx, &config.model, 1).unwrap();
        params.flats_mut()[1].flat_mut::<f32>().unwrap()[3] = f32::NAN;
        Trainer::with_params(&ctx, &config, Arc::clone(&corpus), params).unwrap()
    };
    let error = poisoned(OnNonFinite::Stop).step(dir.path()).unwrap_err();
    let Error::Refused { step: 1, dump, why } = &error else { panic!("{error}") };
    assert!(why.contains("not finite (first in ") && error.to_string().contains("on_non_finite"), "{error}");
    let batch: serde_json::Value = serde_json::from_slice(&std::fs::read(dump).unwrap()).unwrap();
    assert_eq!(batch["micro"][0]["tokens"].as_array().unwrap().len(), 2 * 23);

    let mut trainer = poisoned(OnNonFinite::Skip);
    let before = trainer.params().flats()[2].to_vec::<f32>().unwrap();
    let report = trainer.step(dir.path()).unwrap().unwrap();
    assert!(!report.stepped && !report.grad_norm.is_finite());
    assert_eq!((trainer.state().step, trainer.state().skipped, trainer.optimizer().steps()), (1, 1, 0));
    assert_eq!(trainer.params().flats()[2].to_vec::<f32>().unwrap(), before);
    // It never gets better: the run does not spin for ever.
    let error = (0..20).find_map(|_| trainer.step(dir.path()).err()).unwrap().to_string();
    assert!(error.contains("16 steps in a row were refused"), "{error}");
}

/// A gradient far above the median of those before is refused like one that is not finite, and the way back is to the
/// checkpoint, with the data behind.
#[test]
fn a_spike_is_refused_and_rolled_back() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, mut config, corpus) = (Ctx::cpu(), config(), corpus(dir.path()));
    (config.train.spike, config.train.on_non_finite) = (1.0001, OnNonFinite::RollBack);
    let mut trainer = Trainer::new(&ctx, &config, Arc::clone(&corpus)).unwrap();
    let before = steps(&mut trainer, 16, dir.path());
    assert!(before.iter().all(|r| r.stepped), "a median needs steps");
    let path = write(&dir.path().join("checkpoints"), &trainer.snapshot().unwrap()).unwrap();
    let saved = trainer.params().flats()[1].to_vec::<f32>().unwrap();
    let refused = (0..60).map(|_| trainer.step(dir.path()).unwrap().unwrap()).find(|r| !r.stepped).unwrap();
    let why = refused.refused.unwrap();
    assert!(why.contains("times the median") && why.contains("refused-step-"), "{why}");
    let tokens = trainer.state().tokens;
    trainer.roll_back(Checkpoint::open(&path).unwrap()).unwrap();
    assert_eq!(trainer.params().flats()[1].to_vec::<f32>().unwrap(), saved);
    let state = trainer.state();
    assert_eq!((state.step, state.skipped, state.rolled_back, state.in_a_row), (16, 1, (16, 1), 0));
    assert!(state.tokens <= tokens);
    // What led to the spike is not read again.
    let next = trainer.step(dir.path()).unwrap().unwrap();
    let mut straight = Trainer::resume(&ctx, &config, corpus, Checkpoint::open(&path).unwrap()).unwrap();
    assert_ne!(straight.step(dir.path()).unwrap().unwrap().losses, next.losses);
    for times in 2..16 {
        trainer.roll_back(Checkpoint::open(&path).unwrap()).unwrap();
        assert_eq!(trainer.state().rolled_back, (16, times));
    }
    let error = trainer.roll_back(Checkpoint::open(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("went back to step 16 16 times"), "{error}");
}

/// After a step that saw a logit above the limit, the head's next logits are at the limit or near it.
#[test]
fn queries_are_clipped() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, mut config, corpus) = (Ctx::cpu(), config(), corpus(dir.path()));
    (config.optim.lr, config.train.qk_clip) = (1e-9, 1e-3);
    let mut trainer = Trainer::new(&ctx, &config, corpus).unwrap();
    let name = "layers.3.mla.q.weight";
    let before = trainer.params().get(name).unwrap().to_vec::<f32>().unwrap();
    let report = steps(&mut trainer, 1, dir.path()).remove(0);
    let after = trainer.params().get(name).unwrap().to_vec::<f32>().unwrap();
    // Both heads are scaled, each by a factor of its own, the larger logit's down to the limit.
    let head = before.len() / 2;
    let factors = [0, 1].map(|h| f64::from(after[h * head] / before[h * head]));
    let expected = 1e-3 / report.max_logits[0];
    assert!(factors.iter().all(|f| *f < 1.), "{factors:?}");
    let least = factors[0].min(factors[1]);
    assert!((least / expected - 1.).abs() < 1e-3, "{factors:?} {expected}");
    assert!(
        before
            .iter()
            .zip(&after)
            .enumerate()
            .all(|(i, (b, a))| { (f64::from(a / b) / factors[i / head] - 1.).abs() < 1e-3 })
    );
}

/// One row again and again is learned by heart.
#[test]
fn overfits_one_batch() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config();
    config.model.context_length = 32;
    (config.train.rows, config.train.micro_rows) = (1, 1);
    (config.optim.lr, config.optim.weight_decay, config.optim.ema) = (1e-2, 0., 0.);
    config.schedule.num_steps = 400;
    let document: Vec<u16> = (0..32).map(|t| (t * t * 31 + 7) % 4096).collect();
    let corpus = Arc::new(Corpus::of(made::dataset(dir.path(), &[document], 1), None).unwrap());
    let mut trainer = Trainer::new(&Ctx::cpu(), &config, corpus).unwrap();
    let mut last = f64::INFINITY;
    while !trainer.done() && last > 0.01 {
        last = trainer.step(dir.path()).unwrap().unwrap().losses[0];
    }
    assert!(last < 0.01, "{last} after {} steps", trainer.state().step);
}

#[test]
fn another_model_or_other_data_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (ctx, config, corpus) = (Ctx::cpu(), config(), corpus(dir.path()));
    let mut trainer = Trainer::new(&ctx, &config, Arc::clone(&corpus)).unwrap();
    steps(&mut trainer, 1, dir.path());
    let path = write(&dir.path().join("checkpoints"), &trainer.snapshot().unwrap()).unwrap();
    let resume = |config: &RunConfig, corpus: &Arc<Corpus>| {
        let saved = Checkpoint::open(&path).unwrap();
        Trainer::resume(&ctx, config, Arc::clone(corpus), saved).map(|_| ()).unwrap_err().to_string()
    };
    let mut wider = config.clone();
    wider.model.d_model = 32;
    assert!(resume(&wider, &corpus).contains("shape"));
    let mut no_average = config.clone();
    no_average.optim.ema = 0.;
    let said = resume(&no_average, &corpus);
    assert!(said.contains("that this model does not have") && said.contains("ema."), "{said}");
    let other =
        Corpus::of(hymo_data::corpus::Dataset::open(&dir.path().join("data"), "train").unwrap(), Some(6)).unwrap();
    assert!(resume(&config, &Arc::new(other)).contains("stream"));
    let mut small = config.clone();
    small.model.vocab_size = 100;
    let said = Trainer::new(&ctx, &small, corpus).unwrap_err().to_string();
    assert_eq!(said, "model.vocab_size: found 100, expected at least 4096, the vocabulary of the data's tokenizer");
}
