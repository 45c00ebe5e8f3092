//! Who moves what: coverage, the printed table, and what must not be orthogonalised.

mod small;

use hymo_model::config::OptimConfig;
use hymo_model::{OptimGroup, ParamSpec, ParamTable, presets};
use hymo_ops::check::Noise;
use hymo_optim::{Error, Group, Groups, Method, Optimizer, normuon};
use hymo_tensor::{Ctx, Tensor};
use proptest::prelude::*;
use small::{DECAYED, HIDDEN, Small, place, spec};
use std::collections::BTreeMap;

/// HAZARD 16: of every preset, each parameter is in exactly one group, the one that the table declares, matrices of a run
/// apart; the embedding and the experts are never orthogonalised.
#[test]
fn every_preset_is_covered_exactly_once() {
    for preset in presets::PRESETS {
        let table = ParamTable::new(&preset.model()).unwrap();
        let groups = Groups::declared(table.params(), &OptimConfig::default()).unwrap();
        let mut seen = BTreeMap::new();
        for member in groups.members() {
            *seen.entry(member.name.as_str()).or_insert(0) += 1;
            let (spec, group) = (table.get(&member.name).unwrap(), groups.group_of(member));
            assert_eq!(group.method == Method::NorMuon, spec.group == OptimGroup::NorMuon, "{}", member.name);
            assert_eq!((member.rows, member.cols, member.offset), (spec.rows(), spec.cols(), spec.offset));
            assert!(member.blocks == 1, "{}", member.name);
            let never = ["embed", "experts", "shared", "router", "conv", "norm", ".a.", ".b."];
            assert!(
                group.method != Method::NorMuon || !never.iter().any(|n| member.name.contains(n)),
                "{}",
                member.name
            );
            assert_eq!(group.weight_decay > 0.0, spec.group != OptimGroup::AdamW { decay: false }, "{}", member.name);
        }
        assert!(table.params().iter().all(|p| seen.get(p.name.as_str()) == Some(&1)), "{}", preset.name);
        assert_eq!(seen.len(), table.params().len());
    }
    // The specification's number of NorMuon's matrix elements in the full model.
    let table = ParamTable::new(&presets::hymo_434m()).unwrap();
    let groups = Groups::declared(table.params(), &OptimConfig::default()).unwrap();
    let hidden = groups.members().iter().filter(|m| groups.group_of(m).method == Method::NorMuon);
    assert_eq!(hidden.map(|m| m.numel()).sum::<usize>(), 226_164_736);
}

#[test]
fn the_table_is_printed() {
    let table = ParamTable::new(&presets::hymo_nano()).unwrap();
    let mut config = OptimConfig { decay_embedding: false, ..OptimConfig::default() };
    (config.normuon.split_heads, config.adamw.lr_mult) = (true, 0.5);
    let text = Groups::declared(table.params(), &config).unwrap().to_string();
    for line in [
        "layers.*.gdn.q.weight            hidden     NorMuon             128 x 192      4      1    0.1        6         147456",
        "layers.*.gdn.o.weight            hidden     NorMuon             192 x 256  whole      1    0.1        6         294912",
        "embed.weight                     embedding  Cautious AdamW     4096 x 192      -    0.5      0        1         786432",
        "layers.*.gdn.A_log               free       Cautious AdamW              4      -    0.5      0        6             24",
        "layers.*.moe.experts.*.w1.weight  decayed    Cautious AdamW",
    ] {
        let squeezed = |t: &str| t.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.lines().any(|l| squeezed(l).starts_with(&squeezed(line))), "{line}\nin\n{text}");
    }
    assert!(text.ends_with("each in one group"), "{text}");
}

fn group(name: &str, method: Method, params: &[&str]) -> Group {
    let params = params.iter().map(|&p| p.to_owned()).collect();
    Group { name: name.to_owned(), method, lr_mult: 1.0, weight_decay: 0.1, params }
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let mut embed = spec("embed", &[6, 4], DECAYED);
    embed.part = hymo_model::params::Part::Embedding;
    let mut heads = spec("heads", &[6, 4], HIDDEN);
    heads.head_blocks = Some(4);
    let specs = [spec("w", &[4, 6], HIDDEN), spec("b", &[6], DECAYED), embed, heads];
    let (muon, adam) = (Method::NorMuon, Method::AdamW);
    let try_groups = |groups: Vec<Group>| Groups::new(&specs, groups, true).unwrap_err();
    let others = group("rest", adam, &["embed", "heads"]);
    for (groups, want) in [
        (vec![group("a", muon, &["w"]), others.clone()], "no optimizer group has \"b\""),
        (vec![group("a", muon, &["w"]), group("c", adam, &["w"])], "\"w\" is in the optimizer groups a and c"),
        (vec![group("a", muon, &["w", "w"])], "\"w\" is in the optimizer groups a and a"),
        (vec![group("a", muon, &["x"])], "optimizer group a has \"x\", and no parameter"),
        (vec![group("a", muon, &["w", "b"]), others.clone()], "optimizer group a: \"b\" is no matrix"),
        (vec![group("a", adam, &["w", "b"]), group("c", muon, &["embed", "heads"])], "\"embed\" is the embedding"),
        (
            vec![group("a", adam, &["w", "b", "embed"]), group("c", muon, &["heads"])],
            "\"heads\" has 6 rows, which 4 heads do not divide",
        ),
    ] {
        let found = try_groups(groups).to_string();
        assert!(found.contains(want), "{want}\nin {found}");
    }
}

#[test]
fn places_that_overlap_are_refused() {
    let (ctx, config) = (Ctx::cpu(), OptimConfig::default());
    let mut specs = vec![spec("w", &[4, 6], HIDDEN), spec("b", &[6], DECAYED)];
    let lens = place(&mut specs);
    let refused = |specs: &[ParamSpec], len: usize| {
        let flats = [ctx.zeros::<f32>(&[len]).unwrap()];
        let groups = Groups::declared(specs, &config).unwrap();
        Optimizer::with_groups(&ctx, &flats, groups, &config).unwrap_err()
    };
    assert!(matches!(refused(&specs, 64), Error::Place { name, end: 70, len: 64, .. } if name == "b"));
    specs[1].offset = 23;
    assert!(matches!(refused(&specs, lens[0]), Error::Place { name, taken: 24, .. } if name == "b"));
}

/// HAZARD 16: a buffer that holds a shard of the rows is an error and not another optimizer.
#[test]
fn a_shard_is_not_taken_for_its_matrix() {
    let config = OptimConfig::default();
    let mut small = Small::new::<f32>(vec![spec("w", &[64, 32], HIDDEN)], &config, |s| vec![0.1; s.numel()]);
    let half = |_: ()| vec![small.ctx.zeros::<f32>(&[1024]).unwrap()];
    let (mut params, grads) = (half(()), half(()));
    let error = small.optim.step(&small.ctx, &mut params, &grads, 0.1).unwrap_err();
    assert!(matches!(error, Error::Layout { what: "gradients", unit: 0, .. }), "{error}");
    let whole = small.grads(|s| vec![1.0; s.numel()]);
    let error = small.optim.step(&small.ctx, &mut params, &whole, 0.1).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("parameters: unit 0 has [1024] of f32") && text.contains("a shard is not"), "{text}");
    let error = small.optim.step(&small.ctx, &mut [], &whole, 0.1).unwrap_err();
    assert!(error.to_string().contains("has no buffer"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// HAZARD 16: the passes over any division of a matrix's rows, the orthogonalisation of the whole between them, give the
    /// bits of one rank.
    #[test]
    fn sharded_equals_unsharded(m in 1usize..140, n in 1usize..90, cuts in prop::collection::vec(0.0f64..1.0, 0..5), seed in 0u64..99) {
        let config = OptimConfig { clip_norm: 0.0, ..OptimConfig::default() };
        let start = Noise::new(seed).normals(m * n);
        let mut small = Small::new::<f32>(vec![spec("w", &[m, n], HIDDEN)], &config, |_| start.clone());
        let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (mut w, mut momentum, mut v) = (single(&start), vec![0f32; m * n], vec![0f32; m]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| (c * m as f64) as usize).chain([0, m]).collect();
        cuts.sort_unstable();
        for step in 0..3 {
            let g = Noise::new(seed + 100 + step).normals(m * n);
            let grads = small.grads(|_| g.clone());
            let _ = small.optim.step(&small.ctx, &mut small.flats, &grads, 0.01).unwrap();
            // Each rank its rows; what is gathered is X, O and the sums.
            let (c, g) = (&config.normuon, single(&g));
            let [xs, ys, squares] = normuon::Work::<f32>::elements(m, n);
            let (mut x, mut y, mut squares, mut sums) = (vec![0.; xs], vec![0.; ys], vec![0.; squares], vec![0.; m]);
            for rows in cuts.windows(2).map(|c| c[0]..c[1]) {
                let part = rows.start * n..rows.end * n;
                let (own, x) = (&mut momentum[part.clone()], &mut x[part.clone()]);
                normuon::momentum(c, 1.0, n, &g[part], own, x, &mut sums[rows]);
            }
            let mut work = normuon::Work { x: &mut x, y: &mut y, squares: &mut squares, sums: &mut sums };
            normuon::orthogonalise(&small.ctx, c.orth, m, n, &mut work);
            let o = work.x.to_vec();
            for rows in cuts.windows(2).map(|c| c[0]..c[1]) {
                normuon::moments(c, n, &o[rows.start * n..rows.end * n], &mut v[rows.clone()], &mut sums[rows]);
            }
            let scale = normuon::Apply::scale(c, m, n, &sums);
            let apply = normuon::Apply { lr: 0.01, weight_decay: config.weight_decay, scale };
            for rows in cuts.windows(2).map(|c| c[0]..c[1]) {
                let part = rows.start * n..rows.end * n;
                normuon::apply(c, &apply, n, &o[part.clone()], &v[rows], &mut w[part]);
            }
        }
        let same = |got: Vec<f64>, want: &[f32]| got.iter().zip(want).all(|(&g, &w)| g == f64::from(w));
        prop_assert!(same(small.values("w"), &w));
        prop_assert!(same(small.state("optim.momentum.w"), &momentum));
        prop_assert!(same(small.state("optim.row_moment.w"), &v));
    }

    /// HAZARD 16: heads are orthogonalised as if each were a matrix of its own, and adjacent matrices as if alone.
    #[test]
    fn blocks_move_as_they_would_alone(heads in 1usize..5, rows in 1usize..9, n in 1usize..20, seed in 0u64..99) {
        let mut config = OptimConfig { clip_norm: 0.0, ..OptimConfig::default() };
        config.normuon.split_heads = true;
        let mut fused = spec("fused", &[heads * rows, n], HIDDEN);
        fused.head_blocks = Some(heads);
        let alone = (0..heads).map(|h| spec(&format!("head{h}"), &[rows, n], HIDDEN));
        let noise = Noise::new(seed).normals(2 * heads * rows * n);
        let (start, grads) = noise.split_at(heads * rows * n);
        let part = |all: &[f64], name: &str| match name.strip_prefix("head") {
            Some(h) => all[h.parse::<usize>().unwrap() * rows * n..][..rows * n].to_vec(),
            None => all.to_vec(),
        };
        let specs = std::iter::once(fused).chain(alone).collect();
        let mut small = Small::new::<f32>(specs, &config, |s| part(start, &s.name));
        let flat: Vec<Tensor> = small.grads(|s| part(grads, &s.name));
        for _ in 0..2 {
            let _ = small.optim.step(&small.ctx, &mut small.flats, &flat, 0.02).unwrap();
        }
        let apart: Vec<f64> = (0..heads).flat_map(|h| small.values(&format!("head{h}"))).collect();
        prop_assert_eq!(small.values("fused"), apart);
    }
}
