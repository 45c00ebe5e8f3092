//! What the optimizers remember: two flat buffers a unit, and the number of steps taken.
//!
//! The first buffer is laid out as the parameters are: NorMuon's momentum M, AdamW's m. The second holds, parameter by
//! parameter, NorMuon's mean squares of rows (one number a row) or AdamW's v (one an element), each beginning at a multiple
//! of [`RUN_ALIGN`].

use crate::{Error, Groups, Member, Method};
use hymo_model::params::RUN_ALIGN;
use hymo_tensor::{Ctx, DType, Real, Tensor};
use std::collections::BTreeMap;

/// Name of the number of steps among the saved tensors.
const STEP: &str = "optim.step";

/// Momenta and mean squares of all parameters.
#[derive(Debug)]
pub(crate) struct State {
    pub steps: u64,
    first: Vec<Tensor>,
    second: Vec<Tensor>,
    /// Place of each member's part of the second buffer.
    places: Vec<usize>,
}

/// A member's numbers in one step.
pub(crate) struct Piece<'a, T> {
    pub w: &'a mut [T],
    pub g: &'a [T],
    /// As long as `w`.
    pub first: &'a mut [T],
    /// As long as [`second_shape`] says.
    pub second: &'a mut [T],
}

/// Sizes of what a member has in the second buffer.
fn second_shape(groups: &Groups, member: &Member) -> Vec<usize> {
    match groups.group_of(member).method {
        Method::NorMuon => vec![member.rows],
        Method::AdamW => member.shape.clone(),
    }
}

impl State {
    /// Zeros for parameters that lie in `flats`, which are checked against the members' places.
    pub fn new(ctx: &Ctx, groups: &Groups, flats: &[Tensor]) -> Result<Self, Error> {
        let mut ends = vec![(0, 0); flats.len()];
        let mut places = Vec::with_capacity(groups.members().len());
        for member in groups.members() {
            let (unit, start, end) = (member.unit.index(), member.offset, member.offset + member.numel());
            let len = flats.get(unit).map_or(0, Tensor::numel);
            let (taken, second) = ends.get(unit).copied().unwrap_or_default();
            if start < taken || end > len {
                return Err(Error::Place { name: member.name.clone(), unit: member.unit, start, end, taken, len });
            }
            places.push(second);
            let more: usize = second_shape(groups, member).iter().product();
            ends[unit] = (end, (second + more).next_multiple_of(RUN_ALIGN));
        }
        let zeros = |flat: &Tensor, len: usize| ctx.zeros_real(flat.dtype(), &[len]);
        let first = flats.iter().map(|flat| zeros(flat, flat.numel())).collect::<Result<_, _>>()?;
        let second = flats.iter().zip(&ends).map(|(flat, end)| zeros(flat, end.1)).collect::<Result<_, _>>()?;
        Ok(State { steps: 0, first, second, places })
    }

    /// Whether flat buffers are laid out as the state is.
    pub fn check(&self, what: &'static str, flats: &[Tensor]) -> Result<(), Error> {
        let say = |t: Option<&Tensor>| t.map_or("no buffer".to_owned(), |t| format!("{} of {}", t.shape(), t.dtype()));
        let fits = |(own, given): (&Tensor, &Tensor)| own.dims() == given.dims() && own.dtype() == given.dtype();
        if self.first.len() == flats.len() && self.first.iter().zip(flats).all(fits) {
            return Ok(());
        }
        let units = 0..self.first.len().max(flats.len());
        let (found, want, unit) = units
            .map(|unit| (say(flats.get(unit)), say(self.first.get(unit)), unit))
            .find(|(found, want, _)| found != want)
            .unwrap_or_default();
        Err(Error::Layout { what, unit, found, want })
    }

    pub fn dtype(&self) -> DType {
        self.first.first().map_or(DType::F32, Tensor::dtype)
    }

    /// Every member's piece, in order. The layouts have been checked.
    pub fn pieces<'a, T: Real>(
        &'a mut self,
        groups: &Groups,
        params: &'a mut [Tensor],
        grads: &'a [Tensor],
    ) -> Result<Vec<Piece<'a, T>>, Error> {
        let mut pieces = Vec::with_capacity(groups.members().len());
        let mut members = groups.members().iter().zip(&self.places).peekable();
        let buffers = params.iter_mut().zip(grads).zip(self.first.iter_mut()).zip(self.second.iter_mut());
        for (unit, (((w, g), first), second)) in buffers.enumerate() {
            let g = g.flat::<T>()?;
            let [mut w, mut first, mut second] =
                [w.flat_mut::<T>()?, first.flat_mut::<T>()?, second.flat_mut::<T>()?].map(|rest| Cut { rest, at: 0 });
            while let Some((member, &place)) = members.next_if(|(m, _)| m.unit.index() == unit) {
                let (at, n) = (member.offset, member.numel());
                let more = second_shape(groups, member).iter().product();
                pieces.push(Piece {
                    w: w.cut(at, n),
                    g: &g[at..at + n],
                    first: first.cut(at, n),
                    second: second.cut(place, more),
                });
            }
        }
        Ok(pieces)
    }

    /// A member's parts of the two buffers: their units, and where each begins.
    #[cfg(feature = "cuda")]
    pub fn parts(&mut self, member: &Member, index: usize) -> ([&mut Tensor; 2], [usize; 2]) {
        let unit = member.unit.index();
        ([&mut self.first[unit], &mut self.second[unit]], [member.offset, self.places[index]])
    }

    /// Every saved tensor by name: views that share the state's memory, and the number of steps.
    pub fn tensors(&self, groups: &Groups) -> Result<Vec<(String, Tensor)>, Error> {
        let mut named = vec![(STEP.to_owned(), Tensor::from_vec(&[1], vec![self.steps as i32])?)];
        for (member, &place) in groups.members().iter().zip(&self.places) {
            let unit = member.unit.index();
            let [first, second] = names(groups, member);
            named.push((first, self.first[unit].slice_flat(member.offset, &member.shape)?));
            named.push((second, self.second[unit].slice_flat(place, &second_shape(groups, member))?));
        }
        Ok(named)
    }

    /// Takes saved tensors over, all of them or none.
    pub fn load<'t>(
        &mut self,
        groups: &Groups,
        saved: impl IntoIterator<Item = (&'t str, &'t Tensor)>,
    ) -> Result<(), Error> {
        let mut problems = Vec::new();
        let mut by_name = BTreeMap::new();
        for (name, tensor) in saved {
            if by_name.insert(name, tensor).is_some() {
                problems.push(format!("{name} is there twice"));
            }
        }
        let wanted = self.tensors(groups)?;
        let mut found = Vec::with_capacity(wanted.len());
        for (name, own) in &wanted {
            match by_name.remove(name.as_str()) {
                None => problems.push(format!("{name} is missing")),
                Some(tensor) => match wrong(name, own, tensor)? {
                    Some(what) => problems.push(format!("{name} {what}")),
                    None => found.push(tensor),
                },
            }
        }
        problems.extend(by_name.keys().map(|name| format!("{name} belongs to no parameter")));
        drop(wanted);
        if !problems.is_empty() {
            return Err(Error::State { problems });
        }
        match self.dtype() {
            DType::F64 => self.take_over::<f64>(groups, &found),
            _ => self.take_over::<f32>(groups, &found),
        }
    }

    /// Copies checked tensors in, in the order of [`State::tensors`].
    fn take_over<T: Real>(&mut self, groups: &Groups, found: &[&Tensor]) -> Result<(), Error> {
        // A view in someone's hands makes writing an error: before the first write, so that it is all or nothing.
        for flat in self.first.iter_mut().chain(&mut self.second) {
            flat.expect_writable("flat_mut")?;
        }
        let mut found = found.iter();
        let mut next = || found.next().expect("invariant: one tensor for each that the state has");
        self.steps = u64::try_from(next().to_vec::<i32>()?[0]).unwrap_or(0);
        for (member, &place) in groups.members().iter().zip(&self.places) {
            let unit = member.unit.index();
            for (flat, at) in [(&mut self.first[unit], member.offset), (&mut self.second[unit], place)] {
                flat.write_at(at, &next().to_vec::<T>()?)?;
            }
        }
        Ok(())
    }
}

/// Names of a member's saved tensors.
fn names(groups: &Groups, member: &Member) -> [String; 2] {
    let kinds = match groups.group_of(member).method {
        Method::NorMuon => ["momentum", "row_moment"],
        Method::AdamW => ["first_moment", "second_moment"],
    };
    kinds.map(|kind| format!("optim.{kind}.{}", member.name))
}

/// What about a saved tensor does not fit the state's own.
fn wrong(name: &str, own: &Tensor, saved: &Tensor) -> Result<Option<String>, Error> {
    if (own.dims(), own.dtype()) != (saved.dims(), saved.dtype()) || !saved.is_contiguous() {
        let kind = |t: &Tensor| format!("{} of {}", t.shape(), t.dtype());
        return Ok(Some(format!("is {}, this model's is {}", kind(saved), kind(own))));
    }
    if name == STEP {
        let steps = saved.to_vec::<i32>()?[0];
        return Ok((steps < 0).then(|| format!("is {steps}")));
    }
    let squares = !name.starts_with("optim.momentum.") && !name.starts_with("optim.first_moment.");
    fn bad<T: Real>(t: &Tensor, squares: bool) -> Result<bool, Error> {
        Ok(t.to_vec::<T>()?.iter().any(|x| !x.is_finite() || (squares && *x < T::zero())))
    }
    let bad = match saved.dtype() {
        DType::F64 => bad::<f64>(saved, squares)?,
        _ => bad::<f32>(saved, squares)?,
    };
    let kind = if squares { "finite and not negative" } else { "finite" };
    Ok(bad.then(|| format!("has numbers that are not {kind}")))
}

/// Hands out parts of a slice from left to right.
struct Cut<'a, T> {
    rest: &'a mut [T],
    at: usize,
}

impl<'a, T> Cut<'a, T> {
    fn cut(&mut self, from: usize, n: usize) -> &'a mut [T] {
        let (mine, rest) = std::mem::take(&mut self.rest)[from - self.at..].split_at_mut(n);
        (self.rest, self.at) = (rest, from + n);
        mine
    }
}
