//! Laws of schedules: everything travels once, the parts of all ranks are the whole, and what the
//! runtime on candle holds follows from it.

use std::collections::BTreeSet;

use core_types::WorldSize;
use fsdp_plan::{
    Cut, ElemType, ParameterInfo, ShardingPlan,
    cost::{Activations, CostModel, Link, Links, RankCost, Runtime},
    strategy::{Full, ShardingStrategy},
    support::{Calls, Schedule, UnitSchedule},
};

use crate::laws::plan::{for_each_plan, ranks, replicated};

fn candle() -> CostModel {
    CostModel::default().with_runtime(Runtime::Candle)
}

/// The bytes of a parameter as it is held, in half precision.
fn bytes(plan: &ShardingPlan, param_idx: usize) -> u64 {
    2 * plan.parameters()[param_idx].info().numel()
}

#[test]
fn gradients_of_neighbors_are_there_at_once_where_sums_are_under_way() {
    let units = [("h.0.w", 8), ("h.1.w", 16), ("h.2.w", 4)];
    let parameters =
        units.map(|(name, rows)| ParameterInfo::new(name, [rows, 4], ElemType::F32).unwrap());
    let plan = Full::default().plan(&parameters, WorldSize::new(2).unwrap()).unwrap();
    let unreduced = |model: CostModel, prefetch| {
        plan.cost(&model.with_prefetch(prefetch)).unwrap().ranks[0].unreduced_bytes
    };
    assert_eq!([0, 1, 5].map(|prefetch| unreduced(candle(), prefetch)), [256, 384, 384]);
    assert_eq!([0, 1].map(|prefetch| unreduced(CostModel::default(), prefetch)), [256, 256]);
}

#[test]
fn gradients_are_held_in_single_precision_whatever_they_were_reduced_in() {
    let held = |dtype, reduce| {
        let parameter = ParameterInfo::new("h.0.w", [8, 4], dtype).unwrap();
        let plan = Full::default().plan(&[parameter], WorldSize::new(2).unwrap()).unwrap();
        let model = candle().with_mixed_precision(ElemType::Bf16, reduce);
        plan.cost(&model).unwrap().ranks[0].grad_bytes
    };
    for dtype in [ElemType::F32, ElemType::Bf16] {
        assert_eq!([ElemType::Bf16, ElemType::F32].map(|reduce| held(dtype, reduce)), [64, 64]);
    }
    assert_eq!(held(ElemType::F64, ElemType::F32), 128);
}

#[test]
fn every_parameter_with_elements_travels_with_its_unit_once() {
    for_each_plan(|_, _, plan| {
        let schedule = plan.schedule(&CostModel::default()).unwrap();
        for (param_idx, parameter) in plan.parameters().iter().enumerate() {
            let unit = schedule.unit(parameter.info().unit()).unwrap();
            let sums = schedule.units.iter().flat_map(|unit| {
                [&unit.reduce_scatter, &unit.all_reduce_copies].into_iter().flatten()
            });
            let n_sums = sums.filter(|sum| sum.parameters.contains(&param_idx)).count();
            let is_sent = parameter.info().numel() > 0;
            assert_eq!(n_sums, usize::from(is_sent), "{plan:?}");
            let is_copied = parameter.cut() == Cut::Replicated;
            let gathered = unit.all_gather.as_ref();
            let is_gathered =
                gathered.is_some_and(|gathered| gathered.parameters.contains(&param_idx));
            assert_eq!(is_gathered, is_sent && !is_copied, "{plan:?}");
        }
    });
}

#[test]
fn what_all_ranks_hand_over_is_the_payload() {
    for_each_plan(|_, _, plan| {
        for model in [CostModel::default(), candle()] {
            let schedule = plan.schedule(&model).unwrap();
            for (_, transfer) in schedule.units.iter().flat_map(UnitSchedule::transfers) {
                assert!(transfer.payload_bytes <= transfer.bytes, "{plan:?}");
            }
            let collectives = plan.cost(&model).unwrap().collectives;
            assert_eq!(schedule.collectives().unwrap(), collectives);
            let mut gathered_bytes = 0;
            for rank in ranks(plan) {
                let handed = schedule.handed_over(rank).unwrap();
                gathered_bytes += handed.all_gather.bytes;
                assert_eq!(handed.all_gather.count, collectives.all_gather.count);
                for (handed, sent) in [
                    (handed.reduce_scatter, collectives.reduce_scatter),
                    (handed.all_reduce, collectives.all_reduce),
                ] {
                    assert_eq!((handed.count, handed.bytes), (sent.count, sent.payload_bytes));
                }
            }
            assert_eq!(gathered_bytes, collectives.all_gather.payload_bytes, "{plan:?}");
        }
    });
}

#[test]
fn replicas_gather_apart_and_add_up_their_parts() {
    for_each_plan(|_, _, plan| {
        if plan.world_size().as_u64() > 4 {
            return; // it takes as many steps as ranks
        }
        let apart = plan.schedule(&candle()).unwrap();
        let replicated = replicated(plan, 2);
        let schedule = replicated.schedule(&candle()).unwrap();
        let group = plan.world_size().as_usize();
        for (member, rank) in ranks(&replicated).enumerate() {
            let handed = schedule.handed_over(rank).unwrap();
            let alone = apart.handed_over(ranks(plan).nth(member % group).unwrap()).unwrap();
            assert_eq!(handed.all_gather, alone.all_gather);
            assert_eq!(handed.reduce_scatter, alone.reduce_scatter);
            // Sums of its own parts, in single precision, unit by unit; and those of copies.
            let mut parts = Calls::default();
            for unit in &schedule.units {
                let of_unit = |param_idx: &usize| {
                    let shards = replicated.shards(*param_idx, rank).unwrap();
                    shards.map(|shard| 4 * shard.shard_size).sum::<u64>()
                };
                let own = unit.all_reduce_parts.as_ref();
                let own: u64 = own.iter().flat_map(|own| &own.parameters).map(of_unit).sum();
                let copies = unit.all_reduce_copies.as_ref();
                parts.count += u64::from(own > 0) + u64::from(copies.is_some());
                parts.bytes += own + copies.map_or(0, |copies| copies.payload_bytes);
            }
            assert_eq!(handed.all_reduce, parts, "{plan:?}");
        }
    });
}

/// The parameters of a unit, the root unit among them.
fn members<'a>(plan: &'a ShardingPlan, unit: &'a str) -> impl Iterator<Item = usize> + 'a {
    let numbered = plan.parameters().iter().enumerate();
    numbered.filter(move |(_, parameter)| parameter.info().unit() == unit).map(|(n, _)| n)
}

#[test]
fn the_runtime_on_candle_holds_whole_units_without_padding() {
    let activations = Activations { input_bytes: 10, unit_bytes: 1000 };
    for_each_plan(|parameters, _, plan| {
        let cost = plan.cost(&candle().with_activations(activations)).unwrap();
        let unit_bytes = |unit: &str| members(plan, unit).map(|n| bytes(plan, n)).sum::<u64>();
        let passing = plan.units().into_iter().map(unit_bytes).max().unwrap();
        let reduced = passing.max(unit_bytes(""));
        let largest = (0..3).map(|param_idx| bytes(plan, param_idx)).max().unwrap();
        // The root stays gathered, with its graph.
        for (n_graphs, bytes) in [(1, 10 + 3 * 1000), (2, 3 * 1000), (3, 3 * 1000)] {
            let model = candle().with_activations(activations).with_kept_graphs(n_graphs);
            let kept = plan.cost(&model).unwrap();
            assert!(kept.ranks.iter().all(|rank| rank.activation_bytes == bytes), "{n_graphs}");
            assert_eq!(kept.collectives, cost.collectives, "nothing else is sent");
        }
        for rank in &cost.ranks {
            assert_eq!(rank.storage_bytes, rank.param_bytes, "{plan:?}");
            // In single precision once they are reduced.
            assert_eq!(rank.grad_bytes, 2 * rank.param_bytes, "{plan:?}");
            assert_eq!(rank.gathered_bytes, unit_bytes("") + passing, "the root unit stays");
            assert_eq!(rank.unreduced_bytes, 2 * reduced, "{plan:?}");
            assert_eq!(rank.backward_bytes, 2 * 2 * largest, "{plan:?}");
            // Two blocks keep their inputs, and one of them and the root have graphs.
            assert_eq!(rank.activation_bytes, 2 * 10 + 2 * 1000);
            let terms = [
                rank.gathered_bytes,
                rank.unreduced_bytes,
                rank.backward_bytes,
                rank.activation_bytes,
            ];
            let within_step: u64 = terms.iter().sum();
            assert_eq!(rank.peak_bytes(), rank.total_bytes() + u128::from(within_step));
        }
        let held: u64 = cost.ranks.iter().map(|rank| rank.param_bytes).sum();
        let copies = plan.parameters().iter().filter(|planned| planned.cut() == Cut::Replicated);
        let copies: u64 = copies.map(|planned| planned.info().bytes()).sum();
        let all: u64 = parameters.iter().map(ParameterInfo::bytes).sum();
        assert_eq!(held, all + copies * (plan.world_size().as_u64() - 1));
    });
}

#[test]
fn gradients_that_are_used_at_once_are_those_of_one_unit() {
    for_each_plan(|_, _, plan| {
        let kept = plan.cost(&candle()).unwrap();
        let used = plan.cost(&candle().with_optimizer_in_backward()).unwrap();
        // A unit's part of a rank, in single precision, all that it has of copies.
        let of_unit = |unit: &str, rank| {
            let shards = members(plan, unit).flat_map(|n| plan.shards(n, rank).unwrap());
            4 * shards.map(|shard| shard.shard_size).sum::<u64>()
        };
        let units: Vec<&str> = plan.units().into_iter().chain([""]).collect();
        for (kept, used) in kept.ranks.iter().zip(&used.ranks) {
            assert_eq!((used.grad_bytes, used.optimizer_bytes), (0, kept.optimizer_bytes));
            let largest = units.iter().map(|unit| of_unit(unit, used.rank)).max().unwrap();
            assert!(used.unreduced_bytes >= largest, "{plan:?}");
            assert!(used.unreduced_bytes <= 2 * kept.unreduced_bytes + 4 * 9, "{plan:?}");
            if plan.world_size().as_u64() == 1 {
                assert_eq!(used.unreduced_bytes, 2 * kept.unreduced_bytes);
            }
        }
    });
}

#[test]
fn a_process_holds_what_its_ranks_do_and_one_gathered_copy_for_each_group() {
    for_each_plan(|_, _, plan| {
        if plan.world_size().as_u64() > 4 {
            return; // it takes as many steps as ranks
        }
        let replicated = replicated(plan, 3);
        let cost = replicated.cost(&candle()).unwrap();
        let group = plan.world_size().as_usize();
        for slots in [1, 2, group, 2 * group, 3 * group, 5 * group] {
            let mut most = 0;
            for ranks in cost.ranks.chunks(slots) {
                let all: u128 = ranks.iter().map(RankCost::peak_bytes).sum();
                let groups: BTreeSet<usize> =
                    ranks.iter().map(|rank| rank.rank.as_usize() / group).collect();
                let shared = ranks.len() - groups.len();
                most = most.max(all - shared as u128 * u128::from(ranks[0].gathered_bytes));
            }
            assert_eq!(cost.process_peak_bytes(slots.try_into().unwrap()), most, "{slots}");
        }
    });
}

#[test]
fn other_units_than_those_of_the_plan_send_a_parameter_for_each() {
    for_each_plan(|_, _, plan| {
        let units = [("first", vec![0, 2]), ("second", vec![0, 1, 2])];
        let schedule = plan.schedule_of(&candle(), units).unwrap();
        let payload = |unit: usize, schedule: &Schedule<'_>| {
            let unit = &schedule.units[unit];
            let gathered = unit.all_gather.as_ref();
            (unit.unit.to_owned(), gathered.map_or(0, |gathered| gathered.payload_bytes))
        };
        let is_cut = |param_idx: usize| plan.parameters()[param_idx].cut() != Cut::Replicated;
        let of = |members: &[usize]| {
            let cut = members.iter().filter(|&&param_idx| is_cut(param_idx));
            cut.map(|&param_idx| bytes(plan, param_idx)).sum::<u64>()
        };
        assert_eq!(payload(0, &schedule), ("first".to_owned(), of(&[0, 2])));
        assert_eq!(payload(1, &schedule), ("second".to_owned(), of(&[0, 1, 2])));
        assert!(plan.schedule_of(&candle(), [("third", vec![3])]).is_err());
    });
}

/// How long a step's collectives take at a byte per second, if calls take no time.
fn seconds(plan: &ShardingPlan, model: CostModel) -> f64 {
    let slow = Link { latency_ns: 0, bytes_per_s: 1 };
    let links = Links::new(1 << 20, slow, slow).unwrap();
    plan.cost(&model.with_links(links)).unwrap().step_seconds.unwrap()
}

#[test]
fn everyone_receives_all_but_its_own_part() {
    for_each_plan(|_, strategy, plan| {
        if plan.world_size().as_u64() == 1 {
            assert!(seconds(plan, CostModel::default()).abs() < f64::EPSILON);
            return;
        }
        let schedule = plan.schedule(&candle()).unwrap();
        let mut expected = 0.0;
        for unit in &schedule.units {
            let Some(gathered) = &unit.all_gather else { continue };
            let own = |rank| {
                let shards = gathered.parameters.iter().flat_map(move |&param_idx| {
                    plan.shards(param_idx, rank).unwrap().map(|shard| 2 * shard.shard_size)
                });
                shards.sum::<u64>()
            };
            let least = ranks(plan).map(own).min().unwrap();
            // Gradients in single precision, once.
            expected += (gathered.count + 2) as f64 * (gathered.payload_bytes - least) as f64;
        }
        let copies = schedule.units.iter().filter_map(|unit| unit.all_reduce_copies.as_ref());
        let copies: u64 = copies.map(|copies| copies.payload_bytes).sum();
        let n = plan.world_size().as_u64() as f64;
        expected += 2.0 * (n - 1.0) / n * copies as f64;
        let found = seconds(plan, candle());
        let is_exact = !matches!(strategy.name(), "full-row-ragged" | "full-block-ragged");
        if is_exact {
            assert!((found - expected).abs() < 1e-9 * expected.max(1.0), "{found}, {expected}");
        }
        // The bounds of ragged units are known member by member, their smallest share is estimated.
        assert!(found >= expected * (1.0 - 1e-9), "{found}, {expected}: {plan:?}");
    });
}
