use super::*;
use crate::Tokenizer;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn trained(documents: &[&[u8]], options: TrainOptions) -> (Vec<u8>, Report) {
    let mut trainer = Trainer::new(options).unwrap();
    trainer.feed(documents.iter().map(|d| Ok::<_, Error>(d.to_vec())), &mut |_| ()).unwrap();
    trainer.finish(&mut |_, _| ()).unwrap()
}

/// Recounts everything for every merge: slow, and plainly what is meant.
fn plain_merges(words: &[(Box<[u8]>, u64)], limits: merge::Limits) -> Vec<(u32, u32)> {
    let mut words: Vec<(Vec<u32>, u64)> =
        words.iter().map(|(w, c)| (w.iter().map(|&b| crate::alphabet::ID[b as usize]).collect(), *c)).collect();
    let mut tokens: Vec<Vec<u8>> = crate::alphabet::BY_ID.iter().map(|&byte| vec![byte]).collect();
    let mut merges = Vec::new();
    while merges.len() < limits.merges {
        let mut counts = BTreeMap::new();
        for (word, count) in &words {
            for window in word.windows(2) {
                *counts.entry((window[0], window[1])).or_insert(0) += count;
            }
        }
        let joined = |&(a, b): &(u32, u32)| [&tokens[a as usize][..], &tokens[b as usize]].concat();
        counts.retain(|pair, _| joined(pair).len() <= limits.token_bytes && !tokens.contains(&joined(pair)));
        let Some((&best, _)) = counts
            .iter()
            .filter(|&(_, &c)| c >= limits.min_count)
            .max_by_key(|&(pair, &c)| (c, std::cmp::Reverse(pair)))
        else {
            break;
        };
        let new = tokens.len() as u32;
        tokens.push(joined(&best));
        merges.push(best);
        for (word, _) in &mut words {
            let mut at = 0;
            while at + 1 < word.len() {
                if (word[at], word[at + 1]) == best {
                    word.splice(at..at + 2, [new]);
                }
                at += 1;
            }
        }
    }
    merges
}

fn limits(merges: usize) -> merge::Limits {
    merge::Limits { merges, min_count: 2, token_bytes: 32 }
}

proptest! {
    #[test]
    fn incremental_merges_are_the_plain_ones(words in proptest::collection::btree_map("[abc]{2,9}", 1..20_u64, 1..40), max in 2..12_usize) {
        let words: Vec<(Box<[u8]>, u64)> = words.into_iter().map(|(w, c)| (w.into_bytes().into(), c)).collect();
        let limits = merge::Limits { token_bytes: max, ..limits(60) };
        prop_assert_eq!(merge::learn(words.clone(), limits, &mut |_, _| ()), plain_merges(&words, limits));
    }
}

/// The `tokenizers` crate's own trainer, where its 32-bit counts suffice.
#[test]
fn merges_are_those_of_the_crate() {
    use tokenizers::models::bpe::BpeTrainer;
    use tokenizers::{Model, Trainer as _};
    let text = include_str!("../split.rs");
    let mut ours = Trainer::new(TrainOptions { vocab_size: 1024, ..TrainOptions::default() }).unwrap();
    ours.feed([Ok::<_, Error>(text.as_bytes().to_vec())], &mut |_| ()).unwrap();
    let words = ours.words.sorted();
    let mut theirs = BpeTrainer::builder()
        .vocab_size(768)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(crate::alphabet::CHAR.into_iter().collect())
        .build();
    let repeated = words.iter().flat_map(|(word, n)| std::iter::repeat_n(crate::alphabet::to_text(word), *n as usize));
    theirs.feed(repeated, |word| Ok(vec![word.to_owned()])).unwrap();
    let mut model = tokenizers::models::bpe::BPE::default();
    theirs.train(&mut model).unwrap();
    let merges = merge::learn(words, limits(512), &mut |_, _| ());
    let mut tokens: Vec<String> = crate::alphabet::BY_ID.iter().map(|&b| crate::alphabet::to_text(&[b])).collect();
    for (a, b) in merges {
        tokens.push(format!("{}{}", tokens[a as usize], tokens[b as usize]));
    }
    assert_eq!(tokens.len(), 768);
    for (id, token) in tokens.iter().enumerate() {
        assert_eq!(model.id_to_token(id as u32).as_ref(), Some(token));
    }
}

/// HAZARD 25: counts are 64 bits wide; here they pass 2^32 and a pair's place follows from it.
#[test]
fn counts_beyond_32_bits() {
    let words = vec![(b"xy".to_vec().into(), 5_u64 << 32), (b"zw".to_vec().into(), (5 << 32) + 1)];
    let merges = merge::learn(words, limits(2), &mut |_, _| ());
    let id = |byte: u8| crate::alphabet::ID[byte as usize];
    assert_eq!(merges, [(id(b'z'), id(b'w')), (id(b'x'), id(b'y'))]);
}

/// HAZARD 25: the table of pre-tokens is bounded, what is frequent stays in it, and the report says what was dropped.
#[test]
fn memory_is_bounded_and_frequent_words_stay() {
    let splitter = Splitter::new(PATTERN).unwrap();
    let mut words = Words::default();
    for chunk in 0..20 {
        let rare: String = (0..900).map(|i| format!(" {}", letters(chunk * 900 + i))).collect();
        let text = format!("{rare}{}", " often".repeat(30));
        words.add(Words::of(&splitter, &mut splitter.cache(), &[text.into_bytes()]), 1000);
        assert!(words.len() <= 1000);
    }
    assert_eq!(words.total, 20 * 930);
    assert!(words.dropped > 15_000 && words.dropped <= 18_000, "{}", words.dropped);
    let sorted = words.sorted();
    let often = sorted.iter().find(|(word, _)| &**word == b" often").unwrap();
    assert_eq!(often.1, 600);
}

fn letters(mut number: u32) -> String {
    let mut word = String::new();
    for _ in 0..5 {
        word.push(char::from(b'a' + (number % 26) as u8));
        number /= 26;
    }
    word
}

/// HAZARD 25: one pattern, in the file: what trains is what is written, and the written one is used.
#[test]
fn the_pattern_of_the_file_is_the_pattern_in_use() {
    let (json, _) = trained(&[b"one two three two"], TrainOptions { vocab_size: 600, ..TrainOptions::default() });
    assert_eq!(Tokenizer::from_json(&json).unwrap().pattern(), PATTERN);
    let text = String::from_utf8(json).unwrap();
    let as_json = serde_json::to_string(PATTERN).unwrap();
    assert_eq!(text.matches(&as_json).count(), 1, "the file holds the pattern once");
    let other = Tokenizer::from_json(text.replace(&as_json, "\"[a-z]\"").as_bytes()).unwrap();
    assert_eq!(other.encode(b"two").unwrap().len(), 3, "the file's pattern decides, not ours");
}

#[cfg(feature = "rayon")]
#[test]
fn any_number_of_threads_learns_the_same_bytes() {
    let documents: Vec<Vec<u8>> = (0..40_u32)
        .map(|i| (0..60_000).flat_map(|j| format!(" {}", letters(i * 31 + j * j % 5000)).into_bytes()).collect())
        .collect();
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let options = TrainOptions { vocab_size: 1000, max_words: 2000, ..TrainOptions::default() };
            let mut trainer = Trainer::new(options).unwrap();
            trainer.feed(documents.iter().map(|d| Ok::<_, Error>(d.clone())), &mut |_| ()).unwrap();
            trainer.finish(&mut |_, _| ()).unwrap()
        })
    };
    let one = with(1);
    assert!(one.1.dropped_words > 0 && one.1.unused == 0, "{:?}", one.1);
    assert_eq!(one, with(2));
    assert_eq!(one, with(3));
}

#[test]
fn a_small_text_leaves_slots_unused() {
    let (json, report) = trained(&[b"abab abab"], TrainOptions { vocab_size: 1000, ..TrainOptions::default() });
    assert_eq!((report.merges, report.unused), (2, 1000 - 512 - 2), "ab, abab, and nothing else twice: {report:?}");
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (1000, 744));
}

#[test]
fn what_cannot_be_is_refused() {
    let with = |options| Trainer::new(options).unwrap_err().to_string();
    let small = TrainOptions { vocab_size: 511, ..TrainOptions::default() };
    assert!(with(small).starts_with("a vocabulary of 511: it must be 512 "));
    assert!(with(TrainOptions { vocab_size: 65_537, ..small }).contains("to 65536"));
    assert!(with(TrainOptions { max_token_bytes: 1, ..TrainOptions::default() }).contains("max_token_bytes is 1"));
    let empty = Trainer::new(TrainOptions::default()).unwrap().finish(&mut |_, _| ());
    assert_eq!(empty.unwrap_err(), Error::NoText);
}
