//! Gradients through chains of collectives, beside those of one graph on one device.
//!
//! Along each axis of the mesh a value either varies, each replica having its own, or is one value
//! that all replicas hold. A sum makes one value of many; `pvary` marks where one value enters work
//! that varies. The loss of the reference is the sum of all replicas' losses in which a value that
//! several hold is counted once.

mod generate;
mod reference;
mod tested;

use std::fmt;

use candle_core::{DType, Tensor};

use crate::differential::{
    array::Array,
    grid::{Axes, Grid},
    op::Op,
    program::{Kind, Numbers},
};

pub(crate) use self::generate::chain;

/// How far gradients may be apart, relative to the largest: they are added up in other orders.
const TOLERANCE: f64 = 1e-9;

/// A chain of operations from variables to a loss.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(crate) grid: Grid,
    /// The first values.
    pub(crate) variables: Vec<Variable>,
    /// Each makes a value, in this order.
    pub(crate) links: Vec<Link>,
    /// The numbers of the values whose weighted sums are the loss.
    pub(crate) losses: Vec<(usize, Variable)>,
}

/// Numbers of each replica, which are the same on those that differ in no coordinate along
/// `varying`.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) shape: Vec<usize>,
    pub(crate) varying: Axes,
    pub(crate) seed: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum Link {
    Collective {
        op: Op,
        of: usize,
        axes: Axes,
    },
    /// A reduction without a gradient, of what has none.
    Extreme {
        op: Op,
        of: usize,
        axes: Axes,
    },
    Sin {
        of: usize,
    },
    Product {
        of: usize,
        by: usize,
    },
    Swapped {
        of: usize,
    },
    Flat {
        of: usize,
    },
}

impl Variable {
    pub(crate) fn on_slot(&self, grid: &Grid, slot: usize) -> Array {
        let numbers = Numbers {
            dtype: DType::F64,
            shape: self.shape.clone(),
            kind: Kind::Ordinary,
            seed: self.seed,
        };
        numbers.on_slot(first(grid, &self.varying, slot), None)
    }
}

/// The first slot that holds the same value as `slot`, if the value varies along these axes.
fn first(grid: &Grid, varying: &Axes, slot: usize) -> usize {
    grid.members(&grid.others(varying), slot)[0]
}

/// The gradients of the variables on each slot; those of a value that nothing depends on are zeros.
type Gradients = Vec<Vec<Array>>;

/// How the gradients of a chain differ from those of one graph.
pub(crate) fn check(chain: &Chain, mesh: &pmap_mesh::DeviceMesh) -> Result<(), String> {
    let found = tested::gradients(chain, mesh)?;
    let expected = reference::gradients(chain).map_err(|error| error.to_string())?;
    for (slot, (found, expected)) in
        mesh.local_slots().zip(found.iter().zip(&expected[mesh.local_slots()]))
    {
        for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
            if !is_close(found, expected) {
                return Err(format!(
                    "the gradient of {number} on slot {slot} is {:?}\nfor {:?}",
                    numbers(found),
                    numbers(expected)
                ));
            }
        }
    }
    Ok(())
}

fn is_close(found: &Array, expected: &Array) -> bool {
    let largest = numbers(expected).iter().fold(1.0, |top: f64, x| top.max(x.abs()));
    let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * largest;
    found.agrees(expected) && numbers(found).iter().zip(&numbers(expected)).all(is_close)
}

fn numbers(array: &Array) -> Vec<f64> {
    array.items.iter().map(|item| f64::from_bits(*item)).collect()
}

/// What a link that is no collective makes.
fn local(link: &Link, values: &[Tensor]) -> candle_core::Result<Tensor> {
    match *link {
        Link::Sin { of } => values[of].sin(),
        Link::Product { of, by } => &values[of] * &values[by],
        Link::Swapped { of } => values[of].transpose(0, values[of].rank() - 1),
        Link::Flat { of } => values[of].flatten_all(),
        Link::Collective { .. } | Link::Extreme { .. } => panic!("a collective is not local"),
    }
}

impl fmt::Display for Chain {
    /// A line for each value, with its number, and for each part of the loss.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh {:?}", self.grid.0)?;
        for (number, variable) in self.variables.iter().enumerate() {
            write!(f, "\n{number}: {variable:?}")?;
        }
        for (number, link) in (self.variables.len()..).zip(&self.links) {
            write!(f, "\n{number}: {link:?}")?;
        }
        self.losses.iter().try_for_each(|(of, weights)| write!(f, "\nloss: {of} by {weights:?}"))
    }
}
