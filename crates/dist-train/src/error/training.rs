//! What ends a training step, or cannot be trained as it was asked for.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use dist_checkpoint::support::listed::Listed;

use crate::error::Result;

/// Why a step would train something wrong, or a model cannot be trained as the options say.
///
/// All replicas of all processes decide alike, so each process gets the error and may take the next
/// step; no variable has changed, unless optimizers run [inside the backward
/// pass](crate::ModelBuilder::optimizer_in_backward). What a replica finds out alone, in a unit that it enters
/// ([`UnknownUnit`](Self::UnknownUnit), [`Captured`](Self::Captured),
/// [`ParameterOutsideUnit`](Self::ParameterOutsideUnit), [`NotRepeatable`](Self::NotRepeatable), [`Differentiated`](Self::Differentiated)), is such an error
/// on a mesh of one process; one of several ends as with any error of a replica.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// A loss is not one number that has a gradient.
    #[error(
        "the loss of slot {slot}, of shape {shape:?} and type {dtype}, cannot be differentiated, it \
         must be a scalar of floats"
    )]
    LossShape {
        /// The first such slot.
        slot: usize,
        /// The shape of what `loss` returned.
        shape: Vec<usize>,
        /// The type of its items.
        dtype: String,
    },
    /// The weight of a loss is a tensor, but not one number.
    #[error("the weight of the loss of slot {slot} has the shape {shape:?}, it must be a scalar")]
    WeightShape {
        /// The first such slot.
        slot: usize,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A loss has a weight that no sum can have.
    #[error("the loss of slot {slot} has the weight {weight}, it must be finite and at least 0")]
    Weight {
        /// The slot.
        slot: usize,
        /// Its weight.
        weight: f64,
    },
    /// No shard of an update or evaluation has any weight, so there is no mean.
    #[error("the losses of all slots have the weight 0, so there is no mean loss")]
    NoWeight,
    /// The loss of a shard is infinite or NaN.
    #[error("the loss of slot {slot} is {value}")]
    NonFiniteLoss {
        /// The first such slot.
        slot: usize,
        /// Its loss.
        value: f64,
    },
    /// A gradient of [`value_and_grad`](crate::value_and_grad) is infinite or NaN.
    #[error("the gradient of parameter {index}, of shape {shape:?}, is not finite")]
    NonFiniteGradient {
        /// Its index in the list of parameters.
        index: usize,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The norm of the gradients is infinite or NaN.
    #[error("the norm of the gradients is {value}{}", Culprit(variable.as_deref()))]
    NonFiniteNorm {
        /// The norm.
        value: f64,
        /// The first variable whose gradient has such a norm, in the order of names; `None` if only
        /// their sum is too large.
        variable: Option<String>,
    },
    /// A buffer, such as a running variance, would be infinite or NaN.
    #[error("buffer {name} is no longer finite")]
    NonFiniteBuffer {
        /// The buffer.
        name: String,
    },
    /// Variables have no gradient in the first step, on any slot.
    #[error(
        "{} of {trained} variables got no gradient: {}. The loss does not use them (then \
         `freeze` them, or `allow_unused`), or an operation on the way to them has no backward. \
         candle-nn's LayerNorm, RmsNorm, softmax_last_dim and rope have none: use those of \
         fused_ops::layers and fused_ops, which candle_distributed has as `ops`",
        missing.len(), Listed(missing)
    )]
    NoGradient {
        /// Their names.
        missing: Vec<String>,
        /// How many variables are trained.
        trained: usize,
    },

    /// A loss enters a unit that the model does not have.
    #[error("there is no unit named {unit:?}, the units are {}", Listed(units))]
    UnknownUnit {
        /// The name that was asked for.
        unit: String,
        /// The units of the model.
        units: Vec<String>,
    },
    /// No batch of the first update has entered a unit, so its parameters would never learn.
    #[error(
        "the loss does not enter unit {unit}, so {} of its parameters got no gradient: {}. Enter it, \
         `freeze` them, or `allow_unused`",
        parameters.len(), Listed(parameters)
    )]
    NotEntered {
        /// The first such unit, in the order of names.
        unit: String,
        /// Its parameters that are trained and in no other unit that was entered.
        parameters: Vec<String>,
    },
    /// An option needs the gradients of the whole model, which are never there at once when
    /// optimizers run inside the backward pass.
    #[error(
        "`{option}` needs the gradients of the whole model at once, and with \
         `optimizer_in_backward` those of a unit are gone when the next ones come"
    )]
    NeedsAllGradients {
        /// The option or method.
        option: &'static str,
    },
    /// A type in which parameters cannot be computed with, or gradients summed.
    #[error("`mixed_precision` has {dtype} as {option}: {hint}")]
    UnfitDtype {
        /// `param_dtype` or `reduce_dtype`.
        option: &'static str,
        /// The type.
        dtype: &'static str,
        /// What to take instead.
        hint: &'static str,
    },
    /// A step has failed after its optimizers had begun to run, or a load on its way.
    #[error(
        "a step or a load failed after some parameters had been changed and others had not: `load` a \
         checkpoint, or build the model anew"
    )]
    HalfUpdated,
    /// A unit's function uses a tensor from outside that is differentiated, and its gradient would
    /// be lost.
    #[error(
        "the function of unit {unit} uses a tensor from outside that is differentiated: hand it \
         over with the unit's input, as one of a tuple"
    )]
    Captured {
        /// The unit.
        unit: String,
    },
    /// A loss uses a parameter outside the function of its unit, where it would get no gradient.
    #[error(
        "the loss uses parameter {parameter} outside the function of unit {unit}, where it gets no \
         gradient: return it from the function as one of a tuple"
    )]
    ParameterOutsideUnit {
        /// The unit.
        unit: String,
        /// The parameter.
        parameter: String,
    },
    /// A unit's function had another result when it was run again for the backward pass.
    #[error(
        "unit {unit} has another result in the backward pass than it had in the forward pass: \
         draw random numbers by keys that are made before the unit and moved into it \
         (`ctx.batch_keys()`), or set `Keep::Graph` for it"
    )]
    NotRepeatable {
        /// The unit.
        unit: String,
    },
    /// Two slots of a shard group have entered other units, or in another order, where units are
    /// [gathered ahead](crate::ModelBuilder::prefetch).
    #[error(
        "replica {left} enters the units {}, replica {right} enters {}",
        left_units.join(", "), right_units.join(", ")
    )]
    OtherUnits {
        /// The first slot of the shard group.
        left: usize,
        /// The units that it has entered, in their order.
        left_units: Vec<String>,
        /// The first slot of the group that has entered others.
        right: usize,
        /// The units that this one has entered.
        right_units: Vec<String>,
    },
    /// A unit is differentiated by something else than the step, or twice.
    #[error("unit {unit} is differentiated {how}: only the step differentiates a loss, and once")]
    Differentiated {
        /// The unit.
        unit: String,
        /// When, in words.
        how: &'static str,
    },

    /// An option of sharded models was set, and the model is replicated.
    #[error(
        "`{option}` is for a sharded model, and every device has this one whole: call `fully_shard`"
    )]
    OnlySharded {
        /// The option.
        option: &'static str,
    },
    /// An option of replicated models was set, and the model is sharded.
    #[error("`{option}` is for a model that every device has whole, and this one is sharded")]
    OnlyReplicated {
        /// The option.
        option: &'static str,
    },
    /// A pattern of an option picks no variable.
    #[error("the pattern {pattern:?} of `{option}` matches none of the model's variables")]
    Unmatched {
        /// The option.
        option: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A variable belongs to two groups of parameters.
    #[error("variable {name} is in group {first:?} and in group {second:?}")]
    TwoGroups {
        /// The variable.
        name: String,
        /// A group that it is in.
        first: String,
        /// The other one.
        second: String,
    },
    /// There are two groups of one name.
    #[error("there are two groups named {name:?}")]
    SameGroup {
        /// The name.
        name: String,
    },
    /// No variable of the model is in a group, so nothing has this group's learning rate.
    #[error("there is no group named {name:?}")]
    UnknownGroup {
        /// The name that was asked for.
        name: String,
    },
    /// A variable has a value of its own and another in the pretrained weights.
    #[error("variable {name} has a value already, and another in the weights")]
    TwoValues {
        /// The variable.
        name: String,
    },
    /// A variable has two names, so it would be updated under each of them.
    #[error(
        "{first} and {second} are one variable under two names: ask for one name twice in the \
         constructor"
    )]
    SameVariable {
        /// One of its names.
        first: String,
        /// The other one.
        second: String,
    },
    /// The model has no variable that is not frozen.
    #[error("there is nothing to train: all {variables} variables are frozen or buffers")]
    NothingTrained {
        /// How many variables there are.
        variables: usize,
    },
    /// The processes of the mesh have built different models.
    #[error("the model of replica {replica} has other variables than that of replica 0")]
    OtherModel {
        /// The first replica whose model has variables of other names, shapes or types.
        replica: usize,
    },
    /// The processes of the mesh have set an option of a model in different ways.
    #[error("`{option}` of replica {replica} differs from that of replica 0")]
    OtherOption {
        /// The option, as the method that sets it is called.
        option: &'static str,
        /// The first replica that has another value.
        replica: usize,
    },
}

/// The variable whose gradient is the first that is not finite, if one is.
struct Culprit<'a>(Option<&'a str>);

impl fmt::Display for Culprit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(variable) => {
                write!(f, ", the gradient of {variable} is the first that is not finite")
            }
            None => Ok(()),
        }
    }
}

/// Where the replicas of this process leave what they refuse, since candle's errors can only carry
/// its text.
///
/// What is here need not have ended anything: a loss may pass over the error of a unit and go on.
#[derive(Debug, Default)]
pub(crate) struct Refusal(Mutex<Refused>);

#[derive(Debug, Default)]
struct Refused {
    /// What all replicas of the mesh refuse at the same place.
    agreed: Option<TrainingError>,
    /// What single replicas refuse, each once.
    alone: Vec<TrainingError>,
}

impl Refusal {
    /// Refuses what all replicas refuse, by what they know of each other. Returns an error for the
    /// replica to end with.
    pub(crate) fn agreed(&self, error: TrainingError) -> candle_core::Error {
        // All replicas of this process bring the same, and the first is kept.
        candle_core::Error::msg(self.refused().agreed.get_or_insert(error))
    }

    /// Refuses what this replica alone knows of. The error that is returned ends the call for the
    /// others, unless the loss passes over it.
    pub(crate) fn alone(&self, error: TrainingError) -> candle_core::Error {
        let ending = candle_core::Error::msg(&error);
        let alone = &mut self.refused().alone;
        if !alone.contains(&error) {
            alone.push(error);
        }
        ending
    }

    /// What a replica returns: nothing, where all refuse. Its call succeeds then, since over
    /// several processes a call that fails ends them.
    pub(crate) fn outcome<T>(
        &self,
        outcome: candle_core::Result<T>,
    ) -> candle_core::Result<Option<T>> {
        match outcome {
            Err(_) if self.refused().agreed.is_some() => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// The outcome of a call whose replicas return [outcomes](Self::outcome): what was refused only
    /// where it ended the call.
    #[expect(clippy::expect_used, reason = "a replica returns nothing only where all refuse")]
    pub(crate) fn of<T>(&self, outcome: pmap_mesh::Result<Option<T>>) -> Result<T> {
        let refused = self.refused();
        match outcome {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(refused.agreed.clone().expect("something was refused").into()),
            Err(error) => {
                let said = error.to_string();
                let ended = refused.alone.iter().find(|refused| is_said(&said, refused));
                Err(ended.map_or_else(|| error.into(), |refused| refused.clone().into()))
            }
        }
    }

    /// Whoever panicked with the lock had changed nothing yet.
    fn refused(&self) -> MutexGuard<'_, Refused> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an error's text has that of a refusal. Some of candle's contexts quote what they are of.
fn is_said(text: &str, refused: &TrainingError) -> bool {
    let refused = refused.to_string();
    text.contains(&refused) || text.contains(&refused.escape_debug().to_string())
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
    fn what_was_refused_and_passed_over_ends_nothing() {
        let refusal = Refusal::default();
        refusal.alone(unknown("a"));
        assert_eq!(refusal.of(Ok(Some(7))).unwrap(), 7);
        let other = refusal.of(failed(candle_core::Error::msg("no such file"))).unwrap_err();
        assert!(other.to_string().contains("no such file"), "{other}");
        let ending = refusal.alone(unknown("b"));
        let found = refusal.of(failed(ending.context("unit b, forward pass"))).unwrap_err();
        assert!(matches!(found, Error::Training(found) if found == unknown("b")));
        let quoted = Err::<(), _>(refusal.alone(unknown("c"))).context("quoted").unwrap_err();
        let found = refusal.of(failed(quoted)).unwrap_err();
        assert!(matches!(found, Error::Training(found) if found == unknown("c")));
    }

    #[test]
    fn what_all_refuse_is_told_though_something_was_passed_over() {
        let refusal = Refusal::default();
        refusal.alone(unknown("a"));
        let ending = refusal.agreed(TrainingError::NoWeight);
        let outcome = refusal.outcome::<u8>(Err(ending)).unwrap();
        assert_eq!(outcome, None);
        let found = refusal.of(Ok(outcome)).unwrap_err();
        assert!(matches!(found, Error::Training(TrainingError::NoWeight)));
    }
}
