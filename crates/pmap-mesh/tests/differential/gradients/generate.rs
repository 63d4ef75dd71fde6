//! Random chains in which collectives stand where their gradients have a meaning.

use crate::differential::{
    gradients::{Chain, Link, Variable},
    grid::{Axes, Grid, sorted},
    op::{Op, place_of},
    random::Random,
};

const MAX_LINKS: usize = 10;
/// The most items of one value on one slot.
const MAX_ITEMS: usize = 500;

/// What is known of a value without computing it: its shape, and along which axes it varies.
#[derive(Clone, Debug)]
struct Kind {
    shape: Vec<usize>,
    varying: Axes,
}

/// A random chain on a mesh of so many slots, or of any number.
pub(crate) fn chain(random: &mut Random, slots: Option<usize>) -> Chain {
    let grid = match slots {
        Some(slots) => Grid::of_slots(slots, random),
        None => Grid::random(random),
    };
    let variables: Vec<Variable> =
        (0..random.within(1, 3)).map(|_| variable(random, &grid)).collect();
    let kinds = variables.iter().map(|Variable { shape, varying, .. }| Kind {
        shape: shape.clone(),
        varying: varying.clone(),
    });
    let mut maker = Maker { kinds: kinds.collect(), links: Vec::new(), grid, random };
    for _ in 0..maker.random.within(2, MAX_LINKS) {
        maker.add_link();
    }
    let losses = maker.losses();
    Chain { grid: maker.grid, variables, links: maker.links, losses }
}

fn variable(random: &mut Random, grid: &Grid) -> Variable {
    let shape = (0..random.below(4)).map(|_| match random.below(6) {
        0..=2 => grid.slots(),
        3 => 2 * grid.slots(),
        _ => random.within(1, 3),
    });
    let shape = shape.collect();
    let varying = if random.one_in(2) { grid.all() } else { sorted(&grid.some(random)) };
    Variable { shape, varying, seed: random.word() }
}

struct Maker<'a> {
    random: &'a mut Random,
    grid: Grid,
    kinds: Vec<Kind>,
    links: Vec<Link>,
}

impl Maker<'_> {
    /// Adds a link, if the first that comes to mind has a meaning.
    fn add_link(&mut self) {
        let of = self.value();
        let kind = self.kinds[of].clone();
        let (link, kind) = match self.random.below(12) {
            0 => (Link::Sin { of }, kind),
            1 => return self.add_product(of),
            2 if kind.shape.len() > 1 => {
                let last = kind.shape.len() - 1;
                let mut shape = kind.shape;
                shape.swap(0, last);
                (Link::Swapped { of }, Kind { shape, ..kind })
            }
            3 => {
                let shape = vec![kind.shape.iter().product()];
                (Link::Flat { of }, Kind { shape, ..kind })
            }
            _ => match self.collective(of, &kind) {
                Some(found) => found,
                None => return,
            },
        };
        self.add(link, kind);
    }

    fn add(&mut self, link: Link, kind: Kind) {
        if kind.shape.iter().product::<usize>() <= MAX_ITEMS {
            self.links.push(link);
            self.kinds.push(kind);
        }
    }

    /// The newest values more often, so that chains become long.
    fn value(&mut self) -> usize {
        let newest = if self.random.one_in(2) { self.kinds.len().saturating_sub(2) } else { 0 };
        self.random.within(newest, self.kinds.len() - 1)
    }

    /// A product with any value of the same shape; `pvary` makes both vary along the same axes.
    fn add_product(&mut self, of: usize) {
        let same = |other: &usize| self.kinds[*other].shape == self.kinds[of].shape;
        let others: Vec<usize> = (0..self.kinds.len()).filter(same).collect();
        let by = self.random.pick(&others);
        let left = self.varying_as(of, &self.kinds[by].varying.clone());
        let right = self.varying_as(by, &self.kinds[left].varying.clone());
        self.add(Link::Product { of: left, by: right }, self.kinds[left].clone());
    }

    /// The value, which varies along these axes too.
    fn varying_as(&mut self, of: usize, varying: &Axes) -> usize {
        let axes: Axes =
            varying.iter().copied().filter(|axis| !self.kinds[of].varying.contains(axis)).collect();
        if axes.is_empty() {
            return of;
        }
        let shape = self.kinds[of].shape.clone();
        let varying = sorted(&[&self.kinds[of].varying[..], &axes].concat());
        self.links.push(Link::Collective { op: Op::Pvary, of, axes });
        self.kinds.push(Kind { shape, varying });
        self.kinds.len() - 1
    }

    fn collective(&mut self, of: usize, kind: &Kind) -> Option<(Link, Kind)> {
        let axes = self.grid.some(self.random);
        let group = self.grid.size(&axes);
        let op = Op::random(self.random, kind.shape.len(), group);
        let varies = |axis: &usize| kind.varying.contains(axis);
        let is_meant = match op {
            Op::Pvary => !axes.iter().any(varies),
            _ => axes.iter().all(varies),
        };
        if !is_meant {
            return None;
        }
        let shape = shape_after(&op, &kind.shape, group)?;
        let others = kind.varying.iter().copied().filter(|axis| !axes.contains(axis));
        Some(match op {
            Op::Pmax | Op::Pmin => (
                Link::Extreme { op, of, axes: axes.clone() },
                Kind { shape, varying: others.collect() },
            ),
            Op::Psum | Op::Pmean => {
                let varying = others.collect();
                (Link::Collective { op, of, axes }, Kind { shape, varying })
            }
            Op::Pvary => {
                let varying = sorted(&[&kind.varying[..], &axes].concat());
                (Link::Collective { op, of, axes }, Kind { shape, varying })
            }
            _ => (Link::Collective { op, of, axes }, Kind { shape, ..kind.clone() }),
        })
    }

    /// One or two values, the last one among them.
    fn losses(&mut self) -> Vec<(usize, Variable)> {
        let mut of = vec![self.kinds.len() - 1];
        if self.random.one_in(2) {
            of.push(self.value());
        }
        let loss = |of: usize| {
            let Kind { shape, varying } = self.kinds[of].clone();
            (of, Variable { shape, varying, seed: self.random.word() })
        };
        of.into_iter().map(loss).collect()
    }
}

/// The shape of a collective's result; `None` if it is not possible.
fn shape_after(op: &Op, shape: &[usize], group: usize) -> Option<Vec<usize>> {
    let mut shape = shape.to_vec();
    let rank = shape.len();
    let cut = |shape: &mut Vec<usize>, dim: isize| {
        let dim = place_of(dim, rank)?;
        let is_even = shape[dim].is_multiple_of(group);
        shape[dim] /= group;
        is_even.then_some(())
    };
    match *op {
        Op::AllGather { dim } => shape[place_of(dim, rank)?] *= group,
        Op::PsumScatter { dim } => cut(&mut shape, dim)?,
        Op::AllToAll { split, concat } => {
            cut(&mut shape, split)?;
            shape[place_of(concat, rank)?] *= group;
        }
        _ => {}
    }
    Some(shape)
}
