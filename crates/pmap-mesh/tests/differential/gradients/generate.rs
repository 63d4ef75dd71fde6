//! Random chains, with collectives only where their gradients are defined.

use crate::differential::{
    gradients::{Chain, ChainLink, ChainVariable},
    grid::{Axes, Grid, sorted},
    op::{Op, dim_index},
    random::Random,
};

const MAX_LINKS: usize = 10;
/// The largest number of items of a value on one slot.
const MAX_ITEMS: usize = 500;

/// The shape of a value, and the axes along which it varies.
#[derive(Clone, Debug)]
struct ValueKind {
    shape: Vec<usize>,
    varying: Axes,
}

/// Returns a random chain on a mesh of `slots` slots, or of any size.
pub(crate) fn chain(random: &mut Random, slots: Option<usize>) -> Chain {
    let grid = match slots {
        Some(slots) => Grid::per_slot(slots, random),
        None => Grid::random(random),
    };
    let variables: Vec<ChainVariable> =
        (0..random.between(1, 3)).map(|_| variable(random, &grid)).collect();
    let kinds = variables.iter().map(|ChainVariable { shape, varying, .. }| ValueKind {
        shape: shape.clone(),
        varying: varying.clone(),
    });
    let mut builder = ChainBuilder { kinds: kinds.collect(), links: Vec::new(), grid, random };
    for _ in 0..builder.random.between(2, MAX_LINKS) {
        builder.add_link();
    }
    let losses = builder.losses();
    Chain { grid: builder.grid, variables, links: builder.links, losses }
}

fn variable(random: &mut Random, grid: &Grid) -> ChainVariable {
    let shape = (0..random.less_than(4)).map(|_| match random.less_than(6) {
        0..=2 => grid.slots(),
        3 => 2 * grid.slots(),
        _ => random.between(1, 3),
    });
    let shape = shape.collect();
    let varying = if random.one_in(2) { grid.all() } else { sorted(&grid.some(random)) };
    ChainVariable { shape, varying, seed: random.word() }
}

struct ChainBuilder<'a> {
    random: &'a mut Random,
    grid: Grid,
    kinds: Vec<ValueKind>,
    links: Vec<ChainLink>,
}

impl ChainBuilder<'_> {
    /// Adds a random link, if its gradient is defined.
    fn add_link(&mut self) {
        let value = self.value();
        let kind = self.kinds[value].clone();
        let (link, kind) = match self.random.less_than(12) {
            0 => (ChainLink::Sin { value }, kind),
            1 => return self.add_product(value),
            2 if kind.shape.len() > 1 => {
                let last = kind.shape.len() - 1;
                let mut shape = kind.shape;
                shape.swap(0, last);
                (ChainLink::Swapped { value }, ValueKind { shape, ..kind })
            }
            3 => {
                let shape = vec![kind.shape.iter().product()];
                (ChainLink::Flat { value }, ValueKind { shape, ..kind })
            }
            _ => match self.collective(value, &kind) {
                Some(found) => found,
                None => return,
            },
        };
        self.add(link, kind);
    }

    fn add(&mut self, link: ChainLink, kind: ValueKind) {
        if kind.shape.iter().product::<usize>() <= MAX_ITEMS {
            self.links.push(link);
            self.kinds.push(kind);
        }
    }

    /// Returns the index of a random value, often a new one, so that chains become long.
    fn value(&mut self) -> usize {
        let newest = if self.random.one_in(2) { self.kinds.len().saturating_sub(2) } else { 0 };
        self.random.between(newest, self.kinds.len() - 1)
    }

    /// Adds a product with any value of the same shape; `pvary` makes both vary along the same
    /// axes.
    fn add_product(&mut self, value: usize) {
        let others: Vec<usize> = (0..self.kinds.len())
            .filter(|other| self.kinds[*other].shape == self.kinds[value].shape)
            .collect();
        let other = self.random.pick(&others);
        let left = self.varying_as(value, &self.kinds[other].varying.clone());
        let right = self.varying_as(other, &self.kinds[left].varying.clone());
        self.add(ChainLink::Product { value: left, other: right }, self.kinds[left].clone());
    }

    /// Returns a copy of the value that varies along these axes too.
    fn varying_as(&mut self, value: usize, varying: &Axes) -> usize {
        let axes: Axes = varying
            .iter()
            .copied()
            .filter(|axis| !self.kinds[value].varying.contains(axis))
            .collect();
        if axes.is_empty() {
            return value;
        }
        let shape = self.kinds[value].shape.clone();
        let varying = sorted(&[&self.kinds[value].varying[..], &axes].concat());
        self.links.push(ChainLink::Collective { op: Op::Pvary, value, axes });
        self.kinds.push(ValueKind { shape, varying });
        self.kinds.len() - 1
    }

    fn collective(&mut self, value: usize, kind: &ValueKind) -> Option<(ChainLink, ValueKind)> {
        let axes = self.grid.some(self.random);
        let group = self.grid.size(&axes);
        let op = Op::random(self.random, kind.shape.len(), group);
        let varies = |axis: &usize| kind.varying.contains(axis);
        let has_gradient = match op {
            Op::Pvary => !axes.iter().any(varies),
            _ => axes.iter().all(varies),
        };
        if !has_gradient {
            return None;
        }
        let shape = shape_after(&op, &kind.shape, group)?;
        let others = kind.varying.iter().copied().filter(|axis| !axes.contains(axis));
        Some(match op {
            Op::Pmax | Op::Pmin => (
                ChainLink::Extreme { op, value, axes: axes.clone() },
                ValueKind { shape, varying: others.collect() },
            ),
            Op::Psum | Op::Pmean => {
                let varying = others.collect();
                (ChainLink::Collective { op, value, axes }, ValueKind { shape, varying })
            }
            Op::Pvary => {
                let varying = sorted(&[&kind.varying[..], &axes].concat());
                (ChainLink::Collective { op, value, axes }, ValueKind { shape, varying })
            }
            _ => (ChainLink::Collective { op, value, axes }, ValueKind { shape, ..kind.clone() }),
        })
    }

    /// Returns one or two values, including the last one.
    fn losses(&mut self) -> Vec<(usize, ChainVariable)> {
        let mut value = vec![self.kinds.len() - 1];
        if self.random.one_in(2) {
            value.push(self.value());
        }
        value
            .into_iter()
            .map(|value: usize| {
                let ValueKind { shape, varying } = self.kinds[value].clone();
                (value, ChainVariable { shape, varying, seed: self.random.word() })
            })
            .collect()
    }
}

/// Returns the shape of a collective's result, or `None` if it is impossible.
fn shape_after(op: &Op, shape: &[usize], group: usize) -> Option<Vec<usize>> {
    let mut shape = shape.to_vec();
    let rank = shape.len();
    let cut = |shape: &mut Vec<usize>, dim: isize| {
        let dim = dim_index(dim, rank)?;
        let is_even = shape[dim].is_multiple_of(group);
        shape[dim] /= group;
        is_even.then_some(())
    };
    match *op {
        Op::AllGather { dim } => shape[dim_index(dim, rank)?] *= group,
        Op::PsumScatter { dim } => cut(&mut shape, dim)?,
        Op::AllToAll { split, concat } => {
            cut(&mut shape, split)?;
            shape[dim_index(concat, rank)?] *= group;
        }
        _ => {}
    }
    Some(shape)
}
