//! A program as plain data: what is passed to a mesh, what every replica does, and what is made of
//! the results.

use std::fmt;

use candle_core::DType;
use pmap_mesh::Uneven;

use crate::differential::{
    array::Array,
    bits,
    grid::{Axes, Grid},
    layout::Layout,
    op::Op,
    random::Random,
    spec::Spec,
    underway::Job,
};

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) grid: Grid,
    pub(crate) uneven: Uneven,
    pub(crate) route: Route,
    /// The first values.
    pub(crate) arguments: Vec<Argument>,
    /// Each makes a value, in this order.
    pub(crate) steps: Vec<Step>,
    /// The numbers of values that are put together.
    pub(crate) results: Vec<(usize, Spec)>,
}

impl fmt::Display for Program {
    /// A line for each value, with its number, and for each result.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { grid, uneven, route, .. } = self;
        write!(f, "mesh {:?}, {uneven:?}, {route:?}", grid.0)?;
        for (number, argument) in self.arguments.iter().enumerate() {
            write!(f, "\n{number}: {argument:?}")?;
        }
        for (number, step) in (self.arguments.len()..).zip(&self.steps) {
            write!(f, "\n{number}: {step:?}")?;
        }
        self.results.iter().try_for_each(|(of, spec)| write!(f, "\nresult: {of} as {spec:?}"))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Argument {
    pub(crate) numbers: Numbers,
    pub(crate) layout: Layout,
    pub(crate) spec: Spec,
}

/// How arguments and results get to the devices and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Route {
    Call,
    CallInto,
    /// `shard`, `run`, `gather`.
    Resident,
}

/// What a replica does; a value `of` which it does something is named by its number.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Makes numbers of its own, in dimension `free` of another size on each replica.
    Own { numbers: Numbers, layout: Layout, free: Option<usize> },
    /// Lays a value out in another way.
    Laid { of: usize, layout: Layout },
    /// Calls a collective.
    Collective { op: Op, of: usize, axes: Axes },
    /// Sums up a list, of which each slot wants some.
    Sums { of: Vec<usize>, wanted: Vec<Vec<usize>> },
    /// Calls a collective that could be under way.
    Job(Job),
    /// Starts a collective; its value is an empty list.
    Start(Job),
    /// Waits for all that were started and have not been waited for, each slot in an order of its
    /// own; the value has their results in the order in which they were started.
    Wait { jobs: Vec<Job>, orders: Vec<Vec<usize>> },
    /// Asks for its rank along axes, and their size.
    Place { axes: Axes },
    /// Asks how many rows of its shard are real, and for its weight.
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
    /// NaN, infinity, zeros of both signs, the smallest and the largest.
    Extreme,
    /// All rows of the first dimension are equal.
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

    /// The numbers of one replica, in dimension `free` of another size on each.
    pub(crate) fn on_slot(&self, slot: usize, free: Option<usize>) -> Array {
        let mut own = self.clone();
        own.seed = self.seed.wrapping_add(slot as u64);
        if let Some(dim) = free {
            own.shape[dim] += slot % 3;
        }
        own.array()
    }
}
