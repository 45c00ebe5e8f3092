//! Operations at the sizes of a training step, to be timed: `hymo bench ops` reads the clock, this says what there is to
//! time and how much work it is.

use crate::check::Case;
use crate::gemm;
use hymo_tape::{Grads, ParamGrads, Tape, Var};
use hymo_tensor::{Ctx, Mat, MatMut, Result, Tensor};

/// How a product's operands lie: what is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// C = A Bᵀ.
    Nt,
    /// C = A B.
    Nn,
    /// C = Aᵀ B.
    Tn,
}

/// `times` matrix products [m, k] x [k, n] that an operation cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// What is transposed.
    pub form: Form,
    /// Rows of C, columns of C, length of a sum.
    pub mnk: [usize; 3],
    /// How many of them.
    pub times: usize,
}

impl Product {
    /// 2 m n k, all times together.
    #[must_use]
    pub fn flops(&self) -> u64 {
        2 * self.times as u64 * self.mnk.iter().map(|&x| x as u64).product::<u64>()
    }

    /// All of them by the `gemm` crate on all threads, each of matrices of its own, as the operation's are: what its time is
    /// held against. The matrices lie one after the other, `times` of `m k`, `n k` and `m n` elements.
    pub fn run(&self, a: &[f32], b: &[f32], c: &mut [f32]) {
        let ([m, n, k], ctx) = (self.mnk, Ctx::cpu());
        let (a, b) = (a.chunks_exact(m * k), b.chunks_exact(n * k));
        for ((a, b), c) in a.zip(b).zip(c.chunks_exact_mut(m * n)).take(self.times) {
            let c = MatMut::new(c, m, n, n);
            match self.form {
                Form::Nt => gemm::nt(&ctx, c, Mat::new(a, m, k, k), Mat::new(b, n, k, k), false),
                Form::Nn => gemm::nn(&ctx, c, Mat::new(a, m, k, k), Mat::new(b, k, n, n), false),
                Form::Tn => gemm::tn(&ctx, c, Mat::new(a, k, m, m), Mat::new(b, k, n, n), false),
            }
        }
    }
}

/// What one direction of an operation costs at least.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Work {
    /// Its matrix products.
    pub products: Vec<Product>,
    /// Multiplications and additions, products included.
    pub flops: u64,
    /// Bytes read and written when every input is read once and every output written once.
    pub bytes: u64,
}

/// An operation at one size.
pub struct Bench {
    case: Case,
    forward: Work,
    backward: Work,
    bytes: Option<[u64; 2]>,
}

impl Bench {
    /// The inputs and the operation of a case; no products.
    #[must_use]
    pub fn new(case: Case) -> Self {
        Bench { case, forward: Work::default(), backward: Work::default(), bytes: None }
    }

    /// y = x Wᵀ with x [n, i], W [o, i], `times` of them: a product forward and two backward.
    #[must_use]
    pub fn projection(mut self, [n, i, o]: [usize; 3], times: usize) -> Self {
        self.forward.products.push(Product { form: Form::Nt, mnk: [n, o, i], times });
        self.backward.products.push(Product { form: Form::Nn, mnk: [n, i, o], times });
        self.backward.products.push(Product { form: Form::Tn, mnk: [o, i, n], times });
        self
    }

    /// A product in the forward pass.
    #[must_use]
    pub fn forward_product(mut self, form: Form, mnk: [usize; 3]) -> Self {
        self.forward.products.push(Product { form, mnk, times: 1 });
        self
    }

    /// Arithmetic that is not whole products of the `gemm` crate: forward, backward.
    #[must_use]
    pub fn flops(mut self, forward: u64, backward: u64) -> Self {
        (self.forward.flops, self.backward.flops) = (forward, backward);
        self
    }

    /// The least traffic, where it is not the sizes of inputs and outputs: forward, backward.
    #[must_use]
    pub fn bytes(mut self, forward: u64, backward: u64) -> Self {
        self.bytes = Some([forward, backward]);
        self
    }

    /// The operation and its size.
    #[must_use]
    pub fn name(&self) -> &str {
        self.case.name()
    }

    /// The inputs on a context, ready to be timed.
    ///
    /// # Errors
    /// Inputs that the operation refuses.
    pub fn trial(&self, ctx: &Ctx) -> Result<Trial<'_>> {
        let dtype = ctx.activations();
        let (params, grads) = self.case.params(ctx, dtype)?;
        let inputs = self.case.tensors(ctx, dtype, &params)?;
        let mut trial = Trial { bench: self, ctx: ctx.clone(), inputs, grads: Some(grads), run: None, seeds: None };
        trial.forward()?;
        let outs = trial.run.as_ref().map_or(&[][..], |(_, outs)| outs);
        trial.seeds = Some(self.case.seeds(ctx, outs)?);
        trial.backward()?;
        Ok(trial)
    }
}

/// An operation that can be run again and again.
pub struct Trial<'a> {
    bench: &'a Bench,
    ctx: Ctx,
    inputs: Vec<Tensor>,
    grads: Option<ParamGrads>,
    run: Option<(Tape, Vec<Var>)>,
    seeds: Option<Vec<Tensor>>,
}

impl Trial<'_> {
    /// Runs the operation forwards.
    ///
    /// # Errors
    /// What the operation refuses.
    pub fn forward(&mut self) -> Result<()> {
        self.run = None;
        let grads = self.grads.take().map_or_else(|| ParamGrads::new(Vec::new()), Ok)?;
        let mut tape = Tape::training(&self.ctx, grads);
        let vars = self.bench.case.vars(&mut tape, &self.inputs);
        let outs = self.bench.case.apply_to(&mut tape, &vars)?;
        self.run = Some((tape, outs));
        Ok(())
    }

    /// Runs backwards from the last [`Trial::forward`].
    ///
    /// # Errors
    /// What the operation refuses.
    pub fn backward(&mut self) -> Result<()> {
        let (Some((tape, outs)), Some(seeds)) = (self.run.take(), &self.seeds) else { return Ok(()) };
        let seeds = outs.into_iter().filter(Var::tracked).zip(seeds.iter().cloned()).collect();
        let grads: Grads = tape.backward_from(seeds)?;
        self.grads = grads.into_params();
        Ok(())
    }

    /// The least that the forward pass costs, then the backward pass.
    #[must_use]
    pub fn work(&self) -> [Work; 2] {
        let bench = self.bench;
        let inputs = bench.case.input_bytes();
        let outputs: u64 = self.seeds.iter().flatten().map(|t| 4 * t.numel() as u64).sum();
        let [forward, backward] = bench.bytes.unwrap_or([inputs + outputs, 2 * inputs + outputs]);
        let work = |work: &Work, bytes| {
            let products: u64 = work.products.iter().map(Product::flops).sum();
            Work { flops: work.flops + products, bytes, products: work.products.clone() }
        };
        [work(&bench.forward, forward), work(&bench.backward, backward)]
    }
}
