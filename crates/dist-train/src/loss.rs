//! What a step minimizes: a loss with the weight it has among those of other shards and batches.

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{ALL, Replica, TensorTree};

use crate::{
    agreement,
    error::training::{Refusal, TrainingError},
    tree,
};

/// The loss of a shard: what a step, an evaluation or [`value_and_grad`](crate::value_and_grad)
/// gets from the function that it is given.
///
/// Sums and weights of all slots are added up, as are those of accumulated batches, and divided
/// once. So the loss and its gradients are those of one device, however rows or tokens are spread.
///
/// | what `loss` returns | what it says |
/// |---|---|
/// | a tensor, or [`Loss::mean`] | a mean over the rows of the shard: it weighs as many as there are |
/// | [`Loss::sum`] | a sum over tokens, say, and how many there are |
/// | either [`with`](Self::with) others | tensors that are summed over the slots: numbers of right answers |
///
/// A row of padding ([`Uneven::Pad`](pmap_mesh::Uneven::Pad)) has no weight: a mean is one over the
/// first [`Replica::valid_len`] rows. The loss of a shard without weight counts nowhere, whatever
/// its value; its gradient is zero, but its backward runs, and with it the collectives in it.
/// (candle records nothing of a matrix product of no rows. A loss whose collectives have a backward
/// must mask its padding, and not cut it away.)
///
/// # Examples
///
/// The mean over the tokens that a mask leaves, with the number of right answers:
///
/// ```
/// use candle_core::{D, DType, Result, Tensor};
/// use candle_nn::ops::log_softmax;
/// use dist_train::Loss;
///
/// /// `logits` [batch, length, vocabulary], `labels` [batch, length], `mask` the same, of ones and zeros.
/// fn token_loss(logits: &Tensor, labels: &Tensor, mask: &Tensor) -> Result<Loss<Tensor>> {
///     let picked = log_softmax(logits, D::Minus1)?.gather(&labels.unsqueeze(2)?, 2)?.squeeze(2)?;
///     let right = logits.argmax(D::Minus1)?.eq(labels)?.to_dtype(DType::F32)?;
///     let sum = (picked * mask)?.sum_all()?.neg()?;
///     Ok(Loss::sum(sum, mask.sum_all()?).with((right * mask)?.sum_all()?))
/// }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a loss is what a step is given"]
pub struct Loss<A = ()> {
    value: Tensor,
    weight: Weight,
    aux: A,
}

/// How much a sum weighs: a number, or a scalar tensor of any type. See [`Loss::sum`].
#[derive(Clone, Debug)]
pub struct Weight(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// As many as the shard has rows.
    Rows,
    Number(f64),
    Scalar(Tensor),
}

impl Loss {
    /// A mean over the rows of the shard: a scalar of floats.
    pub fn mean(mean: Tensor) -> Self {
        Self { value: mean, weight: Weight(Kind::Rows), aux: () }
    }

    /// A sum, a scalar of floats, and the number of what it is the sum of: tokens, pixels.
    ///
    /// Weights are finite and not negative. Those of an update, or of an evaluation, are not all 0; an
    /// accumulated batch without weight adds nothing.
    pub fn sum(sum: Tensor, weight: impl Into<Weight>) -> Self {
        Self { value: sum, weight: weight.into(), aux: () }
    }
}

impl<A> Loss<A> {
    /// The same with tensors that are no part of the loss, in place of those it had. They are
    /// summed over the slots and over accumulated batches; no gradient passes.
    ///
    /// All slots give tensors of the same types and shapes.
    pub fn with<B: TensorTree>(self, aux: B) -> Loss<B> {
        Loss { value: self.value, weight: self.weight, aux }
    }

    /// Returns the tensor to differentiate.
    pub(crate) fn value(&self) -> &Tensor {
        &self.value
    }

    /// The loss as a sum, and the rest.
    pub(crate) fn of_shard(self, ctx: &Replica) -> candle_core::Result<(ShardLoss, A)> {
        let Self { value, weight, aux } = self;
        let mut unfit = None;
        let (times, weight) = match weight.0 {
            Kind::Rows => {
                // A batch of which nothing is cut is one row of each slot.
                let rows = ctx.valid_len().map_or(1.0, |rows| rows as f64);
                (rows, rows)
            }
            Kind::Number(weight) => (1.0, weight),
            Kind::Scalar(weight) if weight.rank() == 0 => (1.0, scalar(&weight)?),
            Kind::Scalar(weight) => {
                unfit = Some((WEIGHT, weight));
                (1.0, 0.0)
            }
        };
        if value.rank() != 0 || !value.dtype().is_float() {
            unfit = Some((LOSS, value.clone()));
        }
        Ok((ShardLoss { value, times, times_of_all: 1.0, weight, unfit }, aux))
    }
}

impl<A: TensorTree> Loss<A> {
    /// Returns the loss with the tensors of its tree in a list, and a tree of the same form for
    /// [`with_leaves`].
    pub(crate) fn into_leaves(self) -> (Loss<Vec<Tensor>>, A) {
        let Self { value, weight, aux } = self;
        // Without the graph, which what comes with a loss would keep in memory.
        let leaves = tree::each(&aux, Tensor::detach);
        // A scalar in the place of each tensor, so that the form keeps none in memory.
        let form = tree::map(&aux, |_| value.detach());
        (Loss { value, weight, aux: leaves }, form)
    }
}

impl Loss<Vec<Tensor>> {
    /// Returns the loss of the whole batch, and the sums of the rest: the same on every replica.
    pub(crate) fn evaluate(
        self,
        ctx: &Replica,
        allow_non_finite: bool,
        refusal: &Refusal,
    ) -> candle_core::Result<(BatchLoss, Vec<Tensor>)> {
        let (mut shard, aux) = self.of_shard(ctx)?;
        let batch = shard.agree(ctx, allow_non_finite, refusal)?.with_weight(refusal)?;
        Ok((batch, summed(ctx, aux)?))
    }
}

impl From<Tensor> for Loss {
    fn from(mean: Tensor) -> Self {
        Self::mean(mean)
    }
}

impl From<f64> for Weight {
    fn from(weight: f64) -> Self {
        Self(Kind::Number(weight))
    }
}

impl From<usize> for Weight {
    fn from(weight: usize) -> Self {
        Self(Kind::Number(weight as f64))
    }
}

impl From<Tensor> for Weight {
    fn from(weight: Tensor) -> Self {
        Self(Kind::Scalar(weight))
    }
}

/// The loss of one shard as a sum over what it weighs.
#[derive(Debug)]
pub(crate) struct ShardLoss {
    value: Tensor,
    /// The sum is so many times `value`.
    times: f64,
    /// The same of every shard, if they have one; otherwise 1.
    times_of_all: f64,
    weight: f64,
    /// What is no scalar, and of which part of a loss.
    unfit: Option<(f64, Tensor)>,
}

/// What replicas tell each other of their losses: nothing is wrong, or a part is no scalar.
const FIT: f64 = 0.0;
const LOSS: f64 = 1.0;
const WEIGHT: f64 = 2.0;

/// The loss of a whole batch, or of several: a sum and its weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLoss {
    sum: f64,
    weight: f64,
}

impl ShardLoss {
    /// The loss of the whole batch, the same on every replica; it may have no weight.
    ///
    /// Every replica learns every other's loss and weight before its backward, so that what cannot
    /// be trained on ends the step everywhere at the same place.
    pub(crate) fn agree(
        &mut self,
        ctx: &Replica,
        allow_non_finite: bool,
        refusal: &Refusal,
    ) -> candle_core::Result<BatchLoss> {
        let here = match self.unfit {
            Some((part, _)) => [part, 0.0, 0.0, 0.0],
            None => [FIT, scalar(&self.value)?, self.times, self.weight],
        };
        let shards = agreement::numbers(ctx, here)?;
        if let Some(slot) = shards.iter().position(|&[part, ..]| part != FIT) {
            return Err(refusal.agreed(self.not_scalar(ctx, slot, shards[slot][0])?));
        }
        let mut batch = BatchLoss { sum: 0.0, weight: 0.0 };
        for (slot, &[_, value, times, weight]) in shards.iter().enumerate() {
            if !weight.is_finite() || weight < 0.0 {
                return Err(refusal.agreed(TrainingError::Weight { slot, weight }));
            }
            if weight == 0.0 {
                continue;
            }
            if !value.is_finite() && !allow_non_finite {
                return Err(refusal.agreed(TrainingError::NonFiniteLoss { slot, value }));
            }
            batch.sum += value * times;
            batch.weight += weight;
        }
        self.times_of_all =
            common(shards.iter().filter(|[.., weight]| *weight > 0.0)).unwrap_or(1.0);
        Ok(batch)
    }

    /// The error of what a slot has in place of a scalar, which that slot alone knows.
    fn not_scalar(
        &self,
        ctx: &Replica,
        slot: usize,
        part: f64,
    ) -> candle_core::Result<TrainingError> {
        let (dims, dtype) = match &self.unfit {
            Some((_, tensor)) => (tensor.dims(), tensor.dtype().as_str()),
            None => (&[][..], ""),
        };
        let dims: Vec<u64> = dims.iter().map(|&size| size as u64).collect();
        let shape = agreement::lists(ctx, &dims)?.swap_remove(slot);
        let shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        let shape = shape.map_err(candle_core::Error::wrap)?;
        let letters: Vec<u64> = dtype.chars().map(u64::from).collect();
        let letters = agreement::lists(ctx, &letters)?.swap_remove(slot);
        let letters = letters.into_iter().map(u8::try_from).map(|letter| letter.map(char::from));
        let dtype = letters.collect::<Result<_, _>>().map_err(candle_core::Error::wrap)?;
        Ok(if part == WEIGHT {
            TrainingError::WeightShape { slot, shape }
        } else {
            TrainingError::LossShape { slot, shape, dtype }
        })
    }

    /// The tensor to differentiate, and what the gradients of all parameters are to be multiplied
    /// by, also where nothing of the batch is here: together they make the sum over `scale`.
    ///
    /// On its way to parameters in `halves` the factor of a sum becomes a half. As a power of 2 it
    /// stays what it is; the rest is left to the gradients, which are in single precision: of three
    /// slots in bf16, all would be off by 0.2 %. That rest is one for all slots, because what comes
    /// through a collective has the factor of the slot that it comes from. Where shards have
    /// numbers of rows that differ, these numbers are left in the factor, which a half of 8 bits
    /// holds up to 256.
    pub(crate) fn share(self, scale: f64, halves: bool) -> candle_core::Result<(Tensor, f64)> {
        let (seed, rest) = if halves {
            let power = power_of_two(self.times_of_all / scale);
            (self.times / self.times_of_all * power, self.times_of_all / scale / power)
        } else {
            (self.times / scale, 1.0)
        };
        // Not times the number 0, at which candle ends the gradient: the backward of a collective
        // would wait for this replica.
        let sum = if self.is_empty() {
            &self.value * self.value.zeros_like()?
        } else {
            self.value * seed
        };
        Ok((sum?, rest))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Whether nothing of the batch is here.
    pub(crate) fn is_empty(&self) -> bool {
        self.weight == 0.0
    }
}

impl BatchLoss {
    pub(crate) fn weight(&self) -> f64 {
        self.weight
    }

    /// The same, if it has a mean.
    pub(crate) fn with_weight(self, refusal: &Refusal) -> candle_core::Result<Self> {
        if self.weight == 0.0 { Err(refusal.agreed(TrainingError::NoWeight)) } else { Ok(self) }
    }

    /// The mean over what it weighs.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.weight
    }

    /// The loss of these and other batches.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, weight: self.weight + other.weight }
    }
}

/// Returns tensors summed over all replicas.
pub(crate) fn summed(ctx: &Replica, leaves: Vec<Tensor>) -> candle_core::Result<Vec<Tensor>> {
    if leaves.is_empty() {
        return Ok(leaves);
    }
    let all: Vec<usize> = (0..leaves.len()).collect();
    ctx.psum_list(leaves, &all, ALL)
}

/// A tree of the form of `tree` with these tensors, as many as it has.
pub(crate) fn with_leaves<A: TensorTree>(tree: &A, leaves: Vec<Tensor>) -> A {
    let mut leaves = leaves.into_iter();
    #[expect(clippy::expect_used, reason = "they are the sums of the tree's own tensors")]
    tree::map(tree, |_| leaves.next().expect("a tree has as many tensors each time"))
}

/// How many times its value every one of some shards counts, if they agree.
#[expect(clippy::float_cmp, reason = "numbers of rows, or 1")]
fn common<'a>(shards: impl IntoIterator<Item = &'a [f64; 4]>) -> Option<f64> {
    let mut times = shards.into_iter().map(|&[_, _, times, _]| times);
    let first = times.next()?;
    times.all(|times| times == first).then_some(first)
}

/// The largest power of 2 that is not larger than a positive number.
fn power_of_two(number: f64) -> f64 {
    const EXPONENT: u64 = 0x7FF << 52;
    let power = f64::from_bits(number.to_bits() & EXPONENT);
    // That of a number below 1e-307 is 0, and infinity is its own.
    if power > 0.0 && power.is_finite() { power } else { 1.0 }
}

/// A scalar of any type.
fn scalar(tensor: &Tensor) -> candle_core::Result<f64> {
    // Not every device has double precision.
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_within_a_factor_of_two() {
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
