//! Feed-forward blocks: dense SwiGLU, or routed experts beside a shared one (MATH 3).

use super::{Pass, args, section};
use crate::Error;
use crate::config::{GdnFfn, LayerKind, MlaFfn, ModelConfig};
use crate::params::ParamTable;
use crate::store::ParamRef;
use hymo_ops::{experts, linear, residual, router, swiglu};
use hymo_tape::{Tape, Var};
use hymo_tensor::Result;

/// (silu(n W1ᵀ) ⊙ (n W3ᵀ)) W2ᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    /// Rows w1 | w3.
    up: ParamRef,
    down: ParamRef,
}

impl Dense {
    fn new(table: &ParamTable, prefix: &str) -> std::result::Result<Self, Error> {
        Ok(Dense { up: ParamRef::rows(table, prefix, &["w1", "w3"])?, down: ParamRef::rows(table, prefix, &["w2"])? })
    }

    fn forward(&self, tape: &mut Tape, pass: &Pass, n: &Var) -> Result<Var> {
        let ab = linear::apply(tape, n, &pass.var(&self.up)?)?; // [N, 2F]
        let h = swiglu::apply(tape, &ab)?;
        linear::apply(tape, &h, &pass.var(&self.down)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Moe {
    router: ParamRef,
    bias: String,
    args: router::Args,
    w13: ParamRef,
    w2: ParamRef,
    shared: Option<Dense>,
}

#[derive(Debug, Clone)]
pub(crate) enum Ffn {
    Dense(Dense),
    Moe(Box<Moe>),
}

impl Ffn {
    /// The block of a layer (`layers.{i}` or a prediction module's prefix), if its kind has one.
    pub(crate) fn new(
        table: &ParamTable,
        model: &ModelConfig,
        prefix: &str,
        kind: LayerKind,
    ) -> std::result::Result<Option<Self>, Error> {
        let dense = || Ok(Some(Ffn::Dense(Dense::new(table, &format!("{prefix}.ffn"))?)));
        match kind {
            LayerKind::Gdn => match section(&model.gdn, "model.gdn")?.ffn {
                GdnFfn::None => Ok(None),
                GdnFfn::Swiglu => dense(),
            },
            LayerKind::Mla => match section(&model.mla, "model.mla")?.ffn {
                MlaFfn::None => Ok(None),
                MlaFfn::Swiglu => dense(),
                MlaFfn::Moe => Ok(Some(Ffn::Moe(Box::new(Moe::new(table, model, prefix)?)))),
            },
        }
    }

    /// n [N, D] -> [N, D] and the balance loss, if there are experts to balance.
    pub(crate) fn forward(&self, tape: &mut Tape, pass: &Pass, n: &Var, layer: usize) -> Result<(Var, Option<Var>)> {
        match self {
            Ffn::Dense(d) => Ok((d.forward(tape, pass, n)?, None)),
            Ffn::Moe(m) => m.forward(tape, pass, n, layer),
        }
    }
}

impl Moe {
    fn new(table: &ParamTable, model: &ModelConfig, prefix: &str) -> std::result::Result<Self, Error> {
        let c = section(&model.moe, "model.moe")?;
        let at = format!("{prefix}.moe");
        let stack = |names: &[&str]| -> std::result::Result<ParamRef, Error> {
            let names: Vec<String> = names.iter().map(|n| format!("{at}.experts.0.{n}.weight")).collect();
            let first = table.span(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
            Ok(ParamRef::stack(first, c.n_routed))
        };
        Ok(Moe {
            router: ParamRef::named(table, &format!("{at}.router.weight"))?,
            bias: format!("{at}.router.bias"),
            args: args::router(c, 0.),
            w13: stack(&["w1", "w3"])?,
            w2: stack(&["w2"])?,
            shared: if c.n_shared == 0 { None } else { Some(Dense::new(table, &format!("{at}.shared"))?) },
        })
    }

    fn forward(&self, tape: &mut Tape, pass: &Pass, n: &Var, layer: usize) -> Result<(Var, Option<Var>)> {
        let args = router::Args { tokens: pass.tokens, ..self.args };
        let bias = pass
            .params
            .buffer(&self.bias)
            .map_err(|e| hymo_tensor::Error::value("moe", "router bias", e, "a buffer of these parameters"))?;
        let routed = router::apply(tape, n, &pass.var(&self.router)?, bias, &pass.docs, args)?;
        // HAZARD 15: a second run for the gradients counts nothing.
        if !tape.recomputing() {
            pass.measured()[layer].experts = Some(routed.tally);
        }
        let y = experts::apply(tape, n, &routed.chosen, &routed.gates, &pass.var(&self.w13)?, &pass.var(&self.w2)?)?;
        let y = match &self.shared {
            Some(shared) => {
                let s = shared.forward(tape, pass, n)?;
                residual::apply(tape, &y, &s)?
            }
            None => y,
        };
        Ok((y, Some(routed.balance)))
    }
}
