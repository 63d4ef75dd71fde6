//! Checkpoints across slot counts, plans and layouts.

use candle_nn::{VarBuilder, linear};
use dist_train::{AdamW, DistributedModel, Error, FullyShard, ParameterError, UnitRules, Units};
use fsdp_plan::strategy::{Full, Layout};
use pmap_mesh::DeviceMesh;

use super::model::{N_BLOCKS, adam, batch, build, data_parallel, loss, parameters, sharded};
use crate::support::saved;

/// A row count that two and three slots divide.
const ROWS: usize = 6;

fn stepped(model: &mut DistributedModel<Units, AdamW>, steps: std::ops::Range<usize>) -> Vec<u64> {
    steps.map(|step| model.step(batch(ROWS, step), loss).unwrap().loss.to_bits()).collect()
}

#[test]
fn checkpoints_load_under_every_plan() {
    let (two, three) = (DeviceMesh::cpu(2).unwrap(), DeviceMesh::cpu(3).unwrap());
    // With an optimizer for each unit, whose state is written by parameter.
    let mut first = sharded(&two).optimizer_in_backward().build(adam).unwrap();
    stepped(&mut first, 0..3);
    let written = parameters(&first);
    let checkpoint = saved(&two, &first);
    let expected = stepped(&mut first, 3..6);

    // The same number of slots resumes bitwise, even under another plan.
    let blocks = || Full::new(Layout::BlockRagged { block: 4 });
    let mut again = sharded(&two).strategy(blocks()).build(adam).unwrap();
    again.load(&checkpoint).unwrap();
    assert_eq!(parameters(&again), written);
    assert_eq!(again.steps(), 3);
    assert_eq!(stepped(&mut again, 3..6), expected);
    assert_eq!(parameters(&again), parameters(&first));

    // Through three slots and data parallel, values are unchanged.
    let mut on_three = sharded(&three).strategy(blocks()).build(adam).unwrap();
    on_three.load(&checkpoint).unwrap();
    assert_eq!(parameters(&on_three), written);
    let by_three = saved(&three, &on_three);
    let mut whole = data_parallel(&two).build(adam).unwrap();
    whole.load(&by_three).unwrap();
    let by_whole = saved(&two, &whole);
    let mut back = sharded(&two).optimizer_in_backward().build(adam).unwrap();
    back.load(&by_whole).unwrap();
    assert_eq!(stepped(&mut back, 3..6), expected);
    assert_eq!(parameters(&back), parameters(&first));

    let mut whole = data_parallel(&two).build(adam).unwrap();
    whole.load(&by_three).unwrap();
    assert_eq!(stepped(&mut whole, 3..6), expected);
}

/// Checkpoints store names and shapes of parameters, but no units.
#[test]
fn checkpoints_load_into_other_units() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = sharded(&mesh).build(adam).unwrap();
    stepped(&mut model, 0..2);
    let checkpoint = saved(&mesh, &model);
    let rules = UnitRules::new().unit("ends", ["tokens", "positions", "norm", "out"]);
    let mut other = FullyShard::builder(&mesh, build).by_units(rules).build(adam).unwrap();
    assert_eq!(other.plan().unwrap().units().len(), N_BLOCKS + 1);
    other.load(&checkpoint).unwrap();
    assert_eq!(parameters(&other), parameters(&model));

    // Checkpoints of other models are rejected.
    let small = |vb: VarBuilder<'_>| linear(3, 3, vb.pp("blocks.0.up")).map(drop);
    let mut small = FullyShard::builder(&mesh, small).build(adam).unwrap();
    let refused = small.load(&checkpoint);
    assert!(matches!(refused, Err(Error::Parameter(ParameterError::Unknown { .. }))));
}
