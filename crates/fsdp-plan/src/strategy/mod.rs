//! How to decide who owns what: one trait, several answers.

mod balance;
mod full;
mod hsdp;
mod hybrid;
mod layer_wise;
mod layout;
mod whole_tensor;

use core_types::WorldSize;

pub use self::{
    full::Full,
    hsdp::Hsdp,
    hybrid::{Choice, Hybrid, Matches, Rule},
    layer_wise::{LayerBalance, LayerOrder, LayerWise},
    layout::Layout,
    whole_tensor::WholeTensor,
};
use crate::{
    cut::Cut,
    error::Result,
    param::ParameterInfo,
    plan::{PlannedParameter, ShardingPlan},
};

/// A way to divide parameters over ranks.
///
/// Write your own by choosing a [`Cut`] for each parameter; [`ShardingPlan::new`] checks the whole.
///
/// # Determinism
///
/// Every rank plans for itself, so a plan may depend on nothing but the arguments.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     Cut, ElemType, ParameterInfo, PlannedParameter, Result, ShardingPlan,
///     strategy::ShardingStrategy,
/// };
///
/// /// Plain data parallelism: everything everywhere.
/// struct Ddp;
///
/// impl ShardingStrategy for Ddp {
///     fn name(&self) -> &str {
///         "ddp"
///     }
///
///     fn plan(
///         &self,
///         parameters: &[ParameterInfo],
///         world_size: WorldSize,
///     ) -> Result<ShardingPlan> {
///         let copy = |info: &ParameterInfo| PlannedParameter::new(info.clone(), Cut::Replicated);
///         ShardingPlan::new(self.name(), world_size, parameters.iter().map(copy).collect())
///     }
/// }
///
/// let plan = Ddp.plan(&[ParameterInfo::new("w", [3], ElemType::F32)?], WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[0].cut(), Cut::Replicated);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub trait ShardingStrategy {
    /// The name by which plans tell who made them.
    fn name(&self) -> &str;

    /// Decides which rank of a world of `world_size` owns which part of each of `parameters`.
    ///
    /// # Errors
    ///
    /// Those of [`ShardingPlan::new`], and whatever else the strategy cannot plan.
    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan>;
}

impl<S: ShardingStrategy + ?Sized> ShardingStrategy for Box<S> {
    fn name(&self) -> &str {
        self.as_ref().name()
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        self.as_ref().plan(parameters, world_size)
    }
}

/// Builds the plan with `cuts` for the [`divisible`] parameters, in their order.
///
/// What becomes of the others is decided here, so that no strategy can lose one.
fn assemble(
    name: &str,
    world_size: WorldSize,
    parameters: &[ParameterInfo],
    cuts: Vec<Cut>,
) -> Result<ShardingPlan> {
    let mut cuts = cuts.into_iter();
    #[expect(clippy::expect_used, reason = "strategies cut what `divisible` gives them")]
    let mut next_cut = || cuts.next().expect("a cut for each divisible parameter");
    let planned = parameters.iter().map(|info| {
        let cut = if info.tied_to().is_some() {
            Cut::Tied
        } else if info.always_gather() {
            Cut::Replicated
        } else {
            next_cut()
        };
        PlannedParameter::new(info.clone(), cut)
    });
    ShardingPlan::new(name, world_size, planned.collect())
}

/// The parameters that a strategy decides about: those that are neither gathered always nor tied to
/// others.
fn divisible(parameters: &[ParameterInfo]) -> Vec<&ParameterInfo> {
    parameters.iter().filter(|info| !info.always_gather() && info.tied_to().is_none()).collect()
}
