//! Detection of parameters used outside the functions of their units.
//!
//! A parameter gets its gradient from its unit's operation. Used elsewhere, it would silently count
//! as a constant. So until a step has trained a unit, its function receives leaves of candle's
//! graph, with their ids recorded here. A leaf in the graph of the whole loss was used outside its
//! unit.

use candle_core::{Tensor, TensorId};

use crate::error::training::TrainingError;

/// Leaves passed to the functions of units.
#[derive(Debug, Default)]
pub(crate) struct GivenParameters(Vec<GivenLeaf>);

#[derive(Debug)]
struct GivenLeaf {
    leaf: TensorId,
    unit: String,
    parameter: String,
}

impl GivenParameters {
    pub(crate) fn add(&mut self, leaf: &Tensor, unit: &str, parameter: &str) {
        let (unit, parameter) = (unit.to_owned(), parameter.to_owned());
        self.0.push(GivenLeaf { leaf: leaf.id(), unit, parameter });
    }

    /// Returns an error for the first of these nodes that is a recorded leaf, if any.
    pub(crate) fn find<'a>(
        &self,
        nodes: impl IntoIterator<Item = &'a Tensor>,
    ) -> Option<TrainingError> {
        nodes.into_iter().find_map(|node| self.error_of(node))
    }

    fn error_of(&self, node: &Tensor) -> Option<TrainingError> {
        let given = self.0.iter().find(|given| given.leaf == node.id())?;
        let unit = given.unit.clone();
        Some(TrainingError::ParameterOutsideUnit { unit, parameter: given.parameter.clone() })
    }

    /// Returns an error for the first recorded leaf in the graph of a loss, if any.
    pub(crate) fn find_in_graph(&self, loss: &Tensor) -> Option<TrainingError> {
        // Skip the walk over all operations of the loss outside units.
        if self.0.is_empty() {
            return None;
        }
        self.find(loss.sorted_nodes().into_iter().filter(|node| node.is_variable()))
    }
}
