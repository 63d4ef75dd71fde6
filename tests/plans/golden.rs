//! Equal to PyTorch: `golden/` holds what torch 2.15 answered, and every number of it is checked.

use std::{collections::BTreeMap, slice};

use candle_distributed::plan::{
    CostModel, ElemType, Full, Layout, Optimizer, ParameterInfo, ShardAssignment, ShardingPlan, ShardingStrategy,
};
use serde::Deserialize;

use crate::inputs::{f32_parameter, full, rank, world};

type Models = BTreeMap<String, Vec<(String, Vec<u64>)>>;

fn parameters(models: &Models, model: &str) -> Vec<ParameterInfo> {
    models[model].iter().map(|(name, shape)| f32_parameter(name, shape)).collect()
}

/// What each rank of `plan` holds of the parameter at `param_idx`.
fn shards(plan: &ShardingPlan, param_idx: usize) -> Vec<Option<ShardAssignment>> {
    let world_size = plan.world_size().as_u64();
    (0..world_size).map(|r| plan.shard(param_idx, rank(r, world_size))).collect()
}

#[derive(Deserialize)]
struct Dim0 {
    models: Models,
    cases: Vec<Dim0Case>,
}

#[derive(Deserialize)]
struct Dim0Case {
    model: String,
    world: u64,
    local_bytes: Vec<u64>,
    storage_bytes: Vec<u64>,
    /// Name, number of parameters, and elements on each rank with padding.
    groups: Vec<(String, usize, u64)>,
    /// Bytes stored on each rank; rows of each rank; first row of each rank.
    params: Vec<(u64, Vec<u64>, Vec<Option<u64>>)>,
}

fn dim0() -> Dim0 {
    serde_json::from_str(include_str!("golden/fsdp2_shards.json")).unwrap()
}

#[test]
fn fsdp2_gives_every_rank_the_same_rows() {
    let Dim0 { models, cases } = dim0();
    assert_eq!(cases.len(), 28);
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let plan = full(&parameters, case.world);
        for (param_idx, (info, (_, rows, start0))) in parameters.iter().zip(case.params).enumerate() {
            // Of parameters without elements torch says that they have no rows, and so do we.
            let shards = shards(&plan, param_idx);
            let found_rows = shards.iter().map(|shard| shard.map_or(0, |shard| shard.dim0_rows.unwrap()));
            assert_eq!(found_rows.collect::<Vec<_>>(), rows, "{} over {}", info.name(), case.world);
            let found_starts = shards.iter().map(|shard| shard.and_then(|shard| shard.dim0_start));
            assert_eq!(found_starts.collect::<Vec<_>>(), start0, "{} over {}", info.name(), case.world);
        }
    }
}

#[test]
fn fsdp2_stores_the_same_bytes() {
    let Dim0 { models, cases } = dim0();
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let cost = full(&parameters, case.world).cost(&CostModel::default()).unwrap();
        let owned: Vec<_> = cost.ranks.iter().map(|rank| rank.param_bytes).collect();
        let stored: Vec<_> = cost.ranks.iter().map(|rank| rank.storage_bytes).collect();
        assert_eq!((owned, stored), (case.local_bytes, case.storage_bytes), "{} over {}", case.model, case.world);
        for (info, (storage_bytes, ..)) in parameters.iter().zip(case.params) {
            let cost = full(slice::from_ref(info), case.world).cost(&CostModel::default()).unwrap();
            assert!(cost.ranks.iter().all(|rank| rank.storage_bytes == storage_bytes), "{}", info.name());
        }
    }
}

#[test]
fn fsdp2_has_the_same_units() {
    let Dim0 { models, cases } = dim0();
    for case in cases {
        let parameters = parameters(&models, &case.model);
        for (unit, n_parameters, padded_shard_numel) in case.groups {
            let members: Vec<_> = parameters.iter().filter(|info| info.unit() == unit).cloned().collect();
            assert_eq!(members.len(), n_parameters, "{unit} of {}", case.model);
            let cost = full(&members, case.world).cost(&CostModel::default()).unwrap();
            assert_eq!(cost.ranks[0].storage_bytes, 4 * padded_shard_numel, "{unit} of {}", case.model);
        }
    }
}

#[derive(Deserialize)]
struct Flat {
    cases: Vec<FlatCase>,
}

#[derive(Deserialize)]
struct FlatCase {
    world: u64,
    shard_numel_total: u64,
    units: Vec<FlatUnit>,
}

/// The offset in the shard of a rank, the number of elements, and the first of them.
type FlatPart = (u64, u64, u64);

#[derive(Deserialize)]
struct FlatUnit {
    unit: String,
    unpadded_numel: u64,
    padded_numel: u64,
    shard_numel: u64,
    pad_per_rank: Vec<u64>,
    /// Name, shape, and what each rank holds.
    params: Vec<(String, Vec<u64>, Vec<Option<FlatPart>>)>,
    /// How many units are like this one.
    repeats: u64,
}

impl FlatUnit {
    fn plan(&self, world_size: u64) -> ShardingPlan {
        let parameter = |(name, shape, _): &(String, Vec<u64>, _)| f32_parameter(name, shape).with_unit(&self.unit);
        let parameters: Vec<_> = self.params.iter().map(parameter).collect();
        Full::new(Layout::Flat).plan(&parameters, world(world_size)).unwrap()
    }
}

#[test]
fn fsdp1_gives_every_rank_the_same_elements() {
    let Flat { cases } = serde_json::from_str(include_str!("golden/fsdp1_flat.json")).unwrap();
    assert_eq!(cases.len(), 28);
    for case in &cases {
        for unit in &case.units {
            let plan = unit.plan(case.world);
            let mut filled = vec![0; case.world.try_into().unwrap()];
            for (param_idx, (name, _, expected)) in unit.params.iter().enumerate() {
                for ((filled, shard), expected) in filled.iter_mut().zip(shards(&plan, param_idx)).zip(expected) {
                    // Torch lists empty parts of parameters without elements.
                    let expected = expected.filter(|&(_, numel, _)| numel > 0);
                    let found = shard.map(|shard| (*filled, shard.shard_size, shard.start_offset));
                    assert_eq!(found, expected, "{name} over {}", case.world);
                    *filled += shard.map_or(0, |shard| shard.shard_size);
                }
            }
            let padding: Vec<_> = filled.iter().map(|filled| unit.shard_numel - filled).collect();
            assert_eq!(padding, unit.pad_per_rank, "{} over {}", unit.unit, case.world);
        }
    }
}

#[test]
fn fsdp1_stores_the_same_bytes() {
    let Flat { cases } = serde_json::from_str(include_str!("golden/fsdp1_flat.json")).unwrap();
    for case in &cases {
        let mut shard_numel_total = 0;
        for unit in &case.units {
            let plan = unit.plan(case.world);
            assert_eq!(plan.numel(), u128::from(unit.unpadded_numel));
            let cost = plan.cost(&CostModel::default()).unwrap();
            assert!(cost.ranks.iter().all(|rank| rank.storage_bytes == 4 * unit.shard_numel), "{}", unit.unit);
            let stored: u64 = cost.ranks.iter().map(|rank| rank.storage_bytes).sum();
            assert_eq!(stored, 4 * unit.padded_numel, "{} over {}", unit.unit, case.world);
            shard_numel_total += unit.shard_numel * unit.repeats;
        }
        assert_eq!(shard_numel_total, case.shard_numel_total, "{} ranks", case.world);
    }
}

#[derive(Deserialize)]
struct Step {
    models: Models,
    cases: Vec<StepCase>,
}

#[derive(Deserialize)]
struct StepCase {
    model: String,
    precision: String,
    world: u64,
    param_bytes: Vec<u64>,
    param_storage: Vec<u64>,
    grad_bytes: Vec<u64>,
    opt_bytes: Vec<u64>,
    /// Collectives by name, with calls and bytes.
    calls: BTreeMap<String, (u64, u64)>,
}

impl StepCase {
    fn cost_model(&self) -> CostModel {
        match self.precision.as_str() {
            "fp32" => CostModel::default(),
            "bf16" => CostModel::default().with_mixed_precision(ElemType::Bf16, ElemType::F32),
            other => panic!("unknown precision {other}"),
        }
    }
}

#[test]
fn a_step_of_fsdp2_with_adamw_holds_and_sends_the_same_bytes() {
    let Step { models, cases } = serde_json::from_str(include_str!("golden/fsdp2_step.json")).unwrap();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let cost = full(&parameters, case.world).cost(&case.cost_model()).unwrap();
        let at = format!("{} in {} over {}", case.model, case.precision, case.world);
        let column = |of: fn(&candle_distributed::plan::RankCost) -> u64| cost.ranks.iter().map(of).collect::<Vec<_>>();
        assert_eq!(column(|rank| rank.param_bytes), case.param_bytes, "{at}");
        assert_eq!(column(|rank| rank.storage_bytes), case.param_storage, "{at}");
        assert_eq!(column(|rank| rank.grad_bytes), case.grad_bytes, "{at}");
        assert_eq!(column(|rank| rank.optimizer_bytes), case.opt_bytes, "{at}");

        let expected = |name| case.calls.get(name).copied().unwrap_or_default();
        let sent = cost.collectives;
        let found = [sent.all_gather, sent.reduce_scatter].map(|traffic| (traffic.count, traffic.bytes));
        assert_eq!(found, [expected("all_gather"), expected("reduce_scatter")], "{at}");
        let others = [sent.all_reduce, sent.broadcast, sent.reduce].map(|traffic| traffic.count);
        assert_eq!(others, [0; 3], "{at}");
    }
}

#[test]
fn the_optimizer_decides_what_is_remembered() {
    let parameters = [f32_parameter("a", &[3, 2]), f32_parameter("frozen", &[5]).with_requires_grad(false)];
    for (optimizer, expected) in
        [(Optimizer::Adam, [2 * 16 + 4, 2 * 8 + 4]), (Optimizer::Sgd, [16, 8]), (Optimizer::None, [0, 0])]
    {
        let cost = full(&parameters, 2).cost(&CostModel::default().with_optimizer(optimizer)).unwrap();
        let found: Vec<_> = cost.ranks.iter().map(|rank| rank.optimizer_bytes).collect();
        assert_eq!(found, expected, "{optimizer:?}");
        assert_eq!(cost.ranks.iter().map(|rank| rank.grad_bytes).collect::<Vec<_>>(), [16, 8]);
    }
}
