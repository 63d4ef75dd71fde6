//! Comparison with PyTorch: `golden/` has the results of torch 2.15, and every number is checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use fsdp_plan::{
    Cut, ElemType, ParameterInfo, ShardAssignment, ShardingPlan,
    cost::{CostModel, Optimizer, RankCost},
    strategy::{Full, Hsdp, Layout, ShardingStrategy},
};
use serde::Deserialize;

use crate::plans::inputs::{f32_parameter, full, rank, world};

type Models = BTreeMap<String, Vec<(String, Vec<u64>)>>;

fn parameters(models: &Models, model: &str) -> Vec<ParameterInfo> {
    models[model].iter().map(|(name, shape)| f32_parameter(name, shape)).collect()
}

/// Returns the shard of each rank of the parameter at `param_idx`.
fn shards(plan: &ShardingPlan, param_idx: usize) -> Vec<Option<ShardAssignment>> {
    let world_size = plan.world_size().as_u64();
    (0..world_size).map(|r| plan.shard(param_idx, rank(r, world_size)).unwrap()).collect()
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
    /// Name, number of parameters, and padded elements per rank.
    groups: Vec<(String, usize, u64)>,
    /// Stored bytes per rank; rows per rank; first row per rank.
    params: Vec<(u64, Vec<u64>, Vec<Option<u64>>)>,
}

fn dim0() -> Dim0 {
    serde_json::from_str(include_str!("golden/fsdp2_shards.json")).unwrap()
}

#[test]
fn fsdp2_rows_match() {
    let Dim0 { models, cases } = dim0();
    assert_eq!(cases.len(), 28);
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let plan = full(&parameters, case.world);
        for (param_idx, (info, (_, rows, start0))) in parameters.iter().zip(case.params).enumerate()
        {
            // Torch reports no rows for parameters without elements, and so does the plan.
            let shards = shards(&plan, param_idx);
            let found_rows =
                shards.iter().map(|shard| shard.map_or(0, |shard| shard.dim0_rows.unwrap()));
            assert_eq!(found_rows.collect::<Vec<_>>(), rows, "{} over {}", info.name(), case.world);
            let found_starts = shards.iter().map(|shard| shard.and_then(|shard| shard.dim0_start));
            assert_eq!(
                found_starts.collect::<Vec<_>>(),
                start0,
                "{} over {}",
                info.name(),
                case.world
            );
        }
    }
}

#[test]
fn fsdp2_storage_matches() {
    let Dim0 { models, cases } = dim0();
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let cost = full(&parameters, case.world).cost(&CostModel::default()).unwrap();
        let owned: Vec<_> = cost.ranks.iter().map(|rank| rank.param_bytes).collect();
        let stored: Vec<_> = cost.ranks.iter().map(|rank| rank.storage_bytes).collect();
        assert_eq!(
            (owned, stored),
            (case.local_bytes, case.storage_bytes),
            "{} over {}",
            case.model,
            case.world
        );
        for (info, (storage_bytes, ..)) in parameters.iter().zip(case.params) {
            let cost = full(slice::from_ref(info), case.world).cost(&CostModel::default()).unwrap();
            assert!(
                cost.ranks.iter().all(|rank| rank.storage_bytes == storage_bytes),
                "{}",
                info.name()
            );
        }
    }
}

#[test]
fn fsdp2_units_match() {
    let Dim0 { models, cases } = dim0();
    for case in cases {
        let parameters = parameters(&models, &case.model);
        for (unit, n_parameters, padded_shard_numel) in case.groups {
            let members: Vec<_> =
                parameters.iter().filter(|info| info.unit() == unit).cloned().collect();
            assert_eq!(members.len(), n_parameters, "{unit} of {}", case.model);
            let cost = full(&members, case.world).cost(&CostModel::default()).unwrap();
            assert_eq!(
                cost.ranks[0].storage_bytes,
                4 * padded_shard_numel,
                "{unit} of {}",
                case.model
            );
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

/// Offset in the shard of a rank, number of elements, and first element.
type FlatPart = (u64, u64, u64);

#[derive(Deserialize)]
struct FlatUnit {
    unit: String,
    unpadded_numel: u64,
    padded_numel: u64,
    shard_numel: u64,
    pad_per_rank: Vec<u64>,
    /// Name, shape, and part of each rank.
    params: Vec<(String, Vec<u64>, Vec<Option<FlatPart>>)>,
    /// Number of equal units.
    repeats: u64,
}

impl FlatUnit {
    fn plan(&self, layout: Layout, world_size: u64) -> ShardingPlan {
        let mut parameters = Vec::new();
        for (name, shape, _) in &self.params {
            parameters.push(f32_parameter(name, shape).with_unit(&self.unit));
        }
        Full::new(layout).plan(&parameters, world(world_size)).unwrap()
    }
}

/// Returns the cases of FSDP1 without and with `use_orig_params`, each with its layout.
fn flat() -> [(Layout, Vec<FlatCase>); 2] {
    let cases = |json| serde_json::from_str::<Flat>(json).unwrap().cases;
    [
        (Layout::Flat, cases(include_str!("golden/fsdp1_flat.json"))),
        (Layout::FlatAligned, cases(include_str!("golden/fsdp1_flat_aligned.json"))),
    ]
}

#[test]
fn fsdp1_elements_match() {
    for (layout, cases) in flat() {
        assert_eq!(cases.len(), 28);
        for (case, unit) in
            cases.iter().flat_map(|case| case.units.iter().map(move |unit| (case, unit)))
        {
            let plan = unit.plan(layout, case.world);
            for (param_idx, (name, _, expected)) in unit.params.iter().enumerate() {
                // Torch lists empty parts of parameters without elements.
                let expected = expected.iter().map(|part| part.filter(|&(_, numel, _)| numel > 0));
                let expected: Vec<_> =
                    expected.map(|part| part.map(|(_, numel, first)| (numel, first))).collect();
                let found = shards(&plan, param_idx).into_iter();
                let found =
                    found.map(|shard| shard.map(|shard| (shard.shard_size, shard.start_offset)));
                assert_eq!(found.collect::<Vec<_>>(), expected, "{name} over {}", case.world);
            }
        }
    }
}

#[test]
fn fsdp1_padding_matches() {
    for (layout, cases) in flat() {
        for (case, unit) in
            cases.iter().flat_map(|case| case.units.iter().map(move |unit| (case, unit)))
        {
            let plan = unit.plan(layout, case.world);
            let shard_bytes = |field: fn(&RankCost) -> u64| {
                let cost = plan.cost(&CostModel::default()).unwrap();
                cost.ranks.iter().map(field).collect::<Vec<_>>()
            };
            let at = format!("{} over {} {layout:?}", unit.unit, case.world);
            assert_eq!(
                shard_bytes(|rank| rank.storage_bytes),
                vec![4 * unit.shard_numel; unit.pad_per_rank.len()],
                "{at}"
            );
            let stored: u64 = shard_bytes(|rank| rank.storage_bytes).iter().sum();
            assert_eq!(stored, 4 * unit.padded_numel, "{at}");
            if layout == Layout::Flat {
                let padding = shard_bytes(|rank| rank.storage_bytes - rank.param_bytes);
                assert_eq!(
                    padding,
                    unit.pad_per_rank.iter().map(|numel| 4 * numel).collect::<Vec<_>>(),
                    "{at}"
                );
            }
            // The offset of a parameter in its first shard must match torch.
            for (param_idx, (name, _, expected)) in unit.params.iter().enumerate() {
                let Cut::FlatAligned { offset, .. } = plan.parameters()[param_idx].cut() else {
                    continue;
                };
                let Some((rank, Some((in_shard, ..)))) = (0..)
                    .zip(expected)
                    .find(|(_, part)| part.is_some_and(|(_, numel, _)| numel > 0))
                else {
                    continue;
                };
                assert_eq!(offset, rank * unit.shard_numel + in_shard, "{name}: {at}");
            }
        }
    }
}

#[test]
fn fsdp1_shard_sizes_match() {
    for (layout, cases) in flat() {
        for case in cases {
            let mut numel = 0;
            for unit in &case.units {
                let cost = unit.plan(layout, case.world).cost(&CostModel::default()).unwrap();
                numel += cost.ranks[0].storage_bytes / 4 * unit.repeats;
                let plan_numel = unit.plan(layout, 1).numel();
                assert!(layout == Layout::FlatAligned || plan_numel == unit.unpadded_numel.into());
            }
            assert_eq!(numel, case.shard_numel_total, "{} ranks", case.world);
        }
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
    replicas: u64,
    param_bytes: Vec<u64>,
    param_storage: Vec<u64>,
    grad_bytes: Vec<u64>,
    opt_bytes: Vec<u64>,
    /// Calls and bytes of each collective.
    calls: BTreeMap<String, (u64, u64)>,
}

/// Returns the cost model for torch's `fp32`, or `bf16` with gradients reduced as `fp32`.
fn cost_model(precision: &str) -> CostModel {
    let mixed_precision = match precision {
        "fp32" => None,
        "bf16" => Some((ElemType::Bf16, ElemType::F32)),
        other => panic!("unknown precision {other}"),
    };
    CostModel { mixed_precision, ..CostModel::default() }
}

fn step() -> Step {
    serde_json::from_str(include_str!("golden/fsdp2_step.json")).unwrap()
}

#[test]
fn fsdp2_step_matches() {
    let Step { models, cases } = step();
    assert_eq!(cases.len(), 20);
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let plan =
            Hsdp::new(Full::default(), case.replicas).plan(&parameters, world(case.world)).unwrap();
        let cost = plan.cost(&cost_model(&case.precision)).unwrap();
        let at =
            format!("{} in {} over {} / {}", case.model, case.precision, case.world, case.replicas);
        let column = |field: fn(&RankCost) -> u64| cost.ranks.iter().map(field).collect::<Vec<_>>();
        assert_eq!(column(|rank| rank.param_bytes), case.param_bytes, "{at}");
        assert_eq!(column(|rank| rank.storage_bytes), case.param_storage, "{at}");
        assert_eq!(column(|rank| rank.grad_bytes), case.grad_bytes, "{at}");
        assert_eq!(column(|rank| rank.optimizer_bytes), case.opt_bytes, "{at}");

        let expected = |name| case.calls.get(name).copied().unwrap_or_default();
        let sent = cost.collectives;
        let found = [sent.all_gather, sent.reduce_scatter, sent.all_reduce]
            .map(|sent| (sent.count, sent.bytes));
        assert_eq!(found, ["all_gather", "reduce_scatter", "all_reduce"].map(expected), "{at}");
    }
}

#[derive(Deserialize)]
struct Fsdp1Step {
    models: Models,
    cases: Vec<Fsdp1Case>,
}

#[derive(Deserialize)]
struct Fsdp1Case {
    model: String,
    use_orig_params: bool,
    world: u64,
    param_bytes: Vec<u64>,
    param_storage: Vec<u64>,
    grad_bytes: Vec<u64>,
    opt_bytes: Vec<u64>,
    calls: BTreeMap<String, (u64, u64)>,
}

#[test]
fn fsdp1_step_matches() {
    let Fsdp1Step { models, cases } =
        serde_json::from_str(include_str!("golden/fsdp1_step.json")).unwrap();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let layout = if case.use_orig_params { Layout::FlatAligned } else { Layout::Flat };
        let plan =
            Full::new(layout).plan(&parameters(&models, &case.model), world(case.world)).unwrap();
        let cost = plan.cost(&CostModel::default()).unwrap();
        let at = format!("{} {layout:?} over {}", case.model, case.world);
        let column = |field: fn(&RankCost) -> u64| cost.ranks.iter().map(field).collect::<Vec<_>>();
        assert_eq!(column(|rank| rank.storage_bytes), case.param_storage, "{at}");
        assert_eq!(column(|rank| rank.grad_bytes), case.grad_bytes, "{at}");
        assert_eq!(column(|rank| rank.optimizer_bytes), case.opt_bytes, "{at}");
        // With `use_orig_params=False` torch counts the padding of the flat parameter, too.
        if case.use_orig_params {
            assert_eq!(column(|rank| rank.param_bytes), case.param_bytes, "{at}");
        }
        let found = [cost.collectives.all_gather, cost.collectives.reduce_scatter]
            .map(|sent| (sent.count, sent.bytes));
        assert_eq!(found, ["all_gather", "reduce_scatter"].map(|name| case.calls[name]), "{at}");
    }
}

#[derive(Deserialize)]
struct Peak {
    cases: Vec<PeakCase>,
}

/// Bytes by category at the peak of the second step, in the terms of torch's memory tracker.
#[derive(Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
struct PeakCase {
    #[serde(rename = "model")]
    model: String,
    #[serde(rename = "precision")]
    precision: String,
    #[serde(rename = "reshard_after_forward")]
    reshard_after_forward: String,
    #[serde(rename = "world")]
    world: u64,
    sharded_param: Vec<u64>,
    opt: Vec<u64>,
    unsharded_param: Vec<u64>,
    all_gather: Vec<u64>,
}

#[test]
fn fsdp2_peak_matches() {
    let models = step().models;
    let Peak { cases } = serde_json::from_str(include_str!("golden/fsdp2_peak.json")).unwrap();
    assert_eq!(cases.len(), 24);
    for case in cases {
        let parameters = parameters(&models, &case.model);
        let units: BTreeSet<&str> = parameters.iter().map(ParameterInfo::unit).collect();
        let kept = units.into_iter().filter(|_| case.reshard_after_forward == "False");
        let plan = full(&parameters, case.world).with_kept_units(kept).unwrap();
        let cost = plan.cost(&cost_model(&case.precision)).unwrap();
        let at = format!("{} in {} over {}", case.model, case.precision, case.world);
        let column = |field: fn(&RankCost) -> u64| cost.ranks.iter().map(field).collect::<Vec<_>>();
        assert_eq!(column(|rank| rank.storage_bytes), case.sharded_param, "{at}");
        assert_eq!(column(|rank| rank.optimizer_bytes), case.opt, "{at}");
        // In fp32 the peak occurs while the largest units are gathered: all of them if they stay, else one unit and the
        // buffer of the next.
        if case.precision == "fp32" {
            let passing = if case.reshard_after_forward == "False" {
                vec![0; case.opt.len()]
            } else {
                case.all_gather
            };
            let gathered =
                case.unsharded_param.iter().zip(passing).map(|(gathered, next)| gathered + next);
            assert_eq!(column(|rank| rank.gathered_bytes), gathered.collect::<Vec<_>>(), "{at}");
        }
    }
}

#[test]
fn optimizer_determines_its_state() {
    let parameters =
        [f32_parameter("a", &[3, 2]), f32_parameter("frozen", &[5]).with_requires_grad(false)];
    for (optimizer, expected) in [
        (Optimizer::Adam, [2 * 16 + 4, 2 * 8 + 4]),
        (Optimizer::Sgd, [16, 8]),
        (Optimizer::None, [0, 0]),
    ] {
        let cost =
            full(&parameters, 2).cost(&CostModel { optimizer, ..CostModel::default() }).unwrap();
        let found: Vec<_> = cost.ranks.iter().map(|rank| rank.optimizer_bytes).collect();
        assert_eq!(found, expected, "{optimizer:?}");
        assert_eq!(cost.ranks.iter().map(|rank| rank.grad_bytes).collect::<Vec<_>>(), [16, 8]);
    }
}
