//! Specs as data.

use pmap_mesh::P;

use crate::differential::{
    grid::{Axes, Grid},
    random::Random,
};

/// The treatments of a tensor along some sets of axes.
pub(crate) type Spec = Vec<(Axes, Treatment)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    Shard(isize),
    Concat(isize),
    Stack(isize),
}

/// One random spec in this many has an axis that the mesh does not have.
const UNKNOWN_ONE_IN: usize = 60;

/// Returns a spec for an argument of `rank` dimensions.
pub(crate) fn random_for_argument(random: &mut Random, grid: &Grid, rank: usize) -> Spec {
    if rank == 0 && !random.one_in(20) {
        return Spec::new();
    }
    random_spec(random, grid, |random| {
        if random.one_in(60) { Treatment::Stack(0) } else { Treatment::Shard(dim(random, rank)) }
    })
}

/// Returns a spec for a result of `rank` dimensions.
pub(crate) fn random_for_result(random: &mut Random, grid: &Grid, rank: usize) -> Spec {
    random_spec(random, grid, |random| match random.less_than(6) {
        0 => Treatment::Stack(dim(random, rank + 1)),
        1 => Treatment::Concat(dim(random, rank)),
        _ => Treatment::Shard(dim(random, rank)),
    })
}

/// Returns a dimension, which is sometimes out of range.
fn dim(random: &mut Random, rank: usize) -> isize {
    let dim = random.less_than(rank.max(1)).cast_signed();
    match random.less_than(60) {
        0 => dim + 3,
        1..=15 => dim - rank.cast_signed(),
        _ => dim,
    }
}

/// Returns treatments along disjoint axes; in a few specs an axis occurs twice or does not exist.
fn random_spec(
    random: &mut Random,
    grid: &Grid,
    mut treatment: impl FnMut(&mut Random) -> Treatment,
) -> Spec {
    let mut rest = random.shuffled(grid.all());
    let mut spec = Vec::new();
    while !random.one_in(3) && spec.len() < 4 {
        let axes = rest.split_off(rest.len().saturating_sub(random.between(1, 2)));
        let axes = if random.one_in(4) { grid.all() } else { axes };
        spec.push((axes, treatment(random)));
        if rest.is_empty() {
            break;
        }
    }
    // Repair most specs that name an axis twice, or they would dominate.
    if has_duplicate_axis(&spec) && !random.one_in(8) {
        spec.truncate(1);
    }
    if random.one_in(UNKNOWN_ONE_IN)
        && let Some((axes, _)) = spec.first_mut()
    {
        axes.push(grid.0.len());
    }
    spec
}

fn has_duplicate_axis(spec: &Spec) -> bool {
    let mut named: Axes = spec.iter().flat_map(|(axes, _)| axes.clone()).collect();
    named.sort_unstable();
    named.windows(2).any(|pair| pair[0] == pair[1])
}

/// Converts the spec to the crate's type.
pub(crate) fn named(spec: &Spec, grid: &Grid) -> P {
    spec.iter().fold(P::replicate(), |p, (axes, treatment)| {
        let axes = grid.named(axes);
        p.and(match *treatment {
            Treatment::Shard(dim) => P::shard(dim, axes),
            Treatment::Concat(dim) => P::concat(dim, axes),
            Treatment::Stack(dim) => P::stack(dim, axes),
        })
    })
}

/// A fault of a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpecFaultKind {
    Axes,
    DuplicateAxis,
    ReducedInput,
    DimOutOfRange,
    NotDivisible,
    CutAfterUneven,
}

impl SpecFaultKind {
    /// Reads the message of a fault; returns the index of the argument or result, and its kind.
    pub(crate) fn from_message(fault: &str) -> Option<(usize, Self)> {
        let kinds = [
            ("the mesh has no axis", Self::Axes),
            ("is named twice", Self::DuplicateAxis),
            ("can be sharded or replicated", Self::ReducedInput),
            ("is out of range for", Self::DimOutOfRange),
            ("does not split evenly", Self::NotDivisible),
            ("is too small for", Self::NotDivisible),
            ("is cut a second time", Self::CutAfterUneven),
        ];
        let kind = kinds.into_iter().find(|(text, _)| fault.contains(text))?.1;
        let (_, named) = fault.split_once("put ")?;
        let digits = named.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((digits.parse().ok()?, kind))
    }
}

/// Returns the first fault in the axes of a spec, independent of its tensor.
pub(crate) fn axes_fault(grid: &Grid, spec: &Spec, is_argument: bool) -> Option<SpecFaultKind> {
    let mut seen = Vec::new();
    for (axes, treatment) in spec {
        if !grid.has(axes) {
            return Some(SpecFaultKind::Axes);
        }
        if axes.iter().any(|axis| seen.contains(axis)) {
            return Some(SpecFaultKind::DuplicateAxis);
        }
        if is_argument && !matches!(treatment, Treatment::Shard(_)) {
            return Some(SpecFaultKind::ReducedInput);
        }
        seen.extend(axes);
    }
    None
}
