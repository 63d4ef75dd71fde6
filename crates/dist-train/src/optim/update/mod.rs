//! Updates of variables: in place on the CPU, and by candle's operations on other devices. Both
//! give identical bits.

mod in_place;
pub(super) mod items;
pub(super) mod numbers;
mod open;

use candle_core::{DType, Result, Storage, Tensor, Var, bail};

use self::{
    items::Items,
    numbers::{Numbers, Outcome},
    open::open,
};
use crate::device::shares_memory;

/// The update rule of an optimizer for an item with `N` numbers of state.
pub(super) trait Rule<const N: usize>: Sync {
    /// Returns the new value and the new state.
    ///
    /// # Errors
    ///
    /// Returns the errors of the numbers.
    fn apply<X: Numbers>(&self, value: &X, state: [&X; N], grad: &X) -> Outcome<X, (X, [X; N])>;
}

/// A variable that an optimizer updates.
///
/// A half-precision variable has f32 *master weights*, which accumulate changes too small for half
/// precision and from which the variable is rounded (Micikevicius et al., "Mixed Precision
/// Training", 2018). If the variable is set from outside, the master weights follow.
#[derive(Debug)]
pub(super) struct Variable {
    var: Var,
    master: Option<Var>,
}

/// The name of the master weights in the state of an optimizer.
pub(in crate::optim) const MASTER: &str = "master";

impl Variable {
    pub(super) fn new(var: Var) -> Result<Self> {
        let has_master = var.dtype().is_float() && !matches!(var.dtype(), DType::F32 | DType::F64);
        let master = has_master.then(|| Var::from_tensor(&var.to_dtype(DType::F32)?));
        Ok(Self { master: master.transpose()?, var })
    }

    pub(super) fn var(&self) -> &Var {
        &self.var
    }

    pub(super) fn master(&self) -> Option<&Var> {
        self.master.as_ref()
    }

    /// Sets the master weights to the variable's values where the caller has changed them.
    pub(super) fn refresh_master(&self) -> Result<()> {
        self.master.as_ref().map_or(Ok(()), |master| master.set(&self.current()?))
    }

    /// Returns the values to compute with: the master weights if there are any.
    fn values(&self) -> &Var {
        self.master.as_ref().unwrap_or(&self.var)
    }

    /// Returns a state of zeros.
    pub(super) fn zeros(&self) -> Result<Var> {
        let values = self.values();
        Var::zeros(values.shape(), values.dtype(), values.device())
    }

    /// Updates variable and state by a gradient.
    ///
    /// # Errors
    ///
    /// Returns an error if the gradient has another shape than the variable, and errors of candle.
    pub(super) fn update<const N: usize>(
        &self,
        rule: &impl Rule<N>,
        state: [&Var; N],
        grad: &Tensor,
    ) -> Result<()> {
        if grad.shape() != self.var.shape() {
            bail!(
                "gradient has shape {:?}, but its variable has shape {:?}",
                grad.dims(),
                self.var.dims()
            )
        }
        if self.var.elem_count() == 0 {
            return Ok(());
        }
        if self.is_updated_in_place() {
            self.update_in_place(rule, state, grad)
        } else {
            self.update_by_operations(rule, state, grad)
        }
    }

    fn is_updated_in_place(&self) -> bool {
        let dtypes = [DType::F16, DType::BF16, DType::F32, DType::F64];
        self.var.device().is_cpu() && dtypes.contains(&self.var.dtype())
    }

    fn update_in_place<const N: usize>(
        &self,
        rule: &impl Rule<N>,
        state: [&Var; N],
        grad: &Tensor,
    ) -> Result<()> {
        let mut opened: Vec<&Tensor> = vec![self.values()];
        opened.extend(state.iter().map(|state| state.as_tensor()));
        opened.extend(self.master.as_ref().map(|_| self.var.as_tensor()));
        // Opening a storage takes its write lock, which would deadlock with the read lock held on
        // the gradient.
        let grad = if opened.iter().any(|opened| shares_memory(opened, grad)) {
            &grad.copy()?
        } else {
            grad
        };
        let (storage, layout) = grad.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            bail!("gradient is on {:?}, but its variable is on the CPU", grad.device())
        };
        let grads = Items::new(storage, layout)?;
        open(&opened, &mut |opened| in_place::update(rule, opened, grads))
    }

    fn update_by_operations<const N: usize>(
        &self,
        rule: &impl Rule<N>,
        state: [&Var; N],
        grad: &Tensor,
    ) -> Result<()> {
        let values = self.current()?;
        let before = state.map(Var::as_detached_tensor);
        let grad = grad.detach().to_dtype(values.dtype())?;
        let (values, after) = rule.apply(&values, before.each_ref(), &grad)?;
        for (state, after) in state.iter().zip(after) {
            state.set(&after)?;
        }
        if let Some(master) = &self.master {
            master.set(&values)?;
        }
        self.var.set(&values.to_dtype(self.var.dtype())?)
    }

    /// Returns the values to compute with: master weights, except for items of the variable that
    /// changed since they were rounded from them.
    fn current(&self) -> Result<Tensor> {
        let var = self.var.as_detached_tensor();
        let Some(master) = &self.master else { return Ok(var) };
        let master = master.as_detached_tensor();
        let rounded = master.to_dtype(var.dtype())?.to_dtype(DType::F32)?;
        let var = var.to_dtype(DType::F32)?;
        rounded.ne(&var)?.where_cond(&var, &master)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::{numbers::Outcome, *};

    /// A rule that uses every operation and is not symmetric in value, states and gradient.
    struct AllOperations;

    impl Rule<2> for AllOperations {
        fn apply<X: Numbers>(
            &self,
            value: &X,
            [first, second]: [&X; 2],
            grad: &X,
        ) -> Outcome<X, (X, [X; 2])> {
            let first = first.scaled(0.9)?.plus(&grad.scaled(0.1)?)?;
            let second = second.scaled(0.3)?.plus(&grad.squared()?)?;
            let change = first.over(&second.root()?.affine(1.0, 0.1)?)?;
            Ok((value.minus(&change)?, [first, second]))
        }
    }

    /// A variable with its state.
    struct UpdatedVariable {
        variable: Variable,
        state: [Var; 2],
    }

    impl UpdatedVariable {
        fn new(values: &Tensor) -> Self {
            let variable =
                Variable::new(Var::from_tensor(&values.copy().unwrap()).unwrap()).unwrap();
            let state = [(); 2].map(|()| variable.zeros().unwrap());
            Self { variable, state }
        }

        fn update(&self, grad: &Tensor) {
            self.variable.update(&AllOperations, self.state.each_ref(), grad).unwrap();
        }

        fn update_by_operations(&self, grad: &Tensor) {
            self.variable
                .update_by_operations(&AllOperations, self.state.each_ref(), grad)
                .unwrap();
        }

        /// Returns the bits of the variable, its master weights and its state.
        fn bits(&self) -> Vec<Vec<u8>> {
            let tensors = [Some(&self.variable.var), self.variable.master.as_ref()];
            let tensors = tensors.into_iter().flatten().chain(&self.state);
            tensors.map(|tensor| bytes(tensor)).collect()
        }
    }

    fn bytes(tensor: &Tensor) -> Vec<u8> {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).unwrap();
        bytes
    }

    /// Returns numbers without a pattern, including zeros of both signs.
    fn numbers(len: usize, salt: f32, dtype: DType) -> Tensor {
        let numbers = (0..len).map(|item| match item % 11 {
            3 => 0.0,
            7 => -0.0,
            _ => (item as f32 * 0.731 + salt).sin() * 3.0,
        });
        let numbers: Vec<f32> = numbers.collect();
        Tensor::from_vec(numbers, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

    #[test]
    fn in_place_equals_composed() {
        for dtype in DTYPES {
            for len in [1, 15, 16, 17, 1000, 1024, 1025, 40_003] {
                let updated = [(); 2].map(|()| UpdatedVariable::new(&numbers(len, 0.1, dtype)));
                for step in 0..3 {
                    let grad = numbers(len, step as f32, dtype);
                    updated[0].update(&grad);
                    updated[1].update_by_operations(&grad);
                    assert_eq!(updated[0].bits(), updated[1].bits(), "{dtype:?} {len}");
                }
                let before = bytes(&numbers(len, 0.1, dtype));
                assert_ne!(updated[0].bits()[0], before, "{dtype:?} {len}");
            }
        }
    }

    #[test]
    fn shards_update_like_the_full_tensor() {
        for dtype in DTYPES {
            let (values, grad) = (numbers(100, 0.1, dtype), numbers(100, 0.2, dtype));
            let whole = UpdatedVariable::new(&values);
            whole.update(&grad);
            for start in 0..40 {
                for end in [start, start + 1, start + 19, 100] {
                    let part = |tensor: &Tensor| tensor.narrow(0, start, end - start).unwrap();
                    let shard = UpdatedVariable::new(&part(&values));
                    shard.update(&part(&grad));
                    let expected = bytes(&part(&whole.variable.var).copy().unwrap());
                    assert_eq!(bytes(&shard.variable.var), expected, "{dtype:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn gradients_may_be_views() {
        let values = numbers(64 * 33, 0.1, DType::F32).reshape((33, 64)).unwrap();
        let grad = numbers(64 * 33, 0.2, DType::BF16).reshape((64, 33)).unwrap().t().unwrap();
        let scalar = grad.narrow(0, 0, 1).unwrap().narrow(1, 3, 1).unwrap();
        for grad in [grad, scalar.broadcast_as((33, 64)).unwrap()] {
            let updated = [(); 2].map(|()| UpdatedVariable::new(&values));
            updated[0].update(&grad);
            updated[1].update(&grad.to_dtype(DType::F32).unwrap().contiguous().unwrap());
            assert_eq!(updated[0].bits(), updated[1].bits());
        }
    }

    #[test]
    fn thread_count_does_not_matter() {
        let (values, grad) = (numbers(100_001, 0.1, DType::F32), numbers(100_001, 0.2, DType::F32));
        let bits = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let updated = UpdatedVariable::new(&values);
            pool.install(|| updated.update(&grad));
            updated.bits()
        };
        assert_eq!(bits(1), bits(3));
    }

    #[test]
    fn empty_variables_can_be_updated() {
        UpdatedVariable::new(&numbers(0, 0.1, DType::F32)).update(&numbers(0, 0.2, DType::F32));
    }

    #[test]
    fn a_variable_may_be_its_own_gradient() {
        let updated = [(); 2].map(|()| UpdatedVariable::new(&numbers(20, 0.1, DType::F32)));
        let grad = updated[0].variable.var.as_detached_tensor();
        updated[1].update(&grad.copy().unwrap());
        updated[0].update(&grad);
        assert_eq!(updated[0].bits(), updated[1].bits());
    }

    #[test]
    fn values_set_from_outside_are_used() {
        for dtype in [DType::F16, DType::BF16] {
            for update in [UpdatedVariable::update, UpdatedVariable::update_by_operations] {
                let (values, grad) = (numbers(50, 0.1, dtype), numbers(50, 0.2, dtype));
                let updated = UpdatedVariable::new(&numbers(50, 0.7, dtype));
                updated.variable.var.set(&values).unwrap();
                update(&updated, &grad);
                let expected = UpdatedVariable::new(&values);
                update(&expected, &grad);
                assert_eq!(updated.bits(), expected.bits(), "{dtype:?}");
            }
        }
    }

    #[test]
    fn mismatched_gradients_are_rejected() {
        let updated = UpdatedVariable::new(&numbers(6, 0.1, DType::F32));
        let before = updated.bits();
        let other = numbers(6, 0.2, DType::F32).reshape((2, 3)).unwrap();
        let integers = Tensor::zeros(6, DType::U32, &Device::Cpu).unwrap();
        for grad in [other, integers] {
            let update = updated.variable.update(&AllOperations, updated.state.each_ref(), &grad);
            assert!(update.is_err());
        }
        assert_eq!(updated.bits(), before);
    }
}
