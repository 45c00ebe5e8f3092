//! QK-clip: attention logits that grow without bound are scaled down at their source (MATH 2.6).

use crate::{Error, Trainer};
use hymo_model::LayerStats;

impl Trainer {
    /// Scales the queries of heads whose largest logit of the step was above `train.qk_clip` down to it. Logits are linear
    /// in a head's rows of `W_q`, and those belong to no other head, also where keys are shared.
    pub(crate) fn clip_queries(&mut self, stats: &[LayerStats]) -> Result<(), Error> {
        let limit = self.config.train.qk_clip;
        if limit == 0. {
            return Ok(());
        }
        for (layer, stats) in stats.iter().enumerate() {
            for (head, &max) in stats.max_logits.iter().enumerate().filter(|(_, max)| **max > limit) {
                self.scale_queries(layer, head, stats.max_logits.len(), (limit / max) as f32)?;
            }
        }
        Ok(())
    }

    fn scale_queries(&mut self, layer: usize, head: usize, n_heads: usize, by: f32) -> Result<(), Error> {
        let name = format!("layers.{layer}.mla.q.weight");
        let spec = self.params.table().get(&name).ok_or(hymo_model::Error::UnknownParam { name })?;
        let (unit, range) = (spec.unit.index(), spec.range());
        let rows = range.len() / n_heads; // [d_qk, D] of one head, in a row
        let at = range.start + head * rows;
        let flat = &mut self.params.flats_mut()[unit];
        let mut own = flat.slice_flat(at, &[rows])?.to_vec::<f32>()?;
        own.iter_mut().for_each(|w| *w *= by);
        Ok(flat.write_at(at, &own)?)
    }
}
