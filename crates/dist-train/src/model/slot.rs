//! State that one slot stores between steps, for both layouts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Result as CandleResult, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;
use dist_checkpoint::{Checkpoint, ParameterError, StateDict, TensorKey};

use crate::{
    device::move_to_device,
    error::{Doing, Result},
    grad::scale_gradient,
    optim::{StatefulOptimizer, add_state, check_state, clip, load_state},
    step::{
        batch::Totals,
        inventory::Inventory,
        rules::Rules,
        update::{clipped_factor, global_norm},
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
    /// For each trained parameter of the model, the squared norm of the gradient with which the
    /// current backward pass has updated the parameter, or 0 if it has not.
    pub(crate) squared_norms: Vec<f64>,
    /// Whether a step started to update parameters and did not finish.
    pub(crate) is_half_updated: bool,
}

/// A variable of a slot: a parameter, or a range of its items.
#[derive(Debug)]
pub(crate) struct SlotVar {
    pub(crate) var: Var,
    /// A copy in the compute dtype, if this is not the dtype of `var`.
    pub(crate) rounded: Option<Var>,
    /// The parameter's index in the model.
    pub(crate) param: usize,
    /// The index of the first item in the parameter.
    pub(crate) start: usize,
    /// The parameter's index among the trained parameters; `None` if it is not trained.
    pub(crate) trained_index: Option<usize>,
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
    /// Indices in the slot of the variables that it updates, in the optimizer's order.
    pub(crate) vars: Vec<usize>,
    pub(crate) optimizer: O,
    /// Whether the optimizer has made the current step.
    pub(crate) has_stepped: bool,
}

/// Locks a slot, or other state of one slot. During a step, only the worker of the slot locks it.
/// All other code runs between steps, so there is no contention.
///
/// Ignores poisoning: a loss or an optimizer may panic while the slot is locked, which fails the
/// step like an error. A failed step leaves the slot either unchanged or marked as half updated, so
/// poisoning adds no information.
pub(crate) fn lock<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SlotVar {
    fn key<'a>(&self, inventory: &'a Inventory) -> TensorKey<'a> {
        TensorKey::model(inventory.name(self.param), self.start)
    }

    /// Sets the variable to its range of `items`, the items of the full parameter in one dimension.
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
        self.var.set(&move_to_device(value, self.var.device())?.to_dtype(self.var.dtype())?)?;
        self.round()
    }

    /// Updates the rounded copy of the variable, if there is one.
    ///
    /// # Errors
    ///
    /// Returns the errors of candle.
    fn round(&self) -> CandleResult<()> {
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
        let squared_norms = vec![0.0; n_trained];
        Self { vars, optimizers, totals: None, squared_norms, is_half_updated: false }
    }

    /// Starts a batch: resets the state of the backward pass, and takes the totals of the batches
    /// since the last update.
    pub(crate) fn begin(&mut self) -> Option<Totals> {
        self.squared_norms.fill(0.0);
        for optimizer in &mut self.optimizers {
            optimizer.has_stepped = false;
        }
        self.totals.take()
    }

    /// Returns the indices of the variables that belong to the parameters `trained`, each with the
    /// index of its parameter. Both are indices among all trained parameters.
    pub(crate) fn vars_of(&self, trained: &[usize]) -> Vec<(usize, usize)> {
        let mut vars = Vec::new();
        for (index, var) in self.vars.iter().enumerate() {
            if let Some(trained_index) = var.trained_index
                && trained.contains(&trained_index)
            {
                vars.push((index, trained_index));
            }
        }
        vars
    }

    /// Returns the squared norm of the reduced gradients `sums` of this slot for each trained
    /// parameter. The norms of several variables of a parameter are added up in item order.
    pub(crate) fn local_squared_norms(&self, sums: &[(usize, Tensor)]) -> CandleResult<Vec<f64>> {
        let mut squared_norms = vec![0.0; self.squared_norms.len()];
        for (var, sum) in sums {
            if let SlotVar { is_primary: true, trained_index: Some(index), .. } = self.vars[*var] {
                squared_norms[index] += clip::squared_norm(sum)?;
            }
        }
        Ok(squared_norms)
    }

    /// Returns the optimizer that updates a variable, if any, and the variable's position among the
    /// optimizer's variables.
    fn optimizer_of(&self, var: usize) -> Option<(&O, usize)> {
        self.optimizers.iter().find_map(|slot_optimizer| {
            let position = slot_optimizer.vars.iter().position(|&other| other == var)?;
            Some((&slot_optimizer.optimizer, position))
        })
    }
}

impl<O: Optimizer> Slot<O> {
    /// Returns the learning rate of a group.
    #[expect(clippy::expect_used, reason = "a group has an optimizer on every slot")]
    pub(crate) fn learning_rate(&self, group: usize) -> f64 {
        let first = self.optimizers.iter().find(|optimizer| optimizer.group == group);
        first.expect("every group has an optimizer").optimizer.learning_rate()
    }

    /// Sets the learning rate of a group.
    pub(crate) fn set_learning_rate(&mut self, group: usize, learning_rate: f64) {
        for slot_optimizer in &mut self.optimizers {
            if slot_optimizer.group == group {
                slot_optimizer.optimizer.set_learning_rate(learning_rate);
            }
        }
    }

    /// Updates all variables with gradients of `factor` times `sums`, clipped. `squared_norms` has
    /// the squared norm of the sums of each trained parameter, the same on all slots. Returns the
    /// gradient norm before clipping.
    ///
    /// # Errors
    ///
    /// Returns an error on all slots, before a variable changes, if the norm is not finite. Returns
    /// the errors of optimizers.
    pub(crate) fn update_all(
        &mut self,
        rules: &Rules,
        squared_norms: &[f64],
        sums: Vec<(usize, Tensor)>,
        factor: f64,
    ) -> CandleResult<f64> {
        let norm = global_norm(rules, squared_norms, factor)?;
        self.is_half_updated = true;
        self.update(sums, clipped_factor(rules, norm, factor))?;
        self.step_remaining()?;
        Ok(norm)
    }

    /// Makes a step of each optimizer that updates a variable in `sums`, with gradients of `factor`
    /// times the sums.
    pub(crate) fn update(&mut self, sums: Vec<(usize, Tensor)>, factor: f64) -> CandleResult<()> {
        let summed_vars: Vec<usize> = sums.iter().map(|&(var, _)| var).collect();
        let mut grads = GradStore::default();
        for (var, sum) in sums {
            // Gradients stay in single precision for half-precision variables, because master
            // weights use the extra digits.
            grads.insert(&self.vars[var].var, scale_gradient(sum, factor)?);
        }
        self.step_each(&grads, |optimizer| {
            optimizer.vars.iter().any(|var| summed_vars.contains(var))
        })
    }

    /// Makes a step of the remaining optimizers, which have no variable with a gradient, so that
    /// all optimizers count the same number of steps.
    pub(crate) fn step_remaining(&mut self) -> CandleResult<()> {
        self.step_each(&GradStore::default(), |optimizer| !optimizer.has_stepped)
    }

    /// Makes a step of the optimizers that are due, and rounds the variables that they update.
    fn step_each(
        &mut self,
        grads: &GradStore,
        is_due: impl Fn(&SlotOptimizer<O>) -> bool,
    ) -> CandleResult<()> {
        let Self { vars, optimizers, .. } = self;
        for slot_optimizer in optimizers.iter_mut().filter(|optimizer| is_due(optimizer)) {
            slot_optimizer.has_stepped = true;
            slot_optimizer.optimizer.step(grads)?;
            slot_optimizer.vars.iter().try_for_each(|&var| vars[var].round())?;
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
        for (index, var) in self.vars.iter().enumerate().filter(|(_, var)| var.is_saved) {
            let key = var.key(inventory);
            // `add_state` leaves out the master weights, which replace the variable's value.
            let master = match self.optimizer_of(index) {
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

    /// Checks, before anything changes, that this slot can load a checkpoint: that the checkpoint
    /// has each variable in the same dtype or in another floating-point dtype, and that it has all
    /// optimizer state of each variable.
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
        for optimizer in &self.optimizers {
            for (position, &var) in optimizer.vars.iter().enumerate() {
                let key = self.vars[var].key(inventory);
                check_state(checkpoint, key, &optimizer.optimizer, position)?;
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
        for SlotOptimizer { vars: own, optimizer, .. } in optimizers {
            for (position, &var) in own.iter().enumerate() {
                load_state(checkpoint, vars[var].key(inventory), optimizer, position)?;
            }
        }
        Ok(())
    }
}
