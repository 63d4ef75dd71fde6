//! A step sends what its plan's cost says, counted by the engine below.

use std::iter;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{FullyShard, Keep, Units};
use fsdp_plan::{
    CostModel,
    strategy::{Full, Layout},
};
use pmap_mesh::{DeviceMesh, Replica, Tally, Traffic};

use crate::model::adam;

const WIDTH: usize = 12;
const BLOCKS: usize = 4;
/// Weights and biases.
const PARAMETERS: u64 = 2 * BLOCKS as u64;

fn layers(vb: VarBuilder<'_>) -> Result<()> {
    (0..BLOCKS).try_for_each(|block| linear(WIDTH, WIDTH, vb.pp(block)).map(drop))
}

fn loss(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let enter = |x: Tensor, block: usize| {
        model.unit(&block.to_string(), &x, |vb, x| linear(WIDTH, WIDTH, vb)?.forward(x)?.tanh())
    };
    (0..BLOCKS).try_fold(x, enter)?.sqr()?.mean_all()
}

/// What the slots tell each other beside parameters and gradients in a step: the loss with its
/// weight, which parameters have a gradient, and their squares.
const SCALARS: Tally = Tally { calls: 3, bytes: 3 * 8 + 4 + PARAMETERS * 8 };

fn difference(after: Vec<Traffic>, before: Vec<Traffic>) -> Vec<Traffic> {
    iter::zip(after, before).map(|(after, before)| after - before).collect()
}

#[test]
fn a_step_sends_what_the_plan_says() {
    for slots in [2, 3, 4] {
        for layout in [Layout::Dim0, Layout::RowRagged { rows: 1 }] {
            for keep in [Keep::Inputs, Keep::Gathered] {
                let mesh = DeviceMesh::cpu(slots).unwrap();
                let builder = FullyShard::builder(&mesh, layers).keep_unit("{0,2}", keep);
                let mut model = builder.strategy(Full::new(layout)).build(adam).unwrap();
                let x = Tensor::ones((2 * slots, WIDTH), DType::F32, &Device::Cpu).unwrap();
                let before = mesh.traffic();
                model.step(x.clone(), loss).unwrap();
                let step = difference(mesh.traffic(), before);
                let planned = model.plan().cost(&CostModel::default()).unwrap().collectives;
                let (gather, reduce) = (planned.all_gather, planned.reduce_scatter);
                let mut gathered_bytes = 0;
                for slot in &step {
                    assert_eq!(slot.all_gather.calls - SCALARS.calls, gather.count);
                    gathered_bytes += slot.all_gather.bytes - SCALARS.bytes;
                    // Each hands over whole gradients, and its part of parameters.
                    let expected = Tally { calls: reduce.count, bytes: reduce.bytes };
                    assert_eq!(slot.reduce_scatter, expected);
                    let counted = [slot.all_gather, slot.reduce_scatter];
                    let others = Traffic {
                        all_gather: counted[0],
                        reduce_scatter: counted[1],
                        ..Traffic::default()
                    };
                    assert_eq!(*slot, others, "nothing else is sent");
                }
                assert_eq!(gathered_bytes, gather.bytes, "{slots} slots, {layout:?}, {keep:?}");

                let before = mesh.traffic();
                model.evaluate(x, loss).unwrap();
                for slot in difference(mesh.traffic(), before) {
                    // The loss with its weight, and every unit once.
                    assert_eq!(slot.all_gather.calls, 1 + BLOCKS as u64);
                    assert_eq!(slot.reduce_scatter, Tally::default());
                }
            }
        }
    }
}
