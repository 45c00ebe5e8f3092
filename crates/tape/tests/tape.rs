//! The tape by itself, with two toy operations whose gradients are plain to see.

use hymo_tape::{ParamGrads, Tape, Var, checkpoint};
use hymo_tensor::{Ctx, Result, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// y = a ⊙ b for [N, C] and a parameter or variable of the same shape.
fn product(tape: &mut Tape, a: &Var, b: &Var) -> Result<Var> {
    let multiply = |ctx: &Ctx, x: &Tensor, y: &Tensor| {
        let out: Vec<f32> = x.to_vec::<f32>()?.iter().zip(y.to_vec::<f32>()?).map(|(x, y)| x * y).collect();
        Tensor::from_slice(ctx, x.dims(), &out)
    };
    let y = multiply(tape.ctx(), a.value(), b.value())?;
    let saved = (a.value().clone(), b.value().clone());
    let [y] = tape.record("product", [a, b], [y], a.value().bytes(), move |ctx, [d], [d_a, d_b]| {
        let Some(d) = d else { return Ok(()) };
        d_a.give(ctx, multiply(ctx, &d, &saved.1)?)?;
        d_b.give(ctx, multiply(ctx, &d, &saved.0)?)
    });
    Ok(y)
}

/// The sum of all elements.
fn sum(tape: &mut Tape, x: &Var) -> Result<Var> {
    let total: f32 = x.value().to_vec::<f32>()?.iter().sum();
    let (n, dims) = (x.value().numel(), x.dims().to_vec());
    let y = Tensor::scalar(tape.ctx(), total)?;
    let [y] = tape.record("sum", [x], [y], 0, move |ctx, [d], [d_x]| {
        let Some(d) = d else { return Ok(()) };
        d_x.give(ctx, Tensor::from_slice(ctx, &dims, &vec![d.item()? as f32; n])?)
    });
    Ok(y)
}

fn tensor(ctx: &Ctx, x: &[f32]) -> Tensor {
    Tensor::from_slice(ctx, &[1, x.len()], x).unwrap()
}

#[test]
fn contributions_add_in_slots_and_in_flat_gradients() {
    let ctx = Ctx::cpu().poisoned();
    let flat = Tensor::from_slice(&ctx, &[5], &[9f32, 2., 3., 9., 9.]).unwrap();
    let w = Var::param(flat.slice_flat(1, &[1, 2]).unwrap(), 0, 1);
    let grads = ParamGrads::new(vec![Tensor::from_slice(&ctx, &[5], &[0f32, 10., 0., 0., 0.]).unwrap()]).unwrap();
    let mut tape = Tape::training(&ctx, grads);
    let x = tape.leaf(tensor(&ctx, &[5., 7.]));
    // loss = Σ w x² + Σ w x: d_x = 2 w x + w, d_w = x² + x.
    let wx = product(&mut tape, &w, &x).unwrap();
    let wxx = product(&mut tape, &wx, &x).unwrap();
    let (a, b) = (sum(&mut tape, &wx).unwrap(), sum(&mut tape, &wxx).unwrap());
    let mut grads = tape.backward(&[(&a, 1.), (&b, 1.)]).unwrap();
    assert_eq!(grads.take(&x).unwrap().to_vec::<f32>().unwrap(), [22., 45.]);
    assert!(grads.take(&x).is_none(), "taken");
    let flat = grads.into_params().unwrap().flats()[0].to_vec::<f32>().unwrap();
    assert_eq!(flat, [0., 40., 56., 0., 0.], "adds to what was there and touches nothing else");
}

#[test]
fn the_same_variable_twice_in_one_operation() {
    let ctx = Ctx::cpu();
    let mut tape = Tape::new(&ctx);
    let x = tape.leaf(tensor(&ctx, &[3., -2.]));
    let y = product(&mut tape, &x, &x).unwrap();
    let loss = sum(&mut tape, &y).unwrap();
    let mut grads = tape.backward(&[(&loss, 0.5)]).unwrap();
    assert_eq!(grads.take(&x).unwrap().to_vec::<f32>().unwrap(), [3., -2.]);
}

/// What a node saved is gone once it ran, and so is every buffer when the tape is.
#[test]
fn frees_as_it_goes() {
    let ctx = Ctx::cpu();
    let live_after_first = Arc::new(Mutex::new(0));
    let before = ctx.pool().stats().live;
    {
        let mut tape = Tape::new(&ctx);
        let x = tape.leaf(tensor(&ctx, &[1.; 4096]));
        let mut y = x.clone();
        for step in 0..10 {
            y = product(&mut tape, &y, &y.clone()).unwrap();
            if step == 0 {
                let (seen, value) = (Arc::clone(&live_after_first), y.value().clone());
                [y] = tape.record("probe", [&y], [value], 0, move |ctx, [d], [d_x]| {
                    *seen.lock().unwrap() = ctx.pool().stats().live;
                    d_x.give(ctx, d.unwrap())
                });
            }
        }
        let loss = sum(&mut tape, &y).unwrap();
        drop(y);
        let whole = ctx.pool().stats().live;
        tape.backward(&[(&loss, 1.)]).unwrap();
        assert!(*live_after_first.lock().unwrap() < whole / 2, "nine of ten nodes have run and been freed");
    }
    assert_eq!(ctx.pool().stats().live, before);
}

#[test]
fn nothing_is_recorded_for_constants_or_when_off() {
    let ctx = Ctx::cpu();
    let mut tape = Tape::new(&ctx);
    let x = Var::constant(tensor(&ctx, &[1., 2.]));
    let y = product(&mut tape, &x, &x).unwrap();
    assert!(!y.tracked() && tape.saved().count() == 0);
    let mut off = Tape::off(&ctx);
    let x = off.leaf(tensor(&ctx, &[1., 2.]));
    assert!(!product(&mut off, &x, &x).unwrap().tracked());
    let loss = Var::constant(Tensor::scalar(&ctx, 1f32).unwrap());
    assert!(off.backward(&[(&loss, 1.)]).unwrap_err().to_string().contains("a variable that the tape tracks"));
}

#[test]
fn parameters_without_gradients_or_overlapping_are_errors() {
    let ctx = Ctx::cpu();
    let flat = ctx.zeros::<f32>(&[4]).unwrap();
    let w = Var::param(flat.slice_flat(0, &[1, 2]).unwrap(), 0, 0);
    let v = Var::param(flat.slice_flat(1, &[1, 2]).unwrap(), 0, 1);
    let mut tape = Tape::new(&ctx);
    let y = product(&mut tape, &w, &w).unwrap();
    let loss = sum(&mut tape, &y).unwrap();
    assert!(tape.backward(&[(&loss, 1.)]).unwrap_err().to_string().contains("Tape::training"));
    let mut tape = Tape::training(&ctx, ParamGrads::new(vec![ctx.zeros::<f32>(&[4]).unwrap()]).unwrap());
    let y = product(&mut tape, &w, &v).unwrap();
    let loss = sum(&mut tape, &y).unwrap();
    assert!(tape.backward(&[(&loss, 1.)]).unwrap_err().to_string().contains("do not overlap"));
}

/// HAZARD 15: the block runs twice, its side effects happen once; the gradients have the same bits as without a
/// checkpoint, for inputs used outside as well and for parameters.
#[test]
fn a_checkpointed_block_gives_the_same_bits() {
    let run = |checkpointed: bool| {
        let ctx = Ctx::cpu().poisoned();
        let counted = Arc::new(AtomicUsize::new(0));
        let flat = Tensor::from_slice(&ctx, &[2], &[0.1f32, 0.7]).unwrap();
        let w = Var::param(flat.slice_flat(0, &[1, 2]).unwrap(), 0, 0);
        let mut tape = Tape::training(&ctx, ParamGrads::new(vec![ctx.zeros::<f32>(&[2]).unwrap()]).unwrap());
        let x = tape.leaf(tensor(&ctx, &[0.3, 1.7]));
        let (count, weight) = (Arc::clone(&counted), w.clone());
        let block = move |tape: &mut Tape, [x]: [Var; 1]| {
            if !tape.recomputing() {
                count.fetch_add(1, SeqCst);
            }
            let y = product(tape, &x, &weight)?;
            Ok([product(tape, &y, &x)?])
        };
        let [y] = if checkpointed {
            checkpoint(&mut tape, [&x], block).unwrap()
        } else {
            block(&mut tape, [x.clone()]).unwrap()
        };
        let z = product(&mut tape, &y, &x).unwrap();
        let z = product(&mut tape, &z, &w).unwrap();
        let loss = sum(&mut tape, &z).unwrap();
        let mut grads = tape.backward(&[(&loss, 1.)]).unwrap();
        let d_x = grads.take(&x).unwrap().to_vec::<f32>().unwrap();
        let d_w = grads.into_params().unwrap().flats()[0].to_vec::<f32>().unwrap();
        (d_x, d_w, counted.load(SeqCst))
    };
    let (plain, checkpointed) = (run(false), run(true));
    assert_eq!(plain.2, 1);
    assert_eq!(plain, checkpointed);
}
