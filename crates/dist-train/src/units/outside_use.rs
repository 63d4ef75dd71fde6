//! Detection of parameters used outside the functions of their units.
//!
//! A parameter gets its gradient from the operation of its unit. If the loss uses the parameter
//! elsewhere, it would silently count as a constant. So until a step has trained a unit, the unit's
//! function receives its parameters as leaves of candle's graph, whose ids are recorded here. If
//! such a leaf is in the graph of the whole loss, the parameter was used outside its unit.

use candle_core::{Tensor, TensorId};

use crate::error::training::TrainingError;

/// The leaves that were passed to the functions of units.
#[derive(Debug, Default)]
pub(crate) struct RecordedLeaves(Vec<RecordedLeaf>);

#[derive(Debug)]
struct RecordedLeaf {
    leaf: TensorId,
    unit: String,
    parameter: String,
}

impl RecordedLeaves {
    pub(crate) fn add(&mut self, leaf: &Tensor, unit: &str, parameter: &str) {
        let (unit, parameter) = (unit.to_owned(), parameter.to_owned());
        self.0.push(RecordedLeaf { leaf: leaf.id(), unit, parameter });
    }

    /// Returns an error for the first of these nodes that is a recorded leaf, if any.
    pub(crate) fn find<'a>(
        &self,
        nodes: impl IntoIterator<Item = &'a Tensor>,
    ) -> Option<TrainingError> {
        nodes.into_iter().find_map(|node| self.error_of(node))
    }

    fn error_of(&self, node: &Tensor) -> Option<TrainingError> {
        let recorded = self.0.iter().find(|recorded| recorded.leaf == node.id())?;
        let unit = recorded.unit.clone();
        Some(TrainingError::ParameterOutsideUnit { unit, parameter: recorded.parameter.clone() })
    }

    /// Returns an error for the first recorded leaf in the graph of a loss, if any.
    pub(crate) fn find_in_graph(&self, loss: &Tensor) -> Option<TrainingError> {
        // Avoids a walk over the graph of the loss.
        if self.0.is_empty() {
            return None;
        }
        self.find(loss.sorted_nodes().into_iter().filter(|node| node.is_variable()))
    }
}
