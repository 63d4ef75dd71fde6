//! A data-parallel model whose gradients are checked.

use std::sync::{Arc, OnceLock};

use candle_core::Tensor;
use candle_nn::Optimizer;
use pmap_mesh::{Replica, TensorTree};

use crate::{
    batch::Layout,
    check::{Checked, check_gradients},
    data_parallel::{
        DataParallel,
        slot::{Slot, lock},
    },
    device::moved,
    error::{Doing, Result},
    grad::{differentiate, has_halves, sums},
    gradient_report::GradientReport,
    loss::Loss,
    step::rules::{Rules, Then},
    tree,
};

impl<M: Send, O: Optimizer + Send> DataParallel<M, O> {
    /// Compares the gradients of a batch's loss with differences of it: the first thing to run on a
    /// new model.
    ///
    /// An operation that has a wrong backward trains without a word, and so does one that has none
    /// beside a residual: every variable gets a gradient, only not that of the loss. So for each
    /// part of the model, a block or a layer, the trained variables are moved a little to both
    /// sides, along the gradient and along a random direction, and the differences of the loss are
    /// compared with what the gradients between say of them: at 3 to 17 places, until it is clear. A
    /// gradient may be off by 2 %, in half precision by some more, and by what these places
    /// disagree about, as the kinks of ReLU make them. It is wrong if it is off by more than that
    /// and five standard errors; what lies between, and what rounding hides, is called
    /// [unclear](crate::Verdict::Unclear). In half precision that may be much; variables of f64
    /// leave the least.
    ///
    /// For each part of the model the loss is evaluated 8 times and differentiated 4 times, where it
    /// is hard to tell up to 36 and 32 times, always with the same numbers of [`Replica::rng`].
    /// Variables and buffers have their values again afterwards; accumulated gradients are dropped.
    /// Every process of the mesh calls it.
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
        F: Fn(&Replica, &M, I) -> candle_core::Result<L> + Send + Sync,
    {
        let loss = |ctx: &Replica, model: &M, shard: I| loss(ctx, model, shard).map(Into::into);
        let inventory = Arc::clone(&self.inventory);
        let trained = inventory.roles.trained();
        let names: Vec<&str> = trained.iter().map(|&var| inventory.name(var)).collect();
        let mut subject = Subject { model: self, batch, loss };
        let allow_non_finite = subject.model.options.allow_non_finite;
        let (_, gradients) = subject.run(Wanted::Gradients, allow_non_finite)?;
        check_gradients(&mut subject, &names, &gradients)
    }
}

/// A model in the middle of a check.
struct Subject<'a, M, O, I, F> {
    model: &'a mut DataParallel<M, O>,
    batch: I,
    loss: F,
}

/// What is computed of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Loss,
    Gradients,
}

impl<M, O, I, A, F> Subject<'_, M, O, I, F>
where
    M: Send,
    O: Optimizer + Send,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &M, I) -> candle_core::Result<Loss<A>> + Send + Sync,
{
    /// The loss of the batch, and its gradients of all trained variables if they are wanted.
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    fn run(
        &mut self,
        wanted: Wanted,
        allow_non_finite: bool,
    ) -> Result<(f64, Vec<Option<Tensor>>)> {
        let Self { model, batch, loss } = self;
        let rules = Rules { allow_non_finite, ..model.rules(Then::Keep) };
        let layout = Layout::of(batch);
        let found = OnceLock::new();
        let call = model.mesh.pmap_scoped(|ctx, shard: I| {
            let slot = &mut *lock(&model.workers[ctx.local_index()].slot);
            slot.begin(&rules.buffers)?;
            let here = layout.explain(shard, |shard| loss(ctx, &slot.model, shard))?;
            let computed = slot.compute(ctx, &rules, here, wanted);
            rules.refusal.outcome(computed.map(|computed| {
                found.get_or_init(|| computed);
            }))
        });
        let call = model.options.cut(call).seed(model.progress.seed);
        let outcome =
            rules.refusal.of(call.call_at(model.progress.batches, tree::map(batch, Tensor::clone)));
        for worker in &model.workers {
            lock(&worker.slot).roll_back().doing("taking back a buffer")?;
        }
        outcome?;
        Ok(found.into_inner().expect("every replica has found it"))
    }
}

impl<M, O> Slot<M, O> {
    /// The loss of the whole batch, and its gradients if they are wanted.
    fn compute<A: TensorTree>(
        &self,
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<A>,
        wanted: Wanted,
    ) -> candle_core::Result<(f64, Vec<Option<Tensor>>)> {
        let (mut here, _) = loss.of_shard(ctx)?;
        let whole = here.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
        let whole = whole.with_weight(&rules.refusal)?;
        let mut gradients = Vec::new();
        if wanted == Wanted::Gradients {
            let all: Vec<usize> = (0..self.trained.len()).collect();
            let here = differentiate(here, &self.trained, whole.weight(), has_halves(&self.vars))?;
            gradients = sums(ctx, &self.trained, here, &all)?;
        }
        Ok((whole.mean(), gradients))
    }
}

/// A loss beside the variables' own values may be infinite or NaN.
const BESIDE: bool = true;

impl<M, O, I, A, F> Checked for Subject<'_, M, O, I, F>
where
    M: Send,
    O: Optimizer + Send,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &M, I) -> candle_core::Result<Loss<A>> + Send + Sync,
{
    #[track_caller]
    fn loss(&mut self) -> Result<f64> {
        Ok(self.run(Wanted::Loss, BESIDE)?.0)
    }

    #[track_caller]
    fn gradients(&mut self) -> Result<Vec<Option<Tensor>>> {
        Ok(self.run(Wanted::Gradients, BESIDE)?.1)
    }

    fn value(&self, var: usize) -> Result<Tensor> {
        Ok(lock(&self.model.workers[0].slot).trained[var].as_detached_tensor())
    }

    /// On every device. Slots that share a variable set it several times to the same value.
    fn set(&mut self, var: usize, value: &Tensor) -> Result<()> {
        for worker in &self.model.workers {
            let var = &lock(&worker.slot).trained[var];
            let value = moved(value, var.device());
            value.and_then(|value| var.set(&value)).doing("setting a variable")?;
        }
        Ok(())
    }
}
