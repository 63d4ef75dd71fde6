//! Stochastic gradient descent with momentum, in place and with a state that can be saved.

use candle_core::{Result, Tensor, Var, backprop::GradStore, bail};
use candle_nn::Optimizer;

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

/// Settings of [`Sgd`]; the default is a learning rate of 0.001 and 0 for the rest, as in PyTorch.
#[derive(Clone, Debug)]
pub struct ParamsSgd {
    /// The learning rate.
    pub lr: f64,
    /// Factor of the momentum in each step; 0 for no momentum.
    pub momentum: f64,
    /// Fraction of the gradient not added to the momentum.
    pub dampening: f64,
    /// Fraction of each value that is added to its gradient.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum (Sutskever et al., "On the importance of initialization and
    /// momentum in deep learning", 2013).
    pub nesterov: bool,
}

impl Default for ParamsSgd {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }
}

const LEARNING_RATE: &str = "the learning rate of Sgd";

impl ParamsSgd {
    /// Rejects settings that make every step wrong, with the same limits as PyTorch.
    fn check(&self) -> Result<()> {
        Error::check_at_least_zero(LEARNING_RATE, self.lr)?;
        Error::check_at_least_zero("the momentum of Sgd", self.momentum)?;
        Error::check_at_least_zero("the weight decay of Sgd", self.weight_decay)?;
        Error::check_fraction("the dampening of Sgd", self.dampening)?;
        if self.nesterov {
            Error::check_positive("the momentum of Sgd with `nesterov`", self.momentum)?;
        }
        let is_dampened = self.nesterov && self.dampening > 0.0;
        let name = "the dampening of Sgd with `nesterov`";
        Ok(Error::check_setting(!is_dampened, name, self.dampening, "0")?)
    }
}

/// Stochastic gradient descent with momentum and weight decay, like PyTorch's `SGD`.
///
/// Without momentum it equals [`candle_nn::SGD`]. Variables and momentum are updated in place, and
/// half-precision variables through f32 master weights, like in [`AdamW`](crate::AdamW). The
/// tensors of its state are named `step` and `momentum_buffer`, which exist only with momentum, and
/// `master`.
///
/// # Determinism
///
/// The same as for [`AdamW`](crate::AdamW).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_nn::Optimizer;
/// use dist_train::{ParamsSgd, Sgd};
///
/// let w = Var::ones(2, DType::F32, &Device::Cpu)?;
/// let params = ParamsSgd { lr: 0.25, momentum: 0.5, ..Default::default() };
/// let mut sgd = Sgd::new(vec![w.clone()], params)?;
/// for expected in [0.75, 0.375] {
///     sgd.backward_step(&w.sum_all()?)?;
///     assert_eq!(w.to_vec1::<f32>()?, [expected; 2]);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Sgd {
    vars: VariableStates,
    params: ParamsSgd,
}

impl Optimizer for Sgd {
    type Config = ParamsSgd;

    /// Creates an optimizer with zero momentum.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`] if a setting is negative or not a number, if dampening is at
    /// least 1, or if `nesterov` is combined with dampening or with zero momentum, and errors of
    /// candle.
    fn new(vars: Vec<Var>, params: ParamsSgd) -> Result<Self> {
        params.check()?;
        let names = if params.momentum > 0.0 { &[MOMENTUM][..] } else { &[] };
        Ok(Self { vars: VariableStates::new(vars, names)?, params })
    }

    /// Updates the variables with a gradient; integer variables are never updated.
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

impl StatefulOptimizer for Sgd {
    fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>> {
        self.vars.state(var)
    }

    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()> {
        self.vars.load("Sgd", var, name, value)
    }
}

const MOMENTUM: &str = "momentum_buffer";

fn update(state: &mut VariableState, params: &ParamsSgd, grad: &Tensor) -> Result<()> {
    if params.momentum == 0.0 {
        let ParamsSgd { lr, weight_decay, .. } = *params;
        return state.variable.update(&PlainRule { lr, weight_decay }, [], grad);
    }
    let [(_, momentum)] = &state.tensors[..] else { bail!("Sgd needs one momentum per variable") };
    // The momentum starts as the first gradient, without dampening, as in PyTorch.
    let dampening = if state.step == 0 { 0.0 } else { params.dampening };
    let ParamsSgd { lr, momentum: momentum_factor, weight_decay, nesterov, .. } = *params;
    let grad_factor = 1.0 - dampening;
    if nesterov {
        let rule = MomentumRule::<true> { lr, momentum_factor, grad_factor, weight_decay };
        state.variable.update(&rule, [momentum], grad)?;
    } else {
        let rule = MomentumRule::<false> { lr, momentum_factor, grad_factor, weight_decay };
        state.variable.update(&rule, [momentum], grad)?;
    }
    // Only the first step differs from the others, so saturating is harmless.
    state.step = state.step.saturating_add(1);
    Ok(())
}

/// The update rule without momentum.
struct PlainRule {
    lr: f64,
    weight_decay: f64,
}

impl Rule<0> for PlainRule {
    fn apply<X: Numbers>(&self, value: &X, _: [&X; 0], grad: &X) -> Outcome<X, (X, [X; 0])> {
        let grad = grad.plus(&value.scaled(self.weight_decay)?)?;
        Ok((value.minus(&grad.scaled(self.lr)?)?, []))
    }
}

/// The update rule with momentum. `NESTEROV` is a const parameter because a branch in the loop over
/// items would prevent vectorization.
struct MomentumRule<const NESTEROV: bool> {
    lr: f64,
    /// Factor of the old momentum in the new momentum.
    momentum_factor: f64,
    /// Factor of the gradient in the new momentum.
    grad_factor: f64,
    weight_decay: f64,
}

impl<const NESTEROV: bool> Rule<1> for MomentumRule<NESTEROV> {
    fn apply<X: Numbers>(
        &self,
        value: &X,
        [momentum]: [&X; 1],
        grad: &X,
    ) -> Outcome<X, (X, [X; 1])> {
        let grad = grad.plus(&value.scaled(self.weight_decay)?)?;
        let momentum =
            momentum.scaled(self.momentum_factor)?.plus(&grad.scaled(self.grad_factor)?)?;
        let direction = if NESTEROV {
            grad.plus(&momentum.scaled(self.momentum_factor)?)?
        } else {
            // A copy, because tensors and numbers share only the operations of `Numbers`.
            momentum.scaled(1.0)?
        };
        Ok((value.minus(&direction.scaled(self.lr)?)?, [momentum]))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn start(dtype: DType) -> Var {
        let start = Tensor::new(&[1_f64, -2., 0.5], &Device::Cpu).unwrap();
        Var::from_tensor(&start.to_dtype(dtype).unwrap()).unwrap()
    }

    fn step_once(sgd: &mut Sgd, var: &Var) {
        sgd.backward_step(&var.powf(3.0).unwrap().sum_all().unwrap()).unwrap();
    }

    /// Returns settings, and PyTorch's values after three steps on the sum of cubes.
    fn known() -> [(ParamsSgd, [f64; 3]); 5] {
        let params = |momentum, dampening, weight_decay, nesterov| ParamsSgd {
            lr: 0.1,
            momentum,
            dampening,
            weight_decay,
            nesterov,
        };
        [
            (
                params(0., 0., 0., false),
                [0.461_257_3, -18.073_395_200_000_007, 0.329_561_926_953_125],
            ),
            (
                params(0., 0., 0.1, false),
                [0.447_299_798_130_000_04, -17.584_941_265_920_005, 0.319_746_631_68],
            ),
            (
                params(0.9, 0., 0., false),
                [-0.116_326_700_000_000_09, -27.304_371_200_000_006, 0.166_194_208_203_124_97],
            ),
            (
                params(0.9, 0.5, 0., false),
                [0.028_286_162_499_999_937, -13.244_278_400_000_002, 0.228_896_631_494_140_63],
            ),
            (
                params(0.9, 0., 0.1, true),
                [-0.217_396_345_971_085_84, -155.007_477_319_716_5, 0.088_492_077_638_616_08],
            ),
        ]
    }

    #[test]
    fn steps_match_pytorch_and_resume() {
        for (params, expected) in known() {
            for stop in 0..3 {
                let var = start(DType::F64);
                let mut sgd = Sgd::new(vec![var.clone()], params.clone()).unwrap();
                for step in 0..3 {
                    if step == stop {
                        let mut next = Sgd::new(vec![var.clone()], params.clone()).unwrap();
                        for (name, value) in sgd.state(0).unwrap() {
                            next.load_state(0, name, &value).unwrap();
                        }
                        sgd = next;
                    }
                    step_once(&mut sgd, &var);
                }
                for (found, expected) in var.to_vec1::<f64>().unwrap().into_iter().zip(expected) {
                    assert!(
                        (found / expected - 1.0).abs() < 1e-13,
                        "{found}, {expected}: {params:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn plain_sgd_matches_candle() {
        let [ours, candle] = [(); 2].map(|()| start(DType::F32));
        let mut sgd =
            Sgd::new(vec![ours.clone()], ParamsSgd { lr: 0.1, ..Default::default() }).unwrap();
        let mut plain = candle_nn::SGD::new(vec![candle.clone()], 0.1).unwrap();
        for _ in 0..3 {
            step_once(&mut sgd, &ours);
            plain.backward_step(&candle.powf(3.0).unwrap().sum_all().unwrap()).unwrap();
            assert_eq!(ours.to_vec1::<f32>().unwrap(), candle.to_vec1::<f32>().unwrap());
        }
        assert!(sgd.state(0).unwrap().is_empty());
    }

    #[test]
    fn invalid_settings_are_rejected() {
        let default = ParamsSgd::default;
        for (params, name) in [
            (ParamsSgd { lr: f64::NAN, ..default() }, "learning rate"),
            (ParamsSgd { momentum: -0.1, ..default() }, "momentum"),
            (ParamsSgd { dampening: 1.0, ..default() }, "dampening"),
            (ParamsSgd { weight_decay: -1.0, ..default() }, "weight decay"),
            (ParamsSgd { nesterov: true, ..default() }, "momentum"),
            (ParamsSgd { nesterov: true, momentum: 0.9, dampening: 0.1, ..default() }, "dampening"),
        ] {
            let error = Sgd::new(vec![start(DType::F32)], params).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let mut sgd = Sgd::new(vec![start(DType::F32)], default()).unwrap();
        sgd.set_learning_rate(f64::NAN);
        assert!(sgd.step(&GradStore::default()).is_err());
    }
}
