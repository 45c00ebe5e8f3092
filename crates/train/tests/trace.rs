//! A whole training run against an independent PyTorch one: `fixtures/make_trace.py` has its own model, optimizers, schedule,
//! bias rule and data order, token by token and in float64.

#[path = "../../data/tests/made/mod.rs"]
mod made;
#[path = "../../model/tests/small/mod.rs"]
mod small;

use hymo_data::corpus::Corpus;
use hymo_model::RunConfig;
use hymo_tensor::Ctx;
use hymo_train::Trainer;
use small::Reference;
use std::sync::Arc;

/// 20 steps, the loss at every depth and the balance loss: each to 1e-4 of PyTorch's (the fixture's own passes in float32
/// differ from those in float64 by 3e-6). Two micro-batches a step here, one there.
#[test]
fn twenty_steps_equal_pytorchs() {
    let reference = Reference::load("trace");
    let about = |name: &str| reference.about[name].as_f64().unwrap();
    let ctx = Ctx::cpu().poisoned();
    let mut config = RunConfig::new(reference.config());
    (config.train.rows, config.train.micro_rows) = (about("rows") as usize, 2);
    (config.optim.lr, config.optim.weight_decay, config.optim.clip_norm) =
        (about("lr"), about("weight_decay"), about("clip"));
    (config.schedule.num_steps, config.schedule.warmup, config.schedule.decay) = (20, about("warmup"), about("decay"));
    if let Some(moe) = &mut config.model.moe {
        moe.bias_update_rate = about("bias_rate");
    }

    let mut tokens = reference.values("tokens").iter().map(|&t| t as u16);
    let lengths = reference.values("lengths").iter().map(|&n| n as usize);
    let documents: Vec<Vec<u16>> = lengths.map(|n| tokens.by_ref().take(n).collect()).collect();
    let dir = tempfile::tempdir().unwrap();
    let dataset = made::dataset_of(config.model.vocab_size as u32, dir.path(), &documents, documents.len());
    let corpus = Arc::new(Corpus::of(dataset, None).unwrap());
    let params = reference.params(&ctx, &config.model);
    let mut trainer = Trainer::with_params(&ctx, &config, corpus, params).unwrap();

    let (want, norms) = (reference.values("losses"), reference.values("norms"));
    for (step, (want, norm)) in want.chunks(4).zip(norms).enumerate() {
        let report = trainer.step(dir.path()).unwrap().unwrap();
        let got: Vec<f64> = report.losses.iter().copied().chain([report.balance]).collect();
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-4 * want.abs(), "step {}: {got:?}, PyTorch {want:?}", step + 1);
        }
        assert!((report.grad_norm - norm).abs() <= 1e-3 * norm, "step {}: norm {}, {norm}", step + 1, report.grad_norm);
    }
    assert_eq!(trainer.state().step, 20);
    let bias = trainer.averaged().unwrap().buffer("layers.3.moe.router.bias").unwrap().to_vec::<f32>().unwrap();
    for (got, want) in bias.iter().zip(reference.values("last.layers.3.moe.router.bias")) {
        assert!((f64::from(*got) - want).abs() < 1e-6, "{bias:?}");
    }
}
