//! Data folders made for tests.
#![allow(dead_code)] // each test binary uses its part

use std::path::Path;

use hymo_data::corpus::Dataset;
use hymo_data::manifest::{Dropped, MANIFEST, Manifest, Shaping, ShardEntry, Split, TokenizerId, hex};
use hymo_data::shard::ShardWriter;

/// Writes documents as the split `train`, so many a shard, and opens it.
pub fn dataset(folder: &Path, documents: &[Vec<u16>], a_shard: usize) -> Dataset {
    dataset_of(4096, folder, documents, a_shard)
}

/// As [`dataset`], of a vocabulary of any size.
pub fn dataset_of(vocab_size: u32, folder: &Path, documents: &[Vec<u16>], a_shard: usize) -> Dataset {
    let mut shards = Vec::new();
    for (index, part) in documents.chunks(a_shard).enumerate() {
        let file = format!("train-{index:05}.shard");
        let mut writer = ShardWriter::create(&folder.join(&file), vocab_size, [9; 32], 1 << 20).unwrap();
        part.iter().for_each(|document| writer.push(document).unwrap());
        let written = writer.finish().unwrap();
        let root = format!("{:016x}", written.root);
        let (tokens, documents, bytes) = (written.tokens, written.documents, written.bytes);
        shards.push(ShardEntry { file, bytes, tokens, documents, text_bytes: 4 * tokens, root });
    }
    let tokens = shards.iter().map(|s| s.tokens).sum();
    let split =
        Split { name: "train".into(), tokens, documents: documents.len() as u64, text_bytes: 4 * tokens, shards };
    let options = Shaping {
        text_field: "text".into(),
        val_fraction: 0.,
        dedup: false,
        min_bytes: 1,
        max_bytes: 1 << 20,
        shard_tokens: 1 << 20,
    };
    let manifest = Manifest {
        format: "hymo-data".into(),
        version: 1,
        tokenizer: TokenizerId { sha256: hex(&[9; 32]), vocab_size },
        options,
        sources: Vec::new(),
        dropped: Dropped::default(),
        cut: 0,
        splits: vec![split],
    };
    std::fs::write(folder.join(MANIFEST), manifest.to_json()).unwrap();
    Dataset::open(folder, "train").unwrap()
}
