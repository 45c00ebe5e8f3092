//! To a folder.

use super::{CONFIG, Config, TENSORS, load, unreadable, wrong};
use crate::Error;
use crate::load::Model;
use half::bf16;
use hymo_data::shard::write_whole;
use hymo_tensor::Ctx;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// What matrices are stored in. Vectors, gates, convolutions, routers stay in single precision (HAZARD 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Every bit of the weights.
    #[default]
    F32,
    /// Half the size; each number rounded to nearest.
    Bf16,
}

/// Writes `model` into the folder `dir`, reads it again and compares. Gives the bytes of the tensors' file.
///
/// # Errors
/// A folder that holds something else; what the file system says; a file that does not read back as it was written.
pub fn export(model: &Model, dir: &Path, precision: Precision) -> Result<u64, Error> {
    fs::create_dir_all(dir).map_err(|e| Error::io("make the folder", dir, e))?;
    refuse_foreign(dir)?;
    let held = tensors(model, precision)?;
    let views = held.iter().map(|t| {
        let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes);
        view.map(|view| (t.name.as_str(), view)).map_err(|e| wrong(dir, &t.name, e.to_string()))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let about = HashMap::from([("format".to_owned(), "pt".to_owned()), ("model_type".to_owned(), "hymo".to_owned())]);
    let bytes = safetensors::serialize(views, Some(about)).map_err(|e| unreadable(dir, e.to_string()))?;
    // The configuration goes first and comes last: without it the folder is no model, so a kill in between leaves none
    // rather than one half of each.
    let config = dir.join(CONFIG);
    if config.is_file() {
        fs::remove_file(&config).map_err(|e| Error::io("remove", &config, e))?;
    }
    write_whole(&dir.join(TENSORS), &bytes)?;
    let tokenizer = dir.join(hymo_data::prep::TOKENIZER);
    match &model.tokenizer {
        Some((_, json)) => write_whole(&tokenizer, json)?,
        // An earlier export's would be another model's.
        None if tokenizer.is_file() => fs::remove_file(&tokenizer).map_err(|e| Error::io("remove", &tokenizer, e))?,
        None => {}
    }
    let config = Config {
        model_type: "hymo".to_owned(),
        step: model.step,
        torch_dtype: if precision == Precision::Bf16 { "bfloat16" } else { "float32" }.to_owned(),
        eos_token_id: model.tokenizer.as_ref().map(|(tokenizer, _)| tokenizer.end_of_text()),
        model: model.config.clone(),
    };
    let json = serde_json::to_vec_pretty(&config).map_err(|e| unreadable(dir, e.to_string()))?;
    write_whole(&dir.join(CONFIG), &json)?;
    compare(model, dir, precision)?;
    Ok(bytes.len() as u64)
}

/// Fails where something would be lost that is no part of an export: by its name, or by what its `config.json` says.
fn refuse_foreign(dir: &Path) -> Result<(), Error> {
    let ours = [CONFIG, TENSORS, hymo_data::prep::TOKENIZER];
    for entry in fs::read_dir(dir).map_err(|e| Error::io("read", dir, e))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // `.tmp`: what a kill left of a write.
        if !ours.contains(&name.strip_suffix(".tmp").unwrap_or(&name)) {
            let what = format!("holds \"{name}\", which is no part of an export; choose an empty folder");
            return Err(unreadable(dir, what));
        }
    }
    let path = dir.join(CONFIG);
    let Ok(json) = fs::read(&path) else { return Ok(()) };
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap_or_default();
    if json["model_type"] != "hymo" {
        return Err(unreadable(
            &path,
            "belongs to something else (its model_type is not \"hymo\"); choose an empty folder",
        ));
    }
    Ok(())
}

struct Held {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Whether a tensor may lose digits: a matrix of a linear map that is not the router's or a gate's.
fn may_round(name: &str, shape: &[usize]) -> bool {
    let kept = [".moe.router.", ".gdn.a.", ".gdn.b.", ".conv."];
    shape.len() == 2 && !kept.iter().any(|part| name.contains(part))
}

fn tensors(model: &Model, precision: Precision) -> Result<Vec<Held>, Error> {
    let (table, mut out) = (model.params.table(), Vec::new());
    let mut put = |name: &str, shape: &[usize], values: Vec<f32>| {
        let half = precision == Precision::Bf16 && may_round(name, shape);
        let bytes = match half {
            true => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            false => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let dtype = if half { Dtype::BF16 } else { Dtype::F32 };
        out.push(Held { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes });
    };
    for spec in table.params() {
        put(&spec.name, &spec.shape, model.params.get(&spec.name)?.to_vec::<f32>()?);
    }
    for spec in table.buffers() {
        put(&spec.name, &spec.shape, model.params.buffer(&spec.name)?.to_vec::<f32>()?);
    }
    Ok(out)
}

/// Reads the folder and compares every number with what should be there.
fn compare(model: &Model, dir: &Path, precision: Precision) -> Result<(), Error> {
    let read = load(&Ctx::cpu(), dir)?;
    let same = |name: &str, shape: &[usize], ours: Vec<f32>, theirs: Vec<f32>| {
        let half = precision == Precision::Bf16 && may_round(name, shape);
        let kept = |x: f32| if half { bf16::from_f32(x).to_f32() } else { x };
        let equal = ours.iter().zip(&theirs).all(|(a, b)| kept(*a).to_bits() == b.to_bits());
        if equal { Ok(()) } else { Err(wrong(dir, name, "reads back as other numbers than were written")) }
    };
    for spec in model.params.table().params() {
        let (ours, theirs) = (model.params.get(&spec.name)?, read.params.get(&spec.name)?);
        same(&spec.name, &spec.shape, ours.to_vec()?, theirs.to_vec()?)?;
    }
    for spec in model.params.table().buffers() {
        let (ours, theirs) = (model.params.buffer(&spec.name)?, read.params.buffer(&spec.name)?);
        same(&spec.name, &spec.shape, ours.to_vec()?, theirs.to_vec()?)?;
    }
    Ok(())
}
