//! Public paths of the umbrella crate, and types that threads can share.

use std::vec;

use candle_distributed::{batch, checkpoint, data, mesh, plan, sampler, train, types};

/// Compiles only if each type is `Send` and `Sync`.
macro_rules! assert_send_sync {
    ($($type:ty),+ $(,)?) => {{
        fn assert<T: Send + Sync>() {}
        $(assert::<$type>();)+
    }};
}

#[test]
fn public_types_are_send_and_sync() {
    assert_send_sync!(types::Placement, types::WorldSize, types::Seed, types::Epoch, types::Error);
    assert_send_sync!(
        sampler::DistributedSampler,
        sampler::Indices<'_>,
        sampler::SamplerConfig,
        sampler::SamplerState,
        sampler::MixturePart,
        sampler::MixtureEnd,
        sampler::Error,
    );
    assert_send_sync!(
        batch::DynamicBatchSampler<Vec<u64>>,
        batch::Batch,
        batch::Batches<vec::IntoIter<Result<batch::Sequence, batch::Error>>>,
        batch::PaddingReport,
        batch::DistributedBatchSampler<Vec<u64>>,
        batch::BatchState,
        batch::Steps<Vec<u64>>,
        batch::Step,
        batch::Collator,
        batch::Error,
    );
    assert_send_sync!(
        data::TextDataset,
        data::JsonlDataset<u64>,
        data::NpyDataset<f32>,
        data::TokenDataset,
        data::LoaderBuilder<data::TextDataset>,
        data::LoaderState,
        data::Error,
    );
    assert_send_sync!(
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
        plan::search::PlanCandidate,
        plan::search::Search,
        plan::strategy::Hybrid,
        plan::Error,
    );
    assert_send_sync!(
        mesh::DeviceMesh,
        mesh::Replica,
        mesh::PMap<(), (), ()>,
        mesh::Sharded<()>,
        mesh::Error,
    );
    assert_send_sync!(
        train::AdamW,
        train::Checkpoint,
        train::Checkpoints,
        checkpoint::SkippedCheckpoint,
        train::DistributedModel<train::Units, train::AdamW>,
        train::StateDict,
        train::Error,
    );
}
