//! The loader against the plain meaning of its words: lay the documents end to end, cut them into rows.

mod made;

use std::path::Path;
use std::sync::Arc;

use hymo_data::Error;
use hymo_data::audit::audit;
use hymo_data::corpus::{Corpus, Dataset, Weighted};
use hymo_data::loader::{Loader, LoaderOptions, Prefetch, Step};
use hymo_data::shuffle::Permutation;
use hymo_data::stream::Position;
use hymo_model::Batch;
use proptest::prelude::*;

/// Documents whose tokens tell which document and place they are of.
fn documents(lens: &[u16], set: u16) -> Vec<Vec<u16>> {
    lens.iter().zip(0..).map(|(&len, d)| (0..len).map(|t| (set * 1000 + d * 37 + t * 5) % 4096).collect()).collect()
}

/// The first tokens of the stream, with the running number of their document.
fn plain_stream(sets: &[(Vec<Vec<u16>>, f64)], seed: u64, tokens: usize) -> Vec<(u16, i32)> {
    let mut at = vec![(0_u64, 0_u64, 0_u64); sets.len()];
    let (mut stream, mut number) = (Vec::new(), 0);
    while stream.len() < tokens {
        let behind = |set: usize| at[set].2 as f64 / sets[set].1;
        let set = (0..sets.len()).min_by(|&a, &b| behind(a).total_cmp(&behind(b))).unwrap();
        let (epoch, ordinal, _) = at[set];
        let n = sets[set].0.len() as u64;
        let document = &sets[set].0[Permutation::new(n, seed, set as u64, epoch).at(ordinal) as usize];
        stream.extend(document.iter().map(|&token| (token, number)));
        number += 1;
        at[set].2 += document.len() as u64;
        at[set].1 += 1;
        if at[set].1 == n {
            (at[set].0, at[set].1) = (epoch + 1, 0);
        }
    }
    stream
}

fn corpus(folder: &Path, sets: &[(Vec<Vec<u16>>, f64)], seed: u64) -> Arc<Corpus> {
    let sets = sets.iter().enumerate().map(|(index, (documents, weight))| {
        let folder = folder.join(index.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        Weighted { dataset: made::dataset(&folder, documents, 7), weight: *weight }
    });
    Arc::new(Corpus::new(sets.collect(), Some(seed)).unwrap())
}

/// Rows of a step as (tokens, documents), all ranks in order.
fn rows(steps: &[Step]) -> Vec<(Vec<i32>, Vec<i32>)> {
    let micro = steps.iter().flat_map(|step| &step.micro);
    micro
        .flat_map(|m| {
            let width = m.tokens.len() / m.rows;
            m.tokens.chunks(width).zip(m.documents.chunks(width)).map(|(t, d)| (t.to_vec(), d.to_vec()))
        })
        .collect()
}

fn expected_row(stream: &[(u16, i32)]) -> (Vec<i32>, Vec<i32>) {
    let first = stream[0].1;
    stream.iter().map(|&(token, document)| (i32::from(token), document - first)).unzip()
}

/// One step of every rank, each from a position of its own.
fn all_ranks(corpus: &Arc<Corpus>, options: &LoaderOptions, position: &Position) -> Vec<Step> {
    let step = |rank| {
        let options = LoaderOptions { rank, ..options.clone() };
        let mut loader = Loader::new(Arc::clone(corpus), options, Some(position.clone())).unwrap();
        loader.next_step().unwrap().unwrap()
    };
    (0..options.world).map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// HAZARD 11: one stream for any number of ranks and any micro-batch, resumed after every step from a value that went
    /// through JSON, with each rank's share the next in order, and counts that agree with the model's.
    #[test]
    fn one_stream_however_it_is_cut(
        lens in proptest::collection::vec(1..40_u16, 1..40),
        more in proptest::collection::vec(1..9_u16, 1..20),
        mixed in any::<bool>(),
        len in 1..24_usize,
        n_modules in 0..3_usize,
        seed in 0..1000_u64,
        changes in proptest::collection::vec((prop::sample::select(vec![1, 2, 3, 8]), 1..5_usize), 1..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut sets = vec![(documents(&lens, 0), 1.)];
        if mixed {
            sets.push((documents(&more, 1), 0.4));
        }
        let corpus = corpus(folder.path(), &sets, seed);
        let rows_a_step: usize = 24;
        let stream = plain_stream(&sets, seed, (changes.len() * rows_a_step + 1) * len + n_modules + 1);
        let mut position = Position::start(&corpus);
        for (step, &(world, micro)) in changes.iter().enumerate() {
            let micro_rows = if 24 / world % micro == 0 { micro } else { 1 };
            let options = LoaderOptions { micro_rows, world, ..LoaderOptions::new(len, n_modules, rows_a_step) };
            let shares = all_ranks(&corpus, &options, &position);
            let begin = step * rows_a_step;
            for (index, row) in rows(&shares).into_iter().enumerate() {
                let at = (begin + index) * len;
                prop_assert_eq!(row, expected_row(&stream[at..at + len + n_modules + 1]), "row {}", begin + index);
            }
            let mut end = (begin * len) as u64;
            let (mut valid, mut tokens) = (vec![0.; n_modules + 1], 0.);
            for share in &shares {
                prop_assert_eq!(share.range.start, end);
                end = share.range.end;
                prop_assert_eq!(&share.valid, &shares[0].valid);
                for m in &share.micro {
                    prop_assert_eq!(m.rows, micro_rows);
                    let counts = Batch::new(m.rows, len, n_modules, &m.tokens, &m.documents).unwrap().counts();
                    valid.iter_mut().zip(&counts.valid).for_each(|(sum, n)| *sum += n);
                    tokens += counts.tokens;
                }
                prop_assert_eq!(&share.ends, &shares[0].ends);
            }
            prop_assert_eq!(shares[0].valid.iter().map(|&n| n as f64).collect::<Vec<_>>(), valid);
            prop_assert_eq!(shares[0].tokens as f64, tokens);
            position = serde_json::from_str(&serde_json::to_string(&shares[0].ends).unwrap()).unwrap();
            prop_assert_eq!(position.token, end);
        }
    }

    /// Read once, every token is an input in exactly one place, and what is left of the last step is padding.
    #[test]
    fn read_once_every_token_comes_once(lens in proptest::collection::vec(1..50_u16, 1..60), len in 1..30_usize, rows_a_step in 1..7_usize) {
        let folder = tempfile::tempdir().unwrap();
        let documents = documents(&lens, 0);
        let dataset = made::dataset(folder.path(), &documents, 11);
        let corpus = Arc::new(Corpus::of(dataset, None).unwrap());
        let options = LoaderOptions { once: true, ..LoaderOptions::new(len, 2, rows_a_step) };
        let mut loader = Loader::new(corpus, options, None).unwrap();
        let mut inputs = Vec::new();
        while let Some(step) = loader.next_step().unwrap() {
            let before = inputs.len();
            for (tokens, documents) in rows(std::slice::from_ref(&step)) {
                inputs.extend(tokens[..len].iter().zip(&documents).filter(|&(_, &d)| d >= 0).map(|(&t, _)| t as u16));
            }
            prop_assert_eq!(step.tokens as usize, inputs.len() - before);
            let batch = &step.micro[0];
            let counts = Batch::new(batch.rows, len, 2, &batch.tokens, &batch.documents).unwrap().counts();
            prop_assert_eq!(step.valid.iter().map(|&n| n as f64).collect::<Vec<_>>(), counts.valid);
        }
        prop_assert_eq!(inputs, documents.concat());
        prop_assert!(loader.next_step().unwrap().is_none());
    }
}

/// Each epoch holds every token once, in another order.
#[test]
fn an_epoch_holds_every_token_once() {
    let folder = tempfile::tempdir().unwrap();
    let lens: Vec<u16> = (0..200).map(|i| i * 7 % 23 + 1).collect();
    let total: usize = lens.iter().map(|&n| n as usize).sum();
    let sets = [(documents(&lens, 0), 1.)];
    let corpus = corpus(folder.path(), &sets, 3);
    let mut loader = Loader::new(corpus, LoaderOptions::new(total, 0, 2), None).unwrap();
    let step = loader.next_step().unwrap().unwrap();
    assert_eq!((step.begins.epoch(), step.ends.epoch()), (0, 2));
    let epochs: Vec<Vec<i32>> = rows(&[step]).into_iter().map(|(tokens, _)| tokens[..total].to_vec()).collect();
    assert_ne!(epochs[0], epochs[1]);
    let sorted = |epoch: &[i32]| {
        let mut tokens = epoch.to_vec();
        tokens.sort_unstable();
        tokens
    };
    let mut want: Vec<i32> = sets[0].0.concat().into_iter().map(i32::from).collect();
    want.sort_unstable();
    assert_eq!((sorted(&epochs[0]), sorted(&epochs[1])), (want.clone(), want));
}

/// HAZARD 12: a data set smaller than one batch goes round as often as it takes, and the epochs can be seen.
#[test]
fn a_data_set_smaller_than_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [(documents(&[1], 0), 1.)];
    let corpus = corpus(folder.path(), &sets, 0);
    let mut loader = Loader::new(Arc::clone(&corpus), LoaderOptions::new(8, 2, 4), None).unwrap();
    let step = loader.next_step().unwrap().unwrap();
    assert_eq!((step.tokens, step.ends.epoch()), (32, 32));
    assert_eq!(step.valid, [0, 0, 0], "each token is a document");
    assert_eq!(step.micro[0].documents[..11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(loader.next_step().unwrap().unwrap().ends.epoch(), 64);
}

/// HAZARD 12: a split without tokens is an error, not a loop.
#[test]
fn an_empty_split_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    drop(made::dataset(folder.path(), &documents(&[3], 0), 1));
    let error = Dataset::open(folder.path(), "val").unwrap_err();
    assert!(
        matches!(error, Error::Empty { .. })
            && error.to_string().contains("no tokens in the split \"val\"; there are train")
    );
    let path = folder.path().join("manifest.json");
    let mut manifest = hymo_data::manifest::Manifest::read(folder.path()).unwrap();
    manifest.splits[0] =
        hymo_data::manifest::Split { tokens: 0, documents: 0, shards: vec![], ..manifest.splits[0].clone() };
    std::fs::write(path, manifest.to_json()).unwrap();
    assert!(matches!(Dataset::open(folder.path(), "train"), Err(Error::Empty { .. })));
}

#[test]
fn weights_are_shares_of_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [(documents(&[30; 50], 0), 3.), (documents(&[3; 40], 1), 1.), (documents(&[11; 9], 2), 4.)];
    let corpus = corpus(folder.path(), &sets, 5);
    let mut loader = Loader::new(corpus, LoaderOptions::new(100, 0, 80), None).unwrap();
    let ends = loader.next_step().unwrap().unwrap().ends;
    for (set, weight) in ends.sets.iter().zip([3., 1., 4.]) {
        // Within one document of its share of 8000 tokens.
        assert!((set.tokens as f64 - 1000. * weight).abs() <= 30., "{ends:?}");
    }
}

#[test]
fn steps_made_ahead_are_the_same_and_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(folder.path(), &[(documents(&[5, 9, 2, 30], 0), 1.)], 8);
    let options = LoaderOptions::new(16, 2, 4);
    let mut plain = Loader::new(Arc::clone(&corpus), options.clone(), None).unwrap();
    let mut ahead = Prefetch::new(Loader::new(Arc::clone(&corpus), options.clone(), None).unwrap(), 3).unwrap();
    for _ in 0..20 {
        assert_eq!(ahead.position(), plain.position());
        assert_eq!(ahead.next_step().unwrap(), plain.next_step().unwrap());
    }
    let once = LoaderOptions { once: true, ..options };
    let mut ends = Prefetch::new(Loader::new(corpus, once, None).unwrap(), 1).unwrap();
    assert!(ends.next_step().unwrap().is_some());
    assert!(ends.next_step().unwrap().is_none() && ends.next_step().unwrap().is_none());
}

#[test]
fn positions_and_options_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [(documents(&[5, 9, 2], 0), 1.)];
    let corpus = corpus(folder.path(), &sets, 8);
    let with =
        |options: LoaderOptions, position| Loader::new(Arc::clone(&corpus), options, position).unwrap_err().to_string();
    let plain = LoaderOptions::new(4, 0, 6);
    assert!(
        with(LoaderOptions { world: 4, ..plain.clone() }, None).contains("rows is 6, want a multiple of 4 ranks x 6")
    );
    assert!(with(LoaderOptions { rank: 1, ..plain.clone() }, None).contains("rank is 1, want 0 to 0"));
    assert!(with(LoaderOptions { len: 0, ..plain.clone() }, None).contains("len is 0"));
    let start = Position::start(&corpus);
    let other = Position { stream: "0123".into(), ..start.clone() };
    assert!(with(plain.clone(), Some(other)).contains("other data, weights or seed"));
    let mut beyond = start.clone();
    beyond.sets[0].document = 3;
    assert!(with(plain.clone(), Some(beyond)).contains("document 3 of 3"));
    assert!(
        with(plain.clone(), Some(Position { offset: 100, ..start.clone() })).contains("token 100 of a document of")
    );
    assert!(with(plain.clone(), Some(Position { set: 1, ..start })).contains("data sets"));
    assert_ne!(
        Corpus::of(made::dataset(folder.path(), &sets[0].0, 2), Some(9)).unwrap().fingerprint(),
        corpus.fingerprint()
    );
}

#[test]
fn an_audit_proves_that_ranks_share_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let lens: Vec<u16> = (0..100).map(|i| i % 9 + 1).collect();
    let corpus = corpus(folder.path(), &[(documents(&lens, 0), 1.)], 8);
    let total: u64 = lens.iter().map(|&n| u64::from(n)).sum();
    let options = LoaderOptions { micro_rows: 2, world: 3, ..LoaderOptions::new(10, 2, 6) };
    let found = audit(&corpus, &options, 12, &mut |_| ()).unwrap();
    assert_eq!((found.steps, found.tokens, found.documents, found.epoch_tokens), (12, 720, 100, total));
    assert_eq!(found.ranges[1], [60..80, 80..100, 100..120]);
    let once = LoaderOptions { once: true, ..options };
    let found = audit(&corpus, &once, 1000, &mut |_| ()).unwrap();
    assert_eq!(found.tokens, total, "read once, the ranks read one epoch and no more");
}

/// HAZARD 8: a million documents of one to three tokens, packed as laid end to end.
#[test]
fn a_million_tiny_documents() {
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<Vec<u16>> = (0..1_000_000_u32).map(|d| vec![(d % 4000) as u16; 1 + (d % 3) as usize]).collect();
    let dataset = made::dataset(folder.path(), &documents, 300_000);
    let corpus = Arc::new(Corpus::of(dataset, Some(1)).unwrap());
    let (len, rows_a_step) = (1000, 100);
    let mut loader = Loader::new(corpus, LoaderOptions::new(len, 2, rows_a_step), None).unwrap();
    let order = Permutation::new(1_000_000, 1, 0, 0);
    let mut want = (0..1_000_000).flat_map(|i| documents[order.at(i) as usize].iter().map(move |&t| (t, i)));
    let mut pending: Vec<(u16, u64)> = Vec::new();
    for _ in 0..19 {
        let step = loader.next_step().unwrap().unwrap();
        for (tokens, ids) in rows(&[step]) {
            let missing = len + 3 - pending.len();
            pending.extend(want.by_ref().take(missing));
            let first = pending[0].1;
            for (at, &(token, document)) in pending.iter().enumerate() {
                assert_eq!((tokens[at], ids[at]), (i32::from(token), (document - first) as i32));
            }
            pending.drain(..len);
        }
    }
}
