//! Laws of sharding plans: every element has an owner, costs are sums over ranks, and layers are
//! balanced.

use core_types::{Placement, Rank, WorldSize};
use fsdp_plan::{
    Cut, ElemType, ParameterInfo, PlannedParameter, ShardingPlan,
    cost::{Collectives, CostModel, Links, Optimizer, PlanCost},
    report::PlanReport,
    search::Search,
    strategy::{
        Full, Hsdp, Hybrid, LayerSharing, LayerWise, Layout, ShardingStrategy, WholeTensor,
    },
};

const SHAPES: [&[u64]; 9] =
    [&[0], &[1], &[2], &[5], &[7, 2], &[4, 0], &[1, 6], &[6, 1, 2], &[3, 3]];

fn strategies() -> Vec<Box<dyn ShardingStrategy>> {
    let hybrid = Hybrid::new(["0"], ["h", "out"]).unwrap();
    let layouts = [
        Layout::Dim0,
        Layout::Flat,
        Layout::FlatAligned,
        Layout::ROWS,
        Layout::RowRagged { rows: 2 },
        Layout::BlockRagged { block: 3 },
    ];
    let full = layouts.map(|layout| Box::new(Full::new(layout)) as Box<dyn ShardingStrategy>);
    let contiguous = LayerWise { sharing: LayerSharing::Contiguous };
    let others: [Box<dyn ShardingStrategy>; 4] = [
        Box::new(LayerWise::default()),
        Box::new(contiguous),
        Box::new(WholeTensor),
        Box::new(hybrid),
    ];
    full.into_iter().chain(others).collect()
}

fn parameter(name: &str, shape: &[u64]) -> ParameterInfo {
    ParameterInfo::new(name, shape, ElemType::Bf16).unwrap()
}

pub(crate) fn ranks(plan: &ShardingPlan) -> impl Iterator<Item = Rank> + use<> {
    plan.world_size().placements().map(Placement::rank)
}

/// Calls `check` with the plan of every strategy for every two shapes of the grid, and three shapes of a
/// third parameter, on small worlds. The second parameter is always gathered in half of the cases.
pub(crate) fn for_each_plan(
    check: impl Fn(&[ParameterInfo], &dyn ShardingStrategy, &ShardingPlan),
) {
    let worlds = [1, 2, 3, 5, 64].map(|size| WorldSize::new(size).unwrap());
    let pairs = SHAPES.iter().flat_map(|first| SHAPES.iter().map(move |second| (first, second)));
    for ((first, second), third) in
        pairs.flat_map(|pair| [&[1][..], &[7, 2], &[4, 0]].map(move |third| (pair, third)))
    {
        for always_gather in [false, true] {
            let second = parameter("h.1.w", second).with_always_gather(always_gather);
            let parameters = [parameter("h.0.w", first), second, parameter("out.w", third)];
            for (strategy, &world_size) in
                strategies().iter().flat_map(|s| worlds.iter().map(move |w| (s, w)))
            {
                let plan = strategy.plan(&parameters, world_size).unwrap();
                check(&parameters, strategy.as_ref(), &plan);
            }
        }
    }
}

#[test]
fn every_element_has_its_owner() {
    for_each_plan(|parameters, _, plan| {
        for (param_idx, info) in parameters.iter().enumerate() {
            let shards: Vec<_> =
                ranks(plan).filter_map(|rank| plan.shard(param_idx, rank).unwrap()).collect();
            if plan.parameters()[param_idx].cut() == Cut::Replicated {
                assert_eq!(
                    shards.len(),
                    if info.numel() > 0 { plan.world_size().as_usize() } else { 0 }
                );
                assert!(
                    shards
                        .iter()
                        .all(|shard| (shard.start_offset, shard.shard_size) == (0, info.numel()))
                );
                continue;
            }
            let is_ragged = matches!(
                plan.parameters()[param_idx].cut(),
                Cut::Ragged { .. } | Cut::Wrapped { .. }
            );
            let mut end = 0;
            for (shard_index, shard) in (0..).zip(&shards) {
                assert_eq!(shard.start_offset, end, "{plan:?}");
                // Ranks between the owners of a ragged parameter may hold nothing of it, and still count.
                assert!(
                    shard.shard_index == shard_index
                        || is_ragged && shard.shard_index > shard_index,
                    "{plan:?}"
                );
                assert!(shard.shard_size > 0);
                end += shard.shard_size;
            }
            assert_eq!(end, info.numel(), "{plan:?}");
            assert!(shards.is_sorted_by_key(|shard| shard.owner_rank));
        }
    });
}

#[test]
fn rows_match_elements() {
    for_each_plan(|_, _, plan| {
        for (parameter, shard) in ranks(plan).flat_map(|rank| plan.shards_of_rank(rank).unwrap()) {
            let row: u64 = parameter.info().shape()[1..].iter().product();
            let whole_rows = shard.start_offset % row == 0 && shard.shard_size % row == 0;
            let expected = whole_rows.then_some((shard.start_offset, shard.shard_size));
            let rows = shard
                .dim0_start
                .zip(shard.dim0_rows)
                .map(|(start, rows)| (start * row, rows * row));
            assert_eq!(rows, expected, "{parameter:?}");
        }
    });
}

#[test]
fn costs_are_sums_over_shards() {
    let model = CostModel { optimizer: Optimizer::Sgd, ..CostModel::default() };
    for_each_plan(|_, strategy, plan| {
        let cost = plan.cost(&model).unwrap();
        assert!(cost.ranks.iter().map(|cost| cost.rank).eq(ranks(plan)));
        for rank in &cost.ranks {
            let owned: u64 = plan
                .shards_of_rank(rank.rank)
                .unwrap()
                .map(|(_, shard)| 2 * shard.shard_size)
                .sum();
            assert_eq!(rank.param_bytes, owned, "{plan:?}");
            assert!(rank.storage_bytes >= owned);
            assert_eq!(rank.optimizer_bytes, rank.grad_bytes);
            let grad_bytes =
                if strategy.name() == "full-flat" { rank.storage_bytes } else { owned };
            assert_eq!(rank.grad_bytes, grad_bytes, "{plan:?}");
        }
        let max = cost.ranks.iter().map(|rank| rank.param_bytes).max().unwrap();
        let total: u64 = cost.ranks.iter().map(|rank| rank.param_bytes).sum();
        let [scaled_max, total] =
            [max * plan.world_size().as_u64(), total].map(|bytes| u32::try_from(bytes).unwrap());
        let expected = if total == 0 { 1.0 } else { f64::from(scaled_max) / f64::from(total) };
        assert_eq!(cost.max_over_mean.to_bits(), expected.to_bits());
    });
}

#[test]
fn padding_stays_within_its_bound() {
    for_each_plan(|_, strategy, plan| {
        let cost = plan.cost(&CostModel::default()).unwrap();
        let world_size = plan.world_size().as_u64();
        let is_cut = |planned: &&PlannedParameter| planned.cut() != Cut::Replicated;
        let cut = || plan.parameters().iter().filter(is_cut).map(PlannedParameter::info);
        let row = |info: &ParameterInfo| info.shape()[1..].iter().product::<u64>();
        let padding: u64 =
            cost.ranks.iter().map(|rank| rank.storage_bytes - rank.param_bytes).sum();
        // Padding is less than a granule per rank and parameter, or per rank and unit (at most three units), and less
        // than 16 bytes per aligned parameter.
        let bound = match strategy.name() {
            "full" | "hybrid" => 2 * cut().map(row).sum::<u64>(),
            "full-flat" | "full-flat-aligned" => 2 * 3,
            "full-row-ragged" => 2 * cut().map(|info| 2 * row(info)).sum::<u64>(),
            "full-block-ragged" => 2 * 3 * 3,
            _ => 0,
        };
        let alignment = if strategy.name() == "full-flat-aligned" { 3 * 16 } else { 0 };
        assert!(padding <= world_size * bound + alignment, "{plan:?}");
        if bound == 0 {
            assert_eq!(padding, 0, "{plan:?}");
        }
    });
}

#[test]
fn ragged_shares_stay_near_the_mean() {
    for_each_plan(|_, strategy, plan| {
        if !strategy.name().ends_with("ragged") {
            return;
        }
        for unit in ["h.0", "h.1", ""] {
            let cuts =
                || plan.parameters().iter().filter(|parameter| parameter.info().unit() == unit);
            let granules = cuts().filter_map(|parameter| match parameter.cut() {
                Cut::Ragged { granule, unit_bytes, .. } => Some((granule, unit_bytes)),
                _ => None,
            });
            let Some((granule, unit_bytes)) = granules.max() else { continue };
            for rank in ranks(plan) {
                let shards = plan
                    .shards_of_rank(rank)
                    .unwrap()
                    .filter(|(parameter, _)| parameter.info().unit() == unit);
                let share: u64 = shards.map(|(_, shard)| 2 * shard.shard_size).sum();
                // The difference to the exact share is less than a granule, so all ranks can store that much.
                let world_size = plan.world_size().as_u64();
                assert!(
                    (share * world_size).abs_diff(unit_bytes) < (granule + 1) * world_size,
                    "{plan:?}"
                );
            }
        }
    });
}

#[test]
fn wrapping_cuts_few_tensors() {
    for_each_plan(|_, strategy, plan| {
        if strategy.name() == "whole-tensor" {
            let mut n_cut = 0;
            for (index, parameter) in plan.parameters().iter().enumerate() {
                let owners = ranks(plan).filter(|&rank| plan.shard(index, rank).unwrap().is_some());
                let is_wrapped = matches!(parameter.cut(), Cut::Wrapped { .. });
                n_cut += u64::from(is_wrapped && owners.count() > 1);
            }
            assert!(n_cut < plan.world_size().as_u64());
            let shares = plan.cost(&CostModel::default()).unwrap().ranks;
            let shares = || shares.iter().map(|rank| rank.param_bytes);
            assert!(
                shares().max().unwrap() - shares().min().unwrap() <= 2,
                "one element of two bytes: {plan:?}"
            );
        }
    });
}

#[test]
fn single_rank_sends_nothing() {
    for_each_plan(|parameters, _, plan| {
        if plan.world_size() == WorldSize::ONE {
            let cost = plan.cost(&CostModel::default()).unwrap();
            assert_eq!(cost.collectives, Collectives::default());
            assert_eq!(
                cost.ranks[0].storage_bytes,
                parameters.iter().map(ParameterInfo::bytes).sum::<u64>()
            );
        }
    });
}

/// Returns the rank that owns a whole parameter.
fn owner(plan: &ShardingPlan, name: &str) -> Option<Rank> {
    match plan.parameters()[plan.index_of(name)?].cut() {
        Cut::Whole { owner } => Some(owner),
        _ => None,
    }
}

/// A strategy that returns a fixed plan, for [`Hsdp`] to replicate.
struct Fixed<'a>(&'a ShardingPlan);

impl ShardingStrategy for Fixed<'_> {
    fn name(&self) -> &str {
        self.0.strategy()
    }

    fn plan(&self, _: &[ParameterInfo], _: WorldSize) -> fsdp_plan::Result<ShardingPlan> {
        Ok(self.0.clone())
    }
}

/// Replicates a plan.
pub(crate) fn replicated(plan: &ShardingPlan, replicas: u64) -> ShardingPlan {
    let world_size = WorldSize::new(plan.shard_group().as_u64() * replicas).unwrap();
    Hsdp::new(Fixed(plan), replicas).plan(&[], world_size).unwrap()
}

/// Returns the largest share of a rank, its lower bound, and the share if layers could be cut, as a
/// report has them.
fn layer_balance(plan: &ShardingPlan) -> Option<[u64; 3]> {
    let report = PlanReport::new(plan, &CostModel::default(), None).unwrap();
    let report = serde_json::to_value(report).unwrap();
    let balance = report.get("layer_balance")?;
    Some(["largest", "lower_bound", "if_cut"].map(|field| balance[field].as_u64().unwrap()))
}

#[test]
fn layers_stay_whole_and_balanced() {
    let lists = (0..5_u64.pow(4)).map(|code| [0, 1, 2, 3].map(|digit| code / 5_u64.pow(digit) % 5));
    for sizes in lists {
        let layers = (0..).zip(sizes).map(|(layer, size)| (format!("h.{layer}"), size));
        let halves = layers
            .flat_map(|(layer, size)| [(format!("{layer}.a"), size), (format!("{layer}.b"), size)]);
        let parameters: Vec<_> = halves.map(|(name, size)| parameter(&name, &[size])).collect();
        for world_size in [1, 2, 3, 4, 7].map(|size| WorldSize::new(size).unwrap()) {
            let plan = LayerWise::default().plan(&parameters, world_size).unwrap();
            let owners: Vec<_> = plan.parameters().iter().map(PlannedParameter::cut).collect();
            assert!(owners.chunks(2).all(|layer| layer[0] == layer[1]), "{plan:?}");
            let n_layers = |rank| {
                owners.iter().step_by(2).filter(|&&cut| cut == Cut::Whole { owner: rank }).count()
            };
            let (min, max) = ranks(&plan).fold((usize::MAX, 0), |(min, max), rank| {
                (min.min(n_layers(rank)), max.max(n_layers(rank)))
            });
            assert!(min > 0 || max <= 1, "{plan:?}");
            // The reported balance must match the bytes of ranks.
            let [reported, lower_bound, if_cut] = layer_balance(&plan).unwrap();
            let cost = plan.cost(&CostModel::default()).unwrap();
            let total = 4 * sizes.iter().sum::<u64>();
            let largest = 4 * sizes.iter().max().unwrap();
            assert_eq!(reported, cost.ranks.iter().map(|rank| rank.param_bytes).max().unwrap());
            assert_eq!(if_cut, total.div_ceil(world_size.as_u64()));
            assert!(if_cut.max(largest) <= lower_bound && lower_bound <= reported);
            // Longest-first is at most 4/3 - 1/(3W) above the optimum; its distance from the bound depends on the
            // sizes.
            assert!(
                reported * world_size.as_u64() <= total + (world_size.as_u64() - 1) * largest,
                "{plan:?}"
            );

            let contiguous = LayerWise { sharing: LayerSharing::Contiguous }
                .plan(&parameters, world_size)
                .unwrap();
            let owners: Vec<_> = sizes
                .iter()
                .zip(0..)
                .map(|(_, layer)| owner(&contiguous, &format!("h.{layer}.a")))
                .collect();
            assert!(owners.is_sorted(), "{contiguous:?}");
            assert!(layer_balance(&contiguous).unwrap()[0] >= lower_bound);
        }
    }
}

#[test]
fn search_agrees_with_exhaustive_search() {
    let blocks = (0..3).flat_map(|block| {
        [(format!("h.{block}.a"), vec![12, 5]), (format!("h.{block}.b"), vec![7])]
    });
    let parameters: Vec<_> = blocks
        .chain([("wte.w".into(), vec![11, 3])])
        .map(|(name, shape)| parameter(&name, &shape))
        .collect();
    let model = CostModel { links: Some(Links::H100), ..CostModel::default() };
    for world_size in [1, 2, 6, 16].map(|size| WorldSize::new(size).unwrap()) {
        let groups = (1..=world_size.as_u64()).filter(|group| world_size.as_u64() % group == 0);
        let candidates =
            groups.flat_map(|group| [Layout::Dim0, Layout::ROWS].map(|layout| (group, layout)));
        let costs = candidates.map(|(group, layout)| {
            let strategy = Hsdp::new(Full::new(layout), world_size.as_u64() / group);
            strategy.plan(&parameters, world_size).unwrap().cost(&model).unwrap()
        });
        let costs: Vec<_> = costs.collect();
        for budget in (0..3000).step_by(50) {
            let fitting = costs.iter().filter(|cost| cost.peak_bytes() <= budget.into());
            let fastest = fitting.filter_map(|cost| cost.step_seconds).min_by(f64::total_cmp);
            let search = Search { world_size, budget_bytes: budget, model: CostModel::default() };
            let found = search.run(&parameters).unwrap();
            if let Some(fastest) = fastest {
                assert_eq!(found.missing_bytes, 0);
                assert!(found.cost.peak_bytes() <= budget.into());
                assert!(found.cost.step_seconds.unwrap() <= fastest);
                assert_eq!(found.plan.cost(&model).unwrap(), found.cost);
            } else {
                let smallest = costs.iter().map(PlanCost::peak_bytes).min().unwrap();
                assert_eq!(smallest, u128::from(budget + found.missing_bytes));
            }
        }
    }
}

/// Plans parameters of one layer on the given owners, and a parameter of another layer.
fn whole(owners: &[u64], world_size: u64) -> ShardingPlan {
    let planned = owners.iter().enumerate().map(|(position, &owner)| {
        let owner = Placement::new(owner, world_size).unwrap().rank();
        PlannedParameter::new(parameter(&format!("h.0.w{position}"), &[4, 2]), Cut::Whole { owner })
    });
    let other = PlannedParameter::new(parameter("h.1.w", &[2]), Cut::Replicated);
    let planned = planned.chain([other]).collect();
    ShardingPlan::new("test", WorldSize::new(world_size).unwrap(), planned).unwrap()
}

#[test]
fn split_layers_have_no_balance() {
    assert_eq!(layer_balance(&whole(&[1, 0], 2)), None);
    assert_eq!(layer_balance(&whole(&[1, 1, 0], 2)), None);
    assert_eq!(layer_balance(&whole(&[1, 1], 2)), Some([32, 32, 16]));
    assert_eq!(layer_balance(&whole(&[], 2)), None);
}

#[test]
fn many_owners_are_counted() {
    for (owners, held_as) in [
        (vec![1], "whole on 1"),
        (vec![3, 1, 3], "whole on 1, whole on 3"),
        (vec![0, 1, 2], "whole, on 3 ranks"),
        ((0..782).collect(), "whole, on 782 ranks"),
    ] {
        let plan = whole(&owners, 1000);
        let report = PlanReport::new(&plan, &CostModel::default(), None).unwrap().to_string();
        let line = report.lines().find(|line| line.trim_start().starts_with("h.0")).unwrap();
        assert!(line.trim_end().ends_with(&format!("  {held_as}")), "{line}");
        assert!(report.lines().all(|line| line.chars().count() <= 120), "{report}");
    }
}
