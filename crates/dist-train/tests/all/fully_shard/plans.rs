//! Sharding strategies and replica groups.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use candle_core::{Device, Result, Tensor};
use candle_nn::{Optimizer, ParamsAdamW};
use core_types::WorldSize;
use dist_train::{AdamW, Declared, Error};
use fsdp_plan::strategy::{Full, Hsdp, ShardingStrategy};
use pmap_mesh::DeviceMesh;

use super::model::{
    adam, batch, data_parallel, loss, parameters, sharded, strategies, train, train_plain,
};
use crate::support::bits;

const STEPS: usize = 6;

/// Gradients are summed within each group, then over the groups.
#[test]
fn replica_groups_agree_to_rounding() {
    let expected = train_plain(4, 8, STEPS);
    let trained = |replicas, shards| {
        let builder = DeviceMesh::builder().axis("replicas", replicas).axis("shards", shards);
        let mesh = builder.cpu().unwrap();
        let strategy = Hsdp::new(Full::default(), replicas as u64);
        let model = sharded(&mesh).strategy(strategy).build(adam).unwrap();
        assert_eq!(model.plan().unwrap().shard_group(), WorldSize::new(shards as u64).unwrap());
        train(model, 8, STEPS)
    };
    assert_eq!(trained(4, 1), expected);
    assert_eq!(trained(1, 4), expected);
    let pairs = trained(2, 2);
    assert_eq!(pairs, trained(2, 2), "runs have the same bits");
    for (found, expected) in pairs.losses.iter().zip(&expected.losses) {
        let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }
}

#[test]
fn diverged_groups_are_found() {
    let mesh = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let build = |last_decays: bool| {
        let made = AtomicUsize::new(0);
        let builder = sharded(&mesh).strategy(Hsdp::new(Full::default(), 2));
        let model = builder.build(|group| {
            let is_last = made.fetch_add(1, Ordering::Relaxed) == 3;
            let weight_decay = if is_last && last_decays { 0.9 } else { 0.1 };
            AdamW::new(group.vars, ParamsAdamW { lr: 0.01, weight_decay, ..Default::default() })
        });
        model.unwrap()
    };
    let mut alike = build(false);
    alike.step(batch(8, 0), loss).unwrap();
    alike.check_in_sync().unwrap();
    let mut other = build(true);
    other.check_in_sync().unwrap();
    other.step(batch(8, 0), loss).unwrap();
    let found = other.check_in_sync();
    assert!(matches!(found, Err(Error::Diverged { replica: 3, .. })), "{found:?}");
}

#[test]
fn norm_counts_replicated_shards_once() {
    let line = DeviceMesh::cpu(4).unwrap();
    let grid = DeviceMesh::builder().axis("replicas", 2).axis("shards", 2).cpu().unwrap();
    let mut whole = data_parallel(&line).build(adam).unwrap();
    let expected = whole.step(batch(4, 0), loss).unwrap().grad_norm;
    let repeated: Box<dyn ShardingStrategy> = Box::new(Hsdp::new(Full::default(), 2));
    let on_line = strategies().into_iter().map(|(name, strategy)| (&line, name, strategy, 1e-9));
    // Groups sum in a different order.
    for (mesh, name, strategy, off) in on_line.chain([(&grid, "replicas", repeated, 1e-6)]) {
        let mut model = sharded(mesh).strategy(strategy).build(adam).unwrap();
        let found = model.step(batch(4, 0), loss).unwrap().grad_norm;
        assert!((found / expected - 1.0).abs() < off, "{name}: {found} for {expected}");
    }
}

/// Returns numbers that vary by item and parameter.
fn numbered(declared: &Declared, items: Range<usize>) -> Result<Tensor> {
    let first = declared.name.len() as f32;
    let values: Vec<f32> = items.map(|item| (first + item as f32).sin()).collect();
    Tensor::new(values, &Device::Cpu)
}

#[test]
fn initial_values_equal_the_whole_model() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let whole = data_parallel(&mesh).init_with(numbered).build(adam).unwrap();
    let whole = whole.parameters().unwrap().into_iter();
    let expected = whole.map(|(name, value)| (name, bits(&value))).collect();
    for (name, strategy) in strategies() {
        let builder = sharded(&mesh).strategy(strategy).init_with(numbered);
        assert_eq!(parameters(&builder.build(adam).unwrap()), expected, "{name}");
    }
}
