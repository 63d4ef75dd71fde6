//! A sharded model whose gradients are checked.

use std::{
    mem,
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::Tensor;
use candle_nn::Optimizer;
use pmap_mesh::{Replica, TensorTree};

use crate::{
    agreement,
    batch::Layout,
    check::{Checked, check_gradients},
    device::moved,
    error::{Doing, Result},
    fsdp::{FullyShard, lock, run_loss},
    gradient_report::GradientReport,
    loss::Loss,
    step::rules::{Rules, Then},
    tree,
    units::{
        Units,
        accumulation::UnreducedGrads,
        session::{PassContext, PassKind, Session},
    },
};

impl<O: Optimizer + Send + 'static> FullyShard<O> {
    /// Compares the gradients of a batch's loss with differences of it, as
    /// [`DataParallel::check_gradients`](crate::DataParallel::check_gradients): the first thing to
    /// run on a new model.
    ///
    /// Every process holds the gradients of all parameters for it, and the parameters of a block,
    /// so check a model of fewer or smaller blocks if yours fills its memory.
    ///
    /// # Errors
    ///
    /// [`GradientError`](crate::GradientError) with the parts whose gradients are wrong, or if
    /// the loss is another one each time; [`Error::Training`](crate::Error::Training) and
    /// [`Error::Mesh`](crate::Error::Mesh) as [`step`](Self::step).
    #[track_caller]
    pub fn check_gradients<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<GradientReport>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &Units, I) -> candle_core::Result<L> + Send + Sync,
    {
        self.check_whole()?;
        let loss = |ctx: &Replica, model: &Units, shard: I| loss(ctx, model, shard).map(Into::into);
        let inventory = Arc::clone(&self.model.inventory);
        let trained = inventory.roles.trained();
        let names: Vec<&str> = trained.iter().map(|&var| inventory.name(var)).collect();
        let allow_non_finite = self.options.allow_non_finite;
        let mut subject = Subject { model: self, names: names.clone(), batch, loss };
        let gradients = subject.gradients_of_batch(allow_non_finite)?;
        check_gradients(&mut subject, &names, &gradients)
    }
}

/// A model in the middle of a check.
struct Subject<'a, O, I, F> {
    model: &'a mut FullyShard<O>,
    /// Of the trained parameters.
    names: Vec<&'a str>,
    batch: I,
    loss: F,
}

/// What is computed of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Loss,
    Gradients,
}

/// The sums that a slot has for its parts.
type SlotSums = Vec<Option<Tensor>>;

/// What a batch has led to: `S` are the sums of a slot, or of all slots of this process.
struct Computed<S> {
    mean: f64,
    /// Whether any slot has a gradient of each trained parameter.
    used: Vec<bool>,
    sums: S,
}

/// The loss of the whole batch, and this slot's part of its gradients if they are wanted.
fn compute<A: TensorTree>(
    ctx: &Replica,
    session: &Session,
    rules: &Rules,
    loss: Loss<A>,
    wanted: Wanted,
) -> candle_core::Result<Computed<SlotSums>> {
    session.check_order()?;
    let (mut here, _) = loss.of_shard(ctx)?;
    let whole = here.agree(ctx, rules.allow_non_finite, &rules.refusal)?;
    let whole = whole.with_weight(&rules.refusal)?;
    let mut computed = Computed { mean: whole.mean(), used: Vec::new(), sums: Vec::new() };
    if wanted == Wanted::Gradients {
        let gradients = session.differentiate(here, whole.weight(), UnreducedGrads::default())?;
        computed.used = agreement::any(ctx, &gradients.used)?;
        computed.sums = gradients.sums;
    }
    Ok(computed)
}

impl<O, I, A, F> Subject<'_, O, I, F>
where
    O: Optimizer + Send + 'static,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &Units, I) -> candle_core::Result<Loss<A>> + Send + Sync,
{
    /// The loss of the batch, and if they are wanted its gradients, slot by slot.
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    fn run(&mut self, wanted: Wanted, allow_non_finite: bool) -> Result<Computed<Vec<SlotSums>>> {
        let Self { model, batch, loss, .. } = self;
        let rules = Rules { allow_non_finite, ..model.rules(Then::Keep) };
        let common = PassContext::new(&model.model, rules, wanted == Wanted::Gradients);
        let rules = &common.rules;
        let purpose = match wanted {
            Wanted::Loss => PassKind::Evaluation,
            Wanted::Gradients => PassKind::Gradients,
        };
        let layout = Layout::of(batch);
        let found = OnceLock::new();
        let sums: Vec<Mutex<SlotSums>> = model.slots.iter().map(|_| Mutex::default()).collect();
        let call = model.mesh.pmap_scoped(|ctx, shard: I| {
            let session = Session::new(ctx, &common, purpose.clone())?;
            let here = run_loss(ctx, &session, &layout, shard, &*loss)?;
            if wanted == Wanted::Loss {
                session.finish_gathering()?;
            }
            let computed = compute(ctx, &session, rules, here, wanted);
            let outcome =
                rules.refusal.outcome(computed.map(|Computed { mean, used, sums: of_slot }| {
                    *lock(&sums[ctx.local_index()]) = of_slot;
                    found.get_or_init(|| (mean, used));
                }))?;
            session.abandon()?;
            Ok(outcome)
        });
        let call = model.options.cut(call).seed(model.progress.seed);
        let batch = tree::map(batch, Tensor::clone);
        let outcome = rules.refusal.of(call.call_at(model.progress.batches, batch));
        model.slots.iter().for_each(|slot| lock(slot).forget());
        outcome?;
        let (mean, used) = found.into_inner().expect("every replica has found it");
        let sums = sums.iter().map(|sums| mem::take(&mut *lock(sums))).collect();
        Ok(Computed { mean, used, sums })
    }

    /// The whole gradients of all trained parameters.
    #[track_caller]
    fn gradients_of_batch(&mut self, allow_non_finite: bool) -> Result<Vec<Option<Tensor>>> {
        let Computed { used, sums, .. } = self.run(Wanted::Gradients, allow_non_finite)?;
        let vars = &self.model.model.vars;
        let whole = |(&name, used): (&&str, bool)| {
            if !used {
                return Ok(None);
            }
            // Of what is used, every slot has the sums of its parts.
            vars.gather_with(name, |slot, part| sums[slot][part].clone()).map(Some)
        };
        self.names.iter().zip(used).map(whole).collect()
    }
}

impl<O, I, A, F> Checked for Subject<'_, O, I, F>
where
    O: Optimizer + Send + 'static,
    I: TensorTree,
    A: TensorTree,
    F: Fn(&Replica, &Units, I) -> candle_core::Result<Loss<A>> + Send + Sync,
{
    #[track_caller]
    fn loss(&mut self) -> Result<f64> {
        Ok(self.run(Wanted::Loss, BESIDE)?.mean)
    }

    #[track_caller]
    fn gradients(&mut self) -> Result<Vec<Option<Tensor>>> {
        self.gradients_of_batch(BESIDE)
    }

    fn value(&self, var: usize) -> Result<Tensor> {
        self.model.gather(self.names[var])
    }

    fn set(&mut self, var: usize, value: &Tensor) -> Result<()> {
        let inventory = &self.model.model.inventory;
        let items = value.flatten_all().doing(SETTING)?;
        for slot in &self.model.slots {
            let slot = lock(slot);
            let of_var = |name: &str| name == self.names[var];
            for part in slot.parts.iter().filter(|part| of_var(inventory.name(part.param))) {
                let run = items.narrow(0, part.start, part.var.elem_count());
                // Copied first: candle moves all that a view looks at.
                let run = run.and_then(|run| moved(&run.force_contiguous()?, part.var.device()));
                run.and_then(|run| part.var.set(&run)).doing(SETTING)?;
            }
        }
        Ok(())
    }
}

/// A loss beside the parameters' own values may be infinite or NaN.
const BESIDE: bool = true;

const SETTING: &str = "setting a parameter";
