//! What the cost of a plan depends on besides the plan.

use super::Links;
use crate::{
    elem::ElemType,
    error::{Error, Result},
    param::ParameterInfo,
};

/// The runtime that carries out a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Runtime {
    /// PyTorch's `fully_shard` and `FullyShardedDataParallel`: parts are padded to equal sizes, one
    /// unit is gathered ahead, and the graphs of all units are kept for the backward pass.
    #[default]
    Torch,
    /// dist-train's `FullyShard` on candle: no padding, nothing ahead by default. Gradients of halves are
    /// reduced and held as [`F32`](crate::ElemType::F32). Replicated parameters are copied like the others while
    /// their unit computes, and so is everything where a shard group has one rank. Units that do not
    /// stay gathered keep their inputs and are computed again, unless [their graphs are
    /// kept](crate::cost::CostModel::with_kept_graphs). candle's `backward` makes a
    /// parameter's gradient of zeros, to which it adds the first contribution: the largest gradient
    /// is there two times more for a moment.
    Candle,
}

/// Elements that share a scale in 8-bit states.
const BLOCK_8BIT: u128 = 256;

/// Tensors smaller than this keep their 8-bit states in 32 bits.
const MIN_8BIT_NUMEL: u128 = 4096;

/// What the optimizer remembers from step to step, for each tensor it is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam and `AdamW` as in PyTorch: two moments in the dtype of the parameter, and a 4-byte step
    /// count.
    #[default]
    Adam,
    /// Adam in mixed precision, as in Megatron-LM and `DeepSpeed`: a copy of the parameter and two
    /// moments, all in [`ElemType::F32`], and a 4-byte step count.
    AdamMixed,
    /// Adam with 8-bit states, as in bitsandbytes from 0.44 on: two moments of one byte per
    /// element, and 4 bytes for the scale of each 256; tensors of fewer than 4,096 elements have
    /// moments of 4 bytes. (T. Dettmers and others, "8-bit Optimizers via Block-wise Quantization",
    /// arXiv 2110.02861.) The 2 KiB of quantization maps, which all tensors share, are not counted.
    Adam8bit,
    /// Gradient descent with momentum: one buffer in the dtype of the parameter.
    Sgd,
    /// Nothing, as for gradient descent without momentum.
    None,
}

impl Optimizer {
    /// The bytes for a tensor of `numel` elements that is held as `dtype`.
    pub(super) fn state_bytes(self, dtype: ElemType, numel: u128) -> u128 {
        let f32_bytes = |n_buffers| n_buffers * ElemType::F32.bytes(numel);
        match self {
            Self::Adam => 2 * dtype.bytes(numel) + 4,
            Self::AdamMixed => f32_bytes(3) + 4,
            Self::Adam8bit if numel < MIN_8BIT_NUMEL => f32_bytes(2),
            Self::Adam8bit => 2 * (numel + 4 * numel.div_ceil(BLOCK_8BIT)),
            Self::Sgd => dtype.bytes(numel),
            Self::None => 0,
        }
    }
}

/// What the cost of a plan depends on besides the plan.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::{ElemType, cost::{CostModel, Optimizer}};
/// let model = CostModel::default()
///     .with_optimizer(Optimizer::Sgd)
///     .with_param_dtype(ElemType::F32)
///     .with_mixed_precision(ElemType::Bf16, ElemType::F32);
/// # let _ = model;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CostModel {
    pub(super) optimizer: Optimizer,
    pub(super) optimizer_in_backward: bool,
    pub(super) runtime: Runtime,
    pub(super) kept_graphs: u64,
    prefetch: Option<u64>,
    pub(super) activations: Option<Activations>,
    links: Option<Links>,
    param_dtype: Option<ElemType>,
    mixed_precision: Option<(ElemType, ElemType)>,
}

impl CostModel {
    /// Sets the optimizer. Default: [`Optimizer::Adam`].
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: Optimizer) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Updates the parameters of a unit as soon as their gradients are reduced, after which these are
    /// freed: gradients of one unit are there at a time. Default: they stay until the end of the step.
    #[must_use]
    pub fn with_optimizer_in_backward(mut self) -> Self {
        self.optimizer_in_backward = true;
        self
    }

    /// Holds trained parameters, their gradients and what the optimizer derives from their dtype as
    /// `dtype`, whatever the checkpoint has. Default: each in its own dtype.
    #[must_use]
    pub fn with_param_dtype(mut self, dtype: ElemType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// Sends trained parameters as `param_dtype` and gradients as `reduce_dtype`: PyTorch's
    /// `MixedPrecisionPolicy`.
    ///
    /// What ranks hold stays in the dtype of each parameter. Default: everything does.
    #[must_use]
    pub fn with_mixed_precision(mut self, param_dtype: ElemType, reduce_dtype: ElemType) -> Self {
        self.mixed_precision = Some((param_dtype, reduce_dtype));
        self
    }

    /// Sets the runtime whose memory and traffic are counted. Default: [`Runtime::Torch`].
    #[must_use]
    pub fn with_runtime(mut self, runtime: Runtime) -> Self {
        self.runtime = runtime;
        self
    }

    /// Gathers so many units ahead of the one in use. Default: 1 as PyTorch does, 0 for
    /// [`Runtime::Candle`].
    #[must_use]
    pub fn with_prefetch(mut self, units: u64) -> Self {
        self.prefetch = Some(units);
        self
    }

    /// Keeps the graphs of so many of the units that do not [stay
    /// gathered](crate::ShardingPlan::with_kept_units), while their parameters are freed and
    /// gathered again: what is kept of the others are their inputs. Default: 0. PyTorch keeps all.
    #[must_use]
    pub fn with_kept_graphs(mut self, units: u64) -> Self {
        self.kept_graphs = units;
        self
    }

    /// Also counts what a rank's part of a batch takes. Default: it does not, because a plan knows
    /// no batch.
    #[must_use]
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = Some(activations);
        self
    }

    /// Also tells how long a step's collectives take over these links. Default: it does not.
    #[must_use]
    pub fn with_links(mut self, links: Links) -> Self {
        self.links = Some(links);
        self
    }

    /// The links, if it has any.
    pub(crate) fn links(&self) -> Option<Links> {
        self.links
    }

    /// The dtype in which a parameter is held.
    pub(super) fn held_dtype(&self, info: &ParameterInfo) -> ElemType {
        self.param_dtype.filter(|_| info.dtype().is_trainable()).unwrap_or(info.dtype())
    }

    /// The dtypes in which a parameter and its gradient travel.
    pub(super) fn wire_dtypes(&self, info: &ParameterInfo) -> (ElemType, ElemType) {
        let held = self.held_dtype(info);
        let unless_mixed = (held, self.grad_dtype(info));
        self.mixed_precision.filter(|_| held.is_trainable()).unwrap_or(unless_mixed)
    }

    /// The dtype in which a gradient is held, whatever it was reduced in.
    pub(super) fn grad_dtype(&self, info: &ParameterInfo) -> ElemType {
        match (self.runtime, self.held_dtype(info)) {
            (Runtime::Candle, ElemType::F16 | ElemType::Bf16) => ElemType::F32,
            (Runtime::Torch | Runtime::Candle, held) => held,
        }
    }

    /// The number of units that are gathered ahead of the one in use.
    pub(super) fn prefetch(&self) -> u64 {
        self.prefetch.unwrap_or(match self.runtime {
            Runtime::Torch => 1,
            Runtime::Candle => 0,
        })
    }

    /// Whether parts are padded to equal sizes.
    pub(super) fn pads(&self) -> bool {
        self.runtime == Runtime::Torch
    }
}

/// What a rank's part of a batch takes within and between units.
///
/// # Examples
///
/// ```
/// use fsdp_plan::{
///     ElemType,
///     cost::{Activations, CostModel, Runtime},
/// };
///
/// // Two sequences of 512 tokens per rank, 768 numbers wide.
/// let activations = Activations::of_transformer(1024, 768, ElemType::F32, Runtime::Candle)?;
/// assert_eq!(activations.input_bytes, 1024 * 768 * 4);
/// let model = CostModel::default().with_runtime(Runtime::Candle).with_activations(activations);
/// # let _ = model;
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "whoever knows the model better writes both down")]
pub struct Activations {
    /// The bytes of a unit's inputs, which are kept for the backward pass where the unit is computed
    /// again in it.
    pub input_bytes: u64,
    /// The bytes of everything that the largest unit computes, with the gradients of it that are
    /// there at the same time.
    pub unit_bytes: u64,
}

impl Activations {
    /// An estimate for the blocks of a transformer, from the tokens of a rank's part of a batch and
    /// the width of the values between blocks, of `dtype`.
    ///
    /// A block of PyTorch's keeps 17 numbers for each token and place of the width, attention scores
    /// not counted: 34 bytes in half precision (V. Korthikanti and others, "Reducing Activation
    /// Recomputation in Large Transformer Models", arXiv 2205.05198, equation 2). On candle it is
    /// 56 numbers with the gradients, measured on this project's own transformer.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes do not fit into 64 bits.
    pub fn of_transformer(
        tokens: u64,
        width: u64,
        dtype: ElemType,
        runtime: Runtime,
    ) -> Result<Self> {
        let numbers = match runtime {
            Runtime::Torch => 17,
            Runtime::Candle => 56,
        };
        let bytes = |numbers: u128| {
            let values = u128::from(tokens).checked_mul(u128::from(width));
            let values = values.and_then(|values| values.checked_mul(numbers));
            let bytes = values.and_then(|values| u64::try_from(dtype.bytes(values)).ok());
            bytes.ok_or(Error::TotalTooLarge { what: "the bytes of activations" })
        };
        Ok(Self { input_bytes: bytes(1)?, unit_bytes: bytes(numbers)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_a_tensor() {
        for (optimizer, of_1000, of_4097) in [
            (Optimizer::Adam, 4004, 16_392),
            (Optimizer::AdamMixed, 12_004, 49_168),
            (Optimizer::Adam8bit, 8000, 8194 + 2 * 17 * 4),
            (Optimizer::Sgd, 2000, 8194),
            (Optimizer::None, 0, 0),
        ] {
            let bytes = |numel| optimizer.state_bytes(ElemType::Bf16, numel);
            assert_eq!((bytes(1000), bytes(4097)), (of_1000, of_4097), "{optimizer:?}");
        }
    }
}
