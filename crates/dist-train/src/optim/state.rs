//! Optimizer state of each variable, by name.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore, bail};

use crate::{
    device::move_to_device,
    optim::update::{MASTER, Variable},
};

const STEP: &str = "step";

/// The variables of an optimizer, in their original order.
#[derive(Debug)]
pub(super) struct VariableStates(Vec<VariableState>);

/// A variable with its optimizer state.
#[derive(Debug)]
pub(super) struct VariableState {
    pub(super) variable: Variable,
    /// Number of steps; `i32` because [`f64::powi`] takes it as exponent.
    pub(super) step: i32,
    /// Named tensors of the variable's shape. If there are none, the number of steps is not part of
    /// the state.
    pub(super) tensors: Vec<(&'static str, Var)>,
}

impl VariableStates {
    /// Creates states of zeros, with tensors of these names.
    ///
    /// # Errors
    ///
    /// Rejects a variable that occurs twice, since each step would update it twice.
    pub(super) fn new(vars: Vec<Var>, names: &[&'static str]) -> Result<Self> {
        for (position, var) in vars.iter().enumerate() {
            let first = vars.iter().position(|other| other.id() == var.id());
            if let Some(first) = first.filter(|&first| first < position) {
                bail!("the optimizer has variable {first} again as variable {position}")
            }
        }
        Ok(Self(vars.into_iter().map(|var| VariableState::new(var, names)).collect::<Result<_>>()?))
    }

    /// Calls `update` for each variable with a gradient, except for integer variables.
    pub(super) fn update_each(
        &mut self,
        grads: &GradStore,
        mut update: impl FnMut(&mut VariableState, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for state in &mut self.0 {
            let var = state.variable.var();
            if var.dtype().is_float()
                && let Some(grad) = grads.get(var)
            {
                update(state, grad)?;
            }
        }
        Ok(())
    }

    /// Returns the state of a variable.
    pub(super) fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>> {
        match self.0.get(var) {
            Some(state) => state.named_tensors(),
            None => self.unknown_variable(var),
        }
    }

    /// Replaces one tensor in the state of a variable; `optimizer` is the name for errors.
    pub(super) fn load(
        &mut self,
        optimizer: &str,
        var: usize,
        name: &str,
        value: &Tensor,
    ) -> Result<()> {
        let Some(state) = self.0.get_mut(var) else { return self.unknown_variable(var) };
        if !state.load(name, value)? {
            bail!("{optimizer} has no state {name} for variable {var}")
        }
        Ok(())
    }

    fn unknown_variable<T>(&self, var: usize) -> Result<T> {
        bail!("the optimizer has {} variables, but no variable {var}", self.0.len())
    }
}

impl VariableState {
    fn new(var: Var, names: &[&'static str]) -> Result<Self> {
        let variable = Variable::new(var)?;
        let mut tensors = Vec::with_capacity(names.len());
        for &name in names {
            tensors.push((name, variable.zeros()?));
        }
        Ok(Self { variable, step: 0, tensors })
    }

    fn named_tensors(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let mut named = Vec::new();
        if !self.tensors.is_empty() {
            named.push((STEP, Tensor::new(i64::from(self.step), &Device::Cpu)?));
        }
        for (name, tensor) in &self.tensors {
            named.push((name, tensor.as_detached_tensor()));
        }
        if let Some(master) = self.variable.master() {
            // The caller may have changed the variable.
            self.variable.refresh_master()?;
            named.push((MASTER, master.as_detached_tensor()));
        }
        Ok(named)
    }

    /// Replaces the tensor of this name. Returns false if there is no such tensor.
    fn load(&mut self, name: &str, value: &Tensor) -> Result<bool> {
        if name == STEP && !self.tensors.is_empty() {
            self.step = step_count(value)?;
            return Ok(true);
        }
        let mut tensors = self.tensors.iter();
        let named = tensors.find(|(other, _)| *other == name).map(|(_, tensor)| tensor);
        let master = if name == MASTER { self.variable.master() } else { None };
        let Some(target) = named.or(master) else { return Ok(false) };
        assign(target, value)?;
        Ok(true)
    }
}

/// Sets a tensor of a state from a tensor of any floating-point dtype on any device.
fn assign(state: &Var, value: &Tensor) -> Result<()> {
    state.set(&move_to_device(value, state.device())?.to_dtype(state.dtype())?)
}

/// Reads a number of steps.
fn step_count(value: &Tensor) -> Result<i32> {
    let steps: i64 = value.to_dtype(DType::I64)?.to_scalar()?;
    match i32::try_from(steps) {
        Ok(count @ 0..) => Ok(count),
        _ => bail!("{steps} steps cannot have been taken: the count must be 0 to {}", i32::MAX),
    }
}
