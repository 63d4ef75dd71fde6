//! AdamW, in place and with a state that can be saved.

use candle_core::{Result, Tensor, Var, backprop::GradStore, bail};
use candle_nn::{Optimizer, ParamsAdamW};

use crate::{
    error::Error,
    optim::{
        StatefulOptimizer,
        state::{VariableState, VariableStates},
        update::{
            Rule,
            numbers::{Numbers, Outcome},
        },
    },
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
///
/// It replaces [`candle_nn::AdamW`]. In f32 and f64 its steps equal candle's to the bit. It differs
/// as follows:
///
/// - On the CPU, variables and state are updated in place, so a step allocates no tensor of a
///   variable's size, while candle's step holds six to eight at a time; the threads of the caller's
///   pool share the work.
/// - Its state can be saved; candle's state is private.
/// - Half-precision variables are updated in f32: the state includes f32 master weights, from which
///   each variable is rounded, so changes too small for half precision add up.
/// - As in PyTorch, each variable counts its own steps, one per gradient, and the tensors of its
///   state are named `step`, `exp_avg` and `exp_avg_sq` (and `master`).
///
/// # Determinism
///
/// Items are updated independently, with the same rounding at any position: an optimizer of a
/// variable's shard computes the same values as an optimizer of the full variable, for any number
/// of threads.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_nn::{Optimizer, ParamsAdamW};
/// use dist_train::{AdamW, StatefulOptimizer};
///
/// let w = Var::ones(2, DType::F32, &Device::Cpu)?;
/// let mut adam = AdamW::new(vec![w.clone()], ParamsAdamW::default())?;
/// adam.backward_step(&w.sqr()?.sum_all()?)?;
///
/// let mut other = AdamW::new(vec![w], ParamsAdamW::default())?;
/// for (name, value) in adam.state(0)? {
///     other.load_state(0, name, &value)?;
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW {
    vars: VariableStates,
    params: ParamsAdamW,
}

impl AdamW {
    /// Creates an optimizer with a learning rate and default values for all other settings.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`new`](Optimizer::new).
    pub fn new_lr(vars: Vec<Var>, learning_rate: f64) -> Result<Self> {
        Self::new(vars, ParamsAdamW { lr: learning_rate, ..ParamsAdamW::default() })
    }
}

const LEARNING_RATE: &str = "the learning rate of AdamW";

/// Rejects settings that make every step wrong, with the same limits as PyTorch.
fn check(params: &ParamsAdamW) -> Result<()> {
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
    Error::check_at_least_zero(LEARNING_RATE, lr)?;
    Error::check_fraction("beta1 of AdamW", beta1)?;
    Error::check_fraction("beta2 of AdamW", beta2)?;
    Error::check_at_least_zero("eps of AdamW", eps)?;
    Error::check_at_least_zero("the weight decay of AdamW", weight_decay)?;
    Ok(())
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    /// Creates an optimizer; all of its state is zero.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`] if a setting is negative or not a number, or if a beta is at
    /// least 1, and errors of candle.
    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        check(&params)?;
        Ok(Self { vars: VariableStates::new(vars, &["exp_avg", "exp_avg_sq"])?, params })
    }

    /// Updates the variables that have a gradient, except integer variables.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`] if the learning rate is negative or not a number, and errors of
    /// candle.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        Error::check_at_least_zero(LEARNING_RATE, self.params.lr)?;
        self.vars.update_each(grads, |state, grad| update(state, &self.params, grad))
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.params.lr = learning_rate;
    }
}

impl StatefulOptimizer for AdamW {
    fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>> {
        self.vars.state(var)
    }

    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()> {
        self.vars.load("AdamW", var, name, value)
    }
}

fn update(state: &mut VariableState, params: &ParamsAdamW, grad: &Tensor) -> Result<()> {
    let Some(step) = state.step.checked_add(1) else {
        bail!("AdamW supports at most {} steps per variable", i32::MAX)
    };
    let [(_, mean), (_, variance)] = &state.tensors[..] else {
        bail!("AdamW needs two moments per variable")
    };
    state.variable.update(&AdamRule::new(params, step), [mean, variance], grad)?;
    state.step = step;
    Ok(())
}

/// The factors of a step, computed like in candle's AdamW.
struct AdamRule {
    beta1: f64,
    beta2: f64,
    /// Bias correction of the mean, which starts at zero.
    mean_scale: f64,
    /// Bias correction of the variance, which starts at zero.
    variance_scale: f64,
    eps: f64,
    lr: f64,
    /// Factor of the variable, for weight decay.
    decay: f64,
}

impl AdamRule {
    fn new(params: &ParamsAdamW, step: i32) -> Self {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
        Self {
            beta1,
            beta2,
            mean_scale: 1.0 / (1.0 - beta1.powi(step)),
            variance_scale: 1.0 / (1.0 - beta2.powi(step)),
            eps,
            lr,
            decay: 1.0 - lr * weight_decay,
        }
    }
}

impl Rule<2> for AdamRule {
    fn apply<X: Numbers>(
        &self,
        value: &X,
        [mean, variance]: [&X; 2],
        grad: &X,
    ) -> Outcome<X, (X, [X; 2])> {
        let mean = mean.scaled(self.beta1)?.plus(&grad.scaled(1.0 - self.beta1)?)?;
        let variance =
            variance.scaled(self.beta2)?.plus(&grad.squared()?.scaled(1.0 - self.beta2)?)?;
        let deviation = variance.scaled(self.variance_scale)?.root()?.affine(1.0, self.eps)?;
        let change = mean.scaled(self.mean_scale)?.over(&deviation)?.scaled(self.lr)?;
        Ok((value.scaled(self.decay)?.minus(&change)?, [mean, variance]))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Returns two variables with the same values.
    fn twins(shape: &[usize], dtype: DType) -> [Var; 2] {
        let len: usize = shape.iter().product();
        let values: Vec<f64> = (0..len).map(|item| (item as f64 * 0.37).sin()).collect();
        let values =
            Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        [(); 2].map(|()| Var::from_tensor(&values).unwrap())
    }

    #[test]
    fn a_variable_given_twice_is_rejected() {
        let [first, second] = twins(&[3], DType::F32);
        let vars = vec![first.clone(), second, first];
        let error = AdamW::new_lr(vars, 0.1).unwrap_err().to_string();
        assert!(error.contains("variable 0 again as variable 2"), "{error}");
    }

    fn loss(var: &Var) -> Tensor {
        var.powf(3.0).unwrap().sum_all().unwrap()
    }

    fn bytes(var: &Var) -> Vec<u8> {
        let mut bytes = Vec::new();
        var.write_bytes(&mut bytes).unwrap();
        bytes
    }

    /// Returns an optimizer that continues with the state of `stopped`.
    fn resumed(stopped: &AdamW, var: &Var) -> AdamW {
        let mut next = AdamW::new(vec![var.clone()], stopped.params.clone()).unwrap();
        for (name, value) in stopped.state(0).unwrap() {
            next.load_state(0, name, &value.copy().unwrap()).unwrap();
        }
        next
    }

    #[test]
    fn steps_match_candle_and_resume() {
        let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
        for dtype in [DType::F32, DType::F64] {
            for shape in [&[][..], &[1], &[2, 3], &[67, 5], &[300, 130]] {
                let vars = twins(shape, dtype);
                let mut candle =
                    candle_nn::AdamW::new(vec![vars[0].clone()], params.clone()).unwrap();
                let mut ours = AdamW::new(vec![vars[1].clone()], params.clone()).unwrap();
                for step in 0..20 {
                    candle.backward_step(&loss(&vars[0])).unwrap();
                    if step == 10 {
                        ours = resumed(&ours, &vars[1]);
                    }
                    ours.backward_step(&loss(&vars[1])).unwrap();
                    assert_eq!(
                        bytes(&vars[0]),
                        bytes(&vars[1]),
                        "{dtype:?} {shape:?}, step {step}"
                    );
                }
            }
        }
    }

    #[test]
    fn half_precision_changes_add_up_and_resume() {
        let params = ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..ParamsAdamW::default() };
        for dtype in [DType::BF16, DType::F16] {
            let [var, again] = [(); 2].map(|()| Var::ones(3, dtype, &Device::Cpu).unwrap());
            let mut adam = AdamW::new(vec![var.clone()], params.clone()).unwrap();
            let mut stopped = AdamW::new(vec![again.clone()], params.clone()).unwrap();
            for step in 0..100 {
                adam.backward_step(&var.sum_all().unwrap()).unwrap();
                if step == 50 {
                    stopped = resumed(&stopped, &again);
                }
                stopped.backward_step(&again.sum_all().unwrap()).unwrap();
            }
            let exact = Tensor::full(0.99_f64, 3, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            assert_eq!(bytes(&var), bytes(&Var::from_tensor(&exact).unwrap()), "{dtype:?}");
            assert_eq!(bytes(&var), bytes(&again), "{dtype:?}");
        }
    }

    #[test]
    fn unknown_states_are_rejected() {
        let var = Var::ones(2, DType::F32, &Device::Cpu).unwrap();
        let mut adam = AdamW::new_lr(vec![var.clone()], 0.1).unwrap();
        assert_eq!(adam.learning_rate().to_bits(), 0.1_f64.to_bits());
        assert!(adam.load_state(0, "momentum", &var).is_err());
        assert!(adam.load_state(0, "master", &var).is_err());
        assert!(adam.load_state(1, "step", &var).is_err());
        assert!(adam.state(1).is_err());
        let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        assert!(adam.load_state(0, "exp_avg", &other).is_err());
    }

    #[test]
    fn invalid_settings_are_rejected() {
        let var = Var::ones(2, DType::F32, &Device::Cpu).unwrap();
        let default = ParamsAdamW::default;
        for (params, name) in [
            (ParamsAdamW { lr: -0.1, ..default() }, "learning rate"),
            (ParamsAdamW { lr: f64::NAN, ..default() }, "learning rate"),
            (ParamsAdamW { lr: f64::INFINITY, ..default() }, "learning rate"),
            (ParamsAdamW { beta1: 1.0, ..default() }, "beta1"),
            (ParamsAdamW { beta2: -0.1, ..default() }, "beta2"),
            (ParamsAdamW { eps: -1e-8, ..default() }, "eps"),
            (ParamsAdamW { weight_decay: f64::NAN, ..default() }, "weight decay"),
        ] {
            let error = AdamW::new(vec![var.clone()], params).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let mut adam = AdamW::new(vec![var.clone()], default()).unwrap();
        adam.set_learning_rate(f64::NAN);
        assert!(adam.backward_step(&var.sum_all().unwrap()).is_err());
        assert_eq!(var.to_vec1::<f32>().unwrap(), [1.0, 1.0]);
    }

    #[test]
    fn invalid_step_counts_are_rejected() {
        let var = Var::ones(2, DType::F32, &Device::Cpu).unwrap();
        let mut adam = AdamW::new(vec![var.clone()], ParamsAdamW::default()).unwrap();
        let steps = |count: i64| Tensor::new(count, &Device::Cpu).unwrap();
        for count in [-1, i64::from(i32::MAX) + 1, i64::MIN] {
            assert!(adam.load_state(0, "step", &steps(count)).is_err(), "{count}");
        }
        adam.load_state(0, "step", &steps(i32::MAX.into())).unwrap();
        let before = var.to_vec1::<f32>().unwrap();
        assert!(adam.backward_step(&var.sum_all().unwrap()).is_err());
        assert_eq!(var.to_vec1::<f32>().unwrap(), before);
    }

    #[test]
    fn integers_are_not_updated() {
        let count = Var::ones(2, DType::I64, &Device::Cpu).unwrap();
        let mut adam = AdamW::new(vec![count.clone()], ParamsAdamW::default()).unwrap();
        let mut grads = Tensor::new(0_f32, &Device::Cpu).unwrap().backward().unwrap();
        grads.insert(&count, count.as_detached_tensor());
        adam.step(&grads).unwrap();
        assert_eq!(count.to_vec1::<i64>().unwrap(), [1, 1]);
    }
}
