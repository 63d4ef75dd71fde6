//! A model whose gradients are checked.

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
    /// Compares the gradients of a batch's loss with differences of it: the first thing to run on a
    /// new model.
    ///
    /// An operation that has a wrong backward trains without a word, and so does one that has none
    /// beside a residual: every parameter gets a gradient, only not that of the loss. So for each
    /// part of the model, a block or a layer, the trained parameters are moved a little to both
    /// sides, along the gradient and along a random direction, and the differences of the loss are
    /// compared with what the gradients between say of them: at 3 to 17 places, until it is clear. A
    /// gradient may be off by 2 %, in half precision by some more, and by what these places
    /// disagree about, as the kinks of ReLU make them. It is wrong if it is off by more than that
    /// and five standard errors; what lies between, and what rounding hides, is called
    /// [unclear](crate::Verdict::Unclear). In half precision that may be much; parameters of f64
    /// leave the least.
    ///
    /// For each part of the model the loss is evaluated 8 times and differentiated 4 times, where it
    /// is hard to tell up to 36 and 32 times, always with the same numbers of [`Replica::rng`].
    /// Parameters and buffers have their values again afterwards; accumulated gradients are dropped.
    /// Every process of the mesh calls it, and holds the gradients of all parameters for it and the
    /// parameters of a block, so check a model of fewer or smaller blocks if yours fills its memory.
    ///
    /// # Errors
    ///
    /// [`GradientError`](crate::GradientError) with the parts whose gradients are wrong, or if
    /// the loss is another one each time; [`Error::Training`](crate::Error::Training) and
    /// [`Error::Mesh`](crate::Error::Mesh) as [`step`](Self::step).
    ///
    /// # Examples
    ///
    /// candle's fused softmax has no backward. Beside a residual nothing else shows it:
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
    /// let Err(Error::Gradient(error)) = model.check_gradients(x, loss) else { panic!("it is wrong") };
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
        self.check_whole()?;
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

/// A model in the middle of a check.
struct CheckedModel<'a, M, O, I, F> {
    model: &'a mut DistributedModel<M, O>,
    /// The positions of the trained parameters.
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
    /// Returns the loss of the batch, and its gradients of all trained parameters if it is to be
    /// differentiated.
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

/// A loss beside the parameters' own values may be infinite or NaN.
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

    fn computed(&self, stored: DType) -> DType {
        self.model.precision.computed(stored)
    }

    /// On every slot. Slots that share a variable set it several times to the same value.
    fn set(&mut self, trained: usize, value: &Tensor) -> Result<()> {
        const SETTING: &str = "setting a parameter";
        let items = value.flatten_all().doing(SETTING)?;
        for slot in &self.model.slots {
            let slot = lock(slot);
            for var in slot.vars.iter().filter(|var| var.trained == Some(trained)) {
                var.set_items(&items).doing(SETTING)?;
            }
        }
        Ok(())
    }
}
