//! Inputs of the other tests.

use core_types::{Placement, Rank, WorldSize};
use fsdp_plan::{
    ElemType, ParameterInfo, ShardingPlan, source,
    strategy::{Full, ShardingStrategy},
};

/// Returns GPT-2 with 124 million parameters, in `F32`.
pub(crate) fn gpt2() -> Vec<ParameterInfo> {
    source::from_manifest(fixtures::GPT2).unwrap()
}

/// Returns Qwen2.5 with 494 million parameters, in `BF16`; its head is tied to its embedding.
pub(crate) fn qwen() -> Vec<ParameterInfo> {
    let mut parameters = source::from_manifest(fixtures::QWEN).unwrap();
    let shape = parameters[0].shape().to_vec();
    let head = ParameterInfo::new("lm_head.weight", shape, parameters[0].dtype()).unwrap();
    parameters.push(head.with_tied_to(parameters[0].name()));
    parameters
}

/// Returns Mixtral 8x7B, in `BF16`.
pub(crate) fn mixtral() -> Vec<ParameterInfo> {
    source::from_manifest(fixtures::MIXTRAL).unwrap()
}

/// Returns ViT-Large with patches of 16, in `F32`.
pub(crate) fn vit() -> Vec<ParameterInfo> {
    source::from_manifest(fixtures::VIT).unwrap()
}

/// Returns Llama 3.1 with 8 billion parameters, in `BF16`.
pub(crate) fn llama() -> Vec<ParameterInfo> {
    source::from_manifest(fixtures::LLAMA).unwrap()
}

/// Returns DeepSeek-V3 with 671 billion parameters, mostly in `BF16`.
pub(crate) fn deepseek() -> Vec<ParameterInfo> {
    source::from_safetensors(&fixtures::deepseek_v3()).unwrap()
}

pub(crate) fn f32_parameter(name: &str, shape: &[u64]) -> ParameterInfo {
    ParameterInfo::new(name, shape, ElemType::F32).unwrap()
}

pub(crate) fn world(size: u64) -> WorldSize {
    WorldSize::new(size).unwrap()
}

pub(crate) fn rank(rank: u64, world_size: u64) -> Rank {
    Placement::new(rank, world_size).unwrap().rank()
}

/// Plans with `Full` in its default layout.
pub(crate) fn full(parameters: &[ParameterInfo], world_size: u64) -> ShardingPlan {
    Full::default().plan(parameters, world(world_size)).unwrap()
}
