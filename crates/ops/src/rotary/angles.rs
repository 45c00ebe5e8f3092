use super::OP;
use hymo_tensor::{Error, Result, each};
use std::f64::consts::TAU;

/// Frequencies stretched to a context longer than the one trained (YaRN).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// The new context over the old one.
    pub factor: f64,
    /// Tokens of the context trained before.
    pub original_context: usize,
}

/// What the angles are made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Columns of a head that turn: an even number.
    pub d_rope: usize,
    /// The base of the frequencies.
    pub theta: f64,
    /// Stretched frequencies, if any.
    pub yarn: Option<Yarn>,
}

/// Turns over the original context above which YaRN leaves a frequency as it is, and under which it divides it by the
/// whole factor: the paper's β and α for this family of models.
const TURNS: (f64, f64) = (32., 1.);

impl Rope {
    /// The angle from one position to the next, for each of the d_rope / 2 pairs.
    pub fn frequencies(&self) -> Result<Vec<f64>> {
        let Rope { d_rope, theta, yarn } = *self;
        if d_rope == 0 || d_rope % 2 == 1 {
            return Err(Error::value(OP, "d_rope", d_rope, "a positive even number"));
        }
        if !(theta.is_finite() && theta > 1.) {
            return Err(Error::value(OP, "theta", theta, "a number above 1"));
        }
        let plain = (0..d_rope / 2).map(|i| theta.powf(-2. * i as f64 / d_rope as f64));
        let Some(yarn) = yarn else { return Ok(plain.collect()) };
        if !(yarn.factor.is_finite() && yarn.factor >= 1. && yarn.original_context > 0) {
            return Err(Error::value(OP, "yarn", format!("{yarn:?}"), "a factor from 1 and a positive context"));
        }
        let (low, high) = self.ramp(yarn);
        let mix = |(i, f): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0., 1.);
            f * (1. - ramp) + f / yarn.factor * ramp
        };
        Ok(plain.enumerate().map(mix).collect())
    }

    /// The pairs between which YaRN goes over from the old frequencies to the stretched ones.
    pub(super) fn ramp(&self, yarn: Yarn) -> (f64, f64) {
        let d = self.d_rope as f64;
        // The pair, as a real number, that makes `turns` turns over the original context.
        let pair = |turns: f64| d * (yarn.original_context as f64 / (TAU * turns)).ln() / (2. * self.theta.ln());
        let low = pair(TURNS.0).floor().max(0.);
        let high = pair(TURNS.1).ceil().min(d - 1.);
        // A context too short for any ramp at all; the published form widens it by this much.
        (low, if high > low { high } else { low + 0.001 })
    }
}

/// What YaRN multiplies the attention scale by: m², m = 0.1 ln(factor) + 1.
pub fn yarn_scale(factor: f64) -> f64 {
    let m = 0.1 * factor.max(1.).ln() + 1.;
    m * m
}

/// Cosine and sine of every angle that a batch needs: made once, shared by queries, keys and layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Angles {
    rope: Rope,
    /// Every token's row of the table.
    rows: Vec<u32>,
    /// Rows of d_rope numbers: cosine and sine of each pair in turn.
    table: Vec<f64>,
    #[cfg(feature = "cuda")]
    gpu: crate::gpu::OnGpu<hymo_tensor::Tensor>,
}

/// Positions whose angles one task takes.
const BLOCK: usize = 128;

impl Angles {
    /// The angles at the tokens' positions in their documents, which do not start at 0 where a sequence is carried on.
    pub fn new(positions: &[i32], rope: Rope) -> Result<Self> {
        let frequencies = rope.frequencies()?;
        if let Some(p) = positions.iter().find(|p| **p < 0) {
            return Err(Error::value(OP, "positions", p, "0 or above"));
        }
        let first = positions.iter().copied().min().unwrap_or(0);
        let range = positions.iter().max().map_or(0, |last| (last - first) as usize + 1);
        // Sequences far apart (a batch that decodes) need a row a token, else there is one for each position.
        let sparse = range > positions.len();
        let at = |row: usize| if sparse { positions[row] } else { first + row as i32 };
        let mut table = vec![0.; if sparse { positions.len() } else { range } * rope.d_rope];
        each!(table.chunks_mut(BLOCK * rope.d_rope).collect(), |block, rows| {
            for (i, row) in rows.chunks_mut(rope.d_rope).enumerate() {
                let position = f64::from(at(block * BLOCK + i));
                for (pair, f) in row.chunks_exact_mut(2).zip(&frequencies) {
                    (pair[1], pair[0]) = (position * f).sin_cos();
                }
            }
        });
        let row = |(n, p): (usize, &i32)| if sparse { n as u32 } else { (p - first) as u32 };
        Ok(Angles {
            rope,
            rows: positions.iter().enumerate().map(row).collect(),
            table,
            #[cfg(feature = "cuda")]
            gpu: crate::gpu::OnGpu::default(),
        })
    }

    /// The angles on a GPU, rounded to f32, a row a token: [N, d_rope].
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(&self, ctx: &hymo_tensor::Ctx, gpu: &hymo_cuda::Gpu) -> Result<hymo_tensor::Tensor> {
        self.gpu.get(gpu, || {
            let all: Vec<f32> = (0..self.tokens()).flat_map(|n| self.at(n)).map(|&x| x as f32).collect();
            hymo_tensor::Tensor::from_slice(ctx, &[self.tokens(), self.rope.d_rope], &all)
        })
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.rows.len()
    }

    /// What the angles were made of.
    pub fn rope(&self) -> Rope {
        self.rope
    }

    /// Cosine and sine of each pair at token `n`.
    pub(super) fn at(&self, n: usize) -> &[f64] {
        let row = self.rows[n] as usize * self.rope.d_rope;
        &self.table[row..row + self.rope.d_rope]
    }
}
