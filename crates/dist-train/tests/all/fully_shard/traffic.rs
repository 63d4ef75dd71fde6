//! The traffic of a step, as counted by the engine, matches the plan's schedule.

use std::iter;

use candle_core::{DType, Device, Tensor};
use core_types::{Placement, Rank, WorldSize};
use dist_train::{FullyShard, UnitRules};
use fsdp_plan::{
    cost::{CostModel, Runtime},
    strategy::{Hsdp, ShardingStrategy},
    support::{Calls, HandedOver, Schedule},
};
use pmap_mesh::{
    DeviceMesh,
    support::{Tally, Traffic},
};

use super::model::{KEEPS, adam, batch, loss, sharded, strategies, tied};
use crate::support::layers;

fn candle() -> CostModel {
    CostModel { runtime: Runtime::Candle, ..CostModel::default() }
}

fn difference(after: Vec<Traffic>, before: Vec<Traffic>) -> Vec<Traffic> {
    iter::zip(after, before).map(|(after, before)| after - before).collect()
}

fn rank(slot: usize, slots: usize) -> Rank {
    Placement::new(slot as u64, slots as u64).unwrap().rank()
}

/// Returns the scalar traffic of a step: the loss with its weight, the parameters with a gradient,
/// and their squares.
fn scalars(slots: usize, trained: usize) -> Tally {
    let bytes = 4 * 8 + 4 + 8 * trained as u64;
    if slots == 1 { Tally::default() } else { Tally { calls: 3, bytes } }
}

/// Returns the expected traffic of a slot in a step.
fn expected(handed: HandedOver, scalars: Tally) -> Traffic {
    let tally = |calls: Calls| Tally { calls: calls.count, bytes: calls.bytes };
    let gathered = tally(handed.all_gather);
    let all_gather =
        Tally { calls: gathered.calls + scalars.calls, bytes: gathered.bytes + scalars.bytes };
    Traffic {
        all_gather,
        reduce_scatter: tally(handed.reduce_scatter),
        all_reduce: tally(handed.all_reduce),
        ..Traffic::default()
    }
}

fn check(step: &[Traffic], schedule: &Schedule<'_>, trained: usize, what: &str) {
    let slots = step.len();
    for (slot, found) in step.iter().enumerate() {
        let handed = schedule.handed_over(rank(slot, slots)).unwrap();
        let expected = expected(handed, scalars(slots, trained));
        assert_eq!(*found, expected, "slot {slot} of {slots}: {what}");
    }
}

#[test]
fn every_strategy_matches_its_schedule() {
    for slots in [1, 3] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        for (name, strategy) in strategies() {
            check_every_keep(&mesh, strategy, name);
        }
    }
    for (replicas, shards) in [(2, 2), (3, 1)] {
        let builder = DeviceMesh::builder().axis("replicas", replicas).axis("shards", shards);
        let mesh = builder.cpu().unwrap();
        for (name, strategy) in strategies() {
            let name = format!("{name}, {replicas} groups of {shards}");
            check_every_keep(&mesh, Box::new(Hsdp::new(strategy, replicas as u64)), &name);
        }
    }
}

/// Compares the traffic of a step and an evaluation with the schedule for each `Keep` of two units.
fn check_every_keep(mesh: &DeviceMesh, strategy: Box<dyn ShardingStrategy>, name: &str) {
    let infos = sharded(mesh).build(adam).unwrap().plan().unwrap().parameters().to_vec();
    let infos: Vec<_> = infos.iter().map(|parameter| parameter.info().clone()).collect();
    let world = WorldSize::new(mesh.len() as u64).unwrap();
    let plan = strategy.plan(&infos, world).unwrap();
    for keep in KEEPS {
        let builder = sharded(mesh).plan(plan.clone()).keep_unit("{embed,blocks.1}", keep);
        let mut model = builder.build(adam).unwrap();
        let batch = batch(2 * mesh.len(), 0);
        let before = mesh.traffic();
        model.step(batch.clone(), loss).unwrap();
        let step = difference(mesh.traffic(), before);
        let plan = model.plan().unwrap().clone();
        let schedule = plan.schedule(&candle()).unwrap();
        check(&step, &schedule, infos.len(), &format!("{name}, {keep:?}"));

        let before = mesh.traffic();
        model.evaluate(batch, loss).unwrap();
        for slot in difference(mesh.traffic(), before) {
            let gathers = schedule.units.iter().filter_map(|unit| unit.all_gather.as_ref());
            let gathered = gathers.filter(|gather| gather.ranks > 1).count() as u64;
            // All units once, and the loss with its weight.
            assert_eq!(slot.all_gather.calls, gathered + u64::from(mesh.len() > 1), "{name}");
            assert_eq!((slot.reduce_scatter, slot.all_reduce), Default::default(), "{name}");
        }
    }
}

#[test]
fn frozen_parameters_are_not_reduced() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    // Their inputs have gradients, so the backward pass includes them.
    let frozen = ["blocks.1", "norm", "out", "blocks.0.up"];
    let mut model = sharded(&mesh).freeze(frozen).build(adam).unwrap();
    let before = mesh.traffic();
    model.step(batch(6, 0), loss).unwrap();
    let step = difference(mesh.traffic(), before);
    let trained =
        model.plan().unwrap().parameters().iter().filter(|planned| planned.info().requires_grad());
    let schedule = model.plan().unwrap().schedule(&candle()).unwrap();
    check(&step, &schedule, trained.count(), "frozen");
    assert_eq!(step[0].reduce_scatter.calls, 3, "five units, two of them frozen");
}

/// The number of bytes depends on the dtypes.
#[test]
fn halves_are_sent_as_such() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for reduce_dtype in [DType::F32, DType::BF16] {
        let builder = sharded(&mesh).mixed_precision(DType::BF16, reduce_dtype);
        let mut model = builder.build(adam).unwrap();
        let before = mesh.traffic();
        model.step(batch(6, 0), loss).unwrap();
        let step = difference(mesh.traffic(), before);
        let plan = model.plan().unwrap().clone();
        let schedule = plan.schedule(&model.cost_model().unwrap()).unwrap();
        check(&step, &schedule, plan.parameters().len(), &format!("{reduce_dtype:?}"));
    }
}

#[test]
fn leading_frozen_units_gather_once() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let builder = sharded(&mesh).freeze(["tokens", "positions", "blocks.0"]);
    let mut model = builder.build(adam).unwrap();
    let before = mesh.traffic();
    model.step(batch(6, 0), loss).unwrap();
    let found = difference(mesh.traffic(), before)[0].all_gather.calls;
    let schedule = model.plan().unwrap().schedule(&candle()).unwrap();
    let planned = schedule.handed_over(rank(0, 3)).unwrap().all_gather.count;
    // A plan does not contain the order of units.
    assert_eq!(found, planned - 2 + scalars(3, 0).calls);
}

/// Parameters have bf16, and their gradients are summed in f32.
#[test]
fn tied_parameters_are_sent_twice() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let rules = UnitRules::new().unit("first", ["0"]).unit("both", ["0", "1"]);
    let builder = FullyShard::builder(&mesh, layers::<2>).by_units(rules).dtype(DType::BF16);
    let mut model = builder.build(adam).unwrap();
    let x = Tensor::ones((6, 3), DType::BF16, &Device::Cpu).unwrap();
    let before = mesh.traffic();
    model.step(x, tied).unwrap();
    let step = difference(mesh.traffic(), before);

    let plan = model.plan().unwrap();
    let names = plan.parameters().iter().map(|planned| planned.info().name());
    let positions = |is_of: fn(&str) -> bool| -> Vec<usize> {
        names.clone().enumerate().filter(|(_, name)| is_of(name)).map(|(n, _)| n).collect()
    };
    let units =
        [("first", positions(|name| name.starts_with("0."))), ("both", positions(|_| true))];
    assert_eq!(units.clone().map(|(_, positions)| positions.len()), [2, 4]);
    let schedule = plan.schedule_of(&candle(), units).unwrap();
    check(&step, &schedule, 4, "in two units");
}
