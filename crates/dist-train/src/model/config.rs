//! Options of a builder: the options of every model, and the options of sharded models.

use std::path::PathBuf;

use candle_core::DType;
use core_types::{Seed, WorldSize};
use fsdp_plan::{
    ParameterInfo, ShardingPlan,
    strategy::{Full, ShardingStrategy},
};

use crate::{
    error::{Result, training::TrainingError},
    parameters::{InitialValues, Initializer, declare::Declared},
    precision::Precision,
    step::{inventory::Inventory, options::StepOptions, roles::RolePatterns},
    units::{accumulation::Accumulation, keep_rules::KeepRules},
};

/// Sharing of variables between slots on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Slots on one device share the variables.
    #[default]
    PerDevice,
    /// Each slot has its own variables.
    PerSlot,
}

/// The options of every model.
pub(crate) struct ModelConfig {
    /// The storage dtype of parameters, unless the constructor requests another one.
    pub(crate) dtype: DType,
    pub(crate) precision: Precision,
    pub(crate) initializer: Initializer,
    pub(crate) weights_path: Option<PathBuf>,
    pub(crate) sharing: Sharing,
    pub(crate) role_patterns: RolePatterns,
    pub(crate) step_options: StepOptions,
    pub(crate) rng_seed: Seed,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            precision: Precision::default(),
            initializer: Initializer::Seeded(Seed::new(0)),
            weights_path: None,
            sharing: Sharing::default(),
            role_patterns: RolePatterns::default(),
            step_options: StepOptions::default(),
            rng_seed: Seed::new(0),
        }
    }
}

impl ModelConfig {
    /// Returns the inventory of a model with these parameters, in their order.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`RolePatterns::roles`].
    pub(crate) fn inventory(&self, declared: &[Declared]) -> Result<Inventory> {
        let names: Vec<&str> = declared.iter().map(|declared| declared.name.as_str()).collect();
        let roles = self.role_patterns.roles(&names)?;
        let parameters = declared
            .iter()
            .map(|declared| (declared.name.clone(), declared.shape.dims().to_vec()))
            .collect();
        Ok(Inventory { parameters, roles })
    }

    /// Returns the sources of the initial values of these parameters.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`InitialValues::new`].
    pub(crate) fn initial_values(&self, declared: &[Declared]) -> Result<InitialValues> {
        let (init, weights) = (self.initializer.clone(), self.weights_path.as_deref());
        InitialValues::new(init, weights, &self.role_patterns, declared)
    }

    /// Rejects an option that does not apply to a sharded model.
    pub(crate) fn check_sharded(&self) -> Result<(), TrainingError> {
        if self.sharing == Sharing::PerDevice {
            return Ok(());
        }
        let reason = "`replicated` is for replicated models, but this model is sharded";
        Err(TrainingError::option("replicated", reason))
    }
}

/// The options of a sharded model.
#[derive(Default)]
pub(crate) struct ShardingConfig {
    pub(crate) plan_source: PlanSource,
    pub(crate) keeps: KeepRules,
    pub(crate) n_prefetched: usize,
    pub(crate) accumulation: Accumulation,
    pub(crate) updates_in_backward: bool,
}

/// The source of a sharded model's plan.
#[derive(Default)]
pub(crate) enum PlanSource {
    #[default]
    Default,
    Strategy(Box<dyn ShardingStrategy>),
    Ready(Box<ShardingPlan>),
}

impl ShardingConfig {
    /// Rejects options that do not apply to a replicated model.
    pub(crate) fn check_replicated(&self) -> Result<(), TrainingError> {
        let option = match self {
            Self { plan_source: PlanSource::Strategy(_), .. } => "strategy",
            Self { plan_source: PlanSource::Ready(_), .. } => "plan",
            Self { keeps, .. } if !keeps.is_empty() => "keep",
            Self { n_prefetched: 1.., .. } => "prefetch",
            Self { accumulation: Accumulation::ReduceLast, .. } => "accumulation",
            Self { updates_in_backward: true, .. } => "optimizer_in_backward",
            _ => return Ok(()),
        };
        let reason = format!(
            "`{option}` is for sharded models, but this model is replicated: call `fully_shard`"
        );
        Err(TrainingError::option(option, reason))
    }

    /// Rejects options that cannot be combined with optimizers inside the backward pass.
    pub(crate) fn check_in_backward(&self, options: &StepOptions) -> Result<(), TrainingError> {
        let option = match self {
            Self { updates_in_backward: false, .. } => return Ok(()),
            _ if options.max_norm.is_some() => "clip_grad_norm",
            Self { accumulation: Accumulation::ReduceLast, .. } => "accumulation",
            _ => return Ok(()),
        };
        Err(TrainingError::needs_all_gradients(option))
    }
}

impl PlanSource {
    /// Returns the plan of these parameters for `world_size` ranks.
    pub(crate) fn plan(
        &self,
        infos: &[ParameterInfo],
        world_size: WorldSize,
    ) -> Result<ShardingPlan> {
        Ok(match self {
            Self::Default => Full::default().plan(infos, world_size)?,
            Self::Strategy(strategy) => strategy.plan(infos, world_size)?,
            Self::Ready(plan) => (**plan).clone(),
        })
    }
}
