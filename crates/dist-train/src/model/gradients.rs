//! Gradient checks of a model.

use std::sync::Arc;

use candle_core::{DType, Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::{Replica, TensorTree};

use crate::{
    check::{Checked, check_gradients},
    error::{Doing, Result},
    gradient_report::GradientReport,
    loss::Loss,
    model::{DistributedModel, slot::lock},
    step::rules::{Goal, Rules},
    tree,
};

impl<M: Send, O: Optimizer + Send + 'static> DistributedModel<M, O> {
    /// Compares the gradients of a batch's loss with differences of the loss. Run this first on a
    /// new model.
    ///
    /// An operation with a wrong backward pass trains without any error, and so does an operation
    /// without a backward pass next to a residual: every parameter gets a gradient, but a wrong
    /// one. So for each part of the model, a block or a layer, this moves the trained parameters
    /// slightly in both directions along the gradient and along a random direction, and compares
    /// differences of the loss with the gradients at 3 to 17 points, until the result is clear. A
    /// gradient may be off by 2 %, slightly more in half precision, plus the disagreement between
    /// the points, which kinks such as ReLU's cause. It is wrong if it is off by more than this
    /// tolerance plus five standard errors. Results in between, or hidden by rounding, are
    /// [unclear](crate::Verdict::Unclear): often many in half precision, and fewest with f64
    /// parameters.
    ///
    /// For each part of the model the loss is evaluated 8 times and differentiated 4 times, or up
    /// to 36 and 32 times in difficult cases, always with the same numbers of [`Replica::rng`].
    /// Parameters and buffers are restored afterwards; accumulated gradients are dropped. Every
    /// process of the mesh must call this. Each holds the gradients of all parameters and the
    /// parameters of one block in memory, so check a smaller model if yours fills the memory.
    ///
    /// # Errors
    ///
    /// Returns [`GradientError`](crate::GradientError) with the parts that have wrong gradients, or
    /// if the loss varies between evaluations, and [`Error::Training`](crate::Error::Training) and
    /// [`Error::Mesh`](crate::Error::Mesh) like [`step`](Self::step).
    ///
    /// # Examples
    ///
    /// candle's fused softmax has no backward pass. Next to a residual, only this check detects it:
    ///
    /// ```
    /// use candle_core::{Device, Result, Tensor};
    /// use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, linear, ops::softmax_last_dim};
    /// use dist_train::{DataParallel, Error};
    /// use pmap_mesh::{DeviceMesh, Replica};
    ///
    /// fn model(vb: VarBuilder<'_>) -> Result<(Linear, Linear)> {
    ///     Ok((linear(3, 4, vb.pp("up"))?, linear(4, 4, vb.pp("mix"))?))
    /// }
    ///
    /// fn loss(_: &Replica, (up, mix): &(Linear, Linear), x: Tensor) -> Result<Tensor> {
    ///     let x = up.forward(&x)?;
    ///     (mix.forward(&softmax_last_dim(&x)?)? + x)?.sqr()?.mean_all()
    /// }
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let mut model =
    ///     DataParallel::builder(&mesh, model).build(|group| SGD::new(group.vars, 0.1))?;
    /// let x = Tensor::arange(0_f32, 24., &Device::Cpu)?.sin()?.reshape((8, 3))?;
    /// let Err(Error::Gradient(error)) = model.check_gradients(x, loss) else { panic!("the gradient is wrong") };
    /// assert!(error.to_string().starts_with("the gradients of 1 of 2 parts of the model are wrong: up ("));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn check_gradients<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<GradientReport>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        self.check_not_half_updated()?;
        let loss = |ctx: &Replica, model: &M, shard: I| loss(ctx, model, shard).map(Into::into);
        let inventory = Arc::clone(&self.inventory);
        let params = inventory.roles.trained();
        let names: Vec<&str> = params.iter().map(|&param| inventory.name(param)).collect();
        let allow_non_finite = self.options.allow_non_finite;
        let mut checked = CheckedModel { model: self, params: &params, batch, loss };
        let (_, gradients) = checked.run(Goal::Differentiate, allow_non_finite)?;
        check_gradients(&mut checked, &names, &gradients)
    }
}

/// A model during a check.
struct CheckedModel<'a, M, O, I, F> {
    model: &'a mut DistributedModel<M, O>,
    /// The indices of the trained parameters.
    params: &'a [usize],
    batch: I,
    loss: F,
}

impl<M, O, I, A, F> CheckedModel<'_, M, O, I, F>
where
    M: Send,
    O: Optimizer + Send + 'static,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &M, I) -> CandleResult<Loss<A>> + Send + Sync,
{
    /// Returns the loss of the batch, and the gradients of all trained parameters if the goal is
    /// [`Goal::Differentiate`].
    #[track_caller]
    fn run(&self, goal: Goal, allow_non_finite: bool) -> Result<(f64, Vec<Option<Tensor>>)> {
        let model = &*self.model;
        let rules = Rules { allow_non_finite, ..model.rules(goal) };
        let pass = model.layout.begin(&model.slots, rules)?;
        let batch = tree::map(&self.batch, Tensor::clone);
        let (report, _) = model.run(&pass, model.progress.stream(), batch, &self.loss)?;
        let gradients = match goal {
            Goal::Differentiate => pass.gradients()?,
            _ => Vec::new(),
        };
        Ok((report.loss.mean(), gradients))
    }
}

/// Allows non-finite losses away from the parameters' own values.
const BESIDE: bool = true;

impl<M, O, I, A, F> Checked for CheckedModel<'_, M, O, I, F>
where
    M: Send,
    O: Optimizer + Send + 'static,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &M, I) -> CandleResult<Loss<A>> + Send + Sync,
{
    #[track_caller]
    fn loss(&mut self) -> Result<f64> {
        Ok(self.run(Goal::Measure, BESIDE)?.0)
    }

    #[track_caller]
    fn gradients(&mut self) -> Result<Vec<Option<Tensor>>> {
        Ok(self.run(Goal::Differentiate, BESIDE)?.1)
    }

    fn value(&self, trained: usize) -> Result<Tensor> {
        let DistributedModel { inventory, slots, layout, .. } = &*self.model;
        layout.parameter(inventory, slots, self.params[trained])
    }

    fn compute_dtype(&self, stored: DType) -> DType {
        self.model.precision.compute_dtype(stored)
    }

    /// Sets the value on every slot. Slots that share a variable set it several times to the same
    /// value.
    fn set(&mut self, trained: usize, value: &Tensor) -> Result<()> {
        const SETTING: &str = "setting a parameter";
        let items = value.flatten_all().doing(SETTING)?;
        for slot in &self.model.slots {
            let slot = lock(slot);
            for var in slot.vars.iter().filter(|var| var.trained_index == Some(trained)) {
                var.set_items(&items).doing(SETTING)?;
            }
        }
        Ok(())
    }
}
