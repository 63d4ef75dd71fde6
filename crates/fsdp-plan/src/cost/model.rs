//! What the cost of a plan depends on besides the plan.

use super::{Links, Optimizer};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CostModel {
    pub(super) optimizer: Optimizer,
    pub(super) prefetch: u64,
    links: Option<Links>,
    param_dtype: Option<ElemType>,
    mixed_precision: Option<(ElemType, ElemType)>,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            optimizer: Optimizer::default(),
            prefetch: 1,
            links: None,
            param_dtype: None,
            mixed_precision: None,
        }
    }
}

impl CostModel {
    /// Sets the optimizer. Default: [`Optimizer::Adam`].
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: Optimizer) -> Self {
        self.optimizer = optimizer;
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

    /// Gathers so many units ahead of the one in use. Default: 1, as PyTorch does.
    #[must_use]
    pub fn with_prefetch(mut self, units: u64) -> Self {
        self.prefetch = units;
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
        self.mixed_precision.filter(|_| held.is_trainable()).unwrap_or((held, held))
    }
}
