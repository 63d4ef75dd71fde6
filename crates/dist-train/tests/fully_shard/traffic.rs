//! A step sends what its plan's cost says, counted by the engine below.

use std::iter;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{FullyShard, Keep, Units};
use fsdp_plan::{
    cost::CostModel,
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
const SCALARS: Tally = Tally { calls: 3, bytes: 4 * 8 + 4 + PARAMETERS * 8 };

fn difference(after: Vec<Traffic>, before: Vec<Traffic>) -> Vec<Traffic> {
    iter::zip(after, before).map(|(after, before)| after - before).collect()
}

/// The parameters of a unit.
const UNIT_BYTES: u64 = ((WIDTH * WIDTH + WIDTH) * 4) as u64;

/// A step with two of four units kept gathered, or none, cut into equal parts or not.
#[test]
fn a_step_sends_what_the_plan_says() {
    for slots in [2, 3, 4] {
        for layout in [Layout::Dim0, Layout::BlockRagged { block: 8 }] {
            for (keep, gathered) in [(Keep::Inputs, 8), (Keep::Gathered, 6)] {
                let mesh = DeviceMesh::cpu(slots).unwrap();
                let builder = FullyShard::builder(&mesh, layers).keep_unit("{0,2}", keep);
                let mut model = builder.strategy(Full::new(layout)).build(adam).unwrap();
                let planned = model.plan().cost(&CostModel::default()).unwrap().collectives;
                assert_eq!((planned.all_gather.count, planned.reduce_scatter.count), (gathered, 4));
                let gathered_bytes = gathered * UNIT_BYTES;
                let reduced = Tally { calls: 4, bytes: 4 * UNIT_BYTES };
                if layout == Layout::Dim0 {
                    // Without padding.
                    assert_eq!(planned.all_gather.bytes, gathered_bytes);
                    assert_eq!(planned.reduce_scatter.bytes, reduced.bytes);
                }
                let x = Tensor::ones((2 * slots, WIDTH), DType::F32, &Device::Cpu).unwrap();
                let before = mesh.traffic();
                model.step(x.clone(), loss).unwrap();
                let step = difference(mesh.traffic(), before);
                check_step(&step, gathered, gathered_bytes, reduced);

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

fn check_step(step: &[Traffic], gathered: u64, gathered_bytes: u64, reduced: Tally) {
    let mut parts = 0;
    for slot in step {
        assert_eq!(slot.all_gather.calls, gathered + SCALARS.calls);
        // Each hands over its parts of parameters, and whole gradients.
        parts += slot.all_gather.bytes - SCALARS.bytes;
        let Traffic { all_gather, .. } = *slot;
        let nothing_else = Traffic { all_gather, reduce_scatter: reduced, ..Traffic::default() };
        assert_eq!(*slot, nothing_else);
    }
    assert_eq!(parts, gathered_bytes);
}
