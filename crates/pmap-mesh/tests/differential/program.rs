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
    pending::Job,
    random::Random,
    spec::Spec,
};

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) grid: Grid,
    pub(crate) uneven: Uneven,
    pub(crate) route: Route,
    /// The first values.
    pub(crate) arguments: Vec<Argument>,
    /// The steps; each makes a value, in this order.
    pub(crate) steps: Vec<Step>,
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
pub(crate) struct Argument {
    pub(crate) numbers: Numbers,
    pub(crate) layout: Layout,
    pub(crate) spec: Spec,
}

/// The way of arguments and results to the devices and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Route {
    Call,
    CallInto,
    /// Calls `shard`, `run` and `gather`.
    Resident,
}

/// A step of a replica; a value `of` which it uses is named by its index.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Makes numbers of its own; the size of dimension `free` differs by replica.
    Own { numbers: Numbers, layout: Layout, free: Option<usize> },
    /// Changes the memory layout of a value.
    Laid { value: usize, layout: Layout },
    /// Calls a collective.
    Collective { op: Op, value: usize, axes: Axes },
    /// Sums a list, of which each slot wants some tensors.
    Sums { value: Vec<usize>, wanted: Vec<Vec<usize>> },
    /// Calls a collective that could also be started.
    Job(Job),
    /// Starts a collective; its value is an empty list.
    Start(Job),
    /// Waits for all pending collectives, each slot in a different order. The value has their
    /// results in the order in which they were started.
    Wait { jobs: Vec<Job>, orders: Vec<Vec<usize>> },
    /// Queries the rank along axes, and their size.
    Place { axes: Axes },
    /// Queries the number of real rows in the shard, and its weight.
    Rows,
}

/// The recipe of an array.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Kind,
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ordinary,
    /// NaN, infinity, zeros of both signs, the smallest and the largest number.
    Extreme,
    /// Equal rows in the first dimension.
    Repeated,
}

impl Numbers {
    pub(crate) fn array(&self) -> Array {
        let mut random = Random::new(self.seed);
        let number = match self.kind {
            Kind::Ordinary | Kind::Repeated => bits::ordinary,
            Kind::Extreme => bits::extreme,
        };
        let array = Array::from_fn(self.dtype, &self.shape, |_| number(self.dtype, &mut random));
        let is_repeated = self.kind == Kind::Repeated && !self.shape.is_empty();
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
