//! Parameters that a loss uses outside the functions of their units.
//!
//! A parameter gets its gradient from its unit's operation. Used elsewhere, it would be a constant and
//! train wrong in silence. So until a step has trained a unit, its function gets leaves of candle's
//! graph, whose ids are noted here: a leaf that the graph of the whole loss reaches was used outside.

use candle_core::{Tensor, TensorId};

use crate::error::training::TrainingError;

/// The leaves that functions of units were given.
#[derive(Debug, Default)]
pub(crate) struct GivenParameters(Vec<Given>);

#[derive(Debug)]
struct Given {
    leaf: TensorId,
    unit: String,
    parameter: String,
}

impl GivenParameters {
    pub(crate) fn add(&mut self, leaf: &Tensor, unit: &str, parameter: &str) {
        let (unit, parameter) = (unit.to_owned(), parameter.to_owned());
        self.0.push(Given { leaf: leaf.id(), unit, parameter });
    }

    /// Returns the error of the first of these nodes that is a leaf, if one is.
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

    /// Returns the error of the first leaf that the graph of a loss reaches, if it reaches one.
    pub(crate) fn find_in_graph(&self, loss: &Tensor) -> Option<TrainingError> {
        // The walk is as long as the loss has operations outside units.
        if self.0.is_empty() {
            return None;
        }
        self.find(loss.sorted_nodes().into_iter().filter(|node| node.is_variable()))
    }
}
