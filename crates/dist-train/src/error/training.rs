//! Errors of training steps and of training options.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dist_checkpoint::support::Listed;

use crate::error::Result;

/// A step that would train something wrong, or an option that does not fit the model.
///
/// All replicas of all processes take the same decision, so each process gets the error and may
/// continue with the next step; no variable has changed, unless optimizers run [inside the backward
/// pass](crate::ModelBuilder::optimizer_in_backward).
///
/// Some errors are detected by a single replica inside a unit: [`UnknownUnit`](Self::UnknownUnit),
/// [`Captured`](Self::Captured), [`ParameterOutsideUnit`](Self::ParameterOutsideUnit),
/// [`NotRepeatable`](Self::NotRepeatable) and [`Differentiated`](Self::Differentiated), or in its loss:
/// [`AttachedRows`](Self::AttachedRows). On a mesh of one process, the process may continue after
/// these errors too. On a mesh of several processes, they end all processes, like any error of a
/// replica.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// A loss is not a floating-point scalar, or its weight is a tensor but not a scalar.
    #[error(
        "the {what} of slot {slot} has shape {shape:?} and type {dtype}, it must be a \
         {}scalar", if *what == "loss" { "floating-point " } else { "" }
    )]
    NotScalar {
        /// The first such slot.
        slot: usize,
        /// `loss`, or `weight of the loss`.
        what: &'static str,
        /// The shape.
        shape: Vec<usize>,
        /// The dtype.
        dtype: String,
    },
    /// The weight of a loss is negative, infinite or NaN.
    #[error("the loss of slot {slot} has the weight {weight}, it must be finite and at least 0")]
    Weight {
        /// The slot.
        slot: usize,
        /// The weight.
        weight: f64,
    },
    /// All shards of an update or evaluation have weight 0, so there is no mean.
    #[error("the losses of all slots have the weight 0, so there is no mean loss")]
    NoWeight,
    /// The loss of a shard is infinite or NaN.
    #[error("the loss of slot {slot} is {value}")]
    NonFiniteLoss {
        /// The first such slot.
        slot: usize,
        /// The loss of that slot.
        value: f64,
    },
    /// A gradient of [`value_and_grad`](crate::value_and_grad) is infinite or NaN.
    #[error("the gradient of parameter {index}, of shape {shape:?}, is not finite")]
    NonFiniteGradient {
        /// The index in the list of parameters.
        index: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// Processes passed different batches, although each process has to pass the whole batch.
    #[error(
        "replicas 0 and {replica} got different batches: pass the whole batch in every process, or \
         build the model with `.local_batches()` if each process passes its own rows"
    )]
    BatchMismatch {
        /// The first replica with a different batch.
        replica: usize,
    },
    /// A tensor attached by [`Loss::with_rows`](crate::Loss::with_rows) does not have the rows of
    /// the shard.
    #[error(
        "a tensor of shape {shape:?} is attached by `with_rows`, but the shard has {n_rows} rows: \
         attach sums by `with_sums`"
    )]
    AttachedRows {
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// Number of rows of the shard, without padding.
        n_rows: usize,
    },
    /// The norm of the gradients is infinite or NaN.
    #[error("the norm of the gradients is {value}{}", first_non_finite(variable.as_deref()))]
    NonFiniteNorm {
        /// The norm.
        value: f64,
        /// The first variable with a non-finite gradient norm, in the order of names; `None` if all
        /// norms are finite and only their sum overflows.
        variable: Option<String>,
    },
    /// A buffer, such as a running variance, would be infinite or NaN.
    #[error("buffer {name} is no longer finite")]
    NonFiniteBuffer {
        /// The buffer.
        name: String,
    },
    /// Some variables have no gradient on any slot in the first step.
    #[error(
        "{} of {trained} variables got no gradient: {}. The loss does not use them (then \
         `freeze` them, or `allow_unused`), or an operation on the way to them has no backward pass. \
         candle-nn's LayerNorm, RmsNorm, softmax_last_dim and rope have none: use \
         fused_ops::layers and fused_ops, which candle_distributed exports as `ops`",
        missing.len(), Listed(missing)
    )]
    NoGradient {
        /// The names of these variables.
        missing: Vec<String>,
        /// Number of trained variables.
        trained: usize,
    },

    /// A loss enters a unit that the model does not have.
    #[error("there is no unit named {unit:?}, the units are {}", Listed(units))]
    UnknownUnit {
        /// The requested name.
        unit: String,
        /// The units of the model.
        units: Vec<String>,
    },
    /// No batch of the first update enters a unit, so its parameters would never be trained.
    #[error(
        "the loss does not enter unit {unit}, so {} of its parameters got no gradient: {}. Enter it, \
         `freeze` them, or `allow_unused`",
        parameters.len(), Listed(parameters)
    )]
    NotEntered {
        /// The first such unit, in the order of names.
        unit: String,
        /// Its trained parameters that are in no entered unit.
        parameters: Vec<String>,
    },
    /// A step failed after its optimizers started to run, or a load failed half way.
    #[error(
        "a failed step or load left the model partially updated: `load` a checkpoint, or rebuild \
         the model"
    )]
    HalfUpdated,
    /// A unit's function captures a differentiable tensor from outside, which would get no
    /// gradient.
    #[error(
        "the function of unit {unit} captures a tensor that needs a gradient: pass it with the \
         unit's input, as part of a tuple"
    )]
    Captured {
        /// The unit.
        unit: String,
    },
    /// A loss uses a parameter outside its unit's function, where it would get no gradient.
    #[error(
        "the loss uses parameter {parameter} outside the function of unit {unit}, where it gets no \
         gradient: return it from the function as part of a tuple"
    )]
    ParameterOutsideUnit {
        /// The unit.
        unit: String,
        /// The parameter.
        parameter: String,
    },
    /// Recomputing a unit for the backward pass gave another result than the forward pass.
    #[error(
        "unit {unit} has another result in the backward pass than in the forward pass: draw \
         random numbers by keys that are created before the unit and moved into it \
         (`ctx.batch_keys()`), or set `Keep::Graph` for the unit"
    )]
    NotRepeatable {
        /// The unit.
        unit: String,
    },
    /// Two slots of a shard group entered different units, or in a different order, while units are
    /// [prefetched](crate::ModelBuilder::prefetch).
    #[error(
        "replica {left} enters the units {}, replica {right} enters {}",
        left_units.join(", "), right_units.join(", ")
    )]
    UnitMismatch {
        /// The first slot of the shard group.
        left: usize,
        /// The units it entered, in order.
        left_units: Vec<String>,
        /// The first slot of the group with another sequence of units.
        right: usize,
        /// The units this slot entered, in order.
        right_units: Vec<String>,
    },
    /// A unit is differentiated by the loss itself instead of the step, or a second time.
    #[error("unit {unit} is differentiated {how}: only the step differentiates a loss, and once")]
    Differentiated {
        /// The unit.
        unit: String,
        /// The caller or the number of times, in words.
        how: &'static str,
    },

    /// An option of the builder, or a call, does not fit the model or another option.
    #[error("{reason}")]
    Option {
        /// The name of the method that sets the option.
        option: &'static str,
        /// The message, with the values.
        reason: String,
    },
    /// The processes of the mesh set an option of a model differently, or their models have
    /// variables of different names, shapes or dtypes.
    #[error("replicas 0 and {replica} have different values of `{option}`")]
    OptionMismatch {
        /// The name of the method that sets the option, or `variables`.
        option: &'static str,
        /// The first replica with a different value.
        replica: usize,
    },
}

impl TrainingError {
    pub(crate) fn option(option: &'static str, reason: impl Into<String>) -> Self {
        Self::Option { option, reason: reason.into() }
    }

    /// Returns the error of an option or call that cannot be combined with optimizers inside the
    /// backward pass, where the gradients of the whole model never exist together.
    pub(crate) fn needs_all_gradients(option: &'static str) -> Self {
        let reason = format!(
            "`{option}` needs the gradients of the whole model at once, but \
             `optimizer_in_backward` frees a unit's gradients before the next unit's exist"
        );
        Self::option(option, reason)
    }
}

/// Names the first variable with a non-finite gradient, if any.
fn first_non_finite(variable: Option<&str>) -> String {
    variable.map_or_else(String::new, |variable| {
        format!(", the gradient of {variable} is the first that is not finite")
    })
}

/// The typed errors that this process's replicas report during a step. They are recorded here
/// because a replica fails with candle's errors, which carry only text.
///
/// A recorded error may have had no effect: a loss may ignore the error of a unit and continue.
#[derive(Debug, Default)]
pub(crate) struct StepErrors(Mutex<RecordedErrors>);

#[derive(Debug, Default)]
struct RecordedErrors {
    /// The error of all replicas of the mesh, at the same place.
    agreed: Option<TrainingError>,
    /// Errors that single replicas detected, without duplicates.
    local: Vec<TrainingError>,
}

impl StepErrors {
    /// Records an error that all replicas detect from exchanged data, and returns an error for this
    /// replica to fail with.
    pub(crate) fn record_agreed(&self, error: TrainingError) -> candle_core::Error {
        // All replicas of this process report the same error; the first one is stored.
        candle_core::Error::msg(self.lock().agreed.get_or_insert(error))
    }

    /// Records an error that only this replica detects. The returned error ends the call on all
    /// replicas, unless the loss ignores it.
    pub(crate) fn record_local(&self, error: TrainingError) -> candle_core::Error {
        let candle_error = candle_core::Error::msg(&error);
        let mut recorded = self.lock();
        if !recorded.local.contains(&error) {
            recorded.local.push(error);
        }
        candle_error
    }

    /// Converts the result of a replica: an error becomes `None` if an agreed error is recorded.
    /// The replicas' call then succeeds on all processes, because a failed call would end the other
    /// processes.
    pub(crate) fn none_if_agreed<T>(
        &self,
        result: candle_core::Result<T>,
    ) -> candle_core::Result<Option<T>> {
        match result {
            Err(_) if self.lock().agreed.is_some() => Ok(None),
            result => result.map(Some),
        }
    }

    /// Converts the result of a call with replicas that return the results of
    /// [`none_if_agreed`](Self::none_if_agreed): `None` becomes the agreed error, and the error of
    /// the call becomes the recorded error that caused it, if there is one.
    #[expect(clippy::expect_used, reason = "a replica returns `None` only after an agreed error")]
    pub(crate) fn call_result<T>(&self, result: pmap_mesh::Result<Option<T>>) -> Result<T> {
        let recorded = self.lock();
        match result {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(recorded
                .agreed
                .clone()
                .expect("an agreed error is recorded before `None` is returned")
                .into()),
            Err(error) => {
                let text = error.to_string();
                let cause = recorded.local.iter().find(|local| contains_error(&text, local));
                Err(cause.map_or_else(|| error.into(), |cause| cause.clone().into()))
            }
        }
    }

    /// Locks the recorded errors. Ignores poisoning: every change under the lock is a single
    /// insertion, so a panic leaves no partial state.
    fn lock(&self) -> MutexGuard<'_, RecordedErrors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if a text contains the message of an error, either as it is or escaped: some of
/// candle's contexts quote their cause.
fn contains_error(text: &str, error: &TrainingError) -> bool {
    let message = error.to_string();
    text.contains(&message) || text.contains(&message.escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    use candle_core::{Context, Device};
    use pmap_mesh::ReplicaError;

    use super::*;
    use crate::error::Error;

    fn unknown(unit: &str) -> TrainingError {
        TrainingError::UnknownUnit { unit: unit.to_owned(), units: vec!["0".to_owned()] }
    }

    fn failed(cause: candle_core::Error) -> pmap_mesh::Result<Option<u8>> {
        Err(ReplicaError::Failed { slot: 0, device: Device::Cpu, cause }.into())
    }

    #[test]
    fn ignored_errors_do_not_end_the_call() {
        let errors = StepErrors::default();
        errors.record_local(unknown("a"));
        assert_eq!(errors.call_result(Ok(Some(7))).unwrap(), 7);
        let other =
            errors.call_result(failed(candle_core::Error::msg("no such file"))).unwrap_err();
        assert!(other.to_string().contains("no such file"), "{other}");
        let ending = errors.record_local(unknown("b"));
        let found = errors.call_result(failed(ending.context("unit b, forward pass"))).unwrap_err();
        assert!(matches!(found, Error::Training(found) if found == unknown("b")));
        let quoted = Err::<(), _>(errors.record_local(unknown("c"))).context("quoted").unwrap_err();
        let found = errors.call_result(failed(quoted)).unwrap_err();
        assert!(matches!(found, Error::Training(found) if found == unknown("c")));
    }

    #[test]
    fn agreed_errors_win_over_ignored_ones() {
        let errors = StepErrors::default();
        errors.record_local(unknown("a"));
        let ending = errors.record_agreed(TrainingError::NoWeight);
        let outcome = errors.none_if_agreed::<u8>(Err(ending)).unwrap();
        assert_eq!(outcome, None);
        let found = errors.call_result(Ok(outcome)).unwrap_err();
        assert!(matches!(found, Error::Training(TrainingError::NoWeight)));
    }
}
