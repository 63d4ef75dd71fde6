//! Every way to cut parameters has the same bits.

use core_types::WorldSize;
use dist_train::Keep;
use fsdp_plan::strategy::{
    Choice, Full, Hsdp, Hybrid, LayerWise, Layout, ShardingStrategy, WholeTensor,
};
use pmap_mesh::DeviceMesh;

use crate::model::{adam, batch, data_parallel, loss, sharded, train_plain, train_sharded};

const STEPS: usize = 6;

/// Ways to cut, by names that say what fails.
fn strategies() -> Vec<(&'static str, Box<dyn ShardingStrategy>)> {
    let hybrid = Hybrid::default()
        .with_rule("norm", Choice::Replicate)
        .unwrap()
        .with_rule("mix", Choice::Full(Layout::Flat))
        .unwrap();
    vec![
        ("dim 0", Box::new(Full::new(Layout::Dim0))),
        ("flat", Box::new(Full::new(Layout::Flat))),
        ("rows", Box::new(Full::new(Layout::RowRagged { rows: 1 }))),
        ("blocks", Box::new(Full::new(Layout::BlockRagged { block: 4 }))),
        ("layers", Box::new(LayerWise::default())),
        ("whole tensors", Box::new(WholeTensor)),
        ("hybrid", Box::new(hybrid)),
    ]
}

#[test]
fn however_parameters_are_cut_the_bits_are_the_same() {
    for slots in 1..5 {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let expected = train_plain(slots, 2 * slots, STEPS);
        for (name, strategy) in strategies() {
            let model = sharded(&mesh).strategy(strategy).build(adam).unwrap();
            let found = train_sharded(model, 2 * slots, STEPS);
            assert_eq!(found, expected, "{name} on {slots} slots");
        }
        for (name, strategy) in strategies() {
            let builder = sharded(&mesh).keep(Keep::Gathered);
            let model = builder.strategy(strategy).build(adam).unwrap();
            let found = train_sharded(model, 2 * slots, STEPS);
            assert_eq!(found, expected, "{name} on {slots} slots, kept gathered");
        }
    }
}

#[test]
fn groups_that_repeat_the_parts_have_the_same_bits() {
    let mesh = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let expected = train_plain(4, 8, STEPS);
    let model = sharded(&mesh).strategy(Hsdp::new(Full::default(), 2)).build(adam).unwrap();
    assert_eq!(model.plan().shard_group(), WorldSize::new(2).unwrap());
    assert_eq!(train_sharded(model, 8, STEPS), expected);
}

#[test]
fn the_norm_counts_once_what_several_slots_have() {
    let line = DeviceMesh::cpu(4).unwrap();
    let grid = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let mut whole = data_parallel(&line).build(adam).unwrap();
    let expected = whole.step(batch(4, 0), loss).unwrap().grad_norm;
    let repeated: Box<dyn ShardingStrategy> = Box::new(Hsdp::new(Full::default(), 2));
    let on_line = strategies().into_iter().map(|(name, strategy)| (&line, name, strategy));
    for (mesh, name, strategy) in on_line.chain([(&grid, "replicas", repeated)]) {
        let mut model = sharded(mesh).strategy(strategy).build(adam).unwrap();
        let found = model.step(batch(4, 0), loss).unwrap().grad_norm;
        assert!((found / expected - 1.0).abs() < 1e-9, "{name}: {found} for {expected}");
    }
}
