//! From a folder: an export of ours, or plain tensors by name.

use super::{CONFIG, Config, TENSORS, unreadable, wrong};
use crate::Error;
use crate::checkpoint::{self, Snapshot};
use crate::load::{Model, fits, read_tokenizer};
use half::{bf16, f16};
use hymo_model::{ModelConfig, Params, RunConfig};
use hymo_tensor::Ctx;
use npyz::NpyFile;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A tensor as it was found: f32 values, whatever they were stored in.
#[derive(Debug)]
struct Found {
    file: PathBuf,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// What to import.
#[derive(Debug, Clone)]
pub struct Source<'a> {
    /// A folder with safetensors files, .npy files (the name is the tensor's), or both.
    pub dir: &'a Path,
    /// The model, where the folder has no `config.json`.
    pub config: Option<ModelConfig>,
    /// The tokenizer's file, where the folder has no `tokenizer.json`.
    pub tokenizer: Option<&'a Path>,
}

/// Loads an exported folder.
///
/// # Errors
/// A file that is missing or damaged; a tensor that is missing, of another shape or dtype, or one too many.
pub fn load(ctx: &Ctx, dir: &Path) -> Result<Model, Error> {
    let found = safetensors_of(&dir.join(TENSORS))?;
    assemble(ctx, &Source { dir, config: None, tokenizer: None }, found)
}

/// Reads a folder of tensors and writes them as a checkpoint that training and everything else begins from:
/// `out/checkpoints/step-N`, of weights alone, and `out/tokenizer.json`. Gives the model.
///
/// # Errors
/// As [`load`]; a folder with checkpoints in it.
pub fn import(ctx: &Ctx, source: &Source<'_>, out: &Path) -> Result<Model, Error> {
    let checkpoints = out.join("checkpoints");
    crate::run::refuse_checkpoints(out, &checkpoints)?;
    let mut found = BTreeMap::new();
    let entries = fs::read_dir(source.dir).map_err(|e| Error::io("read", source.dir, e))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    for path in files {
        let more = match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => safetensors_of(&path)?,
            Some("npy") => BTreeMap::from([npy_of(&path)?]),
            _ => continue,
        };
        for (name, tensor) in more {
            if let Some(first) = found.insert(name.clone(), tensor) {
                return Err(wrong(&path, &name, format!("is in {} too", first.file.display())));
            }
        }
    }
    if found.is_empty() {
        return Err(unreadable(source.dir, "no .safetensors and no .npy file in it"));
    }
    let model = assemble(ctx, source, found)?;
    let config = serde_json::to_value(RunConfig::new(model.config.clone())).unwrap_or_default();
    let mut snapshot = Snapshot::new(model.step, config, serde_json::Value::Null);
    for spec in model.params.table().params() {
        snapshot.add(format!("model.{}", spec.name), &model.params.get(&spec.name)?)?;
    }
    for spec in model.params.table().buffers() {
        snapshot.add(format!("model.{}", spec.name), model.params.buffer(&spec.name)?)?;
    }
    fs::create_dir_all(&checkpoints).map_err(|e| Error::io("make the folder", &checkpoints, e))?;
    if let Some((_, json)) = &model.tokenizer {
        hymo_data::shard::write_whole(&out.join(hymo_data::prep::TOKENIZER), json)?;
    }
    let path = checkpoint::write(&checkpoints, &snapshot)?;
    Ok(Model { path, ..model })
}

/// Makes a model of tensors: all of its own, and no others.
fn assemble(ctx: &Ctx, source: &Source<'_>, mut found: BTreeMap<String, Found>) -> Result<Model, Error> {
    let (config, step) = config(source)?;
    let mut failed = None;
    let mut params = Params::from_fn(ctx, &config, |spec| {
        Ok(take(&mut found, source.dir, &spec.name, &spec.shape).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            vec![0.; spec.numel()]
        }))
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    for spec in params.table().buffers().to_vec() {
        let values = take(&mut found, source.dir, &spec.name, &spec.shape)?;
        params.buffer_mut(&spec.name)?.flat_mut::<f32>()?.copy_from_slice(&values);
    }
    if !found.is_empty() {
        let (path, names) = (source.dir.to_owned(), found.into_keys().collect());
        return Err(checkpoint::Error::Unexpected { path, names }.into());
    }
    let beside = source.dir.join(hymo_data::prep::TOKENIZER);
    let file = source.tokenizer.map(Path::to_owned).or_else(|| beside.is_file().then_some(beside));
    let tokenizer = file.map(|file| read_tokenizer(&file)).transpose()?;
    fits(tokenizer.as_ref().map(|(tokenizer, _)| tokenizer), &config)?;
    Ok(Model { config, params, tokenizer, step, path: source.dir.to_owned(), passed_over: Vec::new() })
}

fn config(source: &Source<'_>) -> Result<(ModelConfig, u64), Error> {
    if let Some(config) = &source.config {
        config.validate().map_err(hymo_model::Error::from)?;
        return Ok((config.clone(), 0));
    }
    let path = source.dir.join(CONFIG);
    let json = fs::read(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Config {
            field: "config",
            found: format!("no {CONFIG} in {}", source.dir.display()),
            expected: "one there, or the model's configuration (hymo import --config)".to_owned(),
        },
        _ => Error::io("read", &path, e),
    })?;
    let config: Config = serde_json::from_slice(&json).map_err(|e| unreadable(&path, e.to_string()))?;
    if config.model_type != "hymo" {
        return Err(unreadable(&path, format!("model_type is \"{}\", expected \"hymo\"", config.model_type)));
    }
    config.model.validate().map_err(|e| unreadable(&path, e.to_string()))?;
    Ok((config.model, config.step))
}

fn take(found: &mut BTreeMap<String, Found>, dir: &Path, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
    let Some(tensor) = found.remove(name) else { return Err(wrong(dir, name, "is missing")) };
    if tensor.shape != shape {
        return Err(wrong(&tensor.file, name, format!("shape {:?}, expected {shape:?}", tensor.shape)));
    }
    Ok(tensor.values)
}

fn safetensors_of(path: &Path) -> Result<BTreeMap<String, Found>, Error> {
    let bytes = fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| unreadable(path, e.to_string()))?;
    let mut out = BTreeMap::new();
    for (name, view) in file.iter() {
        let values = widen(view.data(), view.dtype())
            .ok_or_else(|| wrong(path, name, format!("{:?}, expected F64, F32, F16 or BF16", view.dtype())))?;
        out.insert(name.to_owned(), Found { file: path.to_owned(), shape: view.shape().to_vec(), values });
    }
    Ok(out)
}

fn widen(data: &[u8], dtype: Dtype) -> Option<Vec<f32>> {
    // The chunks have the length of the array.
    let pair = |c: &[u8]| [c[0], c[1]];
    Some(match dtype {
        Dtype::F32 => data.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
        Dtype::F64 => data.chunks_exact(8).map(|c| bytemuck::pod_read_unaligned::<f64>(c) as f32).collect(),
        Dtype::BF16 => data.chunks_exact(2).map(|c| bf16::from_le_bytes(pair(c)).to_f32()).collect(),
        Dtype::F16 => data.chunks_exact(2).map(|c| f16::from_le_bytes(pair(c)).to_f32()).collect(),
        _ => return None,
    })
}

/// `layers.0.gdn.q.weight.npy`: one array, in single or double precision.
fn npy_of(path: &Path) -> Result<(String, Found), Error> {
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let bytes = fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let bad = |e: std::io::Error| unreadable(path, e.to_string());
    let open = || NpyFile::new(&bytes[..]).map_err(bad);
    let file = open()?;
    let shape: Vec<usize> = file.shape().iter().map(|&n| n as usize).collect();
    if file.order() != npyz::Order::C && shape.len() > 1 {
        return Err(wrong(path, &name, "in column order, expected rows (numpy.ascontiguousarray)"));
    }
    // A header may claim more than the file holds.
    let most = bytes.len() / 4;
    if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_none_or(|n| n > most) {
        return Err(wrong(path, &name, format!("shape {shape:?} is more than the file holds")));
    }
    let values = match file.try_data::<f32>() {
        Ok(data) => data.collect::<Result<Vec<f32>, _>>().map_err(bad)?,
        Err(file) => {
            let dtype = file.dtype().descr();
            let data = file.try_data::<f64>();
            let data = data.map_err(|_| wrong(path, &name, format!("{dtype}, expected float32 or float64")))?;
            data.map(|x| x.map(|x| x as f32)).collect::<Result<Vec<f32>, _>>().map_err(bad)?
        }
    };
    Ok((name, Found { file: path.to_owned(), shape, values }))
}
