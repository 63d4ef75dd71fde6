//! What users rely on besides behavior: the paths of the umbrella crate, and types that travel
//! between threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_distributed::{batch, mesh, plan, sampler, train, types};

fn travels<T: Send + Sync>() {}

#[test]
fn values_can_be_sent_to_and_shared_between_threads() {
    travels::<(types::Placement, types::WorldSize, types::Seed, types::Epoch, types::Error)>();
    travels::<(sampler::DistributedSampler, sampler::Indices<'_>, sampler::SamplerConfig)>();
    travels::<(sampler::SamplerState, sampler::Mixture, sampler::Error)>();
    travels::<(
        batch::DynamicBatchSampler<Vec<u64>>,
        batch::Batch,
        batch::PaddingReport,
        batch::Error,
    )>();
    travels::<batch::Batches<std::vec::IntoIter<Result<batch::Sequence, batch::Error>>>>();
    travels::<(
        batch::BatchPlan<'_, Vec<u64>>,
        batch::DistributedBatchSampler<Vec<u64>>,
        batch::BatchState,
    )>();
    travels::<(
        batch::Steps<'_, Vec<u64>>,
        batch::Step,
        batch::ShapeReport,
        batch::Segments,
        batch::Collator,
    )>();
    travels::<(plan::ShardingPlan, plan::ParameterInfo, plan::report::PlanReport<'_>, plan::Error)>(
    );
    travels::<(
        plan::cost::PlanCost,
        plan::cost::CostModel,
        plan::Cut,
        plan::ShardAssignment,
        plan::ShardsOfRank<'_>,
    )>();
    travels::<(
        plan::strategy::Hybrid,
        plan::Pattern,
        plan::search::Search,
        plan::search::Outcome,
        plan::report::PlanDiff<'_>,
        plan::reshard::Reshard<'_>,
    )>();
    travels::<(
        mesh::DeviceMesh,
        mesh::Replica,
        mesh::PMap<(), (), ()>,
        mesh::Sharded<()>,
        mesh::Error,
    )>();
    travels::<(
        train::AdamW,
        train::Checkpoints,
        train::Checkpoint,
        train::StateDict,
        train::ShardedVars,
    )>();
    travels::<train::Error>();
}

#[test]
fn the_planner_reads_candles_tensors() {
    let tensor =
        candle_core::Tensor::zeros((2, 3), candle_core::DType::BF16, &candle_core::Device::Cpu)
            .unwrap();
    let infos: Vec<plan::ParameterInfo> = train::parameter_infos([("h.0.w", &tensor)]).unwrap();
    assert_eq!((infos[0].dtype(), infos[0].shape()), (plan::ElemType::Bf16, &[2, 3][..]));
}

#[test]
fn every_error_is_an_error_of_its_crate() {
    fn is_error<E: std::error::Error + 'static>() {}
    is_error::<types::Error>();
    is_error::<sampler::Error>();
    is_error::<batch::Error>();
    is_error::<plan::Error>();
    is_error::<mesh::Error>();
}
