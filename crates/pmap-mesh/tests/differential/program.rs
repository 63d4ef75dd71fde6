//! A program as plain data: the arguments of a mesh, the steps of every replica, and the use of the
//! results.

use std::fmt;

use candle_core::DType;
use pmap_mesh::Uneven;

use crate::differential::{
    array::Array,
    bits,
    grid::{Axes, Grid},
    layout::Layout,
    op::Op,
    pending::AsyncCall,
    random::Random,
    spec::Spec,
};

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) grid: Grid,
    pub(crate) uneven: Uneven,
    pub(crate) route: CallRoute,
    /// The first values.
    pub(crate) arguments: Vec<ProgramArgument>,
    /// The steps; each makes a value, in this order.
    pub(crate) steps: Vec<ProgramStep>,
    /// The indexes of the joined values, with their specs.
    pub(crate) results: Vec<(usize, Spec)>,
}

impl fmt::Display for Program {
    /// Writes a line for each value, with its index, and for each result.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grid, uneven, route, .. } = self;
        write!(f, "mesh {:?}, {uneven:?}, {route:?}", grid.0)?;
        for (number, argument) in self.arguments.iter().enumerate() {
            write!(f, "\n{number}: {argument:?}")?;
        }
        for (number, step) in (self.arguments.len()..).zip(&self.steps) {
            write!(f, "\n{number}: {step:?}")?;
        }
        self.results.iter().try_for_each(|(value, spec)| write!(f, "\nresult: {value} as {spec:?}"))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ProgramArgument {
    pub(crate) numbers: ArrayRecipe,
    pub(crate) layout: Layout,
    pub(crate) spec: Spec,
}

/// The functions that send arguments to the devices and fetch results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CallRoute {
    Call,
    CallInto,
    /// Calls `shard`, `run` and `gather`.
    Resident,
}

/// A step of a replica. It refers to earlier values by index.
#[derive(Clone, Debug)]
pub(crate) enum ProgramStep {
    /// Makes numbers of its own; the size of dimension `free` differs by replica.
    Own { numbers: ArrayRecipe, layout: Layout, free: Option<usize> },
    /// Changes the memory layout of a value.
    Laid { value: usize, layout: Layout },
    /// Calls a collective.
    Collective { op: Op, value: usize, axes: Axes },
    /// Sums a list of values.
    Sums { value: Vec<usize> },
    /// Calls a collective that could also be started and awaited later.
    Blocking(AsyncCall),
    /// Starts a collective; its value is an empty list.
    Start(AsyncCall),
    /// Waits for all pending collectives, each slot in a different order. The value is the list of
    /// their results in the order of their starts.
    Wait { calls: Vec<AsyncCall>, orders: Vec<Vec<usize>> },
    /// Queries the rank along axes and the size of the group.
    Place { axes: Axes },
    /// Queries the number of real rows in the shard, and its weight.
    Rows,
}

/// The dtype, shape and seed from which an array is made.
#[derive(Clone, Debug)]
pub(crate) struct ArrayRecipe {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: NumberKind,
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberKind {
    Ordinary,
    /// NaN, infinity, zeros of both signs, the smallest and the largest number.
    Extreme,
    /// Equal rows in the first dimension.
    Repeated,
}

impl ArrayRecipe {
    pub(crate) fn array(&self) -> Array {
        let mut random = Random::new(self.seed);
        let number = match self.kind {
            NumberKind::Ordinary | NumberKind::Repeated => bits::ordinary,
            NumberKind::Extreme => bits::extreme,
        };
        let array = Array::from_fn(self.dtype, &self.shape, |_| number(self.dtype, &mut random));
        let is_repeated = self.kind == NumberKind::Repeated && !self.shape.is_empty();
        if is_repeated { array.repeated() } else { array }
    }

    /// Returns the numbers of one replica; the size of dimension `free` differs by replica.
    pub(crate) fn on_slot(&self, slot: usize, free: Option<usize>) -> Array {
        let mut own = self.clone();
        own.seed = self.seed.wrapping_add(slot as u64);
        if let Some(dim) = free {
            own.shape[dim] += slot % 3;
        }
        own.array()
    }
}
