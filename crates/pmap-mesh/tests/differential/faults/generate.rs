//! Random scenarios.

use candle_core::DType;

use crate::differential::{
    faults::{Call, Fault, Kind, Scenario, Step},
    grid::Grid,
    op::Op,
    random::Random,
};

const MAX_STEPS: usize = 6;
/// A number that every group size divides.
const ROWS: usize = 60;
/// One scenario in this many has a slot that arrives too late, so that the call ends at a deadline.
const LATE_ONE_IN: usize = 40;

pub(crate) fn scenario(random: &mut Random) -> Scenario {
    let grid = Grid::random(random);
    let steps = steps(random, &grid);
    let mut faults: Vec<Fault> =
        (0..random.between(1, 2)).map(|_| fault(random, &grid, &steps)).collect();
    // A single slot has no peers that wait for it.
    if grid.slots() > 1 && random.one_in(LATE_ONE_IN) {
        faults[0].kind = Kind::Late;
    }
    let stubborn = (0..grid.slots()).filter(|_| random.one_in(3)).collect();
    Scenario { grid, steps, faults, stubborn }
}

/// Returns calls, mixed with pending sums.
fn steps(random: &mut Random, grid: &Grid) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut started = Vec::new();
    for index in 0..random.between(1, MAX_STEPS) {
        let step = match random.less_than(6) {
            0 | 1 => {
                started.push(index);
                Step::Start(grid.some(random))
            }
            2 if !started.is_empty() => {
                Step::Wait(started.swap_remove(random.less_than(started.len())))
            }
            _ => Step::Call(call(random, grid)),
        };
        steps.push(step);
    }
    steps.extend(random.shuffled(started).into_iter().map(Step::Wait));
    steps
}

fn call(random: &mut Random, grid: &Grid) -> Call {
    let axes = if random.one_in(2) { grid.all() } else { grid.some(random) };
    let op = loop {
        let op = Op::random(random, 1, grid.size(&axes));
        // It must not match the others' calls.
        if op != Op::Pvary {
            break op;
        }
    };
    let shape = random.pick(&[vec![ROWS], vec![ROWS], vec![ROWS, 100]]);
    // A negative index could refer to a dimension that need not be divisible.
    let op = match op {
        Op::AllGather { .. } => Op::AllGather { dim: 0 },
        Op::PsumScatter { .. } => Op::PsumScatter { dim: 0 },
        Op::AllToAll { .. } => Op::AllToAll { split: 0, concat: 0 },
        op => op,
    };
    Call { op, axes, dtype: random.pick(&[DType::F32, DType::F64]), shape }
}

fn fault(random: &mut Random, grid: &Grid, steps: &[Step]) -> Fault {
    let index = random.less_than(steps.len());
    let kind = match &steps[index] {
        Step::Call(call) => instead_of_call(random, grid, call),
        Step::Start(_) | Step::Wait(_) => instead_of_start_or_wait(random, grid),
    };
    Fault { slot: random.less_than(grid.slots()), index, kind }
}

fn instead_of_call(random: &mut Random, grid: &Grid, call: &Call) -> Kind {
    match random.less_than(16) {
        0 => Kind::Error,
        1 => Kind::Panic,
        2 => Kind::Return,
        3 => Kind::Skip,
        4 => Kind::Twice,
        5 => Kind::NoSuchDim,
        6 => Kind::NoSuchAxis,
        7 => Kind::NoSuchRoot,
        8 => Kind::Nested,
        9 => Kind::WrongThread,
        10 | 11 => Kind::TwoThreads,
        _ => Kind::Other(other(random, grid, call)),
    }
}

fn instead_of_start_or_wait(random: &mut Random, grid: &Grid) -> Kind {
    match random.less_than(8) {
        0 => Kind::Error,
        1 => Kind::Panic,
        2 => Kind::Return,
        3 | 4 => Kind::Skip,
        5 => Kind::Twice,
        _ => Kind::Other(call(random, grid)),
    }
}

/// Returns a call that differs from this one in one respect.
fn other(random: &mut Random, grid: &Grid, call: &Call) -> Call {
    let any = self::call(random, grid);
    let size = grid.size(&call.axes);
    match random.less_than(5) {
        // A root or pairs may be out of range in another group.
        0 => Call { op: any.op, axes: any.axes, ..call.clone() },
        // Only the root or the pairs differ.
        4 => {
            let op = match &call.op {
                Op::Broadcast { root } => Op::Broadcast { root: (root + 1) % size },
                Op::Ppermute { pairs } => {
                    Op::Ppermute { pairs: pairs.iter().skip(1).copied().collect() }
                }
                op => op.clone(),
            };
            Call { op, ..call.clone() }
        }
        1 => Call { shape: vec![ROWS, 2], ..call.clone() },
        2 => Call { dtype: any.dtype, ..call.clone() },
        _ => any,
    }
}
