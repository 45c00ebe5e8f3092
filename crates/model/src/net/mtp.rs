//! A multi-token-prediction module (MATH 5.1): module k sees the hidden state of position i and the embedding of token
//! i + k, and predicts token i + k + 1.

use super::state::LayerState;
use super::{Norm, Pass, ffn, gdn};
use crate::Error;
use crate::config::{LayerKind, ModelConfig};
use crate::params::ParamTable;
use crate::store::ParamRef;
use hymo_ops::{concat, linear, residual};
use hymo_tape::{Tape, Var};
use hymo_tensor::Result;

#[derive(Debug, Clone)]
pub(crate) struct Mtp {
    enorm: Norm,
    hnorm: Norm,
    proj: ParamRef,
    norm: Norm,
    gdn: gdn::Gdn,
    ffn: Option<(Norm, ffn::Ffn)>,
    out_norm: Norm,
}

impl Mtp {
    pub(crate) fn new(table: &ParamTable, model: &ModelConfig, index: usize) -> std::result::Result<Self, Error> {
        let at = format!("mtp.{index}");
        let norm = |name: &str| Norm::new(table, &format!("{at}.{name}"), &model.norm);
        let ffn = ffn::Ffn::new(table, model, &at, LayerKind::Gdn)?;
        let ffn = ffn.map(|f| Ok::<_, Error>((norm("ffn_norm")?, f))).transpose()?;
        Ok(Mtp {
            enorm: norm("enorm")?,
            hnorm: norm("hnorm")?,
            proj: ParamRef::named(table, &format!("{at}.proj.weight"))?,
            norm: norm("norm")?,
            gdn: gdn::Gdn::new(table, model, &at)?,
            ffn,
            out_norm: norm("out_norm")?,
        })
    }

    /// h [N, D] of the depth before and e [N, D] (zero where the token lies in another document) -> h of this depth,
    /// before its output norm.
    pub(crate) fn forward(
        &self,
        tape: &mut Tape,
        pass: &Pass,
        h: &Var,
        e: &Var,
        state: Option<&mut LayerState>,
    ) -> Result<Var> {
        let (e, h) = (self.enorm.forward(tape, pass, e)?, self.hnorm.forward(tape, pass, h)?);
        let both = concat::apply(tape, &e, &h)?; // [N, 2D]
        let u = linear::apply(tape, &both, &pass.var(&self.proj)?)?;
        let n = self.norm.forward(tape, pass, &u)?;
        let mixed = self.gdn.forward(tape, pass, &n, state)?;
        let x = residual::apply(tape, &u, &mixed)?;
        let Some((norm, ffn)) = &self.ffn else { return Ok(x) };
        let n = norm.forward(tape, pass, &x)?;
        // A module's block is dense: its layer index is never used for counts.
        let (y, _) = ffn.forward(tape, pass, &n, 0)?;
        residual::apply(tape, &x, &y)
    }

    /// What the shared head reads.
    pub(crate) fn output(&self, tape: &mut Tape, pass: &Pass, h: &Var) -> Result<Var> {
        self.out_norm.forward(tape, pass, h)
    }
}
