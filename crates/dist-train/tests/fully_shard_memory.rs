//! What a step of a sharded model holds at most, counted by the allocator; alone in its process, so
//! that nothing else counts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "models are built of builders by value")]

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer as _, ParamsAdamW, VarBuilder, linear_no_bias};
use dist_train::{AdamW, FullyShard, Group, Keep, Units};
use fsdp_plan::cost::CostModel;
use peak_alloc::PeakAlloc;
use pmap_mesh::{DeviceMesh, Replica};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Guards the counter, which counts for all threads of the test program.
static COUNTING: Mutex<()> = Mutex::new(());

const WIDTH: usize = 128;
const ROWS: usize = 16;

struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let up = linear_no_bias(WIDTH, 4 * WIDTH, vb.pp("up"))?;
        Ok(Self { up, down: linear_no_bias(4 * WIDTH, WIDTH, vb.pp("down"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.relu()?)?
    }
}

fn build(blocks: usize) -> impl Fn(VarBuilder<'_>) -> Result<()> {
    move |vb| (0..blocks).try_for_each(|block| Block::new(vb.pp(block)).map(drop))
}

fn loss(blocks: usize) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> {
    move |_, model, mut x| {
        for block in 0..blocks {
            x = model.unit(&block.to_string(), &x, |vb, x| Block::new(vb)?.forward(x))?;
        }
        x.sqr()?.mean_all()
    }
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW::default())
}

const BLOCKS: usize = 12;
const BLOCK_BYTES: usize = 8 * WIDTH * WIDTH * 4;
/// What a slot has of a value between two blocks.
const VALUE_BYTES: usize = ROWS * WIDTH * 4;

/// The most that a model and its steps hold, in bytes.
fn peak<M>(make: impl Fn() -> M, step: impl Fn(&mut M)) -> usize {
    // What threads keep for later matrix products is no model's.
    let mut first = make();
    step(&mut first);
    drop(first);
    let before = MEMORY.current_usage();
    let mut model = make();
    step(&mut model);
    MEMORY.reset_peak_usage();
    (0..2).for_each(|_| step(&mut model));
    MEMORY.peak_usage() - before
}

fn batch(slots: usize) -> Tensor {
    Tensor::ones((slots * ROWS, WIDTH), DType::F32, &Device::Cpu).unwrap()
}

fn sharded(slots: usize, blocks: usize, keep: Keep) -> usize {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let x = batch(slots);
    let make = || FullyShard::builder(&mesh, build(blocks)).keep(keep).build(adam).unwrap();
    peak(make, |model| {
        model.step(x.clone(), loss(blocks)).unwrap();
    })
}

/// What the plan says that all ranks hold together, at the worst moment of each.
fn planned(slots: usize, blocks: usize) -> usize {
    let mesh = DeviceMesh::cpu(slots).unwrap();
    let model = FullyShard::builder(&mesh, build(blocks)).build(adam).unwrap();
    let cost = model.plan().cost(&CostModel::default().with_prefetch(0)).unwrap();
    cost.ranks.iter().map(|rank| usize::try_from(rank.peak_bytes()).unwrap()).sum()
}

#[test]
fn a_step_holds_what_the_plan_says_and_one_unit_s_work() {
    let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    for slots in [1, 2, 4] {
        let found = sharded(slots, BLOCKS, Keep::Inputs);
        let plan = planned(slots, BLOCKS);
        // The values between blocks, those within one, and of one of its two weights a gradient of
        // zeros and one that is added to it.
        let mut work = slots * (BLOCKS * VALUE_BYTES + 16 * VALUE_BYTES + BLOCK_BYTES);
        if slots == 1 {
            // A plan of one rank has nothing gathered and nothing to reduce: here it is all the same.
            work += 2 * BLOCK_BYTES;
        }
        assert!(found <= plan + work, "{slots} slots: {found} bytes, {plan} planned and {work}");
    }
}

/// What a block adds besides: the nodes of the graph, names, and where its parts lie.
const BOOKKEEPING_BYTES: usize = 12 << 10;

#[test]
fn a_model_of_more_blocks_holds_more_of_its_parameters_and_inputs_alone() {
    let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    for slots in [1, 3] {
        let [few, many] = [8, 24].map(|blocks| sharded(slots, blocks, Keep::Inputs));
        let added = (many - few) / 16;
        let expected = 4 * BLOCK_BYTES + slots * VALUE_BYTES;
        let most = expected + slots * BOOKKEEPING_BYTES;
        assert!(added <= most, "{slots} slots: {added} bytes for a block, {expected} expected");
    }
}
