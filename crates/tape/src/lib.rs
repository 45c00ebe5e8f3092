//! The tape: what ran, so that it can be run backwards. It knows tensors and closures and names no operation.
//!
//! A fused operation computes its outputs, then [`Tape::record`]s one closure that turns the gradients of its outputs
//! into gradients of its inputs. [`Tape::backward`] runs the closures in reverse and drops each one, and with it what
//! it saved, as soon as it has run.
//!
//! How gradients add up: the first contribution to reach a variable is written (or moved in), later ones are added.
//! Parameters live in flat buffers, one per unit ([`ParamGrads`]), and every contribution adds to them: they start at
//! zero, and micro-batches accumulate. [`checkpoint()`] keeps only a block's inputs and runs the block again when its
//! gradients are due; the sums are taken in the same order, so the result has the same bits.

mod checkpoint;
mod grads;
mod observe;
mod slot;

pub use checkpoint::checkpoint;
pub use grads::{Grads, ParamGrads};
pub use observe::Observer;
pub use slot::GradSlot;

use hymo_tensor::{Ctx, Error, Result, Tensor};
use std::sync::Arc;

/// Where a variable's gradient goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: a constant.
    Nowhere,
    /// A slot of the tape.
    Slot(usize),
    /// `numel` elements from `offset` of a unit's flat gradient.
    Flat { unit: usize, offset: usize },
}

/// A tensor with a place for its gradient.
#[derive(Debug, Clone)]
pub struct Var {
    value: Tensor,
    place: Place,
}

impl Var {
    /// A variable without a gradient.
    pub fn constant(value: Tensor) -> Self {
        Var { value, place: Place::Nowhere }
    }

    /// A parameter (or adjacent parameters seen as one matrix): `value` views the unit's flat buffer from `offset`.
    pub fn param(value: Tensor, unit: usize, offset: usize) -> Self {
        Var { value, place: Place::Flat { unit, offset } }
    }

    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The dimensions of the value.
    pub fn dims(&self) -> &[usize] {
        self.value.dims()
    }

    /// Whether a gradient is wanted.
    pub fn tracked(&self) -> bool {
        self.place != Place::Nowhere
    }

    /// Whether this is a parameter, whose gradient adds into a flat buffer ([`Tape::with_param_grads`]).
    pub fn is_param(&self) -> bool {
        matches!(self.place, Place::Flat { .. })
    }
}

type Back = Box<dyn FnOnce(&Ctx, &mut Grads) -> Result<()>>;

struct Node {
    name: &'static str,
    scope: usize,
    saved_bytes: usize,
    back: Back,
}

/// Records operations in the order in which they ran.
pub struct Tape {
    ctx: Ctx,
    nodes: Vec<Node>,
    slots: usize,
    recording: bool,
    recomputing: bool,
    params: Option<ParamGrads>,
    observer: Option<Arc<dyn Observer>>,
    scope: usize,
}

impl Tape {
    /// A tape that records; gradients of parameters, if any are used, need [`Tape::training`].
    pub fn new(ctx: &Ctx) -> Self {
        Tape {
            ctx: ctx.clone(),
            nodes: Vec::new(),
            slots: 0,
            recording: true,
            recomputing: false,
            params: None,
            observer: None,
            scope: 0,
        }
    }

    /// A tape that records and adds the parameters' gradients into `params`.
    pub fn training(ctx: &Ctx, params: ParamGrads) -> Self {
        Tape { params: Some(params), ..Tape::new(ctx) }
    }

    /// A tape that records nothing: for evaluation.
    pub fn off(ctx: &Ctx) -> Self {
        Tape { recording: false, ..Tape::new(ctx) }
    }

    /// The same tape, watched.
    #[must_use]
    pub fn observed(mut self, observer: Option<Arc<dyn Observer>>) -> Self {
        self.observer = observer;
        self
    }

    /// What follows belongs to this part of a model, as its observer counts parts. A tape begins in part 0.
    pub fn enter(&mut self, scope: usize) {
        self.scope = scope;
    }

    /// Where operations run.
    pub fn ctx(&self) -> &Ctx {
        &self.ctx
    }

    /// Whether gradients will be asked for.
    pub fn recording(&self) -> bool {
        self.recording
    }

    /// Whether this is a block's second run for its gradients: side effects (counts, statistics) belong to the first.
    pub fn recomputing(&self) -> bool {
        self.recomputing
    }

    /// A variable whose gradient [`Grads::take`] gives after the backward pass.
    pub fn leaf(&mut self, value: Tensor) -> Var {
        let place = if self.recording { self.new_slot() } else { Place::Nowhere };
        Var { value, place }
    }

    fn new_slot(&mut self) -> Place {
        self.slots += 1;
        Place::Slot(self.slots - 1)
    }

    /// Puts the outputs of an operation on the tape. `back` gets the gradients of the outputs (`None`: that output was
    /// never used; it is not called when none was) and one slot per input, in order, to write or add to.
    ///
    /// When nothing is recorded, or no input is tracked, the outputs are constants and `back` is dropped with all that
    /// it saved.
    pub fn record<const I: usize, const O: usize>(
        &mut self,
        name: &'static str,
        inputs: [&Var; I],
        outputs: [Tensor; O],
        saved_bytes: usize,
        back: impl FnOnce(&Ctx, [Option<Tensor>; O], &mut [GradSlot<'_>; I]) -> Result<()> + 'static,
    ) -> [Var; O] {
        if let Some(observer) = &self.observer {
            observer.forward(name, self.scope);
        }
        if !self.recording || !inputs.iter().any(|v| v.tracked()) {
            return outputs.map(Var::constant);
        }
        let inputs = inputs.map(|v| (v.place, v.value.shape(), v.value.dtype()));
        self.record_node(name, outputs, saved_bytes, move |ctx, grads, places| {
            let d_out = places.map(|p| grads.take_place(p));
            if d_out.iter().all(Option::is_none) {
                return Ok(());
            }
            grads.with(ctx, &inputs, |slots| back(ctx, d_out, slots))
        })
    }

    /// As [`Tape::record`] for nodes that drive the gradients themselves.
    fn record_node<const O: usize>(
        &mut self,
        name: &'static str,
        outputs: [Tensor; O],
        saved_bytes: usize,
        back: impl FnOnce(&Ctx, &mut Grads, [Place; O]) -> Result<()> + 'static,
    ) -> [Var; O] {
        let outs = outputs.map(|value| Var { value, place: self.new_slot() });
        let places = std::array::from_fn(|i| outs[i].place);
        let back: Back = Box::new(move |ctx, grads| back(ctx, grads, places));
        self.nodes.push(Node { name, scope: self.scope, saved_bytes, back });
        outs
    }

    /// Gradient slots outside a node, for an operation that computes gradients while it runs forward (a loss, whose
    /// upstream gradient is known). Fails when a parameter's gradient is wanted and the tape has none, and for a variable
    /// that the tape itself tracks: its gradient exists only during the backward pass.
    pub fn with_param_grads<const I: usize>(
        &mut self,
        vars: [&Var; I],
        f: impl FnOnce(&Ctx, &mut [GradSlot<'_>; I]) -> Result<()>,
    ) -> Result<()> {
        if vars.iter().any(|v| matches!(v.place, Place::Slot(_))) {
            return Err(Error::value("with_param_grads", "vars", "a tracked activation", "parameters and constants"));
        }
        let mut grads = Grads::new(0, self.params.take());
        let inputs = vars.map(|v| (v.place, v.value.shape(), v.value.dtype()));
        let done = grads.with(&self.ctx, &inputs, |slots| f(&self.ctx, slots));
        self.params = grads.into_params();
        done
    }

    /// Name and saved bytes of every operation recorded, in order.
    pub fn saved(&self) -> impl Iterator<Item = (&'static str, usize)> + '_ {
        self.nodes.iter().map(|n| (n.name, n.saved_bytes))
    }

    /// Runs everything backwards from scalar losses, each weighted by its seed (1 for a loss to minimise).
    pub fn backward(self, seeds: &[(&Var, f64)]) -> Result<Grads> {
        let mut start = Vec::with_capacity(seeds.len());
        for (var, seed) in seeds {
            var.value.expect("backward", "loss", &[1])?;
            let d = match var.value.dtype() {
                hymo_tensor::DType::F64 => Tensor::scalar(&self.ctx, *seed)?,
                _ => Tensor::scalar(&self.ctx, *seed as f32)?,
            };
            start.push(((*var).clone(), d));
        }
        self.backward_from(start)
    }

    /// Runs everything backwards from given gradients of given variables.
    pub fn backward_from(self, start: Vec<(Var, Tensor)>) -> Result<Grads> {
        self.backward_into(start, Vec::new())
    }

    /// As [`Tape::backward_from`], some variables' gradients already begun: contributions add to those.
    pub(crate) fn backward_into(self, start: Vec<(Var, Tensor)>, begun: Vec<(Var, Tensor)>) -> Result<Grads> {
        let mut grads = Grads::new(self.slots, self.params);
        for (var, d) in begun.into_iter().chain(start) {
            d.expect("backward", "seed", var.dims())?;
            if !var.tracked() {
                let want = "a variable that the tape tracks";
                return Err(Error::value("backward", "seed", "a constant", want));
            }
            grads.give(&self.ctx, &var, d)?;
        }
        for node in self.nodes.into_iter().rev() {
            let Some(observer) = &self.observer else {
                (node.back)(&self.ctx, &mut grads)?;
                continue;
            };
            observer.backward_begins(node.name, node.scope);
            let done = (node.back)(&self.ctx, &mut grads);
            observer.backward_ends(node.name, node.scope);
            done?;
        }
        Ok(grads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradient of an activation exists only during the backward pass.
    #[test]
    fn gradients_in_forward_are_for_parameters_only() {
        let ctx = Ctx::cpu();
        let mut tape = Tape::training(&ctx, ParamGrads::new(vec![ctx.zeros::<f32>(&[2]).unwrap()]).unwrap());
        let leaf = tape.leaf(ctx.zeros::<f32>(&[2]).unwrap());
        let param = Var::param(ctx.zeros::<f32>(&[2]).unwrap(), 0, 0);
        assert!(param.is_param() && !leaf.is_param());
        let err = tape.with_param_grads([&leaf], |_, _| Ok(())).unwrap_err().to_string();
        assert_eq!(err, "with_param_grads: vars is a tracked activation, want parameters and constants");
        tape.with_param_grads([&param], |ctx, [slot]| {
            slot.target::<f32>(ctx)?.unwrap().0.fill(1.);
            Ok(())
        })
        .unwrap();
        let params = tape.backward_from(Vec::new()).unwrap().into_params().unwrap();
        assert_eq!(params.flats()[0].to_vec::<f32>().unwrap(), [1., 1.]);
    }
}
