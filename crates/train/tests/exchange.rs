//! A model goes out and comes back with every tensor, or not at all.

use hymo_model::{ModelConfig, Params, presets};
use hymo_tensor::Ctx;
use hymo_tokenizer::Tokenizer;
use hymo_tokenizer::train::{TrainOptions, Trainer as Learner};
use hymo_train::Model;
use hymo_train::exchange::{Precision, Source, export, import, load};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::fs;
use std::path::{Path, PathBuf};

fn config() -> ModelConfig {
    let mut model = presets::hymo_nano();
    (model.d_model, model.n_layers, model.context_length, model.vocab_size) = (24, 4, 20, 560);
    if let (Some(gdn), Some(mla), Some(moe)) = (&mut model.gdn, &mut model.mla, &mut model.moe) {
        (gdn.n_heads, gdn.d_k, gdn.d_v, gdn.chunk_size) = (2, 8, 8, 16);
        (mla.n_heads, mla.n_kv_groups, mla.d_nope, mla.d_rope, mla.d_v, mla.kv_latent) = (2, 1, 6, 2, 8, 8);
        (moe.n_routed, moe.d_ff) = (4, 16);
    }
    model
}

fn model() -> Model {
    let mut learner = Learner::new(TrainOptions { vocab_size: 560, ..TrainOptions::default() }).unwrap();
    learner.feed([Ok::<_, hymo_data::Error>(b"a cat and a hat and a bat".to_vec())], &mut |_| ()).unwrap();
    let (json, _) = learner.finish(&mut |_, _| ()).unwrap();
    let (ctx, config) = (Ctx::cpu(), config());
    let mut params = Params::init(&ctx, &config, 3).unwrap();
    let bias = params.buffer_mut("layers.3.moe.router.bias").unwrap();
    bias.flat_mut::<f32>().unwrap().copy_from_slice(&[0.25, -0.5, 1e-3, 7.]);
    let tokenizer = Some((Tokenizer::from_json(&json).unwrap(), json));
    Model { config, params, tokenizer, step: 12, path: PathBuf::new(), passed_over: Vec::new() }
}

fn numbers(model: &Model) -> Vec<Vec<u32>> {
    let table = model.params.table();
    let params = table.params().iter().map(|s| model.params.get(&s.name).unwrap().to_vec::<f32>().unwrap());
    let buffers = table.buffers().iter().map(|s| model.params.buffer(&s.name).unwrap().to_vec::<f32>().unwrap());
    params.chain(buffers).map(|v| v.into_iter().map(f32::to_bits).collect()).collect()
}

fn rewrite(path: &Path, edit: impl Fn(&str, TensorView<'_>) -> Option<(String, Vec<usize>)>) {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept: Vec<_> = file
        .iter()
        .filter_map(|(name, view)| {
            let (dtype, data) = (view.dtype(), view.data().to_vec());
            edit(name, view).map(|(name, shape)| (name, dtype, shape, data))
        })
        .collect();
    let views =
        kept.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// HAZARD 27: prediction modules and router biases too.
#[test]
fn out_and_back_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let (model, ctx) = (model(), Ctx::cpu());
    let out = dir.path().join("out");
    export(&model, &out, Precision::F32).unwrap();
    export(&model, &out, Precision::F32).unwrap();
    let names: Vec<String> =
        fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    for read in [load(&ctx, &out).unwrap(), Model::load(&ctx, &out).unwrap()] {
        assert_eq!((numbers(&read), &read.config, read.step), (numbers(&model), &model.config, 12));
        assert_eq!(read.tokenizer.as_ref().unwrap().1, model.tokenizer.as_ref().unwrap().1);
    }
    // To a checkpoint, and from there again.
    let run = dir.path().join("run");
    let source = Source { dir: &out, config: None, tokenizer: None };
    let imported = import(&ctx, &source, &run).unwrap();
    assert!(imported.path.ends_with("checkpoints/step-12"), "{}", imported.path.display());
    let read = Model::load(&ctx, &run).unwrap();
    assert_eq!((numbers(&read), read.tokenizer.is_some()), (numbers(&model), true));
    let again = import(&ctx, &source, &run).unwrap_err().to_string();
    assert!(again.contains("has checkpoints of an earlier run, the newest of step 12"), "{again}");
}

#[test]
fn half_precision_spares_what_must_not_round() {
    let dir = tempfile::tempdir().unwrap();
    let model = model();
    let full = export(&model, &dir.path().join("f32"), Precision::F32).unwrap();
    let half = export(&model, &dir.path().join("bf16"), Precision::Bf16).unwrap();
    assert!(half < full * 7 / 10, "{half} of {full}");
    let bytes = fs::read(dir.path().join("bf16/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let dtype = |name: &str| format!("{:?}", file.tensor(name).unwrap().dtype());
    for name in ["layers.0.gdn.A_log", "layers.0.gdn.dt_bias", "layers.3.moe.router.weight", "layers.3.moe.router.bias"]
    {
        assert_eq!(dtype(name), "F32", "{name}");
    }
    assert_eq!((dtype("layers.0.gdn.q.weight"), dtype("embed.weight")), ("BF16".into(), "BF16".into()));
}

#[test]
fn a_load_is_all_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (model, ctx) = (model(), Ctx::cpu());
    let out = dir.path().join("out");
    let error = |edit: &dyn Fn(&Path)| {
        export(&model, &out, Precision::F32).unwrap();
        edit(&out);
        load(&ctx, &out).unwrap_err().to_string()
    };
    let tensors = |out: &Path| out.join("model.safetensors");
    let missing = error(&|out| {
        rewrite(&tensors(out), |name, view| {
            (name != "mtp.1.gdn.A_log").then(|| (name.to_owned(), view.shape().to_vec()))
        })
    });
    assert!(missing.contains("\"mtp.1.gdn.A_log\": is missing"), "{missing}");
    let extra = error(&|out| {
        rewrite(&tensors(out), |name, view| Some((name.replace("mtp.1.enorm", "mtp.2.enorm"), view.shape().to_vec())))
    });
    assert!(extra.contains("\"mtp.1.enorm.weight\": is missing"), "{extra}");
    let shape = error(&|out| {
        rewrite(&tensors(out), |name, view| {
            let turned = if name == "mtp.0.proj.weight" { vec![48, 24] } else { view.shape().to_vec() };
            Some((name.to_owned(), turned))
        })
    });
    assert!(shape.contains("mtp.0.proj.weight") && shape.contains("[48, 24], expected [24, 48]"), "{shape}");
    let cut = error(&|out| {
        let bytes = fs::read(tensors(out)).unwrap();
        fs::write(tensors(out), &bytes[..bytes.len() - 5]).unwrap();
    });
    assert!(cut.contains("model.safetensors"), "{cut}");
    let fewer = error(&|out| {
        let text = fs::read_to_string(out.join("config.json")).unwrap();
        let text = text.replace("\"n_modules\": 2", "\"n_modules\": 1");
        fs::write(out.join("config.json"), text.replace("0.3,\n        0.1", "0.3")).unwrap();
    });
    assert!(fewer.contains("tensors that this model does not have, the first \"mtp.1"), "{fewer}");
    let other = error(&|out| fs::write(out.join("config.json"), "{\"model_type\": \"llama\"}").unwrap());
    assert!(other.contains("config.json"), "{other}");
    let kept = export(&model, &out, Precision::F32).unwrap_err().to_string();
    assert!(kept.contains("config.json: belongs to something else"), "{kept}");
    fs::remove_file(out.join("config.json")).unwrap();
    // A kill in the middle of a write: neither a model, nor in the way of the next export.
    fs::write(out.join("model.safetensors.tmp"), "half").unwrap();
    assert!(load(&ctx, &out).is_err());
    export(&model, &out, Precision::F32).unwrap();
    assert!(load(&ctx, &out).is_ok() && !out.join("model.safetensors.tmp").exists());
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let foreign = export(&model, &out, Precision::F32).unwrap_err().to_string();
    assert!(foreign.contains("holds \"notes.txt\", which is no part of an export"), "{foreign}");
    let nothing = Model::load(&ctx, dir.path()).unwrap_err().to_string();
    assert!(nothing.contains("no model: neither a run's folder"), "{nothing}");
}

/// One array a file, by name.
#[test]
fn plain_arrays_are_imported_by_name() {
    use npyz::WriterBuilder;
    let dir = tempfile::tempdir().unwrap();
    let (model, ctx) = (model(), Ctx::cpu());
    let plain = dir.path().join("plain");
    fs::create_dir(&plain).unwrap();
    let write = |name: &str, shape: &[usize], values: Vec<f32>| {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let file = fs::File::create(plain.join(format!("{name}.npy"))).unwrap();
        let mut writer = npyz::WriteOptions::new().default_dtype().shape(&shape).writer(file).begin_nd().unwrap();
        writer.extend(values).unwrap();
        writer.finish().unwrap();
    };
    for spec in model.params.table().params() {
        write(&spec.name, &spec.shape, model.params.get(&spec.name).unwrap().to_vec().unwrap());
    }
    let bias = "layers.3.moe.router.bias";
    let source = Source { dir: &plain, config: Some(model.config.clone()), tokenizer: None };
    let error = import(&ctx, &source, &dir.path().join("a")).unwrap_err().to_string();
    assert!(error.contains(&format!("\"{bias}\": is missing")), "{error}");
    write(bias, &[4], model.params.buffer(bias).unwrap().to_vec().unwrap());
    let imported = import(&ctx, &source, &dir.path().join("a")).unwrap();
    assert_eq!(numbers(&imported), numbers(&model));
    fs::write(plain.join("norm.weight.npy"), b"\x93NUMPY\x01\x00not an array").unwrap();
    let error = import(&ctx, &source, &dir.path().join("b")).unwrap_err().to_string();
    assert!(error.contains("norm.weight.npy"), "{error}");
}
