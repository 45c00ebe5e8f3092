//! Against values of public code (`fixtures/attention.safetensors`).

use super::cases::args;
use super::*;
use crate::check::{rms_error, values};
use crate::rotary::{self, Angles, Rope};
use crate::{fixture, linear, rms_norm};
use hymo_tensor::DType;
use std::collections::BTreeMap;

type Data = (Vec<usize>, Vec<f64>);

fn tensor(dtype: DType, dims: &[usize], data: &[f64]) -> Tensor {
    match dtype {
        DType::F64 => Tensor::from_vec(dims, data.to_vec()).unwrap(),
        _ => Tensor::from_vec(dims, data.iter().map(|&x| x as f32).collect()).unwrap(),
    }
}

#[track_caller]
fn close(what: &str, got: &Tensor, want: &[f64], bound: f64) {
    let error = rms_error(&values(got).unwrap(), want);
    assert!(error <= bound, "{what} in {}: {error:e}, bound {bound:e}", got.dtype());
}

fn angles(positions: &[i32], d_rope: usize) -> Arc<Angles> {
    Arc::new(Angles::new(positions, Rope { d_rope, theta: 1e4, yarn: None }).unwrap())
}

/// Each group's [content key | value] as all content keys before all values.
fn regroup(data: &[f64], groups: usize, d_nope: usize, d_v: usize) -> Vec<f64> {
    let row = |row: &[f64]| {
        let part =
            |from: usize, n: usize| (0..groups).map(move |g| g * (d_nope + d_v) + from..g * (d_nope + d_v) + from + n);
        part(0, d_nope).chain(part(d_nope, d_v)).flat_map(|r| row[r].to_vec()).collect::<Vec<_>>()
    };
    data.chunks(groups * (d_nope + d_v)).flat_map(row).collect()
}

/// Grouped attention with rotary keys and documents, in PyTorch's f64.
#[test]
fn grouped_attention_matches_the_reference() {
    let all = fixture::load("attention");
    let get = |name: &str| all[&format!("grouped.{name}")].1.clone();
    let ints = |name: &str| get(name).iter().map(|&x| x as i32).collect::<Vec<_>>();
    let (a, n) = (args(4, 2, [12, 4, 10]), 140);
    let docs = Docs::new(2, 70, &ints("seg")).unwrap();
    let angles = angles(&ints("pos"), 4);
    for (dtype, bound) in [(DType::F32, 5e-7), (DType::F64, 6e-8)] {
        let mut tape = Tape::new(&Ctx::cpu().poisoned());
        let q = tape.leaf(tensor(dtype, &[n, 64], &get("q")));
        let kv = tape.leaf(tensor(dtype, &[n, 44], &regroup(&get("kv"), 2, 12, 10)));
        let k_r = tape.leaf(tensor(dtype, &[n, 8], &get("k_r")));
        let turned = rotary::apply(&mut tape, &q, &angles, rotary::Args { n_heads: 4, head_dim: 16 }).unwrap();
        let keys = rotary::apply(&mut tape, &k_r, &angles, rotary::Args { n_heads: 2, head_dim: 4 }).unwrap();
        let out = apply(&mut tape, &turned, &kv, &keys, &docs, a).unwrap();
        close("o", out.o.value(), &get("o"), bound);
        close("lse", &out.lse, &get("lse"), bound);
        let mut grads = tape.backward_from(vec![(out.o, tensor(dtype, &[n, 40], &get("d_o")))]).unwrap();
        close("d_q", &grads.take(&q).unwrap(), &get("d_q"), bound);
        close("d_kv", &grads.take(&kv).unwrap(), &regroup(&get("d_kv"), 2, 12, 10), bound);
        close("d_k_r", &grads.take(&k_r).unwrap(), &get("d_k_r"), bound);
    }
}

const WEIGHTS: [&str; 6] = ["q", "dkv", "latent_norm", "kr", "ukv", "o"];

/// A whole latent attention layer of operations: y, and the gradients of x and of [`WEIGHTS`].
fn layer(dtype: DType, get: &dyn Fn(&str) -> Data) -> Vec<Tensor> {
    let a = args(3, 3, [12, 4, 10]);
    let mut tape = Tape::new(&Ctx::cpu().poisoned());
    let ((dims, x), positions) = (get("x"), (0..66).map(|t| t % 33).collect::<Vec<i32>>());
    let x = tape.leaf(tensor(dtype, &[66, dims[2]], &x));
    let w = WEIGHTS.map(|name| {
        let (dims, data) = if name == "ukv" {
            // One projection gives all content keys, then all values.
            let ((uk, k), (uv, v)) = (get("uk.weight"), get("uv.weight"));
            (vec![uk[0] + uv[0], uk[1]], [k, v].concat())
        } else {
            get(&format!("{name}.weight"))
        };
        tape.leaf(tensor(dtype, &dims, &data))
    });
    let [q, dkv, norm, kr, ukv, o] = &w;
    let angles = angles(&positions, 4);
    let q = linear::apply(&mut tape, &x, q).unwrap();
    let q = rotary::apply(&mut tape, &q, &angles, rotary::Args { n_heads: 3, head_dim: 16 }).unwrap();
    let c = linear::apply(&mut tape, &x, dkv).unwrap();
    let c = rms_norm::apply(&mut tape, &c, norm, rms_norm::Args { eps: 1e-6, zero_centred: false }).unwrap();
    let k_r = linear::apply(&mut tape, &x, kr).unwrap();
    let k_r = rotary::apply(&mut tape, &k_r, &angles, rotary::Args { n_heads: 3, head_dim: 4 }).unwrap();
    let kv = linear::apply(&mut tape, &c, ukv).unwrap();
    let out = apply(&mut tape, &q, &kv, &k_r, &Docs::whole(2, 33), a).unwrap();
    let y = linear::apply(&mut tape, &out.o, o).unwrap();
    let mut results = vec![y.value().clone()];
    let d_y = tensor(dtype, y.dims(), &get("d_y").1);
    let mut grads = tape.backward_from(vec![(y, d_y)]).unwrap();
    results.extend([&x].into_iter().chain(&w).map(|v| grads.take(v).unwrap()));
    results
}

/// DeepSeek-V3's attention in transformers, whose norm, softmax and angles are f32, and the same layer in f64.
#[test]
fn the_layer_matches_deepseek_v3() {
    let all: BTreeMap<String, Data> = fixture::load("attention");
    let get = |name: &str| all[&format!("deepseek.{name}")].clone();
    for (dtype, prefix, bound) in [(DType::F32, "", 2e-6), (DType::F64, "", 2e-6), (DType::F64, "f64.", 6e-8)] {
        let got = layer(dtype, &get);
        let want = |name: &str| match name {
            "d_ukv.weight" => ["d_uk.weight", "d_uv.weight"].map(|n| get(&format!("{prefix}{n}")).1).concat(),
            _ => get(&format!("{prefix}{name}")).1,
        };
        close("y", &got[0], &want("y"), bound);
        close("d_x", &got[1], &want("d_x"), bound);
        for (name, d) in WEIGHTS.iter().zip(&got[2..]) {
            if *name == "kr" {
                // One rotary key for all heads there, one a group here: their gradients add up to it.
                let d = values(d).unwrap();
                let sum: Vec<f64> = (0..80).map(|i| d[i] + d[80 + i] + d[160 + i]).collect();
                close("d_kr", &tensor(DType::F64, &[80], &sum), &want("d_kr_sum"), bound);
            } else {
                close(name, d, &want(&format!("d_{name}.weight")), bound);
            }
        }
    }
}
