//! Chunked against token by token in f32, over gates, keys, lengths, chunks and initial states.

use hymo_ops::Docs;
use hymo_ops::check::Noise;
use hymo_ops::delta_rule::{Args, Inputs, forward};
use hymo_tensor::{Ctx, Tensor, par};

pub const DECAYS: [&str; 5] = ["mixed", "none", "e^-40", "e^-1e4", "none and e^-1e4"];
pub const BETAS: [&str; 3] = ["random", "0", "1"];
pub const KEYS: [&str; 3] = ["random", "repeated", "correlated"];

/// Largest differences found: outputs, absolute; final state, of its largest element.
#[derive(Clone, Copy, Default, Debug)]
pub struct Worst {
    pub o: f32,
    pub h: f32,
}

struct Sequence {
    qkv: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
    h0: Vec<f32>,
    heads: usize,
    d_k: usize,
    d_v: usize,
}

impl Sequence {
    fn new(regime: usize, len: usize, heads: usize, d_k: usize, d_v: usize) -> Self {
        let (decay, beta, key) = (regime % 5, regime / 5 % 3, regime / 15);
        let mut noise = Noise::new(regime as u64);
        let width = heads * (2 * d_k + d_v);
        let mut qkv: Vec<f32> = noise.normals(len * width).iter().map(|&x| x as f32).collect();
        let first = qkv[heads * d_k..2 * heads * d_k].to_vec();
        for row in qkv.chunks_mut(width) {
            for (k, &f) in row[heads * d_k..2 * heads * d_k].iter_mut().zip(&first) {
                *k = [*k, f, f + 0.1 * *k][key];
            }
        }
        let g = (0..len * heads).map(|_| {
            let (u, v) = (noise.uniform() as f32, noise.uniform());
            [-6. * u.powi(4), 0., -40., -1e4, if v < 0.05 { -1e4 } else { 0. }][decay]
        });
        let g = g.collect();
        let beta = (0..len * heads).map(|_| [noise.uniform() as f32, 0., 1.][beta]).collect();
        let h0 = noise.normals(heads * d_k * d_v).iter().map(|&x| x as f32).collect();
        Sequence { qkv, g, beta, h0, heads, d_k, d_v }
    }

    fn run(&self, ctx: &Ctx, len: usize, chunk: usize, carried: bool) -> (Tensor, Tensor) {
        let args = Args { n_heads: self.heads, d_k: self.d_k, d_v: self.d_v, chunk, qk_l2norm: true };
        let of = |x: &[f32]| {
            let w = x.len() / (self.g.len() / self.heads);
            Tensor::from_slice(ctx, &[len, w], &x[..len * w]).unwrap()
        };
        let h0 = Tensor::from_slice(ctx, &[1, self.heads, self.d_k, self.d_v], &self.h0).unwrap();
        let docs = Docs::continuing(1, len, &vec![0; len], &[carried]).unwrap();
        let (qkv, g, beta) = (of(&self.qkv), of(&self.g), of(&self.beta));
        let inputs = Inputs { qkv: &qkv, g: &g, beta: &beta, h0: Some(&h0), docs: &docs };
        let (o, h_t, _) = forward(ctx, inputs, args, false).unwrap();
        (o, h_t)
    }

    fn compare(&self, len: usize, chunks: &[usize], carried: bool) -> Worst {
        let (fast, oracle) = (Ctx::cpu().poisoned(), Ctx::cpu().oracle());
        let (o, h) = self.run(&oracle, len, 1, carried);
        let largest = h.flat::<f32>().unwrap().iter().fold(0f32, |m, x| m.max(x.abs()));
        // A state forgotten down to denormal numbers has no more than their spacing.
        let largest = largest.max(f32::MIN_POSITIVE);
        let mut worst = Worst::default();
        for &chunk in chunks {
            let (o2, h2) = self.run(&fast, len, chunk, carried);
            let far = |a: &Tensor, b: &Tensor| {
                let (a, b) = (a.flat::<f32>().unwrap(), b.flat::<f32>().unwrap());
                // A NaN must not hide behind a maximum.
                a.iter().zip(b).fold(0f32, |m, (a, b)| if (a - b).abs() <= m { m } else { (a - b).abs() })
            };
            let h_far = far(&h2, &h) / largest;
            assert!(far(&o2, &o) < 1e-5 && h_far < 1e-5, "chunk {chunk}, {len} tokens: {} {h_far}", far(&o2, &o));
            worst = Worst { o: worst.o.max(far(&o2, &o)), h: worst.h.max(h_far) };
        }
        worst
    }
}

/// Every regime at every length: with and without an initial state.
pub fn sweep(lengths: &[usize], chunks: &[usize], [heads, d_k, d_v]: [usize; 3]) -> Worst {
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let found = par::map(DECAYS.len() * BETAS.len() * KEYS.len(), |regime| {
        let s = Sequence::new(regime, longest, heads, d_k, d_v);
        let mut worst = Worst::default();
        for carried in [false, true] {
            for &len in lengths {
                let w = s.compare(len, chunks, carried);
                worst = Worst { o: worst.o.max(w.o), h: worst.h.max(w.h) };
            }
        }
        worst
    });
    found.into_iter().fold(Worst::default(), |a, b| Worst { o: a.o.max(b.o), h: a.h.max(b.h) })
}
