//! Checkpoints: whole or not at all.

#[cfg(target_os = "linux")]
mod small_disk;

use hymo_tensor::{Ctx, Tensor};
use hymo_train::checkpoint::{Checkpoint, Error, Keep, Manifest, Saver, Snapshot, newest, write};
use proptest::prelude::*;
use serde_json::json;
use std::path::{Path, PathBuf};

fn numbers(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1009) as f32 / 1009. - seed).collect()
}

fn snapshot(step: u64) -> Snapshot {
    let ctx = Ctx::cpu();
    let mut s = Snapshot::new(step, json!({ "model": "small" }), json!({ "tokens": step * 512 }));
    s.add("a", &Tensor::from_slice(&ctx, &[3, 5], &numbers(15, step as f32)).unwrap()).unwrap();
    s.add("b", &Tensor::from_slice(&ctx, &[7], &[f32::NAN, -0., f32::INFINITY, 1e-45, 1., 2., 3.]).unwrap()).unwrap();
    s
}

fn load(path: &Path) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let mut c = Checkpoint::open(path)?;
    let out = (c.take("a", &[3, 5])?, c.take("b", &[7])?);
    c.finish()?;
    Ok(out)
}

#[test]
fn every_bit_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &snapshot(12)).unwrap();
    assert_eq!(path, dir.path().join("step-12"));
    let c = Checkpoint::open(&path).unwrap();
    assert_eq!((c.step(), c.config(), c.state()), (12, &json!({ "model": "small" }), &json!({ "tokens": 6144 })));
    let shapes = |name: &str| c.tensors()[name].shape.clone();
    assert_eq!((c.tensors().len(), shapes("a"), shapes("b")), (2, vec![3, 5], vec![7]));
    let (a, b) = load(&path).unwrap();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a), bits(&numbers(15, 12.)));
    assert_eq!(bits(&b), bits(&[f32::NAN, -0., f32::INFINITY, 1e-45, 1., 2., 3.]));
}

/// Counters are whole numbers: 2^24 + 1 is one, which single precision does not have.
#[test]
fn whole_numbers_stay_whole() {
    let dir = tempfile::tempdir().unwrap();
    let counts = Tensor::from_slice(&Ctx::cpu(), &[2], &[(1 << 24) + 1, -7]).unwrap();
    let mut s = Snapshot::new(1, json!(null), json!(null));
    s.add("steps", &counts).unwrap();
    let mut c = Checkpoint::open(&write(dir.path(), &s).unwrap()).unwrap();
    assert!(c.take("steps", &[2]).unwrap_err().to_string().contains("I32, expected F32"));
    let mut to = Ctx::cpu().zeros::<i32>(&[2]).unwrap();
    c.take_into("steps", &mut to).unwrap();
    assert_eq!(to.to_vec::<i32>().unwrap(), [(1 << 24) + 1, -7]);
    c.finish().unwrap();
}

/// HAZARD 14: a view is saved as what it shows, not with the buffer behind it.
#[test]
fn a_view_takes_its_own_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Tensor::from_slice(&Ctx::cpu(), &[4, 50_000], &numbers(200_000, 0.)).unwrap();
    let mut s = Snapshot::new(1, json!(null), json!(null));
    s.add("view", &whole.slice_cols(10..13).unwrap()).unwrap();
    let path = write(dir.path(), &s).unwrap();
    assert!(path.join("rank00000.safetensors").metadata().unwrap().len() < 1000);
    let got = Checkpoint::open(&path).unwrap().take("view", &[4, 3]).unwrap();
    assert_eq!(got[3..6], numbers(200_000, 0.)[50_010..50_013]);
}

/// HAZARD 14: whatever is wrong with the newest is said, and the one before is used.
#[test]
fn a_broken_checkpoint_is_named_and_the_one_before_is_used() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage); 8] = [
        ("checksum", |p| {
            let f = p.join("rank00000.safetensors");
            let mut bytes = std::fs::read(&f).unwrap();
            let last = bytes.len() - 3;
            bytes[last] ^= 4;
            std::fs::write(f, bytes).unwrap();
        }),
        ("size is", |p| {
            let f = p.join("rank00000.safetensors");
            let bytes = std::fs::read(&f).unwrap();
            std::fs::write(f, &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("rank00000.safetensors", |p| std::fs::remove_file(p.join("rank00000.safetensors")).unwrap()),
        ("not finished", |p| std::fs::remove_file(p.join("manifest.json")).unwrap()),
        ("manifest.json", |p| std::fs::write(p.join("manifest.json"), "{\"format\": 2,").unwrap()),
        ("format 1", |p| std::fs::write(p.join("manifest.json"), "{\"format\": 1}").unwrap()),
        ("manifest.json: checksum is", |p| {
            // A flip that is still JSON, in a number that nothing else holds.
            let text = std::fs::read_to_string(p.join("manifest.json")).unwrap();
            assert!(text.contains("5120"));
            std::fs::write(p.join("manifest.json"), text.replace("5120", "5121")).unwrap();
        }),
        ("of step 7, its folder is named for step 10", |p| {
            std::fs::remove_dir_all(p).unwrap();
            std::fs::rename(write(p.parent().unwrap(), &snapshot(7)).unwrap(), p).unwrap();
        }),
    ];
    for (said, damage) in cases {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &snapshot(5)).unwrap();
        damage(&write(dir.path(), &snapshot(10)).unwrap());
        let found = newest(dir.path()).unwrap();
        assert_eq!(found.checkpoint.unwrap().step(), 5);
        let (path, error) = &found.refused[0];
        assert!(path.ends_with("step-10") && error.to_string().contains(said), "{said}: {error}");
    }
}

#[test]
fn an_empty_place_has_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    for place in [dir.path().to_owned(), dir.path().join("none")] {
        let found = newest(&place).unwrap();
        assert!(found.checkpoint.is_none() && found.refused.is_empty());
    }
    let error = Checkpoint::open(&dir.path().join("step-3")).unwrap_err().to_string();
    assert!(error.contains("no such folder"), "{error}");
}

/// What a kill leaves behind at each point of a write is cleared away, and what was complete loads.
#[test]
fn what_a_kill_leaves_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &snapshot(5)).unwrap();
    // While a new one is being written.
    std::fs::create_dir(dir.path().join("step-9.tmp")).unwrap();
    std::fs::write(dir.path().join("step-9.tmp/rank00000.safetensors"), "half").unwrap();
    // Between setting the old step 5 aside and giving the new one its name.
    std::fs::rename(dir.path().join("step-5"), dir.path().join("step-5.old")).unwrap();
    assert_eq!(newest(dir.path()).unwrap().checkpoint.unwrap().step(), 5);
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step-5"]);
    // Written again, it is the new one, and nothing is left over.
    let mut again = snapshot(5);
    again.state = json!("again");
    write(dir.path(), &again).unwrap();
    assert_eq!(newest(dir.path()).unwrap().checkpoint.unwrap().state(), &json!("again"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_load_is_all_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &snapshot(1)).unwrap();
    let mut c = Checkpoint::open(&path).unwrap();
    let said = |e: Error| e.to_string();
    assert!(said(c.take("c", &[1]).unwrap_err()).contains("tensor \"c\": not in this checkpoint"));
    assert!(said(c.take("a", &[5, 3]).unwrap_err()).contains("shape [3, 5], expected [5, 3]"));
    c.take("b", &[7]).unwrap();
    assert!(said(c.finish().unwrap_err()).contains("1 tensors that this model does not have, the first \"a\""));
}

#[test]
fn what_stays() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 3, 4, 5, 6] {
        write(dir.path(), &snapshot(step)).unwrap();
    }
    let left = |keep: Keep, best| {
        keep.apply(dir.path(), best).unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names.join(" ")
    };
    assert_eq!(left(Keep { last: 2, every: 2, best: true }, Some(3)), "step-2 step-3 step-4 step-5 step-6");
    assert_eq!(left(Keep { last: 1, every: 0, best: true }, Some(3)), "step-3 step-6");
    assert_eq!(left(Keep { last: 0, every: 0, best: false }, Some(3)), "step-6");
}

#[test]
fn saving_goes_on_beside_the_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut saver = Saver::new(dir.path(), Keep { last: 2, every: 0, best: false });
    assert_eq!(saver.save(snapshot(1), None).unwrap(), None);
    assert_eq!(saver.save(snapshot(2), None).unwrap().unwrap().path, dir.path().join("step-1"));
    saver.save(snapshot(3), None).unwrap();
    let last = saver.wait().unwrap().unwrap();
    assert!(last.path == dir.path().join("step-3") && last.seconds > 0.);
    assert_eq!(saver.wait().unwrap(), None);
    assert!(!dir.path().join("step-1").exists() && dir.path().join("step-2").exists());
}

/// A place that cannot be written says so, at the next call, and the earlier checkpoint stays.
#[test]
fn a_failed_save_comes_to_light() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("file");
    std::fs::write(&place, "in the way").unwrap();
    let mut saver = Saver::new(&place, Keep::default());
    saver.save(snapshot(1), None).unwrap();
    let error = saver.save(snapshot(2), None).unwrap_err().to_string();
    assert!(error.contains("cannot make") && error.contains("file"), "{error}");
    assert_eq!(saver.wait().unwrap(), None);
}

/// The memory of an old snapshot holds whatever comes next: as much as before, or not.
#[test]
fn a_snapshot_over_an_old_one_is_as_a_new_one() {
    let ctx = Ctx::cpu();
    let of = |shapes: &[(&[usize], bool)], seed: f32, old: Option<Snapshot>| {
        let new = Snapshot::new(4, json!({}), json!(null));
        let mut s = old.into_iter().fold(new, Snapshot::over);
        for (i, &(dims, whole)) in shapes.iter().enumerate() {
            let n = dims.iter().product();
            let numbers = numbers(n, seed + i as f32);
            let t = match whole {
                true => Tensor::from_slice(&ctx, dims, &numbers.iter().map(|&x| x as i32).collect::<Vec<_>>()),
                false => Tensor::from_slice(&ctx, dims, &numbers),
            };
            s.add(format!("t{i}"), &t.unwrap()).unwrap();
        }
        s
    };
    // Large enough for several blocks of a copy; then another size, another dtype, fewer and more tensors.
    let first: &[(&[usize], bool)] = &[(&[700, 900], false), (&[3], true), (&[2, 5], false)];
    let four: &[usize] = &[4];
    let others: [&[(&[usize], bool)]; 4] =
        [first, &[(&[700, 901], false), (&[3], false), (&[10], true)], &[(&[3], true)], &[(four, false); 6]];
    for shapes in others {
        let over = of(shapes, 7., Some(of(first, 1., None)));
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [over, new] = [(a.path(), over), (b.path(), of(shapes, 7., None))]
            .map(|(dir, s)| std::fs::read(write(dir, &s).unwrap().join("rank00000.safetensors")).unwrap());
        assert!(over == new, "{shapes:?}");
    }
}

/// HAZARD 14: a full disk leaves the earlier checkpoint, and says how much is needed and how much there is.
#[cfg(target_os = "linux")]
#[test]
#[allow(clippy::print_stderr)] // A test that could not be made must not look like one that passed.
fn a_full_disk_is_said() {
    let Some(disk) = small_disk::SmallDisk::mount(2) else {
        eprintln!("not tried: mounting a small file system takes privileges that this user does not have");
        return;
    };
    let dir = disk.0.join("checkpoints");
    write(&dir, &snapshot(1)).unwrap();
    let mut big = Snapshot::new(2, json!(null), json!(null));
    big.add("x", &Tensor::from_slice(&Ctx::cpu(), &[1 << 20], &numbers(1 << 20, 1.)).unwrap()).unwrap();
    let error = write(&dir, &big).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::NoSpace { needed: 4_194_304, free: Some(free), .. } if free < 2 << 20), "{text}");
    assert!(text.contains("the earlier ones are intact"), "{text}");
    assert_eq!(newest(&dir).unwrap().checkpoint.unwrap().step(), 1);
    assert!(!dir.join("step-2.tmp").exists());
}

/// A [rows, cols] tensor written by several owners of parts of it.
fn in_pieces(dir: &Path, rows: usize, cols: usize, cuts: &[usize], columns: bool) -> PathBuf {
    let values = numbers(rows * cols, 3.);
    let path = write(dir, &{
        let mut s = Snapshot::new(1, json!(null), json!(null));
        s.add("w", &Tensor::from_slice(&Ctx::cpu(), &[rows, cols], &values).unwrap()).unwrap();
        s
    })
    .unwrap();
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("manifest.json")).unwrap()).unwrap();
    let (mut chunks, mut files, mut from) = (Vec::new(), serde_json::Map::new(), 0);
    for (rank, &to) in cuts.iter().enumerate() {
        let part: Vec<f32> = (0..rows * cols)
            .filter(|i| (from..to).contains(&if columns { i % cols } else { i / cols }))
            .map(|i| values[i])
            .collect();
        let (offset, shape) = if columns { ([0, from], [rows, to - from]) } else { ([from, 0], [to - from, cols]) };
        let mut s = Snapshot::new(7, json!(null), json!(null));
        s.add("w", &Tensor::from_slice(&Ctx::cpu(), &shape, &part).unwrap()).unwrap();
        let part = write(&dir.join("parts"), &s).unwrap();
        let name = format!("rank{rank:05}.safetensors");
        std::fs::copy(part.join("rank00000.safetensors"), path.join(&name)).unwrap();
        let other: Manifest = serde_json::from_slice(&std::fs::read(part.join("manifest.json")).unwrap()).unwrap();
        files.insert(name.clone(), serde_json::to_value(&other.files["rank00000.safetensors"]).unwrap());
        chunks.push(json!({ "file": name, "offset": offset, "shape": shape }));
        from = to;
    }
    manifest["files"] = serde_json::Value::Object(files);
    manifest["tensors"]["w"]["chunks"] = json!(chunks);
    std::fs::write(path.join("manifest.json"), sealed(manifest).to_string()).unwrap();
    path
}

/// A manifest with the checksum of what it says now, where it says what a manifest can.
fn sealed(manifest: serde_json::Value) -> serde_json::Value {
    let parsed = serde_json::from_value::<Manifest>(manifest.clone());
    parsed.map_or(manifest, |parsed| serde_json::to_value(parsed.sealed()).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Any cut of a tensor over ranks, by rows or by columns, reads back as the whole.
    #[test]
    fn pieces_are_put_together(rows in 2usize..9, cols in 2usize..9, a in 1usize..8, columns: bool) {
        let dir = tempfile::tempdir().unwrap();
        let n = if columns { cols } else { rows };
        let path = in_pieces(dir.path(), rows, cols, &[a.min(n - 1), n], columns);
        let got = Checkpoint::open(&path).unwrap().take("w", &[rows, cols]).unwrap();
        prop_assert_eq!(got, numbers(rows * cols, 3.));
    }

    /// No bytes in place of a manifest or a file make the reader panic.
    #[test]
    fn any_bytes_are_refused_or_read(manifest: bool, at in 0usize..2000, with: Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), &snapshot(3)).unwrap();
        let file = path.join(if manifest { "manifest.json" } else { "rank00000.safetensors" });
        let mut bytes = std::fs::read(&file).unwrap();
        let at = at % bytes.len();
        let before = bytes.clone();
        bytes.splice(at..(at + with.len()).min(before.len()), with);
        std::fs::write(&file, &bytes).unwrap();
        let loaded = load(&path);
        // In the manifest, blanks may change and nothing else.
        let same = |m: &[u8]| serde_json::from_slice::<Manifest>(m).ok();
        prop_assert!(bytes == before || loaded.is_err() || (manifest && same(&bytes) == same(&before)));
    }
}

/// Pieces that overlap, miss a part, reach outside or name a file elsewhere.
#[test]
fn a_manifest_that_cannot_be_true_is_refused() {
    let change = |edit: &dyn Fn(&mut serde_json::Value)| {
        let dir = tempfile::tempdir().unwrap();
        let path = in_pieces(dir.path(), 6, 4, &[2, 6], false);
        let file = path.join("manifest.json");
        let mut manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        edit(&mut manifest);
        std::fs::write(file, sealed(manifest).to_string()).unwrap();
        Checkpoint::open(&path).unwrap_err().to_string()
    };
    let chunk = |edit: fn(&mut serde_json::Value)| change(&|m| edit(&mut m["tensors"]["w"]["chunks"][1]));
    assert!(chunk(|c| c["offset"] = json!([1, 0])).contains("overlap"));
    assert!(chunk(|c| c["offset"] = json!([3, 0])).contains("does not lie in [6, 4]"));
    assert!(chunk(|c| c["shape"] = json!([3, 4])).contains("20 of 24 elements"));
    assert!(chunk(|c| c["file"] = json!("rank00009.safetensors")).contains("no file of this checkpoint"));
    assert!(chunk(|c| c["offset"] = json!([u64::MAX, 0])).contains("does not lie in"));
    let elsewhere = change(&|m| m["files"]["../x"] = m["files"]["rank00000.safetensors"].clone());
    assert!(elsewhere.contains("not the name of a file in this folder"));
    assert!(change(&|m| m["more"] = json!(1)).contains("unknown field `more`"));
    let shape = change(&|m| m["tensors"]["w"]["shape"] = json!([u64::MAX, 4]));
    assert!(shape.contains("overflows"), "{shape}");
}
