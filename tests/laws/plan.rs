//! Laws of sharding plans: every element has its owner, costs are the sums of what ranks hold, layers are balanced.

use candle_distributed::{
    plan::{
        Collectives, CostModel, Cut, ElemType, Full, Hybrid, LayerWise, Layout, Optimizer, ParameterInfo,
        PlannedParameter, ShardingPlan, ShardingStrategy,
    },
    types::{Placement, Rank, WorldSize},
};
use proptest::prelude::*;

const SHAPES: [&[u64]; 9] = [&[0], &[1], &[2], &[5], &[7, 2], &[4, 0], &[1, 6], &[6, 1, 2], &[3, 3]];

fn strategies() -> Vec<Box<dyn ShardingStrategy>> {
    let hybrid = Hybrid::new(["0"], ["h", "out"]);
    vec![Box::new(Full::default()), Box::new(Full::new(Layout::Flat)), Box::new(LayerWise::default()), Box::new(hybrid)]
}

fn parameter(name: &str, shape: &[u64]) -> ParameterInfo {
    ParameterInfo::new(name, shape, ElemType::Bf16).unwrap()
}

fn ranks(plan: &ShardingPlan) -> impl Iterator<Item = Rank> + use<> {
    plan.world_size().placements().map(Placement::rank)
}

/// Calls `check` with the plan of every strategy for every three shapes of the grid on every small world, the second
/// of the parameters gathered always or not.
fn for_each_plan(check: impl Fn(&[ParameterInfo], &dyn ShardingStrategy, &ShardingPlan)) {
    let worlds: Vec<_> = (1..=6).chain([64]).map(|size| WorldSize::new(size).unwrap()).collect();
    let pairs = SHAPES.iter().flat_map(|first| SHAPES.iter().map(move |second| (first, second)));
    for ((first, second), third) in pairs.flat_map(|pair| SHAPES.iter().map(move |third| (pair, third))) {
        for always_gather in [false, true] {
            let second = parameter("h.1.w", second).with_always_gather(always_gather);
            let parameters = [parameter("h.0.w", first), second, parameter("out.w", third)];
            for (strategy, &world_size) in strategies().iter().flat_map(|s| worlds.iter().map(move |w| (s, w))) {
                let plan = strategy.plan(&parameters, world_size).unwrap();
                check(&parameters, strategy.as_ref(), &plan);
            }
        }
    }
}

#[test]
fn every_element_is_owned_once_or_by_all() {
    for_each_plan(|parameters, _, plan| {
        for (param_idx, info) in parameters.iter().enumerate() {
            let shards: Vec<_> = ranks(plan).filter_map(|rank| plan.shard(param_idx, rank)).collect();
            if plan.parameters()[param_idx].cut() == Cut::Replicated {
                assert_eq!(shards.len(), if info.numel() > 0 { plan.world_size().as_usize() } else { 0 });
                assert!(shards.iter().all(|shard| (shard.start_offset, shard.shard_size) == (0, info.numel())));
                continue;
            }
            let mut end = 0;
            for (shard_index, shard) in (0..).zip(&shards) {
                assert_eq!((shard.start_offset, shard.shard_index), (end, shard_index), "{plan:?}");
                assert!(shard.shard_size > 0);
                end += shard.shard_size;
            }
            assert_eq!(end, info.numel(), "{plan:?}");
            assert!(shards.is_sorted_by_key(|shard| shard.owner_rank));
        }
    });
}

#[test]
fn shards_of_a_rank_are_its_shards_of_each_parameter() {
    for_each_plan(|parameters, _, plan| {
        for rank in ranks(plan) {
            let of_rank: Vec<_> =
                plan.shards_of_rank(rank).map(|(found, shard)| (found.info().name(), shard)).collect();
            let one_by_one: Vec<_> = parameters
                .iter()
                .filter_map(|info| Some((info.name(), plan.shard(plan.index_of(info.name())?, rank)?)))
                .collect();
            assert_eq!(of_rank, one_by_one);
            assert!(of_rank.iter().all(|(_, shard)| shard.owner_rank == rank));
        }
    });
}

#[test]
fn rows_say_the_same_as_elements() {
    for_each_plan(|_, strategy, plan| {
        for (parameter, shard) in ranks(plan).flat_map(|rank| plan.shards_of_rank(rank)) {
            let row: u64 = parameter.info().shape()[1..].iter().product();
            let flat = strategy.name() == "full-flat" && !parameter.info().always_gather();
            let expected = (!flat).then_some((shard.start_offset, shard.shard_size));
            let rows = shard.dim0_start.zip(shard.dim0_rows).map(|(start, rows)| (start * row, rows * row));
            assert_eq!(rows, expected, "{parameter:?}");
        }
    });
}

#[test]
fn costs_are_sums_over_shards() {
    let model = CostModel::default().with_optimizer(Optimizer::Sgd);
    for_each_plan(|_, strategy, plan| {
        let cost = plan.cost(&model).unwrap();
        assert!(cost.ranks.iter().map(|cost| cost.rank).eq(ranks(plan)));
        for rank in &cost.ranks {
            let owned: u64 = plan.shards_of_rank(rank.rank).map(|(_, shard)| 2 * shard.shard_size).sum();
            assert_eq!(rank.param_bytes, owned, "{plan:?}");
            assert!(rank.storage_bytes >= owned);
            assert_eq!(rank.optimizer_bytes, rank.grad_bytes);
            let grad_bytes = if strategy.name() == "full-flat" { rank.storage_bytes } else { owned };
            assert_eq!(rank.grad_bytes, grad_bytes, "{plan:?}");
        }
        let max = cost.ranks.iter().map(|rank| rank.param_bytes).max().unwrap();
        let total: u64 = cost.ranks.iter().map(|rank| rank.param_bytes).sum();
        let ratio =
            |owned: u64, of: u64| f64::from(u32::try_from(owned).unwrap()) / f64::from(u32::try_from(of).unwrap());
        let expected = if total == 0 { 1.0 } else { ratio(max * plan.world_size().as_u64(), total) };
        assert_eq!(cost.max_over_mean.to_bits(), expected.to_bits());
    });
}

#[test]
fn padding_stays_within_its_bound() {
    for_each_plan(|parameters, strategy, plan| {
        let cost = plan.cost(&CostModel::default()).unwrap();
        let world_size = plan.world_size().as_u64();
        let padding: u64 = cost.ranks.iter().map(|rank| rank.storage_bytes - rank.param_bytes).sum();
        let cut = parameters.iter().filter(|info| !info.always_gather());
        // Less than a row per rank and parameter, less than an element per rank and unit.
        let bound = match strategy.name() {
            "full" | "hybrid" => cut.map(|info| info.shape()[1..].iter().product::<u64>()).sum::<u64>(),
            "full-flat" => 3,
            _ => 0,
        };
        assert!(padding <= (world_size - 1) * bound * 2, "{plan:?}");
    });
}

#[test]
fn one_rank_owns_everything_and_sends_nothing() {
    for_each_plan(|parameters, _, plan| {
        if plan.world_size() == WorldSize::ONE {
            let cost = plan.cost(&CostModel::default()).unwrap();
            assert_eq!(cost.collectives, Collectives::default());
            assert_eq!(cost.ranks[0].storage_bytes, parameters.iter().map(ParameterInfo::bytes).sum::<u64>());
        }
    });
}

#[test]
fn the_same_arguments_give_the_same_plan() {
    for_each_plan(|parameters, strategy, plan| {
        assert_eq!(&strategy.plan(parameters, plan.world_size()).unwrap(), plan);
    });
}

#[test]
fn layers_are_never_parted_and_balanced() {
    let lists = (0..5_u64.pow(5)).map(|code| [0, 1, 2, 3, 4].map(|digit| code / 5_u64.pow(digit) % 5));
    for sizes in lists {
        let layers = (0..).zip(sizes).map(|(layer, size)| (format!("h.{layer}"), size));
        let halves = layers.flat_map(|(layer, size)| [(format!("{layer}.a"), size), (format!("{layer}.b"), size)]);
        let parameters: Vec<_> = halves.map(|(name, size)| parameter(&name, &[size])).collect();
        for world_size in [1, 2, 3, 4, 7].map(|size| WorldSize::new(size).unwrap()) {
            let plan = LayerWise::default().plan(&parameters, world_size).unwrap();
            let owners: Vec<_> = plan.parameters().iter().map(PlannedParameter::cut).collect();
            assert!(owners.chunks(2).all(|layer| layer[0] == layer[1]), "{plan:?}");
            let n_layers = |rank| owners.iter().step_by(2).filter(|&&cut| cut == Cut::Whole { owner: rank }).count();
            let (min, max) = ranks(&plan)
                .fold((usize::MAX, 0), |(min, max), rank| (min.min(n_layers(rank)), max.max(n_layers(rank))));
            assert!(min > 0 || max <= 1, "{plan:?}");
            // Longest-first is at most 4/3 - 1/(3W) above the optimum, which is at least the mean and the largest layer.
            let cost = plan.cost(&CostModel::default()).unwrap();
            let (total, largest) = (4 * sizes.iter().sum::<u64>(), 4 * sizes.iter().max().unwrap());
            let most = cost.ranks.iter().map(|rank| rank.param_bytes).max().unwrap();
            let world_size = world_size.as_u64();
            assert!(most <= total.div_ceil(world_size) + largest, "{plan:?}");
            assert!(most * world_size <= total + (world_size - 1) * largest, "{plan:?}");
        }
    }
}

proptest! {
    #[test]
    fn shards_meet_whatever_the_sizes(
        rows in 1..1_u64 << 40,
        columns in 1..1_u64 << 16,
        world in 2..=WorldSize::MAX.as_u64(),
        rank in any::<u64>(),
    ) {
        let world_size = WorldSize::new(world).unwrap();
        let rank = usize::try_from(rank % (world - 1)).unwrap();
        let parameters = [parameter("a", &[rows, columns]), parameter("b", &[columns, rows])];
        for layout in [Layout::Dim0, Layout::Flat] {
            let plan = Full::new(layout).plan(&parameters, world_size).unwrap();
            let mut pair = ranks(&plan).skip(rank);
            let (here, next) = (pair.next().unwrap(), pair.next().unwrap());
            for param_idx in [0, 1] {
                if let (Some(here), Some(next)) = (plan.shard(param_idx, here), plan.shard(param_idx, next)) {
                    prop_assert_eq!(here.start_offset + here.shard_size, next.start_offset);
                    prop_assert_eq!(here.shard_index + 1, next.shard_index);
                }
            }
        }
    }
}
