//! Random scenarios.

use candle_core::DType;

use crate::differential::{
    faults::{CollectiveCall, FaultKind, Scenario, ScenarioStep, SlotFault},
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
    let mut faults: Vec<SlotFault> =
        (0..random.between(1, 2)).map(|_| fault(random, &grid, &steps)).collect();
    // A single slot has no peers that wait for it.
    if grid.slots() > 1 && random.one_in(LATE_ONE_IN) {
        faults[0].kind = FaultKind::Late;
    }
    let stubborn = (0..grid.slots()).filter(|_| random.one_in(3)).collect();
    Scenario { grid, steps, faults, stubborn }
}

/// Returns calls, mixed with pending sums.
fn steps(random: &mut Random, grid: &Grid) -> Vec<ScenarioStep> {
    let mut steps = Vec::new();
    let mut started = Vec::new();
    for index in 0..random.between(1, MAX_STEPS) {
        let step = match random.less_than(6) {
            0 | 1 => {
                started.push(index);
                ScenarioStep::Start(grid.some(random))
            }
            2 if !started.is_empty() => {
                ScenarioStep::Wait(started.swap_remove(random.less_than(started.len())))
            }
            _ => ScenarioStep::Call(call(random, grid)),
        };
        steps.push(step);
    }
    steps.extend(random.shuffled(started).into_iter().map(ScenarioStep::Wait));
    steps
}

fn call(random: &mut Random, grid: &Grid) -> CollectiveCall {
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
    CollectiveCall { op, axes, dtype: random.pick(&[DType::F32, DType::F64]), shape }
}

fn fault(random: &mut Random, grid: &Grid, steps: &[ScenarioStep]) -> SlotFault {
    let index = random.less_than(steps.len());
    let kind = match &steps[index] {
        ScenarioStep::Call(call) => instead_of_call(random, grid, call),
        ScenarioStep::Start(_) | ScenarioStep::Wait(_) => instead_of_start_or_wait(random, grid),
    };
    SlotFault { slot: random.less_than(grid.slots()), index, kind }
}

fn instead_of_call(random: &mut Random, grid: &Grid, call: &CollectiveCall) -> FaultKind {
    match random.less_than(16) {
        0 => FaultKind::Error,
        1 => FaultKind::Panic,
        2 => FaultKind::Return,
        3 => FaultKind::Skip,
        4 => FaultKind::Twice,
        5 => FaultKind::NoSuchDim,
        6 => FaultKind::NoSuchAxis,
        7 => FaultKind::NoSuchRoot,
        8 => FaultKind::Nested,
        9 => FaultKind::WrongThread,
        10 | 11 => FaultKind::TwoThreads,
        _ => FaultKind::Other(other(random, grid, call)),
    }
}

fn instead_of_start_or_wait(random: &mut Random, grid: &Grid) -> FaultKind {
    match random.less_than(8) {
        0 => FaultKind::Error,
        1 => FaultKind::Panic,
        2 => FaultKind::Return,
        3 | 4 => FaultKind::Skip,
        5 => FaultKind::Twice,
        _ => FaultKind::Other(call(random, grid)),
    }
}

/// Returns a call that differs from this one in one respect.
fn other(random: &mut Random, grid: &Grid, call: &CollectiveCall) -> CollectiveCall {
    let any = self::call(random, grid);
    let size = grid.size(&call.axes);
    match random.less_than(5) {
        // A root or pairs may be out of range in another group.
        0 => CollectiveCall { op: any.op, axes: any.axes, ..call.clone() },
        // Only the root or the pairs differ.
        4 => {
            let op = match &call.op {
                Op::Broadcast { root } => Op::Broadcast { root: (root + 1) % size },
                Op::Ppermute { pairs } => {
                    Op::Ppermute { pairs: pairs.iter().skip(1).copied().collect() }
                }
                op => op.clone(),
            };
            CollectiveCall { op, ..call.clone() }
        }
        1 => CollectiveCall { shape: vec![ROWS, 2], ..call.clone() },
        2 => CollectiveCall { dtype: any.dtype, ..call.clone() },
        _ => any,
    }
}
