//! AdamW, with a state that can be saved.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore, bail};
use candle_nn::{Optimizer, ParamsAdamW};

use crate::optim::StatefulOptimizer;

/// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
///
/// Its steps are those of [`candle_nn::AdamW`] to the bit, but its state can be saved; that of
/// candle's is private. As in PyTorch, each variable counts its own steps, those for which it had a
/// gradient, and the tensors of its state are named `step`, `exp_avg` and `exp_avg_sq`.
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
    vars: Vec<Moments>,
    params: ParamsAdamW,
}

/// A variable, and running means of its gradients.
#[derive(Debug)]
struct Moments {
    var: Var,
    /// The number of steps: 32 bits, as it becomes an exponent in [`f64::powi`].
    step: i32,
    exp_avg: Var,
    exp_avg_sq: Var,
}

impl Moments {
    fn new(var: Var) -> Result<Self> {
        let zeros = || Var::zeros(var.shape(), var.dtype(), var.device());
        Ok(Self { step: 0, exp_avg: zeros()?, exp_avg_sq: zeros()?, var })
    }

    fn update(&mut self, params: &ParamsAdamW, grad: &Tensor) -> Result<()> {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
        let Some(step) = self.step.checked_add(1) else {
            bail!("AdamW counts to {} steps of a variable", i32::MAX)
        };
        let exp_avg = ((self.exp_avg.as_tensor() * beta1)? + (grad * (1.0 - beta1))?)?;
        let exp_avg_sq = ((self.exp_avg_sq.as_tensor() * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
        // Both start at zero, and are too small by these factors.
        let mean = (&exp_avg * (1.0 / (1.0 - beta1.powi(step))))?;
        let variance = (&exp_avg_sq * (1.0 / (1.0 - beta2.powi(step))))?;
        let decayed = (self.var.as_tensor() * (1.0 - lr * weight_decay))?;
        let change = ((mean / (variance.sqrt()? + eps)?)? * lr)?;
        self.step = step;
        self.exp_avg.set(&exp_avg)?;
        self.exp_avg_sq.set(&exp_avg_sq)?;
        self.var.set(&(decayed - change)?)
    }
}

impl AdamW {
    /// The position of a variable, if there is one.
    fn checked(&self, var: usize) -> Result<usize> {
        if var >= self.vars.len() {
            bail!("the optimizer has {} variables, there is no variable {var}", self.vars.len())
        }
        Ok(var)
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        Ok(Self { vars: vars.into_iter().map(Moments::new).collect::<Result<_>>()?, params })
    }

    /// Updates the variables that have a gradient; integers, which have none to follow, stay as
    /// they are.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        for moments in self.vars.iter_mut().filter(|moments| moments.var.dtype().is_float()) {
            if let Some(grad) = grads.get(&moments.var) {
                moments.update(&self.params, grad)?;
            }
        }
        Ok(())
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
        let moments = &self.vars[self.checked(var)?];
        Ok(vec![
            ("step", Tensor::new(i64::from(moments.step), &Device::Cpu)?),
            ("exp_avg", moments.exp_avg.as_detached_tensor()),
            ("exp_avg_sq", moments.exp_avg_sq.as_detached_tensor()),
        ])
    }

    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()> {
        let position = self.checked(var)?;
        let moments = &mut self.vars[position];
        match name {
            "step" => moments.step = step_count(value)?,
            "exp_avg" => moments.exp_avg.set(&value.to_device(moments.var.device())?)?,
            "exp_avg_sq" => moments.exp_avg_sq.set(&value.to_device(moments.var.device())?)?,
            _ => bail!("AdamW has no state {name}, it has step, exp_avg and exp_avg_sq"),
        }
        Ok(())
    }
}

/// A number of steps that can have been taken.
fn step_count(value: &Tensor) -> Result<i32> {
    let steps: i64 = value.to_dtype(DType::I64)?.to_scalar()?;
    match i32::try_from(steps) {
        Ok(count @ 0..) => Ok(count),
        _ => bail!("{steps} steps cannot have been taken, 0 to {} can", i32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_those_of_candle_and_continue_after_a_stop() {
        let start = Tensor::new(&[[1_f32, -2.], [3., 0.5]], &Device::Cpu).unwrap();
        let vars = [(); 2].map(|()| Var::from_tensor(&start).unwrap());
        let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
        let mut candle = candle_nn::AdamW::new(vec![vars[0].clone()], params.clone()).unwrap();
        let mut ours = AdamW::new(vec![vars[1].clone()], params.clone()).unwrap();
        for step in 0..20 {
            candle.backward_step(&vars[0].powf(3.0).unwrap().sum_all().unwrap()).unwrap();
            if step == 10 {
                let mut next = AdamW::new(vec![vars[1].clone()], params.clone()).unwrap();
                for (name, value) in ours.state(0).unwrap() {
                    next.load_state(0, name, &value).unwrap();
                }
                ours = next;
            }
            ours.backward_step(&vars[1].powf(3.0).unwrap().sum_all().unwrap()).unwrap();
            let values = vars.each_ref().map(|var| var.to_vec2::<f32>().unwrap());
            assert_eq!(values[0], values[1], "after step {step}");
        }
        assert!(ours.load_state(0, "momentum", &start).is_err());
        assert!(ours.load_state(1, "step", &start).is_err());
        assert!(ours.state(1).is_err());
    }

    #[test]
    fn step_counts_that_cannot_be_are_refused() {
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
    fn integers_stay_as_they_are() {
        let count = Var::ones(2, DType::I64, &Device::Cpu).unwrap();
        let mut adam = AdamW::new(vec![count.clone()], ParamsAdamW::default()).unwrap();
        let mut grads = Tensor::new(0_f32, &Device::Cpu).unwrap().backward().unwrap();
        grads.insert(&count, count.as_detached_tensor());
        adam.step(&grads).unwrap();
        assert_eq!(count.to_vec1::<i64>().unwrap(), [1, 1]);
    }
}
