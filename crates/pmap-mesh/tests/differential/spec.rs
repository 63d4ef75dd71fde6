//! Specs as data: how a tensor lies on the axes of a mesh.

use pmap_mesh::{P, SpecFault};

use crate::differential::{
    grid::{Axes, Grid},
    random::Random,
};

/// What happens to a tensor along each of some sets of axes.
pub(crate) type Spec = Vec<(Axes, Treatment)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    Shard(isize),
    Concat(isize),
    Stack(isize),
    Sum,
    Mean,
}

/// How seldom a random spec has an axis that the mesh does not have.
const UNKNOWN_ONE_IN: usize = 60;

/// A spec for an argument of so many dimensions.
pub(crate) fn of_argument(random: &mut Random, grid: &Grid, rank: usize) -> Spec {
    if rank == 0 && !random.one_in(20) {
        return Spec::new();
    }
    random_spec(random, grid, |random| {
        if random.one_in(60) { Treatment::Sum } else { Treatment::Shard(dim(random, rank)) }
    })
}

/// A spec for a result of so many dimensions.
pub(crate) fn of_result(random: &mut Random, grid: &Grid, rank: usize) -> Spec {
    random_spec(random, grid, |random| match random.below(8) {
        0 => Treatment::Sum,
        1 => Treatment::Mean,
        2 => Treatment::Stack(dim(random, rank + 1)),
        3 => Treatment::Concat(dim(random, rank)),
        _ => Treatment::Shard(dim(random, rank)),
    })
}

/// A dimension, now and then one that is not there.
fn dim(random: &mut Random, rank: usize) -> isize {
    let dim = random.below(rank.max(1)).cast_signed();
    match random.below(60) {
        0 => dim + 3,
        1..=15 => dim - rank.cast_signed(),
        _ => dim,
    }
}

/// Treatments along disjoint axes; now and then one axis is named twice, or is not there.
fn random_spec(
    random: &mut Random,
    grid: &Grid,
    mut treatment: impl FnMut(&mut Random) -> Treatment,
) -> Spec {
    let mut rest = random.shuffled(grid.all());
    let mut spec = Vec::new();
    while !random.one_in(3) && spec.len() < 4 {
        let axes = rest.split_off(rest.len().saturating_sub(random.within(1, 2)));
        let axes = if random.one_in(4) { grid.all() } else { axes };
        spec.push((axes, treatment(random)));
        if rest.is_empty() {
            break;
        }
    }
    // Of those that name an axis twice most are made right, or there would be little else.
    if is_twice(&spec) && !random.one_in(8) {
        spec.truncate(1);
    }
    if random.one_in(UNKNOWN_ONE_IN)
        && let Some((axes, _)) = spec.first_mut()
    {
        axes.push(grid.0.len());
    }
    spec
}

fn is_twice(spec: &Spec) -> bool {
    let mut named: Axes = spec.iter().flat_map(|(axes, _)| axes.clone()).collect();
    named.sort_unstable();
    named.windows(2).any(|pair| pair[0] == pair[1])
}

/// The spec as the crate has it.
pub(crate) fn named(spec: &Spec, grid: &Grid) -> P {
    spec.iter().fold(P::replicate(), |p, (axes, treatment)| {
        let axes = grid.named(axes);
        p.and(match *treatment {
            Treatment::Shard(dim) => P::shard(dim, axes),
            Treatment::Concat(dim) => P::concat(dim, axes),
            Treatment::Stack(dim) => P::stack(dim, axes),
            Treatment::Sum => P::sum(axes),
            Treatment::Mean => P::mean(axes),
        })
    })
}

/// What is wrong with a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Axes,
    AxisTwice,
    ReducedInput,
    DimOutOfRange,
    NotDivisible,
    CutAfterUneven,
    MeanOfIntegers,
}

impl Fault {
    /// The fault as the crate tells it, with the number of the argument or result.
    pub(crate) fn of(fault: &SpecFault) -> Option<(usize, Self)> {
        Some(match *fault {
            SpecFault::Axes { index, .. } => (index, Self::Axes),
            SpecFault::AxisTwice { index, .. } => (index, Self::AxisTwice),
            SpecFault::ReducedInput { index } => (index, Self::ReducedInput),
            SpecFault::DimOutOfRange { index, .. } => (index, Self::DimOutOfRange),
            SpecFault::NotDivisible { index, .. } => (index, Self::NotDivisible),
            SpecFault::CutAfterUneven { index, .. } => (index, Self::CutAfterUneven),
            SpecFault::MeanOfIntegers { index, .. } => (index, Self::MeanOfIntegers),
            _ => return None,
        })
    }
}

/// What is wrong with the axes of a spec, whatever tensor it is for; the first of it.
pub(crate) fn fault_of_axes(grid: &Grid, spec: &Spec, is_argument: bool) -> Option<Fault> {
    let mut seen = Vec::new();
    for (axes, treatment) in spec {
        if !grid.has(axes) {
            return Some(Fault::Axes);
        }
        if axes.iter().any(|axis| seen.contains(axis)) {
            return Some(Fault::AxisTwice);
        }
        if is_argument && !matches!(treatment, Treatment::Shard(_)) {
            return Some(Fault::ReducedInput);
        }
        seen.extend(axes);
    }
    None
}
