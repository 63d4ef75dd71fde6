//! Gradients through chains of collectives, compared with one graph on one device.
//!
//! Along each axis of the mesh a value either varies by replica, or is one value that all replicas
//! share. A sum turns many values into one; `pvary` marks where one value enters work that varies.
//! The loss of the reference is the sum of all replicas' losses, where a shared value is counted
//! once.

mod generate;
mod reference;
mod tested;

use std::fmt;

use candle_core::{DType, Tensor};

use crate::differential::{
    array::Array,
    grid::{Axes, Grid},
    op::Op,
    program::{ArrayRecipe, NumberKind},
};

pub(crate) use self::generate::chain;

/// The tolerance of gradients relative to the largest one, since sums have different orders.
const TOLERANCE: f64 = 1e-9;

/// A chain of operations from variables to a loss.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(crate) grid: Grid,
    /// The first values.
    pub(crate) variables: Vec<ChainVariable>,
    /// The links; each makes a value, in this order.
    pub(crate) links: Vec<ChainLink>,
    /// The indexes of the values in the weighted sum of the loss.
    pub(crate) losses: Vec<(usize, ChainVariable)>,
}

/// Numbers of each replica; replicas with the same coordinates along `varying` have the same
/// numbers.
#[derive(Clone, Debug)]
pub(crate) struct ChainVariable {
    pub(crate) shape: Vec<usize>,
    pub(crate) varying: Axes,
    pub(crate) seed: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum ChainLink {
    Collective {
        op: Op,
        value: usize,
        axes: Axes,
    },
    /// A reduction without a gradient, of a value without one.
    Extreme {
        op: Op,
        value: usize,
        axes: Axes,
    },
    Sin {
        value: usize,
    },
    Product {
        value: usize,
        other: usize,
    },
    Swapped {
        value: usize,
    },
    Flat {
        value: usize,
    },
}

impl ChainVariable {
    pub(crate) fn on_slot(&self, grid: &Grid, slot: usize) -> Array {
        let numbers = ArrayRecipe {
            dtype: DType::F64,
            shape: self.shape.clone(),
            kind: NumberKind::Ordinary,
            seed: self.seed,
        };
        numbers.on_slot(first(grid, &self.varying, slot), None)
    }
}

/// Returns the first slot with the same value as `slot`, for a value that varies along these axes.
fn first(grid: &Grid, varying: &Axes, slot: usize) -> usize {
    grid.members(&grid.others(varying), slot)[0]
}

/// The gradients of the variables on each slot; zeros if the loss does not depend on a variable.
type SlotGradients = Vec<Vec<Array>>;

/// Returns an error if the gradients of a chain differ from the reference.
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
    found.agrees(expected)
        && numbers(found)
            .iter()
            .zip(&numbers(expected))
            .all(|(a, b)| (a - b).abs() <= TOLERANCE * largest)
}

fn numbers(array: &Array) -> Vec<f64> {
    array.items.iter().map(|item| f64::from_bits(*item)).collect()
}

/// Returns the value of a link that is not a collective.
fn local(link: &ChainLink, values: &[Tensor]) -> candle_core::Result<Tensor> {
    match *link {
        ChainLink::Sin { value } => values[value].sin(),
        ChainLink::Product { value, other } => &values[value] * &values[other],
        ChainLink::Swapped { value } => values[value].transpose(0, values[value].rank() - 1),
        ChainLink::Flat { value } => values[value].flatten_all(),
        ChainLink::Collective { .. } | ChainLink::Extreme { .. } => {
            panic!("a collective is not local")
        }
    }
}

impl fmt::Display for Chain {
    /// Writes a line for each value, with its index, and for each part of the loss.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh {:?}", self.grid.0)?;
        for (number, variable) in self.variables.iter().enumerate() {
            write!(f, "\n{number}: {variable:?}")?;
        }
        for (number, link) in (self.variables.len()..).zip(&self.links) {
            write!(f, "\n{number}: {link:?}")?;
        }
        self.losses
            .iter()
            .try_for_each(|(value, weights)| write!(f, "\nloss: {value} by {weights:?}"))
    }
}
