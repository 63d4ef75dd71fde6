//! Losses with the weights that combine shards and batches.

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{ALL, Replica, TensorTree};

use crate::{
    agreement,
    error::training::{StepErrors, TrainingError},
    tree,
};

/// The loss of a shard: the return value of the function passed to a step, an evaluation or
/// [`value_and_grad`](crate::value_and_grad).
///
/// Sums and weights are added up over all slots and accumulated batches, and divided once. So the
/// loss and its gradients equal the results of one device for any distribution of rows or tokens.
///
/// | return value of `loss` | meaning |
/// |---|---|
/// | a tensor, or [`Loss::mean`] | a mean over the rows of the shard, weighted by their number |
/// | [`Loss::sum`] | a sum, for example over tokens, and their number |
/// | either, [`with_sums`](Self::with_sums) | and tensors to add up over the slots, such as counts of correct predictions |
/// | either, [`with_rows`](Self::with_rows) | and tensors with a row for each row of the shard, such as predictions, to join |
///
/// Rows of padding ([`Uneven::Pad`](pmap_mesh::Uneven::Pad)) have no weight: a mean must cover the
/// first [`Replica::valid_len`] rows only. The loss of a shard without weight is ignored for any
/// value; its gradient is zero, but its backward pass runs, so that its collectives run too.
/// (candle records no graph for a matrix product of zero rows. A loss with differentiable
/// collectives must mask its padding instead of cutting it off.)
///
/// # Examples
///
/// The mean over unmasked tokens, with the number of correct predictions:
///
/// ```
/// use candle_core::{D, DType, Result, Tensor};
/// use candle_nn::ops::log_softmax;
/// use dist_train::Loss;
///
/// /// `logits` [batch, length, vocabulary], `labels` [batch, length], `mask` the same, ones and zeros.
/// fn token_loss(logits: &Tensor, labels: &Tensor, mask: &Tensor) -> Result<Loss<Tensor>> {
///     let picked = log_softmax(logits, D::Minus1)?.gather(&labels.unsqueeze(2)?, 2)?.squeeze(2)?;
///     let right = logits.argmax(D::Minus1)?.eq(labels)?.to_dtype(DType::F32)?;
///     let sum = (picked * mask)?.sum_all()?.neg()?;
///     Ok(Loss::sum(sum, mask.sum_all()?).with_sums((right * mask)?.sum_all()?))
/// }
/// ```
#[derive(Clone, Debug)]
#[must_use = "pass the loss to a step"]
pub struct Loss<A = ()> {
    value: Tensor,
    weight: Weight,
    attached: Attached<A>,
    /// The [fingerprint](crate::batch::shared_fingerprint) of the batch that this process passed, if other
    /// processes must have passed the same batch.
    batch: Option<f64>,
}

/// Tensors attached to a loss.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attached<A> {
    pub(crate) aux: A,
    join: Join,
}

/// The rule that joins attached tensors of several slots or batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Join {
    Sum,
    /// Concatenates rows, in the order of batches and slots.
    Rows,
}

/// The weight of a sum: a number, or a scalar tensor of any dtype. See [`Loss::sum`].
#[derive(Clone, Debug)]
pub struct Weight(WeightKind);

#[derive(Clone, Debug)]
enum WeightKind {
    /// The number of rows of the shard.
    Rows,
    Number(f64),
    Scalar(Tensor),
}

impl Loss {
    /// Creates a loss from the mean over the rows of the shard, a floating-point scalar.
    pub fn mean(mean: Tensor) -> Self {
        Self::sum(mean, Weight(WeightKind::Rows))
    }

    /// Creates a loss from a sum, a floating-point scalar, and the number of its summands, such as
    /// tokens or pixels.
    ///
    /// Weights must be finite and not negative. At least one weight of an update or evaluation must
    /// be positive; an accumulated batch without weight adds nothing.
    pub fn sum(sum: Tensor, weight: impl Into<Weight>) -> Self {
        let attached = Attached { aux: (), join: Join::Sum };
        Self { value: sum, weight: weight.into(), attached, batch: None }
    }
}

impl<A> Loss<A> {
    /// Attaches tensors to add up over the slots and over accumulated batches, such as counts,
    /// replacing other attached tensors. No gradient flows through them.
    ///
    /// All slots must attach tensors of the same dtypes and shapes.
    #[doc(alias = "reduce")]
    pub fn with_sums<B: TensorTree>(self, aux: B) -> Loss<B> {
        self.attach(aux, Join::Sum)
    }

    /// Attaches tensors with a row for each row of the shard, such as predictions, replacing other
    /// attached tensors. No gradient flows through them. The result has the rows of the whole batch
    /// in their order: rows of all slots are joined in dimension 0, without
    /// [padding](pmap_mesh::Uneven::Pad), and likewise the rows of accumulated batches.
    ///
    /// A tensor with another number of rows than the shard is an error
    /// ([`TrainingError::AttachedRows`]), and so is a batch of which no tensor is cut, or whose rows are
    /// not in the order of slots. Rows that several slots have count once.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_nn::{Linear, Module, Optimizer, SGD, linear};
    /// use dist_train::{DataParallel, Loss};
    /// use pmap_mesh::{DeviceMesh, Replica, Uneven};
    ///
    /// let mut model = DataParallel::builder(&DeviceMesh::cpu(2)?, |vb| linear(3, 1, vb))
    ///     .uneven(Uneven::Balanced)
    ///     .build(|group| SGD::new(group.vars, 0.1))?;
    /// let x = Tensor::zeros((5, 3), candle_core::DType::F32, &Device::Cpu)?;
    /// let labels = Tensor::arange(0_f32, 5., &Device::Cpu)?;
    /// let done = model.evaluate((x, labels), |_: &Replica, model: &Linear, (x, labels): (Tensor, Tensor)| {
    ///     let logits = model.forward(&x)?;
    ///     Ok(Loss::mean((logits.squeeze(1)? - &labels)?.sqr()?.mean_all()?).with_rows((logits, labels)))
    /// })?;
    /// let (logits, labels) = done.aux;
    /// assert_eq!(logits.dims(), [5, 1]);
    /// assert_eq!(labels.to_vec1::<f32>()?, [0., 1., 2., 3., 4.]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "gather_for_metrics")]
    pub fn with_rows<B: TensorTree>(self, aux: B) -> Loss<B> {
        self.attach(aux, Join::Rows)
    }

    fn attach<B>(self, aux: B, join: Join) -> Loss<B> {
        let Self { value, weight, batch, .. } = self;
        Loss { value, weight, attached: Attached { aux, join }, batch }
    }

    /// Sets the fingerprint of the batch that this process passed; see [`ShardLoss::agree`].
    pub(crate) fn of_batch(self, batch: Option<f64>) -> Self {
        Self { batch, ..self }
    }

    /// Returns the tensor to differentiate.
    pub(crate) fn value(&self) -> &Tensor {
        &self.value
    }

    /// Splits off the attached tensors and converts the loss into a weighted sum.
    pub(crate) fn into_shard(self, ctx: &Replica) -> candle_core::Result<(ShardLoss, Attached<A>)> {
        let Self { value, weight, attached, batch } = self;
        let mut not_scalar = None;
        let (times, weight) = match weight.0 {
            WeightKind::Rows => {
                // If no tensor of the batch is split, each slot counts as one row.
                let rows = ctx.valid_len().map_or(1.0, |rows| rows as f64);
                (rows, rows)
            }
            WeightKind::Number(weight) => (1.0, weight),
            WeightKind::Scalar(weight) if weight.rank() == 0 => (1.0, scalar(&weight)?),
            WeightKind::Scalar(weight) => {
                not_scalar = Some((WEIGHT, weight));
                (1.0, 0.0)
            }
        };
        if value.rank() != 0 || !value.dtype().is_float() {
            not_scalar = Some((LOSS, value.clone()));
        }
        let shard = ShardLoss { value, times, common_times: 1.0, weight, not_scalar, batch };
        Ok((shard, attached))
    }
}

impl<A: TensorTree> Loss<A> {
    /// Returns the loss with the attached tensors as a list, and a tree with their form, for
    /// [`with_leaves`].
    pub(crate) fn into_leaves(self) -> (Loss<Vec<Tensor>>, A) {
        let Attached { aux, join } = &self.attached;
        // Detached, because attached tensors would keep the graph in memory.
        let leaves = tree::each(aux, Tensor::detach);
        // A scalar replaces each tensor, so that the form retains no data.
        let form = tree::map(aux, |_| self.value.detach());
        let join = *join;
        (self.attach(leaves, join), form)
    }
}

impl Loss<Vec<Tensor>> {
    /// Returns the loss of the whole batch and the attached tensors of all slots, the same on every
    /// replica.
    pub(crate) fn evaluate(
        self,
        ctx: &Replica,
        allow_non_finite: bool,
        errors: &StepErrors,
    ) -> candle_core::Result<(BatchLoss, Vec<Tensor>)> {
        let (mut shard, attached) = self.into_shard(ctx)?;
        let batch = shard.agree(ctx, allow_non_finite, errors)?.require_weight(errors)?;
        Ok((batch, attached.over_replicas(ctx, errors)?.aux))
    }
}

impl From<Tensor> for Loss {
    fn from(mean: Tensor) -> Self {
        Self::mean(mean)
    }
}

impl From<f64> for Weight {
    fn from(weight: f64) -> Self {
        Self(WeightKind::Number(weight))
    }
}

impl From<usize> for Weight {
    fn from(weight: usize) -> Self {
        Self(WeightKind::Number(weight as f64))
    }
}

impl From<Tensor> for Weight {
    fn from(weight: Tensor) -> Self {
        Self(WeightKind::Scalar(weight))
    }
}

/// The loss of one shard as a weighted sum.
#[derive(Debug)]
pub(crate) struct ShardLoss {
    value: Tensor,
    /// The factor of `value` in the sum: 1, or the number of rows for a mean.
    times: f64,
    /// The `times` of all shards with weight if they are equal, or 1 if they differ.
    common_times: f64,
    weight: f64,
    /// The part of an invalid loss that is not a scalar (`LOSS` or `WEIGHT`), and its tensor.
    not_scalar: Option<(f64, Tensor)>,
    /// The fingerprint of the batch, to compare with other processes.
    batch: Option<f64>,
}

/// Codes that replicas exchange about their losses: valid, or the part that is not a scalar.
const VALID: f64 = 0.0;
const LOSS: f64 = 1.0;
const WEIGHT: f64 = 2.0;

/// The loss of a whole batch, or of several: a sum and its weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLoss {
    sum: f64,
    weight: f64,
}

impl ShardLoss {
    /// Returns the loss of the whole batch, the same on every replica; its weight may be 0.
    ///
    /// Replicas exchange losses and weights before the backward pass, so that an invalid loss ends
    /// the step at the same place everywhere. Over several processes they also exchange fingerprints
    /// of their batches: a process that passes different rows loses some of them in the cut, and no other
    /// check finds this.
    pub(crate) fn agree(
        &mut self,
        ctx: &Replica,
        allow_non_finite: bool,
        errors: &StepErrors,
    ) -> candle_core::Result<BatchLoss> {
        let here = match self.not_scalar {
            Some((part, _)) => [part, 0.0, 0.0, 0.0],
            None => [VALID, scalar(&self.value)?, self.times, self.weight],
        };
        let shards = match self.batch {
            None => agreement::gather_numbers(ctx, here)?,
            Some(batch) => gather_with_batch(ctx, here, batch, errors)?,
        };
        if let Some(slot) = shards.iter().position(|&[part, ..]| part != VALID) {
            return Err(errors.record_agreed(self.shape_error(ctx, slot, shards[slot][0])?));
        }
        let mut batch = BatchLoss { sum: 0.0, weight: 0.0 };
        for (slot, &[_, value, times, weight]) in shards.iter().enumerate() {
            if !weight.is_finite() || weight < 0.0 {
                return Err(errors.record_agreed(TrainingError::Weight { slot, weight }));
            }
            if weight == 0.0 {
                continue;
            }
            if !value.is_finite() && !allow_non_finite {
                return Err(errors.record_agreed(TrainingError::NonFiniteLoss { slot, value }));
            }
            batch.sum += value * times;
            batch.weight += weight;
        }
        self.common_times =
            common_times(shards.iter().filter(|[.., weight]| *weight > 0.0)).unwrap_or(1.0);
        Ok(batch)
    }

    /// Exchanges the shapes and dtypes of invalid tensors, and returns the error about a slot's.
    fn shape_error(
        &self,
        ctx: &Replica,
        slot: usize,
        part: f64,
    ) -> candle_core::Result<TrainingError> {
        let (local_dims, local_dtype) = match &self.not_scalar {
            Some((_, tensor)) => (tensor.dims(), tensor.dtype().as_str()),
            None => (&[][..], ""),
        };
        let local_dims: Vec<u64> = local_dims.iter().map(|&size| size as u64).collect();
        let dims = agreement::gather_lists(ctx, &local_dims)?.swap_remove(slot);
        let shape = dims.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        let shape = shape.map_err(candle_core::Error::wrap)?;
        let local_letters: Vec<u64> = local_dtype.chars().map(u64::from).collect();
        let letters = agreement::gather_lists(ctx, &local_letters)?.swap_remove(slot);
        let chars = letters.into_iter().map(u8::try_from).map(|letter| letter.map(char::from));
        let dtype = chars.collect::<Result<_, _>>().map_err(candle_core::Error::wrap)?;
        let what = if part == WEIGHT { "weight of the loss" } else { "loss" };
        Ok(TrainingError::NotScalar { slot, what, shape, dtype })
    }

    /// Returns the tensor to differentiate, and a factor for the gradients of all parameters. The
    /// product of both is the sum divided by `scale`. The factor also applies on slots with an
    /// empty shard.
    ///
    /// With half-precision parameters (`halves`), backpropagation converts the tensor's factor to
    /// half precision. A power of 2 survives this unchanged; the remainder is applied to the
    /// gradients, which are in single precision. (Otherwise all gradients would have an error of
    /// 0.2 % with three slots in bf16.) All slots have the same remainder, because a gradient that
    /// arrives through a collective already has the factor of the slot that sent it. If shards
    /// differ in their number of rows, the tensor's factor includes these numbers, which bf16
    /// represents exactly up to 256.
    pub(crate) fn into_scaled_sum(
        self,
        scale: f64,
        halves: bool,
    ) -> candle_core::Result<(Tensor, f64)> {
        let (factor, rest) = if halves {
            let power = power_of_two(self.common_times / scale);
            (self.times / self.common_times * power, self.common_times / scale / power)
        } else {
            (self.times / scale, 1.0)
        };
        // Not a multiplication by the constant 0, which stops candle's backpropagation: other
        // replicas would wait for this one in the backward pass of a collective.
        let sum = if self.is_empty() {
            &self.value * self.value.zeros_like()?
        } else {
            self.value * factor
        };
        Ok((sum?, rest))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Returns true if the shard has no weight.
    pub(crate) fn is_empty(&self) -> bool {
        self.weight == 0.0
    }
}

impl BatchLoss {
    pub(crate) fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns the loss unchanged, or an error if its weight is 0.
    pub(crate) fn require_weight(self, errors: &StepErrors) -> candle_core::Result<Self> {
        if self.weight == 0.0 {
            Err(errors.record_agreed(TrainingError::NoWeight))
        } else {
            Ok(self)
        }
    }

    /// Returns the weighted mean.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.weight
    }

    /// Adds the loss of other batches.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, weight: self.weight + other.weight }
    }
}

/// Gathers numbers from every replica, by slot, and checks that all processes passed the same batch.
fn gather_with_batch(
    ctx: &Replica,
    here: [f64; 4],
    batch: f64,
    errors: &StepErrors,
) -> candle_core::Result<Vec<[f64; 4]>> {
    let [part, value, times, weight] = here;
    let all = agreement::gather_numbers(ctx, [batch, part, value, times, weight])?;
    let different = all.iter().position(|[other, ..]| other.to_bits() != all[0][0].to_bits());
    if let Some(replica) = different {
        return Err(errors.record_agreed(TrainingError::BatchMismatch { replica }));
    }
    Ok(all.into_iter().map(|[_, shard @ ..]| shard).collect())
}

impl Attached<Vec<Tensor>> {
    /// Returns the attached tensors of all slots, the same on every replica.
    pub(crate) fn over_replicas(
        self,
        ctx: &Replica,
        errors: &StepErrors,
    ) -> candle_core::Result<Self> {
        let Self { aux, join } = self;
        if aux.is_empty() {
            return Ok(Self { aux, join });
        }
        let aux = match join {
            Join::Sum => ctx.psum_list("attached tensors", &aux, ALL)?,
            Join::Rows => join_rows(ctx, &aux, errors)?,
        };
        Ok(Self { aux, join })
    }

    /// Adds the attached tensors of a later batch.
    pub(crate) fn plus(self, later: &Self) -> candle_core::Result<Self> {
        if (self.aux.len(), self.join) != (later.aux.len(), later.join) {
            candle_core::bail!(
                "{} tensors are attached to the loss ({:?}), {} were attached to the previous \
                 batch's loss ({:?})",
                later.aux.len(),
                later.join,
                self.aux.len(),
                self.join
            )
        }
        let pairs = self.aux.iter().zip(&later.aux);
        let aux = pairs.map(|(left, right)| match self.join {
            Join::Sum => left + right,
            Join::Rows => Tensor::cat(&[left, right], 0),
        });
        Ok(Self { aux: aux.collect::<candle_core::Result<_>>()?, join: self.join })
    }
}

/// Joins the rows of all slots in their order in the batch. Of slots with the same rows, as on a mesh
/// whose other axes repeat them, the first one's are taken.
fn join_rows(
    ctx: &Replica,
    aux: &[Tensor],
    errors: &StepErrors,
) -> candle_core::Result<Vec<Tensor>> {
    let here = ctx.row_start().zip(ctx.valid_len());
    let (start, n_real) = match here {
        Some((start, n_real)) => (start as f64, n_real as f64),
        None if ctx.count() == 1 => (0.0, 1.0),
        None => return Err(errors.record_agreed(no_joined_rows("no tensor of the batch is cut"))),
    };
    let places = agreement::gather_numbers(ctx, [start, n_real])?;
    let is_copy = |slot: usize| places[..slot].contains(&places[slot]);
    let has_own = |slot: &usize| places[*slot][1] > 0.0 && !is_copy(*slot);
    if !(0..places.len()).filter(has_own).map(|slot| places[slot][0]).is_sorted() {
        let reason = "a later slot has earlier rows of the batch";
        return Err(errors.record_agreed(no_joined_rows(reason)));
    }
    let mut joined = Vec::with_capacity(aux.len());
    for rows in aux {
        let rows = real_rows(ctx, rows, errors)?;
        let n_own = if is_copy(ctx.slot()) { 0 } else { rows.dim(0)? };
        joined.push(ctx.all_gather(&rows.narrow(0, 0, n_own)?, 0, ALL)?);
    }
    Ok(joined)
}

fn no_joined_rows(reason: &str) -> TrainingError {
    TrainingError::option("in_axes", format!("`with_rows` joins rows of slots, but {reason}"))
}

/// Returns an attached tensor without the rows of padding.
fn real_rows(ctx: &Replica, rows: &Tensor, errors: &StepErrors) -> candle_core::Result<Tensor> {
    // If no tensor of the batch is split, any number of rows is right.
    let first_dim = rows.dims().first().copied();
    let n_real = ctx.valid_len().or(first_dim);
    match n_real {
        Some(n_real) if [Some(n_real), ctx.padded_len()].contains(&first_dim) => {
            rows.narrow(0, 0, n_real)
        }
        _ => {
            let (shape, n_rows) = (rows.dims().to_vec(), n_real.unwrap_or(1));
            Err(errors.record_local(TrainingError::AttachedRows { shape, n_rows }))
        }
    }
}

/// Returns a tree of the form of `tree` with other leaves, given in the order of `tree`.
pub(crate) fn with_leaves<A: TensorTree>(tree: &A, leaves: Vec<Tensor>) -> A {
    let mut leaves = leaves.into_iter();
    #[expect(clippy::expect_used, reason = "the leaves are joined from the tree's own tensors")]
    tree::map(tree, |_| leaves.next().expect("there is one leaf per tensor of the tree"))
}

/// Returns the `times` of the shards if they are equal, or `None` if they differ or there are no
/// shards.
#[expect(clippy::float_cmp, reason = "numbers of rows, or 1")]
fn common_times<'a>(shards: impl IntoIterator<Item = &'a [f64; 4]>) -> Option<f64> {
    let mut times = shards.into_iter().map(|&[_, _, times, _]| times);
    let first = times.next()?;
    times.all(|times| times == first).then_some(first)
}

/// Returns the largest power of 2 that is at most a positive `number`.
fn power_of_two(number: f64) -> f64 {
    const EXPONENT: u64 = 0x7FF << 52;
    let power = f64::from_bits(number.to_bits() & EXPONENT);
    // Subnormal numbers yield 0 here, and infinity yields itself.
    if power > 0.0 && power.is_finite() { power } else { 1.0 }
}

/// Reads a scalar of any dtype.
fn scalar(tensor: &Tensor) -> candle_core::Result<f64> {
    // Converted on the host, because not every device supports double precision.
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_of_two_is_the_largest_below() {
        for number in [1.0, 1.5, 0.3, 1.0 / 3.0, 1e-300, 7e20] {
            let power = power_of_two(number);
            assert!(power <= number && number < 2.0 * power, "{number} {power}");
            assert!(power.log2().fract().abs() < f64::EPSILON, "{power}");
        }
        for number in [0.0, f64::INFINITY] {
            assert_eq!(power_of_two(number).to_bits(), 1_f64.to_bits());
        }
    }
}
