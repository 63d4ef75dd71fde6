//! What the cost of a plan depends on besides the plan.

use super::{Activations, Links, Optimizer, Runtime};
use crate::{elem::ElemType, param::ParameterInfo};

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
