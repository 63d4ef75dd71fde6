//! Laws of resharding: for any two plans, the moves give each rank exactly its new shards.

use std::collections::{BTreeMap, BTreeSet};

use core_types::{Placement, WorldSize};
use fsdp_plan::{
    ElemType, ParameterInfo, ShardingPlan,
    reshard::{Reshard, ShardMove},
    strategy::{Full, Hsdp, LayerWise, Layout, ShardingStrategy, WholeTensor},
};

fn world(size: u64) -> WorldSize {
    WorldSize::new(size).unwrap()
}

fn parameters() -> Vec<ParameterInfo> {
    let shapes: [(&str, &[u64], bool); 6] = [
        ("wte.w", &[7, 3], false),
        ("h.0.a", &[5, 2], false),
        ("h.0.b", &[2], true),
        ("h.1.a", &[4, 6], false),
        ("h.1.b", &[0, 3], false),
        ("out.w", &[1, 9], false),
    ];
    let parameters = shapes.map(|(name, shape, gather)| {
        ParameterInfo::new(name, shape, ElemType::Bf16).unwrap().with_always_gather(gather)
    });
    parameters.to_vec()
}

/// Makes plans of every kind for the same parameters, with and without replicas.
fn plans() -> Vec<ShardingPlan> {
    let layouts = [
        Layout::Dim0,
        Layout::Flat,
        Layout::FlatAligned,
        Layout::ROWS,
        Layout::BlockRagged { block: 4 },
    ];
    let full = layouts.map(|layout| Box::new(Full::new(layout)) as Box<dyn ShardingStrategy>);
    let others: [Box<dyn ShardingStrategy>; 3] = [
        Box::new(LayerWise::default()),
        Box::new(WholeTensor),
        Box::new(Hsdp::new(Full::default(), 2)),
    ];
    let strategies = full.into_iter().chain(others);
    let plan = |strategy: Box<dyn ShardingStrategy>| {
        [2, 4, 6].map(|size| strategy.plan(&parameters(), world(size)).unwrap())
    };
    strategies.flat_map(plan).collect()
}

/// The bytes of each parameter on a rank, by position.
type Held = BTreeMap<(usize, u64), u8>;

/// Returns the bytes of `rank` under `plan`; each byte depends on its parameter and position.
fn held(plan: &ShardingPlan, rank: u64) -> Held {
    let rank = Placement::new(rank, plan.world_size().as_u64()).unwrap().rank();
    let shards = plan.shards_of_rank(rank).unwrap().flat_map(|(parameter, shard)| {
        let param_idx = plan.index_of(parameter.info().name()).unwrap();
        let bytes = 2 * shard.start_offset..2 * (shard.start_offset + shard.shard_size);
        bytes.map(move |byte| {
            ((param_idx, byte), u8::try_from((31 * param_idx as u64 + byte) % 251).unwrap())
        })
    });
    shards.collect()
}

/// Applies `moves` to the old bytes of `rank` and returns the result.
fn moved(
    reshard: &Reshard<'_>,
    from: &ShardingPlan,
    to: &ShardingPlan,
    rank: u64,
    moves: &[ShardMove],
) -> Held {
    let wanted = held(to, rank);
    let place =
        reshard.place_of(Placement::new(rank, to.world_size().as_u64()).unwrap().rank()).unwrap();
    let mut held_now =
        if place < from.world_size().as_u64() { held(from, place) } else { Held::new() };
    held_now.retain(|at, _| wanted.contains_key(at));
    for part in moves.iter().filter(|part| part.to.as_u64() == rank) {
        let source = held(from, part.from.as_u64());
        for byte in part.start..part.start + part.bytes {
            let value = source[&(part.param_idx, byte)];
            assert_eq!(
                held_now.insert((part.param_idx, byte), value),
                None,
                "{part:?} was already there"
            );
        }
    }
    held_now
}

/// Calls `check` for every two plans, with and without renumbering.
fn for_each_pair(check: impl Fn(&ShardingPlan, &ShardingPlan, &Reshard<'_>)) {
    let plans = plans();
    for (from, to) in plans.iter().flat_map(|from| plans.iter().map(move |to| (from, to))) {
        let reshard = Reshard::new(from, to).unwrap();
        if from == to {
            assert_eq!(reshard.moves().count(), 0);
        }
        check(from, to, &reshard);
        check(from, to, &reshard.renumbered());
    }
}

#[test]
fn moves_complete_every_rank() {
    for_each_pair(|from, to, reshard| {
        let moves: Vec<ShardMove> = reshard.moves().collect();
        for rank in 0..to.world_size().as_u64() {
            assert_eq!(moved(reshard, from, to, rank, &moves), held(to, rank), "{from:?} {to:?}");
        }
    });
}

#[test]
fn volume_sums_the_moves_and_places_are_distinct() {
    for_each_pair(|from, to, reshard| {
        let volume = reshard.volume();
        let moves: Vec<ShardMove> = reshard.moves().collect();
        assert_eq!(volume.moves, moves.len() as u64);
        let n_bytes = moves.iter().map(|part| u128::from(part.bytes)).sum::<u128>();
        assert_eq!(volume.move_bytes, n_bytes);
        let all: usize = (0..to.world_size().as_u64()).map(|rank| held(to, rank).len()).sum();
        assert_eq!(volume.stay_bytes + volume.move_bytes, all as u128);
        let ranks = || to.world_size().placements().map(Placement::rank);
        let places: BTreeSet<u64> = ranks().map(|rank| reshard.place_of(rank).unwrap()).collect();
        assert_eq!(places.len() as u64, to.world_size().as_u64());
        let n_places = from.world_size().as_u64().max(to.world_size().as_u64());
        assert!(places.last().is_some_and(|&place| place < n_places));
    });
}
