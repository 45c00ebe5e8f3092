//! What a run's configuration names, opened.

use crate::Error;
use hymo_data::corpus::{Corpus, Dataset, Weighted};
use hymo_data::manifest::{MANIFEST, Manifest};
use hymo_data::prep::TOKENIZER;
use hymo_model::config::DataConfig;
use hymo_tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// What `[data]` says to train on.
///
/// # Errors
/// No folders; folders that cannot be read, or of different tokenizers.
pub fn corpus(data: &DataConfig) -> Result<Arc<Corpus>, Error> {
    if data.shards.is_empty() {
        let expected = "one or more folders that `hymo data prep` wrote".to_owned();
        return Err(Error::Config { field: "data.shards", found: "[]".to_owned(), expected });
    }
    let open = |(i, folder): (usize, &String)| -> Result<Weighted, Error> {
        let path = Path::new(folder);
        if !path.join(MANIFEST).is_file() {
            let there = if path.is_dir() { "no folder of shards" } else { "not there" };
            let expected = "folders that `hymo data prep` wrote".to_owned();
            return Err(Error::Config { field: "data.shards", found: format!("\"{folder}\", {there}"), expected });
        }
        let dataset = Dataset::open(path, "train")?;
        let weight = data.weights.get(i).copied().unwrap_or(dataset.tokens() as f64);
        Ok(Weighted { dataset, weight })
    };
    let sets = data.shards.iter().enumerate().map(open).collect::<Result<_, _>>()?;
    Ok(Arc::new(Corpus::new(sets, data.shuffle.then_some(data.seed))?))
}

/// The split `val` of every folder that has one, each in its own order.
///
/// # Errors
/// Folders that cannot be read.
pub fn held_out(data: &DataConfig) -> Result<Vec<Arc<Corpus>>, Error> {
    let mut found = Vec::new();
    for folder in data.shards.iter().map(Path::new) {
        if Manifest::read(folder)?.split("val").is_some_and(|split| split.tokens > 0) {
            found.push(Arc::new(Corpus::of(Dataset::open(folder, "val")?, None)?));
        }
    }
    Ok(found)
}

/// The tokenizer of a corpus and its file, which stands beside the shards.
///
/// # Errors
/// It is not there, is no tokenizer, or another one.
pub fn tokenizer(corpus: &Corpus) -> Result<(Tokenizer, Vec<u8>), Error> {
    let dataset = &corpus.sets()[0].dataset;
    let path = dataset.folder().join(TOKENIZER);
    let json = std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
    let tokenizer = Tokenizer::from_json(&json).map_err(|source| Error::Tokenizer { path, source })?;
    dataset.check_tokenizer(&tokenizer)?;
    Ok((tokenizer, json))
}
