//! The number of units that are gathered at the same time.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use dist_train::{AdamW, DistributedModel, FullyShard, Keep, Units};
use pmap_mesh::{DeviceMesh, Replica};

use crate::{MemoryUse, adam, alone, measure};

/// The size of a frozen matrix, which has no gradient or moments, so a step only adds gathered
/// copies. (There is no matrix product, because candle computes gradients for both of its sides.)
const FROZEN_BYTES: usize = 512 * 512 * 4;

fn frozen(vb: VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    let fixed = vb.get((512, 512), "fixed")?.mean(0)?.to_dtype(x.dtype())?;
    x.broadcast_mul(&fixed)?.broadcast_add(&vb.get(512, "bias")?.to_dtype(x.dtype())?)
}

/// Returns the maximum number of units gathered at the same time.
fn gathered_at_once(slots: usize, keep: Keep, prefetch: usize, dtype: DType) -> usize {
    let blocks = 6;
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let build = |vb: VarBuilder<'_>| {
        (0..blocks).try_for_each(|block| {
            vb.pp(block).get((512, 512), "fixed")?;
            vb.pp(block).get(512, "bias").map(drop)
        })
    };
    let make = || {
        let builder = FullyShard::builder(&mesh, build).freeze(["**.fixed"]).keep(keep);
        let builder = builder.prefetch(prefetch).mixed_precision(dtype, DType::F32);
        builder.build(adam).unwrap()
    };
    let loss = |_: &Replica, model: &Units, mut x: Tensor| {
        for block in 0..blocks {
            x = model.unit(&block.to_string(), &x, frozen)?;
        }
        x.sqr()?.mean_all()
    };
    let x = Tensor::ones((slots, 512), DType::F32, &Device::Cpu).unwrap();
    let step = |model: &mut DistributedModel<Units, AdamW>| {
        model.step(x.clone(), loss).unwrap();
    };
    let MemoryUse { at_rest, peaks: [at_most, ..] } = measure(make, step);
    // All other memory is smaller than one matrix.
    (at_most - at_rest) / FROZEN_BYTES
}

#[test]
fn keep_and_prefetch_bound_gathered_units() {
    let _alone = alone();
    let slots = 2;
    assert_eq!(gathered_at_once(slots, Keep::Inputs, 0, DType::F32), 1, "{slots} slots");
    assert_eq!(gathered_at_once(slots, Keep::Graph, 0, DType::F32), 1, "{slots} slots");
    assert_eq!(gathered_at_once(slots, Keep::Gathered, 0, DType::F32), 6, "{slots} slots");
    // Six bf16 units take the memory of three, plus a part of one in flight.
    assert_eq!(gathered_at_once(slots, Keep::Gathered, 0, DType::BF16), 3, "{slots} slots");
    for prefetch in [1, 2] {
        for keep in [Keep::Inputs, Keep::Graph] {
            let found = gathered_at_once(slots, keep, prefetch, DType::F32);
            assert!(found <= prefetch + 1, "{slots} slots, {keep:?}: {found} for {prefetch}");
        }
    }
}
