//! Memory grows with the number of blocks only by parameters and the inputs of units.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear_no_bias};
use dist_train::{AdamW, DistributedModel, FullyShard, Keep, Units};
use pmap_mesh::{DeviceMesh, Replica};

use crate::{MemoryUse, adam, alone, measure};

const WIDTH: usize = 128;
const ROWS: usize = 16;

struct MlpBlock {
    up: Linear,
    down: Linear,
}

impl MlpBlock {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let up = linear_no_bias(WIDTH, 4 * WIDTH, vb.pp("up"))?;
        Ok(Self { up, down: linear_no_bias(4 * WIDTH, WIDTH, vb.pp("down"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.relu()?)?
    }
}

fn build(blocks: usize) -> impl Fn(VarBuilder<'_>) -> Result<()> {
    move |vb| (0..blocks).try_for_each(|block| MlpBlock::new(vb.pp(block)).map(drop))
}

fn loss(blocks: usize) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> {
    move |_, model, mut x| {
        for block in 0..blocks {
            x = model.unit(&block.to_string(), &x, |vb, x| MlpBlock::new(vb)?.forward(x))?;
        }
        x.sqr()?.mean_all()
    }
}

const BLOCK_BYTES: usize = 8 * WIDTH * WIDTH * 4;
/// The size of a slot's value between two blocks.
const VALUE_BYTES: usize = ROWS * WIDTH * 4;

fn batch(slots: usize) -> Tensor {
    Tensor::ones((slots * ROWS, WIDTH), DType::F32, &Device::Cpu).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum UpdateTime {
    AtTheEnd,
    InBackward,
}

fn model(
    mesh: &DeviceMesh,
    blocks: usize,
    update_time: UpdateTime,
) -> DistributedModel<Units, AdamW> {
    let builder = FullyShard::builder(mesh, build(blocks));
    match update_time {
        UpdateTime::AtTheEnd => builder.build(adam).unwrap(),
        UpdateTime::InBackward => builder.optimizer_in_backward().build(adam).unwrap(),
    }
}

/// Returns the lowest peak of some steps.
fn at_most(slots: usize, blocks: usize, update_time: UpdateTime) -> usize {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let x = batch(slots);
    let step = |model: &mut DistributedModel<Units, AdamW>| {
        model.step(x.clone(), loss(blocks)).unwrap();
    };
    measure(|| model(&mesh, blocks, update_time), step).peaks[0]
}

/// Other memory of a block: graph nodes, names and locations of shards.
const BOOKKEEPING_BYTES: usize = 12 << 10;

#[test]
fn more_blocks_add_parameters_and_inputs() {
    let _alone = alone();
    // The parameter, two moments, and the gradient if optimizers run at the end of the step.
    for (update_time, copies) in [(UpdateTime::AtTheEnd, 4), (UpdateTime::InBackward, 3)] {
        for slots in [1, 3] {
            let [few, many] = [8, 24].map(|blocks| at_most(slots, blocks, update_time));
            let added = (many - few) / 16;
            let expected = copies * BLOCK_BYTES + slots * VALUE_BYTES;
            // In either model, the number of slots with a block's gradients at the same time varies.
            let by_chance = (slots - 1) * BLOCK_BYTES / 16;
            let most = expected + slots * BOOKKEEPING_BYTES + by_chance;
            let what = format!("{update_time:?}, {slots} slots: {added} bytes for a block");
            assert!(added <= most, "{what}, {expected} expected");
        }
    }
}

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
