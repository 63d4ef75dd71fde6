//! The cost model: settings beyond the plan that determine its cost.

use super::{Links, fit};
use crate::{
    elem::ElemType,
    error::{Error, Result},
    param::ParameterInfo,
};

/// The runtime that executes a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Runtime {
    /// PyTorch's `fully_shard` and `FullyShardedDataParallel`: parts are padded to equal sizes, one
    /// unit is prefetched, and the graphs of all units are kept for the backward pass.
    #[default]
    Torch,
    /// dist-train's `FullyShard` on candle. Parts are not padded, and no unit is prefetched by default. Gradients of
    /// 16-bit floats are reduced and stored as [`F32`](crate::ElemType::F32). Replicated parameters are copied like
    /// gathered ones while their unit computes, and so are all parameters in a shard group of one rank. Units that do
    /// not stay gathered keep their inputs and are recomputed, unless [their graphs are
    /// kept](crate::cost::CostModel::kept_graphs). candle's `backward` adds the first contribution of a gradient
    /// to a tensor of zeros, so the largest gradient exists two more times for a moment.
    Candle,
}

/// Elements per scale in 8-bit states.
const BLOCK_8BIT: u128 = 256;

/// Tensors with fewer elements keep their 8-bit states in 32 bits.
const MIN_8BIT_NUMEL: u128 = 4096;

/// The optimizer, which determines the state per tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam and `AdamW` of PyTorch: two moments in the dtype of the parameter, and a 4-byte step
    /// count.
    #[default]
    Adam,
    /// Adam in mixed precision, as in Megatron-LM and `DeepSpeed`: a copy of the parameter and two
    /// moments in [`ElemType::F32`], and a 4-byte step count.
    AdamMixed,
    /// Adam with 8-bit states, as in bitsandbytes since 0.44: two moments of one byte per element,
    /// and a 4-byte scale per 256 elements; tensors of fewer than 4,096 elements have moments of 4
    /// bytes. (T. Dettmers and others, "8-bit Optimizers via Block-wise Quantization", arXiv
    /// 2110.02861.) The 2 KiB of quantization maps, shared by all tensors, are not counted.
    Adam8bit,
    /// Gradient descent with momentum: one buffer in the dtype of the parameter.
    Sgd,
    /// No state: gradient descent without momentum.
    None,
}

impl Optimizer {
    /// Returns the state bytes of a tensor of `numel` elements stored as `dtype`.
    pub(super) fn state_bytes(self, dtype: ElemType, numel: u128) -> u128 {
        let f32_bytes = |n_buffers| n_buffers * ElemType::F32.rounded_up_bytes(numel);
        match self {
            Self::Adam => 2 * dtype.rounded_up_bytes(numel) + 4,
            Self::AdamMixed => f32_bytes(3) + 4,
            Self::Adam8bit if numel < MIN_8BIT_NUMEL => f32_bytes(2),
            Self::Adam8bit => 2 * (numel + 4 * numel.div_ceil(BLOCK_8BIT)),
            Self::Sgd => dtype.rounded_up_bytes(numel),
            Self::None => 0,
        }
    }
}

/// Settings that determine the cost of a plan.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::{ElemType, cost::{CostModel, Optimizer}};
/// let model = CostModel {
///     optimizer: Optimizer::Sgd,
///     param_dtype: Some(ElemType::F32),
///     mixed_precision: Some((ElemType::Bf16, ElemType::F32)),
///     ..CostModel::default()
/// };
/// # let _ = model;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "callers take the other fields from `Default`")]
pub struct CostModel {
    /// Optimizer. Default: [`Optimizer::Adam`].
    pub optimizer: Optimizer,
    /// Whether the parameters of a unit are updated as soon as their gradients are reduced, and these
    /// gradients freed, so that the gradients of one unit exist at a time. Default: gradients stay
    /// until the end of the step.
    pub optimizer_in_backward: bool,
    /// Runtime. Default: [`Runtime::Torch`].
    pub runtime: Runtime,
    /// Number of units that keep their graphs among the units that do not [stay
    /// gathered](crate::ShardingPlan::with_kept_units); their parameters are freed and gathered
    /// again. The other units keep their inputs. Default: 0. PyTorch keeps all graphs.
    pub kept_graphs: u64,
    /// Number of units gathered ahead of the current one. Default: 1 as in PyTorch, 0 for
    /// [`Runtime::Candle`].
    pub prefetch: Option<u64>,
    /// Activations of a rank's batch. Default: not counted, because plans know no batch.
    pub activations: Option<Activations>,
    /// Links, for an estimate of the time of collectives. Default: no estimate.
    pub links: Option<Links>,
    /// Dtype in which trained parameters, their gradients and optimizer state are stored. Default:
    /// each parameter in the dtype of the checkpoint.
    pub param_dtype: Option<ElemType>,
    /// Dtypes in which trained parameters and gradients are transferred, like PyTorch's
    /// `MixedPrecisionPolicy`; the storage dtype does not change. Default: the storage dtype.
    pub mixed_precision: Option<(ElemType, ElemType)>,
}

impl CostModel {
    /// Returns the storage dtype of a parameter.
    pub(super) fn stored_dtype(&self, info: &ParameterInfo) -> ElemType {
        self.param_dtype.filter(|_| info.dtype().is_trainable()).unwrap_or(info.dtype())
    }

    /// Returns the dtypes in which a parameter and its gradient are transferred.
    pub(super) fn transfer_dtypes(&self, info: &ParameterInfo) -> (ElemType, ElemType) {
        let stored = self.stored_dtype(info);
        match self.mixed_precision {
            Some(dtypes) if stored.is_trainable() => dtypes,
            _ => (stored, self.grad_dtype(info)),
        }
    }

    /// Returns the storage dtype of a gradient, independent of the reduce dtype.
    pub(super) fn grad_dtype(&self, info: &ParameterInfo) -> ElemType {
        match (self.runtime, self.stored_dtype(info)) {
            (Runtime::Candle, ElemType::F16 | ElemType::Bf16) => ElemType::F32,
            (Runtime::Torch | Runtime::Candle, stored) => stored,
        }
    }

    /// Returns the number of prefetched units.
    pub(super) fn n_prefetched(&self) -> u64 {
        self.prefetch.unwrap_or(match self.runtime {
            Runtime::Torch => 1,
            Runtime::Candle => 0,
        })
    }

    /// Returns true if the runtime pads parts to equal sizes.
    pub(super) fn pads(&self) -> bool {
        self.runtime == Runtime::Torch
    }
}

/// The activation memory of a rank's batch.
///
/// # Examples
///
/// ```
/// use fsdp_plan::{
///     ElemType,
///     cost::{Activations, CostModel, Runtime},
/// };
///
/// // Two sequences of 512 tokens per rank, with a width of 768.
/// let activations = Activations::for_transformer(1024, 768, ElemType::F32, Runtime::Candle)?;
/// assert_eq!(activations.input_bytes, 1024 * 768 * 4);
/// let model = CostModel {
///     runtime: Runtime::Candle,
///     activations: Some(activations),
///     ..CostModel::default()
/// };
/// # let _ = model;
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "callers who know their model set both fields")]
pub struct Activations {
    /// Bytes of a unit's inputs, kept for units that are recomputed in the backward pass.
    pub input_bytes: u64,
    /// Bytes of all activations of the largest unit and of their gradients that exist at the same
    /// time.
    pub unit_bytes: u64,
}

impl Activations {
    /// Estimates the activations of transformer blocks from the tokens of a rank's batch and the
    /// width of the values between blocks.
    ///
    /// A PyTorch block keeps 17 values per token and unit of width without attention scores, that is, 34 bytes in half
    /// precision (V. Korthikanti and others, "Reducing Activation Recomputation in Large Transformer Models", arXiv
    /// 2205.05198, equation 2). On candle it is 56 values with gradients, measured on this project's transformer.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes exceed 64 bits.
    pub fn for_transformer(
        tokens: u64,
        width: u64,
        dtype: ElemType,
        runtime: Runtime,
    ) -> Result<Self> {
        let values_per_place = match runtime {
            Runtime::Torch => 17,
            Runtime::Candle => 56,
        };
        let too_large = Error::TotalTooLarge { what: "the bytes of activations" };
        let places = u128::from(tokens) * u128::from(width);
        let values = places.checked_mul(values_per_place).ok_or(too_large)?;
        Ok(Self {
            input_bytes: fit(dtype.rounded_up_bytes(places), "the bytes of activations")?,
            unit_bytes: fit(dtype.rounded_up_bytes(values), "the bytes of activations")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_bytes_match_each_optimizer() {
        for (optimizer, small, large) in [
            (Optimizer::Adam, 4004, 16_392),
            (Optimizer::AdamMixed, 12_004, 49_168),
            (Optimizer::Adam8bit, 8000, 8194 + 2 * 17 * 4),
            (Optimizer::Sgd, 2000, 8194),
            (Optimizer::None, 0, 0),
        ] {
            let bytes = |numel| optimizer.state_bytes(ElemType::Bf16, numel);
            assert_eq!((bytes(1000), bytes(4097)), (small, large), "{optimizer:?}");
        }
    }
}
