//! What users rely on besides behavior: the paths of the umbrella crate, and types that travel between
//! threads.

use std::vec;

use candle_distributed::{batch, checkpoint, mesh, plan, sampler, train, types};

/// Compiles if values of each type can be sent to and shared between threads.
macro_rules! travel {
    ($($type:ty),+ $(,)?) => {{
        fn travels<T: Send + Sync>() {}
        $(travels::<$type>();)+
    }};
}

#[test]
fn values_can_be_sent_to_and_shared_between_threads() {
    travel!(types::Placement, types::WorldSize, types::Seed, types::Epoch, types::Error);
    travel!(
        sampler::DistributedSampler,
        sampler::Indices<'_>,
        sampler::SamplerConfig,
        sampler::SamplerState,
        sampler::Mixture,
        sampler::Error,
    );
    travel!(
        batch::DynamicBatchSampler<Vec<u64>>,
        batch::Batch,
        batch::Batches<vec::IntoIter<Result<batch::Sequence, batch::Error>>>,
        batch::PaddingReport,
        batch::DistributedBatchSampler<Vec<u64>>,
        batch::BatchState,
        batch::Steps<'_, Vec<u64>>,
        batch::Step,
        batch::Collator,
        batch::Error,
    );
    travel!(
        plan::ShardingPlan,
        plan::ParameterInfo,
        plan::Cut,
        plan::Pattern,
        plan::ShardAssignment,
        plan::cost::CostModel,
        plan::cost::PlanCost,
        plan::report::PlanDiff<'_>,
        plan::report::PlanReport<'_>,
        plan::reshard::Reshard<'_>,
        plan::search::SearchOutcome,
        plan::search::Search,
        plan::strategy::Hybrid,
        plan::Error,
    );
    travel!(
        mesh::DeviceMesh,
        mesh::Replica,
        mesh::PMap<(), (), ()>,
        mesh::Sharded<()>,
        mesh::Error,
    );
    travel!(
        train::AdamW,
        train::Checkpoint,
        train::Checkpoints,
        checkpoint::SkippedCheckpoint,
        train::DistributedModel<train::Units, train::AdamW>,
        train::StateDict,
        train::Error,
    );
}

#[test]
fn the_planner_reads_candles_tensors() {
    let (shape, device) = ((2, 3), candle_core::Device::Cpu);
    let tensor = candle_core::Tensor::zeros(shape, candle_core::DType::BF16, &device).unwrap();
    let infos = train::parameter_infos([("h.0.w", &tensor)]).unwrap();
    assert_eq!((infos[0].dtype(), infos[0].shape()), (plan::ElemType::Bf16, &[2, 3][..]));
}
