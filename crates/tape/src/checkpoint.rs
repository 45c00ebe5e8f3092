use crate::{Grads, ParamGrads, Place, Tape, Var};
use hymo_tensor::{Ctx, Result, Tensor};

/// Runs `block` without saving anything but its inputs, and runs it again when its gradients are due.
///
/// `block` must compute the same outputs both times; it can see that it runs again by [`Tape::recomputing`] (HAZARD
/// 15: counts are taken once). Bit-equal to running the block directly: the gradients of the inputs go on from the
/// sums begun outside, and the parameters' flat gradients are lent to the inner tape.
pub fn checkpoint<const I: usize, const O: usize>(
    tape: &mut Tape,
    inputs: [&Var; I],
    block: impl Fn(&mut Tape, [Var; I]) -> Result<[Var; O]> + 'static,
) -> Result<[Var; O]> {
    if !tape.recording {
        return block(tape, inputs.map(Clone::clone));
    }
    let mut quiet = Tape::off(&tape.ctx);
    (quiet.recomputing, quiet.scope) = (tape.recomputing, tape.scope);
    quiet.observer.clone_from(&tape.observer);
    let (observer, scope) = (tape.observer.clone(), tape.scope);
    let outputs = block(&mut quiet, inputs.map(|v| Var::constant(v.value.clone())))?.map(|v| v.value);
    let inputs = inputs.map(Clone::clone);
    let saved = inputs.iter().map(|v| v.value.bytes()).sum();
    Ok(tape.record_node("checkpoint", outputs, saved, move |ctx, grads, places| {
        let d_out = places.map(|p| grads.take_place(p));
        if d_out.iter().all(Option::is_none) {
            return Ok(());
        }
        let params = grads.take_params();
        let mut inner = Tape { recomputing: true, params, observer, scope, ..Tape::new(ctx) };
        // Parameters keep their place in the flat gradient; only the tape's own slots change hands.
        let leaves = std::array::from_fn(|i| match inputs[i].place {
            Place::Slot(_) => inner.leaf(inputs[i].value.clone()),
            _ => inputs[i].clone(),
        });
        let outs = block(&mut inner, leaves.clone())?;
        let params = finish(ctx, inner, outs, d_out, &leaves, &inputs, grads)?;
        grads.put_params(params);
        Ok(())
    }))
}

/// The inner backward pass: gradients begun outside are moved in and moved back.
fn finish<const I: usize, const O: usize>(
    ctx: &Ctx,
    inner: Tape,
    outs: [Var; O],
    d_out: [Option<Tensor>; O],
    leaves: &[Var; I],
    inputs: &[Var; I],
    grads: &mut Grads,
) -> Result<Option<ParamGrads>> {
    let mut begun = Vec::new();
    for (leaf, input) in leaves.iter().zip(inputs) {
        if let Some(d) = grads.take(input) {
            begun.push((leaf.clone(), d));
        }
    }
    let start = outs.into_iter().zip(d_out).filter_map(|(v, d)| Some((v, d?))).filter(|(v, _)| v.tracked()).collect();
    let mut inner = inner.backward_into(start, begun)?;
    for (leaf, input) in leaves.iter().zip(inputs) {
        if let Some(d) = inner.take(leaf) {
            grads.give(ctx, input, d)?;
        }
    }
    Ok(inner.into_params())
}
