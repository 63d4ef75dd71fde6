//! What a plan costs: bytes on every rank, and what one training step sends.
//!
//! The formulas are those of PyTorch's `fully_shard` (FSDP2) and `FullyShardedDataParallel` (FSDP1). Tests compare them
//! to the byte with what torch answers: all of them for FSDP2, storage for FSDP1. Nothing here grows with
//! parameters × ranks: see [`loads`].

mod collectives;
mod loads;

use core_types::Rank;
use serde::Serialize;

pub use self::collectives::{Collectives, Traffic};
use self::loads::{Load, Loads};
use crate::{
    ElemType, ShardingPlan,
    error::{Error, Result},
};

/// What the optimizer remembers from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam and `AdamW`: two moments per trained element, and a 4-byte step count per trained tensor.
    #[default]
    Adam,
    /// Gradient descent with momentum: one buffer per trained element.
    Sgd,
    /// Nothing, as for gradient descent without momentum.
    None,
}

impl Optimizer {
    /// Buffers of the size of the gradients.
    fn n_buffers(self) -> i128 {
        match self {
            Self::Adam => 2,
            Self::Sgd => 1,
            Self::None => 0,
        }
    }

    /// Bytes for each tensor, whatever its size.
    fn tensor_bytes(self) -> i128 {
        if self == Self::Adam { 4 } else { 0 }
    }
}

/// What the cost of a plan depends on besides the plan.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::{CostModel, ElemType, Optimizer};
/// let model = CostModel::default()
///     .with_optimizer(Optimizer::Sgd)
///     .with_mixed_precision(ElemType::Bf16, ElemType::F32);
/// # let _ = model;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CostModel {
    optimizer: Optimizer,
    mixed_precision: Option<(ElemType, ElemType)>,
}

impl CostModel {
    /// Sets the optimizer. Default: [`Optimizer::Adam`].
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: Optimizer) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Sends float parameters as `param_dtype` and gradients as `reduce_dtype`: PyTorch's `MixedPrecisionPolicy`.
    ///
    /// What ranks hold stays in the dtype of each parameter. Default: everything does.
    #[must_use]
    pub fn with_mixed_precision(mut self, param_dtype: ElemType, reduce_dtype: ElemType) -> Self {
        self.mixed_precision = Some((param_dtype, reduce_dtype));
        self
    }

    /// The types in which a parameter of type `dtype` and its gradient travel.
    fn wire_dtypes(self, dtype: ElemType) -> (ElemType, ElemType) {
        self.mixed_precision.filter(|_| dtype.is_float()).unwrap_or((dtype, dtype))
    }
}

/// The bytes that one rank holds between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct RankCost {
    /// The rank.
    pub rank: Rank,
    /// Parameters it owns or keeps a copy of, without padding.
    pub param_bytes: u64,
    /// Memory in which it stores them. Under [`Cut::Dim0`](crate::Cut::Dim0) every rank has room for as many rows as
    /// the largest share, under [`Cut::Flat`](crate::Cut::Flat) for as many elements.
    pub storage_bytes: u64,
    /// Gradients, in the dtype of the parameters. A flat buffer's padding has gradients too.
    pub grad_bytes: u64,
    /// What the optimizer remembers.
    ///
    /// It counts a tensor cut along dim 0 on every rank, also where a rank has no row of it, and a flat unit as one
    /// tensor, because that is what PyTorch's optimizers are given.
    pub optimizer_bytes: u64,
}

impl RankCost {
    /// Stored parameters, gradients and optimizer state together.
    pub fn total_bytes(&self) -> u128 {
        [self.storage_bytes, self.grad_bytes, self.optimizer_bytes].map(u128::from).iter().sum()
    }

    fn new(rank: Rank, load: Load, optimizer: Optimizer) -> Result<Self> {
        let fit = |bytes, what| u64::try_from(bytes).map_err(|_| Error::TotalTooLarge { what });
        let optimizer_bytes = optimizer.n_buffers() * load.grad + optimizer.tensor_bytes() * load.n_trained;
        Ok(Self {
            rank,
            param_bytes: fit(load.owned, "the bytes of a rank's parameters")?,
            storage_bytes: fit(load.stored, "the bytes that a rank stores")?,
            grad_bytes: fit(load.grad, "the bytes of a rank's gradients")?,
            optimizer_bytes: fit(optimizer_bytes, "the bytes of a rank's optimizer state")?,
        })
    }
}

/// What a plan costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanCost {
    /// Every rank in order.
    pub ranks: Vec<RankCost>,
    /// The largest `param_bytes` of a rank over the mean of all ranks; 1 if nobody owns a byte.
    pub max_over_mean: f64,
    /// What all ranks together send in one step.
    pub collectives: Collectives,
}

impl ShardingPlan {
    /// Computes what this plan costs every rank.
    ///
    /// # Complexity
    ///
    /// Linear in parameters + ranks, in time and memory.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if a sum does not fit into 64 bits.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::WorldSize;
    /// use fsdp_plan::{CostModel, ElemType, Full, ParameterInfo, ShardingStrategy};
    ///
    /// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
    /// let cost = Full::default().plan(&parameters, WorldSize::new(4)?)?.cost(&CostModel::default())?;
    ///
    /// // Rows are cut 3, 3, 3, 1, and the last rank stores two rows of padding.
    /// assert_eq!(cost.ranks.iter().map(|rank| rank.param_bytes).collect::<Vec<_>>(), [48, 48, 48, 16]);
    /// assert_eq!(cost.ranks.iter().map(|rank| rank.storage_bytes).collect::<Vec<_>>(), [48; 4]);
    /// assert_eq!(cost.ranks[3].optimizer_bytes, 2 * 16 + 4);
    /// assert_eq!(cost.max_over_mean, 1.2);
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    pub fn cost(&self, model: &CostModel) -> Result<PlanCost> {
        let loads = Loads::of(self).into_ranks();
        let ranks = self.world_size().placements().zip(loads);
        let ranks: Vec<_> =
            ranks.map(|(place, load)| RankCost::new(place.rank(), load, model.optimizer)).collect::<Result<_>>()?;
        let max_over_mean = max_over_mean(&ranks);
        Ok(PlanCost { ranks, max_over_mean, collectives: Collectives::of(self, *model)? })
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is for people; 53 bits are enough of it")]
fn max_over_mean(ranks: &[RankCost]) -> f64 {
    let bytes = || ranks.iter().map(|rank| u128::from(rank.param_bytes));
    let (max, total) = (bytes().max().unwrap_or(0), bytes().sum::<u128>());
    if total == 0 { 1.0 } else { (max * ranks.len() as u128) as f64 / total as f64 }
}
