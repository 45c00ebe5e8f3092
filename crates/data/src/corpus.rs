//! Data sets opened for reading: the shards of a split, and several splits mixed.

use std::ops::Range;
use std::path::{Path, PathBuf};

use hymo_tokenizer::Tokenizer;
use xxhash_rust::xxh3::xxh3_64;

use crate::manifest::{Manifest, hex};
use crate::shard::Shard;
use crate::shuffle::Permutation;
use crate::{Error, Result};

/// Tables of document ends that fit in this many bytes are held in memory; what does not fit is read where it is needed.
const ENDS_BYTES: u64 = 64 << 20;

/// One split of a data folder.
#[derive(Debug)]
pub struct Dataset {
    folder: PathBuf,
    name: String,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// The first document of each shard, and the number of documents.
    firsts: Vec<u64>,
    tokens: u64,
}

impl Dataset {
    /// Opens a split, checks that its shards are there, whole, and those of the manifest.
    ///
    /// # Errors
    /// What is missing, cut short or another's; a split without tokens.
    pub fn open(folder: &Path, split: &str) -> Result<Self> {
        let manifest = Manifest::read(folder)?;
        let Some(entry) = manifest.split(split).filter(|split| split.tokens > 0) else {
            let there =
                manifest.splits.iter().filter(|split| split.tokens > 0).map(|split| split.name.clone()).collect();
            return Err(Error::Empty { path: folder.to_owned(), split: split.to_owned(), there });
        };
        let (mut shards, mut firsts, mut budget) = (Vec::new(), vec![0], ENDS_BYTES);
        for shard in &entry.shards {
            let path = folder.join(&shard.file);
            let mut open = Shard::open(&path)?;
            let wrong = |why: &str| Error::Shard { path: path.clone(), place: "header".into(), why: why.to_owned() };
            let header = open.header();
            if (header.tokens, header.documents) != (shard.tokens, shard.documents) {
                return Err(wrong("its counts are not those of the manifest"));
            }
            if hex(&header.tokenizer) != manifest.tokenizer.sha256 {
                return Err(wrong("made with another tokenizer than the manifest says"));
            }
            if open.ends_bytes() <= budget {
                budget -= open.ends_bytes();
                open.load_ends()?;
            }
            firsts.push(firsts[firsts.len() - 1] + shard.documents);
            shards.push(open);
        }
        let tokens = entry.tokens;
        Ok(Dataset { folder: folder.to_owned(), name: split.to_owned(), manifest, shards, firsts, tokens })
    }

    /// The manifest of its folder.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its documents.
    #[must_use]
    pub fn documents(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Fails unless the shards hold this tokenizer's ids.
    ///
    /// # Errors
    /// They were made with another one.
    pub fn check_tokenizer(&self, tokenizer: &Tokenizer) -> Result<()> {
        let (shards, given) = (self.manifest.tokenizer.sha256.clone(), hex(&tokenizer.sha256()));
        if shards == given {
            return Ok(());
        }
        Err(Error::Tokenizer { path: self.folder.clone(), shards, given })
    }

    fn place(&self, document: u64) -> (&Shard, u64) {
        let shard = self.firsts.partition_point(|&first| first <= document) - 1;
        (&self.shards[shard], document - self.firsts[shard])
    }

    /// How many tokens a document has.
    ///
    /// # Errors
    /// The shard cannot be read.
    pub fn len_of(&self, document: u64) -> Result<u64> {
        let (shard, index) = self.place(document);
        shard.document(index).map(|range| range.end - range.start)
    }

    /// The tokens of a document.
    ///
    /// # Errors
    /// The shard cannot be read.
    pub fn tokens_of(&self, document: u64) -> Result<Vec<u16>> {
        let (shard, index) = self.place(document);
        shard.tokens(index)
    }

    /// Reads a part of a document, as little-endian pairs of bytes.
    pub(crate) fn read(&self, document: u64, part: Range<u64>, bytes: &mut Vec<u8>) -> Result<()> {
        let (shard, index) = self.place(document);
        let range = shard.document(index)?;
        debug_assert!(part.end <= range.end - range.start);
        bytes.resize(2 * (part.end - part.start) as usize, 0);
        shard.read_tokens(range.start + part.start, bytes)
    }
}

/// A data set and its share of the tokens.
#[derive(Debug)]
pub struct Weighted {
    /// The data set.
    pub dataset: Dataset,
    /// Its share, relative to the others'.
    pub weight: f64,
}

/// Data sets mixed by weight, in an order that a seed gives.
#[derive(Debug)]
pub struct Corpus {
    sets: Vec<Weighted>,
    seed: Option<u64>,
    fingerprint: u64,
}

impl Corpus {
    /// Mixes data sets. With a seed the documents of each are shuffled anew every epoch, without one they keep their order.
    ///
    /// # Errors
    /// No data set, weights that are not positive, data sets of different tokenizers.
    pub fn new(sets: Vec<Weighted>, seed: Option<u64>) -> Result<Self> {
        let Some(first) = sets.first() else {
            return Err(Error::option("data sets", 0, "1 or more"));
        };
        let tokenizer = &first.dataset.manifest.tokenizer;
        for set in &sets {
            if !(set.weight > 0. && set.weight.is_finite()) {
                return Err(Error::option("weight", set.weight, "a positive number"));
            }
            if set.dataset.manifest.tokenizer != *tokenizer {
                return Err(Error::Tokenizer {
                    path: set.dataset.folder.clone(),
                    shards: set.dataset.manifest.tokenizer.sha256.clone(),
                    given: tokenizer.sha256.clone(),
                });
            }
        }
        let mut identity = Vec::new();
        for set in &sets {
            identity.extend(set.dataset.manifest.fingerprint().to_le_bytes());
            identity.extend(set.dataset.name.as_bytes());
            identity.extend(set.weight.to_bits().to_le_bytes());
        }
        identity
            .extend(seed.map_or([0; 9], |seed| std::array::from_fn(|i| if i < 8 { seed.to_le_bytes()[i] } else { 1 })));
        Ok(Corpus { sets, seed, fingerprint: xxh3_64(&identity) })
    }

    /// One data set alone.
    ///
    /// # Errors
    /// None that a data set which has been opened can cause.
    pub fn of(dataset: Dataset, seed: Option<u64>) -> Result<Self> {
        Corpus::new(vec![Weighted { dataset, weight: 1. }], seed)
    }

    /// The data sets.
    #[must_use]
    pub fn sets(&self) -> &[Weighted] {
        &self.sets
    }

    /// Two corpora share it only if they give the same stream.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Size of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.sets[0].dataset.manifest.tokenizer.vocab_size as usize
    }

    /// The order of a data set's documents in an epoch; `None` is their own.
    pub(crate) fn order(&self, set: usize, epoch: u64) -> Option<Permutation> {
        self.seed.map(|seed| Permutation::new(self.sets[set].dataset.documents(), seed, set as u64, epoch))
    }
}
