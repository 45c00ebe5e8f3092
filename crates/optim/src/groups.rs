//! Which optimizer moves which parameter, and how: groups that cover every parameter exactly once.
//!
//! The groups are declared parameter by parameter in the model's table, never found by looking at shapes (HAZARD 16).

use crate::Error;
use hymo_model::config::{Matrices, OptimConfig};
use hymo_model::params::Part;
use hymo_model::{OptimGroup, ParamSpec, Unit};
use std::collections::BTreeMap;
use std::fmt;

/// An optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Orthogonalised momentum: [`crate::normuon`].
    NorMuon,
    /// Cautious AdamW: [`crate::adamw`].
    AdamW,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Method::NorMuon => "NorMuon",
            Method::AdamW => "Cautious AdamW",
        })
    }
}

/// Parameters that are moved alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Name in tables and messages.
    pub name: String,
    /// Their optimizer.
    pub method: Method,
    /// Factor on the learning rate.
    pub lr_mult: f64,
    /// Weight decay; a step takes the part `lr * lr_mult * weight_decay` of a weight.
    pub weight_decay: f64,
    /// Their names.
    pub params: Vec<String>,
}

/// A parameter with all that the optimizer needs to know of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Name of the parameter.
    pub name: String,
    /// Rows (outputs).
    pub rows: usize,
    /// Elements of a row; 1 for a vector.
    pub cols: usize,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Unit in whose flat buffer it lies.
    pub unit: Unit,
    /// Its first element there.
    pub offset: usize,
    /// Index of its group.
    pub group: usize,
    /// Blocks of rows that are orthogonalised apart; 1 takes the matrix as one.
    pub blocks: usize,
}

impl Member {
    /// Elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.rows * self.cols
    }
}

/// All groups, checked: every parameter is in exactly one. Displays as a table, layers of the same kind in one line.
#[derive(Debug, Clone, PartialEq)]
pub struct Groups {
    groups: Vec<Group>,
    members: Vec<Member>,
}

impl Groups {
    /// The groups that the parameter table declares, with a configuration's numbers.
    ///
    /// # Errors
    /// As [`Groups::new`].
    pub fn declared(specs: &[ParamSpec], config: &OptimConfig) -> Result<Self, Error> {
        let group = |name: &str, method, weight_decay| {
            let lr_mult = match method {
                Method::NorMuon => config.normuon.lr_mult,
                Method::AdamW => config.adamw.lr_mult,
            };
            Group { name: name.to_owned(), method, lr_mult, weight_decay, params: Vec::new() }
        };
        let embedding = if config.decay_embedding { config.weight_decay } else { 0.0 };
        let hidden = match config.matrices {
            Matrices::NorMuon => Method::NorMuon,
            Matrices::AdamW => Method::AdamW,
        };
        let mut groups = vec![
            group("hidden", hidden, config.weight_decay),
            group("embedding", Method::AdamW, embedding),
            group("decayed", Method::AdamW, config.weight_decay),
            group("free", Method::AdamW, 0.0),
        ];
        for spec in specs {
            let index = match spec.group {
                OptimGroup::NorMuon => 0,
                OptimGroup::AdamW { decay: true } if spec.part == Part::Embedding => 1,
                OptimGroup::AdamW { decay: true } => 2,
                OptimGroup::AdamW { decay: false } => 3,
            };
            groups[index].params.push(spec.name.clone());
        }
        groups.retain(|g| !g.params.is_empty());
        Groups::new(specs, groups, config.normuon.split_heads)
    }

    /// Groups of one's own. `split_heads` orthogonalises heads apart where the table declares them.
    ///
    /// # Errors
    /// [`Error::NotCovered`], [`Error::CoveredTwice`] and [`Error::UnknownParam`] unless each parameter is in one group;
    /// [`Error::NotOrthogonal`] for NorMuon on a vector, on the embedding, or on heads that do not divide the rows.
    pub fn new(specs: &[ParamSpec], groups: Vec<Group>, split_heads: bool) -> Result<Self, Error> {
        let known: BTreeMap<&str, &ParamSpec> = specs.iter().map(|s| (s.name.as_str(), s)).collect();
        let mut group_of: BTreeMap<&str, usize> = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            for name in &group.params {
                if !known.contains_key(name.as_str()) {
                    return Err(Error::UnknownParam { group: group.name.clone(), name: name.clone() });
                }
                if let Some(first) = group_of.insert(name, index) {
                    let [first, second] = [first, index].map(|g| groups[g].name.clone());
                    return Err(Error::CoveredTwice { name: name.clone(), first, second });
                }
            }
        }
        let mut members = Vec::with_capacity(specs.len());
        for spec in specs {
            let covered = group_of.get(spec.name.as_str());
            let &group = covered.ok_or_else(|| Error::NotCovered { name: spec.name.clone() })?;
            members.push(member(spec, group, &groups[group], split_heads)?);
        }
        members.sort_by_key(|m| (m.unit, m.offset));
        Ok(Groups { groups, members })
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Every parameter, by unit and place.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The group of a member.
    #[must_use]
    pub fn group_of(&self, member: &Member) -> &Group {
        &self.groups[member.group]
    }
}

fn member(spec: &ParamSpec, index: usize, group: &Group, split_heads: bool) -> Result<Member, Error> {
    let wrong = |why: &str| {
        Err(Error::NotOrthogonal { group: group.name.clone(), name: spec.name.clone(), why: why.to_owned() })
    };
    let mut blocks = 1;
    if group.method == Method::NorMuon {
        if spec.shape.len() != 2 {
            return wrong("is no matrix, and only a matrix can be orthogonalised");
        }
        if spec.part == Part::Embedding {
            return wrong("is the embedding, whose rows are words and not outputs of one map");
        }
        blocks = spec.head_blocks.filter(|_| split_heads).unwrap_or(1);
        if blocks == 0 || spec.rows() % blocks != 0 {
            return wrong(&format!("has {} rows, which {blocks} heads do not divide", spec.rows()));
        }
    }
    Ok(Member {
        name: spec.name.clone(),
        rows: spec.rows(),
        cols: spec.cols(),
        shape: spec.shape.clone(),
        unit: spec.unit,
        offset: spec.offset,
        group: index,
        blocks,
    })
}

/// A line of the printed table: parameters that differ in numbers within their names only.
struct Line<'a> {
    pattern: String,
    member: &'a Member,
    tensors: usize,
}

impl Groups {
    fn lines(&self) -> Vec<Line<'_>> {
        let mut lines: Vec<Line<'_>> = Vec::new();
        let mut found = BTreeMap::new();
        for member in &self.members {
            let star = |part: &'_ str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
            let pattern = member.name.split('.').map(star).collect::<Vec<_>>().join(".");
            let key = (member.group, pattern.clone(), member.shape.clone(), member.blocks);
            let at = *found.entry(key).or_insert(lines.len());
            match lines.get_mut(at) {
                Some(line) => line.tensors += 1,
                None => lines.push(Line { pattern, member, tensors: 1 }),
            }
        }
        lines.sort_by_key(|l| l.member.group);
        lines
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        let width = lines.iter().map(|l| l.pattern.len()).max().unwrap_or(0).max(9);
        let head = ["parameter", "group", "optimizer", "shape", "split", "lr x", "decay", "tensors", "numbers"];
        let [name, group, method, shape, split, lr, decay, tensors, numbers] = head;
        write!(f, "{name:width$}  {group:9}  {method:14}  {shape:>13}  {split:>5}  {lr:>5}  {decay:>5}")?;
        writeln!(f, "  {tensors:>7}  {numbers:>13}")?;
        for Line { pattern, member, tensors } in lines {
            let Group { name: group, method, lr_mult, weight_decay, .. } = self.group_of(member);
            let shape = member.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
            let split = match (method, member.blocks) {
                (Method::AdamW, _) => "-".to_owned(),
                (Method::NorMuon, 1) => "whole".to_owned(),
                (Method::NorMuon, blocks) => blocks.to_string(),
            };
            write!(f, "{pattern:width$}  {group:9}  {method:14}  {shape:>13}  {split:>5}  {lr_mult:>5}")?;
            writeln!(f, "  {weight_decay:>5}  {tensors:>7}  {:>13}", tensors * member.numel())?;
        }
        let (tensors, numbers) = (self.members.len(), self.members.iter().map(Member::numel).sum::<usize>());
        write!(f, "{tensors} tensors, {numbers} numbers, each in one group")
    }
}
