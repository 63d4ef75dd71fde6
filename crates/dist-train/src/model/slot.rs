//! State that one slot stores between steps, for both layouts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Result as CandleResult, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;
use dist_checkpoint::{Checkpoint, ParameterError, StateDict, TensorKey};

use crate::{
    device::moved,
    error::{Doing, Result},
    grad::scaled,
    optim::{StatefulOptimizer, add_state, check_state, clip, load_state},
    step::{
        batch::Totals,
        inventory::Inventory,
        rules::Rules,
        update::{clipped, norm},
    },
};

/// A shared slot: owned by its worker, and by operations in its graph that update parameters.
pub(crate) type SharedSlot<O> = Arc<Mutex<Slot<O>>>;

/// State that one slot stores between steps: variables, and the optimizers for its updates.
#[derive(Debug)]
pub(crate) struct Slot<O> {
    /// The variables, in the order of parameters.
    pub(crate) vars: Vec<SlotVar>,
    /// The optimizers, at least one per group, in the order of groups.
    pub(crate) optimizers: Vec<SlotOptimizer<O>>,
    /// Totals of the batches since the last update.
    pub(crate) totals: Option<Totals>,
    /// Squares of the gradients used for updates in the current backward pass, one per trained
    /// parameter of the model.
    pub(crate) squares: Vec<f64>,
    /// Whether a step started to update parameters and did not finish.
    pub(crate) is_half_updated: bool,
}

/// A variable of a slot: a parameter, or a range of its items.
#[derive(Debug)]
pub(crate) struct SlotVar {
    pub(crate) var: Var,
    /// The copy in the dtype that the model computes in, if it is another one.
    pub(crate) rounded: Option<Var>,
    /// The parameter's index in the model.
    pub(crate) param: usize,
    /// The index of the first item in the parameter.
    pub(crate) start: usize,
    /// The parameter's index among the trained parameters; `None` if it is not trained.
    pub(crate) trained: Option<usize>,
    /// Whether this slot reports the gradient of these items, if several slots store them.
    pub(crate) is_primary: bool,
    /// Whether this slot writes the variable to checkpoints.
    pub(crate) is_saved: bool,
    /// Whether this slot reads the variable from checkpoints.
    pub(crate) is_loaded: bool,
}

/// The optimizer of some variables of a group: all variables that the slot updates, or, inside the
/// backward pass, the variables of one unit.
#[derive(Debug)]
pub(crate) struct SlotOptimizer<O> {
    pub(crate) group: usize,
    /// Indices of its variables in the slot, in the optimizer's order.
    pub(crate) vars: Vec<usize>,
    pub(crate) optimizer: O,
    /// Whether it has made the current step.
    pub(crate) has_stepped: bool,
}

/// Locks a slot. During a step only the slot's own worker locks it, and all other code runs between
/// steps, so there is no contention.
///
/// Ignores poisoning: a loss or an optimizer may panic while it holds the lock, which fails the
/// step like an error. A failed step leaves the slot either unchanged or marked as half updated, so
/// poisoning adds no information.
pub(crate) fn lock<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SlotVar {
    fn key<'a>(&self, inventory: &'a Inventory) -> TensorKey<'a> {
        TensorKey::model(inventory.name(self.param), self.start)
    }

    /// Sets the variable to its range of a full parameter's items, given as a one-dimensional
    /// tensor.
    ///
    /// # Errors
    ///
    /// Returns the errors of candle.
    pub(crate) fn set_items(&self, items: &Tensor) -> CandleResult<()> {
        let own = items.narrow(0, self.start, self.var.elem_count())?;
        // Copied first, because candle would move the full storage of a view.
        self.set(&own.force_contiguous()?.reshape(self.var.shape())?)
    }

    /// Sets the variable to a value of any dtype on any device.
    ///
    /// # Errors
    ///
    /// Returns the errors of candle.
    fn set(&self, value: &Tensor) -> CandleResult<()> {
        self.var.set(&moved(value, self.var.device())?.to_dtype(self.var.dtype())?)?;
        self.round()
    }

    /// Updates the rounded copy of the variable, if there is one.
    ///
    /// # Errors
    ///
    /// Returns the errors of candle.
    pub(crate) fn round(&self) -> CandleResult<()> {
        let Some(rounded) = &self.rounded else { return Ok(()) };
        rounded.set(&self.var.as_detached_tensor().to_dtype(rounded.dtype())?)
    }
}

impl<O> Slot<O> {
    pub(crate) fn new(
        vars: Vec<SlotVar>,
        optimizers: Vec<SlotOptimizer<O>>,
        n_trained: usize,
    ) -> Self {
        let squares = vec![0.0; n_trained];
        Self { vars, optimizers, totals: None, squares, is_half_updated: false }
    }

    /// Starts a batch, and returns the totals of the batches since the last update.
    pub(crate) fn begin(&mut self) -> Option<Totals> {
        self.squares.fill(0.0);
        self.optimizers.iter_mut().for_each(|of_vars| of_vars.has_stepped = false);
        self.totals.take()
    }

    /// Returns the indices of variables of some trained parameters, each with the parameter's index
    /// among all trained parameters.
    pub(crate) fn vars_of(&self, trained: &[usize]) -> Vec<(usize, usize)> {
        let of_var = |(position, var): (usize, &SlotVar)| Some((position, var.trained?));
        let all = self.vars.iter().enumerate().filter_map(of_var);
        all.filter(|(_, of_var)| trained.contains(of_var)).collect()
    }

    /// Returns the sums of squares of this slot's sums for each trained parameter, added up in item
    /// order.
    pub(crate) fn local_squares(&self, sums: &[(usize, Tensor)]) -> CandleResult<Vec<f64>> {
        let mut squares = vec![0.0; self.squares.len()];
        for (position, sum) in sums {
            if let SlotVar { is_primary: true, trained: Some(trained), .. } = self.vars[*position] {
                squares[trained] += clip::squares(sum)?;
            }
        }
        Ok(squares)
    }

    /// Returns the optimizer that updates a variable, if any, and the variable's index in it.
    fn optimizer_of(&self, var: usize) -> Option<(&O, usize)> {
        self.optimizers.iter().find_map(|of_vars| {
            let position = of_vars.vars.iter().position(|&other| other == var)?;
            Some((&of_vars.optimizer, position))
        })
    }
}

impl<O: Optimizer> Slot<O> {
    /// Returns the learning rate of a group.
    #[expect(clippy::expect_used, reason = "a group has an optimizer on every slot")]
    pub(crate) fn learning_rate(&self, group: usize) -> f64 {
        let of_group = self.optimizers.iter().find(|of_vars| of_vars.group == group);
        of_group.expect("every group has an optimizer").optimizer.learning_rate()
    }

    /// Sets the learning rate of a group.
    pub(crate) fn set_learning_rate(&mut self, group: usize, learning_rate: f64) {
        let of_group = self.optimizers.iter_mut().filter(|of_vars| of_vars.group == group);
        of_group.for_each(|of_vars| of_vars.optimizer.set_learning_rate(learning_rate));
    }

    /// Updates all variables by `factor` times these sums. `squares` has the squares of each
    /// trained parameter, which all slots agree on. Returns the gradient norm before clipping.
    ///
    /// # Errors
    ///
    /// Returns an error on all slots, before a variable changes, if the norm is not finite, and the
    /// errors of optimizers.
    pub(crate) fn update_all(
        &mut self,
        rules: &Rules,
        squares: &[f64],
        sums: Vec<(usize, Tensor)>,
        factor: f64,
    ) -> CandleResult<f64> {
        let norm = norm(rules, squares, factor)?;
        self.is_half_updated = true;
        self.update(sums, clipped(rules, norm, factor))?;
        self.step_remaining()?;
        Ok(norm)
    }

    /// Makes a step of these variables' optimizers by `factor` times the sums.
    pub(crate) fn update(&mut self, sums: Vec<(usize, Tensor)>, factor: f64) -> CandleResult<()> {
        let summed: Vec<usize> = sums.iter().map(|&(position, _)| position).collect();
        let mut grads = GradStore::default();
        for (position, sum) in sums {
            // Gradients stay in single precision for half-precision variables, because master
            // weights use the extra digits.
            grads.insert(&self.vars[position].var, scaled(sum, factor)?);
        }
        self.step_each(&grads, |of_vars| of_vars.vars.iter().any(|var| summed.contains(var)))
    }

    /// Makes a step of the remaining optimizers, which had no variable with a gradient, so that all
    /// count the same number of steps.
    pub(crate) fn step_remaining(&mut self) -> CandleResult<()> {
        self.step_each(&GradStore::default(), |of_vars| !of_vars.has_stepped)
    }

    /// Makes a step of the optimizers that are due.
    fn step_each(
        &mut self,
        grads: &GradStore,
        is_due: impl Fn(&SlotOptimizer<O>) -> bool,
    ) -> CandleResult<()> {
        let Self { vars, optimizers, .. } = self;
        for of_vars in optimizers.iter_mut().filter(|of_vars| is_due(of_vars)) {
            of_vars.has_stepped = true;
            of_vars.optimizer.step(grads)?;
            of_vars.vars.iter().try_for_each(|&var| vars[var].round())?;
        }
        Ok(())
    }
}

impl<O: StatefulOptimizer> Slot<O> {
    /// Adds this slot's tensors to a checkpoint.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`StateDict::add`] and [`add_state`].
    pub(super) fn save(
        &self,
        inventory: &Inventory,
        local_slot: usize,
        state: &mut StateDict,
    ) -> Result<()> {
        for (position, var) in self.vars.iter().enumerate().filter(|(_, var)| var.is_saved) {
            let key = var.key(inventory);
            let master = match self.optimizer_of(position) {
                Some((optimizer, position)) => {
                    add_state(state, local_slot, key, optimizer, position)?
                }
                None => None,
            };
            // With master weights a checkpoint does not depend on the dtype of the variable.
            let value = master.unwrap_or_else(|| var.var.as_detached_tensor());
            state.add(local_slot, key, value)?;
        }
        Ok(())
    }

    /// Checks, before anything changes, that this slot can load a checkpoint: integers stay
    /// integers, and the optimizers have all state of their variables.
    ///
    /// # Errors
    ///
    /// Returns [`ParameterError::Conversion`], and the errors of [`check_state`].
    pub(super) fn check(&self, inventory: &Inventory, checkpoint: &Checkpoint) -> Result<()> {
        for var in self.vars.iter().filter(|var| var.is_loaded && var.var.elem_count() > 0) {
            let (key, expected) = (var.key(inventory), var.var.dtype());
            let found = checkpoint.dtype(key)?;
            if found != expected && !(found.is_float() && expected.is_float()) {
                let name = key.parameter.to_owned();
                let (found, expected) = (found.as_str(), expected.as_str());
                return Err(ParameterError::Conversion { name, found, expected }.into());
            }
        }
        for of_vars in &self.optimizers {
            for (position, &var) in of_vars.vars.iter().enumerate() {
                let key = self.vars[var].key(inventory);
                check_state(checkpoint, key, &of_vars.optimizer, position)?;
            }
        }
        Ok(())
    }

    /// Loads this slot's values from a checkpoint.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Checkpoint::like`], [`load_state`] and candle.
    pub(super) fn load(&mut self, inventory: &Inventory, checkpoint: &Checkpoint) -> Result<()> {
        let Self { vars, optimizers, .. } = self;
        for var in vars.iter().filter(|var| var.is_loaded) {
            let value = checkpoint.like(var.key(inventory), &var.var)?;
            var.set(&value).doing("loading a parameter")?;
        }
        for of_vars in optimizers {
            for (position, &var) in of_vars.vars.iter().enumerate() {
                load_state(checkpoint, vars[var].key(inventory), &mut of_vars.optimizer, position)?;
            }
        }
        Ok(())
    }
}
