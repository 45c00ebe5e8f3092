use super::*;
use proptest::prelude::*;
use std::fs;

const TOKENIZER: [u8; 32] = [7; 32];

fn written(folder: &Path, documents: &[Vec<u16>]) -> (std::path::PathBuf, Written) {
    let path = folder.join("train-00000.shard");
    let mut writer = ShardWriter::create(&path, 4096, TOKENIZER, 1000).unwrap();
    for document in documents {
        writer.push(document).unwrap();
    }
    (path.clone(), writer.finish().unwrap())
}

fn documents(n: u16) -> Vec<Vec<u16>> {
    (1..=n).map(|d| (0..d % 97 + 1).map(|t| d.wrapping_mul(31).wrapping_add(t) % 4096).collect()).collect()
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for n in [1, 2, 130, 5000] {
        let (path, written) = written(folder.path(), &documents(n));
        assert_eq!(fs::metadata(&path).unwrap().len(), written.bytes);
        let mut shard = Shard::open(&path).unwrap();
        assert_eq!((shard.header().documents, shard.header().tokenizer), (n.into(), TOKENIZER));
        for loaded in [false, true] {
            if loaded {
                shard.load_ends().unwrap();
            }
            for (index, document) in documents(n).iter().enumerate().step_by(7) {
                assert_eq!(&shard.tokens(index as u64).unwrap(), document);
            }
        }
        assert_eq!(shard.verify(Some(written.root), &mut |_| ()).unwrap(), []);
        assert!(!temporary_is_left(folder.path()));
    }
}

fn temporary_is_left(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().any(|f| f.unwrap().path().extension().is_some_and(|e| e == "tmp"))
}

/// What opening and verifying say of a shard.
fn named(path: &Path, root: u64) -> Option<(String, std::ops::Range<u64>)> {
    match Shard::open(path) {
        Err(Error::Shard { place, .. }) => Some((place, 0..HEADER_BYTES)),
        Err(other) => panic!("{other}"),
        Ok(shard) => {
            let damage = shard.verify(Some(root), &mut |_| ()).unwrap();
            assert!(damage.len() <= 1, "{damage:?}");
            damage.first().map(|d| (d.part.to_owned(), d.bytes.clone()))
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// A flipped bit anywhere is found, and the place that is named holds it.
    #[test]
    fn any_flipped_bit_is_named(n in 1..4000_u16, at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let folder = tempfile::tempdir().unwrap();
        let (path, written) = written(folder.path(), &documents(n));
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, &bytes).unwrap();
        let (part, range) = named(&path, written.root).expect("a flipped bit went unseen");
        prop_assert!(range.contains(&(at as u64)), "bit in byte {at}, named {part} {range:?}");
    }

    /// No bytes make the reader panic, and what it opens it can read or refuse.
    #[test]
    fn damaged_shards_are_refused_and_never_panic(
        n in 1..300_u16,
        cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        keep in any::<prop::sample::Index>(),
        whole in any::<bool>(),
        fix_header in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (path, written) = written(folder.path(), &documents(n));
        let mut bytes = fs::read(&path).unwrap();
        for (at, value) in cuts {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if fix_header {
            let sum = xxh3_64(&bytes[..120]);
            bytes[120..128].copy_from_slice(&sum.to_le_bytes());
        }
        if !whole {
            bytes.truncate(keep.index(bytes.len()));
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(mut shard) = Shard::open(&path) {
            prop_assert!(whole);
            for index in 0..shard.header().documents {
                let _ = shard.tokens(index);
            }
            let _ = shard.verify(Some(written.root), &mut |_| ());
            let _ = shard.verify(None, &mut |_| ());
            let _ = shard.load_ends();
        }
    }

    #[test]
    fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600), magic in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.shard");
        let mut bytes = bytes;
        if magic && bytes.len() >= 128 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
            let sum = xxh3_64(&bytes[..120]);
            bytes[120..128].copy_from_slice(&sum.to_le_bytes());
        }
        fs::write(&path, &bytes).unwrap();
        prop_assert!(Shard::open(&path).is_err());
    }
}

/// HAZARD 12: an empty or truncated shard is a clear error that names the file and the place.
#[test]
fn a_shard_cut_short_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = written(folder.path(), &documents(50));
    let bytes = fs::read(&path).unwrap();
    for len in [0, 5, 127, 128, 129, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        let error = Shard::open(&path).unwrap_err().to_string();
        assert!(error.contains("train-00000.shard, byte") && error.contains("cut short"), "{len}: {error}");
    }
    fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    assert!(Shard::open(&path).unwrap_err().to_string().contains("bytes behind its end"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told_with_what_to_free() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train-00000.shard");
    std::os::unix::fs::symlink("/dev/full", folder.path().join("train-00000.shard.tmp")).unwrap();
    let error = ShardWriter::create(&path, 4096, TOKENIZER, 1 << 20).unwrap_err().to_string();
    assert!(
        error.contains("the disk is full; free about 4 MB") && error.contains("finished shards are kept"),
        "{error}"
    );
    assert!(!path.exists());
}
