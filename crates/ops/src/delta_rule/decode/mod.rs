//! The recurrence over runs of tokens of many sequences, for decoding: each run goes on from its own state, moves it on in
//! place or, to be taken back, leaves it and keeps a [`Trace`].
//!
//! A token's output has the same bits whatever stands beside it: alone, in a run of any length, among other sequences.
//! [`commit`] gives the state the bits that stepping would have, since it repeats the writes of the kept tokens and nothing
//! else: MATH 5.5's formula, one token after the other.

mod token;

use super::cpu::unit;
use super::{Args, OP};
use hymo_tensor::{Ctx, Error, Mat, MatMut, Result, Tensor, each};
use std::ops::Range;
use token::{Again, Step};

/// What tokens wrote: enough to write some of them again.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Heads in turn, tokens in each: e^g, then k `[K]`, then u `[V]`.
    writes: Vec<f32>,
    tokens: usize,
}

impl Trace {
    /// Tokens written.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * self.writes.len()
    }

    fn fit(&mut self, tokens: usize, args: Args) {
        self.tokens = tokens;
        self.writes.resize(args.n_heads * tokens * record(args), 0.);
    }
}

/// Numbers that [`Trace`] keeps of a token and head.
fn record(args: Args) -> usize {
    1 + args.d_k + args.d_v
}

/// What becomes of a run's state.
#[derive(Debug)]
pub enum Then<'a> {
    /// It moves on past the run's last token.
    Move,
    /// It stays, and what the tokens wrote is kept for [`commit`].
    Keep(&'a mut Trace),
    /// It stays, and the run leaves nothing.
    Forget,
}

/// Consecutive tokens of one sequence.
#[derive(Debug)]
pub struct Run<'a> {
    /// Which rows they are. Runs come in order and leave no row out.
    pub rows: Range<usize>,
    /// [H, K, V] before the first of them.
    pub state: &'a mut [f32],
    /// What becomes of it.
    pub then: Then<'a>,
}

/// o [N, H V] of qkv [N, 2 H K + H V] (after the convolution), g and beta [N, H], each run from its own state. f32.
///
/// # Errors
/// Shapes that do not fit; runs that are not all rows in order; a state of another size.
pub fn advance(ctx: &Ctx, [qkv, g, beta]: [&Tensor; 3], runs: Vec<Run<'_>>, args: Args) -> Result<Tensor> {
    let (n, heads) = (qkv.rows(), args.n_heads);
    qkv.expect(OP, "qkv", &[n, 2 * heads * args.d_k + heads * args.d_v])?;
    g.expect(OP, "g", &[n, heads])?;
    beta.expect(OP, "beta", &[n, heads])?;
    check(&runs, n, args)?;
    let mut o = ctx.empty::<f32>(&[n, heads * args.d_v])?;
    let inputs = [qkv.view::<f32>()?, g.view::<f32>()?, beta.view::<f32>()?];
    let mut rest = o.view_mut::<f32>()?;
    let mut tasks = Vec::with_capacity(runs.len() * heads);
    for Run { rows, state, then } in runs {
        let mine;
        (mine, rest) = rest.split_rows(rows.len());
        let (moves, mut writes) = match then {
            Then::Move => (true, None),
            Then::Forget => (false, None),
            Then::Keep(trace) => {
                trace.fit(rows.len(), args);
                (false, Some(trace.writes.chunks_mut(rows.len() * record(args))))
            }
        };
        let states = state.chunks_mut(args.d_k * args.d_v);
        for (h, (state, o)) in states.zip(mine.grid(rows.len().max(1), args.d_v)).enumerate() {
            let writes = writes.as_mut().and_then(Iterator::next);
            tasks.push((Head { inputs, rows: rows.clone(), h, args }, state, moves, writes, o));
        }
    }
    each!(tasks, |_, (head, state, moves, writes, o)| {
        if moves {
            head.run(state, writes, o);
        } else {
            head.run(&mut state.to_vec(), writes, o);
        }
    });
    Ok(o)
}

fn check(runs: &[Run<'_>], n: usize, args: Args) -> Result<()> {
    let mut at = 0;
    for run in runs {
        let size = args.n_heads * args.d_k * args.d_v;
        if run.rows.start != at || run.rows.is_empty() || run.state.len() != size {
            let got = format!("rows {:?} with a state of {}", run.rows, run.state.len());
            return Err(Error::value(OP, "runs", got, format!("rows from {at} and a state of {size}")));
        }
        at = run.rows.end;
    }
    match at == n {
        true => Ok(()),
        false => Err(Error::value(OP, "runs", format!("{at} rows"), format!("all {n}"))),
    }
}

/// One head of one run.
struct Head<'a> {
    inputs: [Mat<'a, f32>; 3],
    rows: Range<usize>,
    h: usize,
    args: Args,
}

impl Head<'_> {
    #[inline(always)]
    fn run(&self, state: &mut [f32], writes: Option<&mut [f32]>, mut o: MatMut<'_, f32>) {
        let Args { n_heads, d_k, d_v, qk_l2norm, .. } = self.args;
        let [qkv, g, beta] = self.inputs;
        let scale = ((d_k as f64).sqrt().recip()) as f32;
        let mut own = vec![0.; d_k + record(self.args)];
        let (q, own) = own.split_at_mut(d_k);
        let mut kept = writes.map(|w| w.chunks_mut(record(self.args)));
        for (t, row) in self.rows.clone().enumerate() {
            let write = match &mut kept {
                Some(kept) => kept.next().unwrap_or_default(),
                None => &mut *own,
            };
            let (alpha, write) = write.split_first_mut().expect("invariant: a record is never empty");
            let (k, u) = write.split_at_mut(d_k);
            let x = qkv.row(row);
            unit(q, &x[self.h * d_k..][..d_k], qk_l2norm, scale);
            unit(k, &x[(n_heads + self.h) * d_k..][..d_k], qk_l2norm, 1.);
            *alpha = g.row(row)[self.h].exp();
            let v = &x[2 * n_heads * d_k + self.h * d_v..][..d_v];
            let beta = beta.row(row)[self.h];
            pulp::Arch::new().dispatch(Step { state, q, k, v, alpha: *alpha, beta, u, o: o.row_mut(t) });
        }
    }
}

/// Moves a state [H, K, V] on past the first `n` tokens of a trace.
///
/// # Errors
/// A trace of fewer tokens, or a state that it was not taken from.
pub fn commit(state: &mut [f32], trace: &Trace, n: usize, args: Args) -> Result<()> {
    let Args { n_heads, d_k, d_v, .. } = args;
    if n > trace.tokens || state.len() != n_heads * d_k * d_v {
        let got = format!("{n} tokens onto a state of {}", state.len());
        return Err(Error::value(OP, "commit", got, format!("up to {} onto {}", trace.tokens, n_heads * d_k * d_v)));
    }
    if n == 0 {
        return Ok(());
    }
    let heads = state.chunks_mut(d_k * d_v).zip(trace.writes.chunks(trace.tokens * record(args)));
    each!(heads.collect(), |_, (state, writes)| {
        for write in writes.chunks_exact(record(args)).take(n) {
            let (alpha, (k, u)) = (write[0], write[1..].split_at(d_k));
            pulp::Arch::new().dispatch(Again { state, k, u, alpha });
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Noise, rms_error, values};

    const ARGS: Args = Args { n_heads: 2, d_k: 9, d_v: 70, chunk: 64, qk_l2norm: true };
    const STATE: usize = 2 * 9 * 70;

    fn inputs(ctx: &Ctx, n: usize) -> [Tensor; 3] {
        let mut noise = Noise::new(5);
        let width = 2 * 2 * 9 + 2 * 70;
        let mut tensor = |cols: usize, of: &dyn Fn(f64) -> f64| {
            let x: Vec<f32> = noise.normals(n * cols).into_iter().map(|x| of(x) as f32).collect();
            Tensor::from_slice(ctx, &[n, cols], &x).unwrap()
        };
        [tensor(width, &|x| x), tensor(2, &|x| -x.abs()), tensor(2, &crate::act::sigmoid)]
    }

    fn rows(x: &[Tensor; 3], range: Range<usize>) -> [Tensor; 3] {
        [0, 1, 2].map(|i| x[i].slice_rows(range.clone()).unwrap())
    }

    fn run(ctx: &Ctx, x: &[Tensor; 3], state: &mut [f32], then: Then<'_>) -> Vec<f32> {
        let runs = vec![Run { rows: 0..x[0].rows(), state, then }];
        advance(ctx, [&x[0], &x[1], &x[2]], runs, ARGS).unwrap().to_vec().unwrap()
    }

    /// HAZARD 4, 6, 7: the recurrence over runs is the chunk form, from a state and to a state.
    #[test]
    fn runs_match_the_chunk_form() {
        let ctx = Ctx::cpu().poisoned();
        let x = inputs(&ctx, 100);
        let docs = crate::Docs::whole(1, 100);
        let whole = super::super::Inputs { qkv: &x[0], g: &x[1], beta: &x[2], h0: None, docs: &docs };
        let (o, h, _) = super::super::forward(&ctx, whole, ARGS, false).unwrap();
        let mut state = vec![0.; STATE];
        let got = run(&ctx, &x, &mut state, Then::Move);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        assert!(rms_error(&wide(&got), &values(&o).unwrap()) < 1e-6);
        assert!(rms_error(&wide(&state), &values(&h).unwrap()) < 1e-6);
    }

    /// HAZARD 4, 17, 20: any cut into runs, any company and any number of taken-back tokens leave the same bits.
    #[test]
    fn cuts_company_and_taking_back_change_no_bit() {
        let ctx = Ctx::cpu().poisoned();
        let x = inputs(&ctx, 12);
        let mut state = vec![0.; STATE];
        let want = run(&ctx, &x, &mut state, Then::Move);
        for cut in 1..12 {
            let mut own = vec![0.; STATE];
            let first = run(&ctx, &rows(&x, 0..cut), &mut own, Then::Move);
            let before = own.clone();
            let (mut trace, mut other) = (Trace::default(), vec![0.5; STATE]);
            let rest = 12 - cut;
            // The rest beside another sequence, forgotten, then kept, then written.
            let both = [0, 1, 2].map(|i| x[i].slice_rows(cut..12).unwrap());
            let again = run(&ctx, &both, &mut own, Then::Forget);
            assert_eq!(own, before);
            let runs = vec![
                Run { rows: 0..cut, state: &mut other, then: Then::Move },
                Run { rows: cut..12, state: &mut own, then: Then::Keep(&mut trace) },
            ];
            let o = advance(&ctx, [&x[0], &x[1], &x[2]], runs, ARGS).unwrap();
            assert_eq!(own, before);
            let second = o.slice_rows(cut..12).unwrap().to_vec::<f32>().unwrap();
            assert_eq!((&second, trace.tokens()), (&again, rest));
            assert_eq!([first, second].concat(), want);
            for n in 0..=rest {
                let (mut one, mut two) = (before.clone(), before.clone());
                commit(&mut one, &trace, n, ARGS).unwrap();
                if n > 0 {
                    run(&ctx, &rows(&x, cut..cut + n), &mut two, Then::Move);
                }
                assert_eq!(one, two, "{n} of {rest}");
            }
            assert!(commit(&mut own, &trace, rest + 1, ARGS).is_err());
        }
    }

    #[test]
    fn says_what_does_not_fit() {
        let ctx = Ctx::cpu();
        let x = inputs(&ctx, 3);
        let (mut state, mut small) = (vec![0.; STATE], vec![0.; 3]);
        let says = |rows: Range<usize>, state: &mut [f32]| {
            let runs = vec![Run { rows, state, then: Then::Move }];
            advance(&ctx, [&x[0], &x[1], &x[2]], runs, ARGS).unwrap_err().to_string()
        };
        assert!(says(0..2, &mut state).contains("2 rows, want all 3"));
        assert!(says(1..3, &mut state).contains("want rows from 0"));
        assert!(says(0..3, &mut small).contains("a state of 3"));
    }
}
