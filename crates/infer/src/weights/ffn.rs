//! Feed-forward blocks: dense SwiGLU, or routed experts beside a shared one (MATH 3).

use super::{Pack, section};
use crate::Result;
use hymo_model::args;
use hymo_model::config::{GdnFfn, LayerKind, MlaFfn};
use hymo_ops::packed_linear::{self, Weights as Packed};
use hymo_ops::{router, swiglu};
use hymo_tensor::{Ctx, DType, Tensor};

/// (silu(n W1ᵀ) ⊙ (n W3ᵀ)) W2ᵀ.
#[derive(Debug)]
pub(crate) struct Dense {
    /// Rows w1 | w3.
    up: Packed,
    down: Packed,
}

#[derive(Debug)]
pub(crate) struct Moe {
    router: Packed,
    bias: Tensor,
    args: router::Args,
    experts: Vec<Dense>,
    shared: Option<Dense>,
}

#[derive(Debug)]
pub(crate) enum Ffn {
    Dense(Box<Dense>),
    Moe(Box<Moe>),
}

impl Dense {
    fn new(pack: &Pack<'_>, prefix: &str) -> Result<Self> {
        Ok(Dense { up: pack.packed_rows(prefix, &["w1", "w3"])?, down: pack.packed_rows(prefix, &["w2"])? })
    }

    fn bytes(&self) -> usize {
        self.up.bytes() + self.down.bytes()
    }

    /// n [N, D] -> [N, D]; the hidden row times its gate, where there are gates.
    fn forward(&self, ctx: &Ctx, n: &Tensor, gates: Option<&[f32]>) -> Result<Tensor> {
        let ab = packed_linear::forward(ctx, n, &self.up)?; // [N, 2F]
        let mut h = swiglu::forward(ctx, &ab)?.0; // [N, F]
        if let Some(gates) = gates {
            let mut rows = h.view_mut::<f32>()?;
            gates.iter().enumerate().for_each(|(i, &gate)| rows.row_mut(i).iter_mut().for_each(|h| *h *= gate));
        }
        Ok(packed_linear::forward(ctx, &h, &self.down)?)
    }
}

impl Moe {
    fn new(pack: &Pack<'_>, prefix: &str) -> Result<Self> {
        let c = section(&pack.config.moe, "model.moe")?;
        let at = format!("{prefix}.moe");
        let expert = |e: usize| Dense::new(pack, &format!("{at}.experts.{e}"));
        Ok(Moe {
            router: pack.exact_rows(&at, &["router"])?,
            bias: pack.params.buffer(&format!("{at}.router.bias"))?.clone(),
            args: args::router(c, 0.),
            experts: (0..c.n_routed).map(expert).collect::<Result<_>>()?,
            shared: (c.n_shared > 0).then(|| Dense::new(pack, &format!("{at}.shared"))).transpose()?,
        })
    }

    /// n [N, D] -> [N, D]. Only chosen experts are read. A token's experts add up in the order of their scores.
    fn forward(&self, ctx: &Ctx, n: &Tensor) -> Result<Tensor> {
        let logits = packed_linear::forward(ctx, n, &self.router)?; // [N, E]
        let (chosen, gates) = router::choose(ctx, &logits, &self.bias, self.args)?;
        let (chosen, gates) = (chosen.view::<i32>()?, gates.view::<f32>()?);
        let (rows, k) = (n.view::<f32>()?, self.args.top_k);
        let mut parts = ctx.empty::<f32>(&[n.rows() * k, n.cols()])?;
        let mut to = parts.view_mut::<f32>()?;
        for (e, expert) in self.experts.iter().enumerate() {
            let pairs = (0..n.rows()).flat_map(|i| (0..k).map(move |j| (i, j)));
            let mine: Vec<_> = pairs.filter(|&(i, j)| chosen.row(i)[j] as usize == e).collect();
            if mine.is_empty() {
                continue;
            }
            let mut x = ctx.empty::<f32>(&[mine.len(), n.cols()])?;
            let mut xs = x.view_mut::<f32>()?;
            mine.iter().enumerate().for_each(|(r, &(i, _))| xs.row_mut(r).copy_from_slice(rows.row(i)));
            let gates: Vec<f32> = mine.iter().map(|&(i, j)| gates.row(i)[j]).collect();
            let y = expert.forward(ctx, &x, Some(&gates))?;
            let y = y.view::<f32>()?;
            mine.iter().enumerate().for_each(|(r, &(i, j))| to.row_mut(i * k + j).copy_from_slice(y.row(r)));
        }
        let mut out = ctx.empty::<f32>(n.dims())?;
        let (mut outs, parts) = (out.view_mut::<f32>()?, parts.view::<f32>()?);
        for i in 0..n.rows() {
            let out = outs.row_mut(i);
            out.copy_from_slice(parts.row(i * k));
            (1..k).for_each(|j| out.iter_mut().zip(parts.row(i * k + j)).for_each(|(o, &p)| *o += p));
        }
        if let Some(shared) = &self.shared {
            out.add_assign(&shared.forward(ctx, n, None)?)?;
        }
        Ok(out)
    }
}

impl Ffn {
    pub fn new(pack: &Pack<'_>, prefix: &str, kind: LayerKind) -> Result<Option<Self>> {
        let dense = || Ok(Some(Ffn::Dense(Box::new(Dense::new(pack, &format!("{prefix}.ffn"))?))));
        match kind {
            LayerKind::Gdn => match section(&pack.config.gdn, "model.gdn")?.ffn {
                GdnFfn::None => Ok(None),
                GdnFfn::Swiglu => dense(),
            },
            LayerKind::Mla => match section(&pack.config.mla, "model.mla")?.ffn {
                MlaFfn::None => Ok(None),
                MlaFfn::Swiglu => dense(),
                MlaFfn::Moe => Ok(Some(Ffn::Moe(Box::new(Moe::new(pack, prefix)?)))),
            },
        }
    }

    /// Bytes of the matrices: all of them, or those that one token is sent through.
    pub fn bytes(&self, one_token: bool) -> usize {
        match self {
            Ffn::Dense(d) => d.bytes(),
            Ffn::Moe(m) => {
                let used = if one_token { m.args.top_k } else { m.experts.len() };
                let routed: usize = m.experts.iter().take(used).map(Dense::bytes).sum();
                m.router.bytes() + routed + m.shared.as_ref().map_or(0, Dense::bytes)
            }
        }
    }

    /// n [N, D] -> [N, D].
    pub fn forward(&self, ctx: &Ctx, n: &Tensor) -> Result<Tensor> {
        match self {
            Ffn::Dense(d) => d.forward(ctx, n, None),
            Ffn::Moe(m) => m.forward(ctx, n),
        }
    }
}

/// W_uv [G V, C] as [G C, V]: what [`hymo_ops::attention::decode`] reads.
pub(super) fn group_transposed(ctx: &Ctx, w: &Tensor, groups: usize) -> Result<Tensor> {
    if w.dtype() != DType::F32 {
        return Err(hymo_tensor::Error::DType { op: "weights", arg: "uv", got: w.dtype(), want: "f32" }.into());
    }
    let (d_v, c) = (w.rows() / groups, w.cols());
    let mut out = ctx.empty::<f32>(&[groups * c, d_v])?;
    let (from, mut to) = (w.view::<f32>()?, out.view_mut::<f32>()?);
    for g in 0..groups {
        for i in 0..c {
            let row = to.row_mut(g * c + i);
            row.iter_mut().enumerate().for_each(|(j, t)| *t = from.row(g * d_v + j)[i]);
        }
    }
    Ok(out)
}
