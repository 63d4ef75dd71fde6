//! Random programs. All of their steps are possible, but the specs of arguments and results may be
//! wrong.

use std::mem;

use candle_core::DType;
use pmap_mesh::Uneven;

use crate::differential::{
    bits::REDUCIBLE,
    grid::{Axes, Grid},
    layout::Layout,
    op::Op,
    pending::{AsyncCall, AsyncCallKind, LARGE_BYTES, TensorRuns},
    program::{ArrayRecipe, CallRoute, NumberKind, Program, ProgramArgument, ProgramStep},
    random::Random,
    reference::ProgramState,
    spec::{self, Spec},
};

/// The largest number of steps of a program.
const MAX_STEPS: usize = 12;
/// The largest number of items in all values of a program, over all slots. The reference computes
/// the items one by one.
const MAX_ITEMS: usize = 120_000;
/// One tensor in this many is large.
const LARGE_ONE_IN: usize = 100;
/// One list of runs in this many has a large tensor.
const LARGE_RUNS_ONE_IN: usize = 8;
/// The number of items in one block of a sum.
const BLOCK_ITEMS: usize = 8192;

/// Returns a random program on a mesh of `slots` slots, or of any size.
pub(crate) fn program(random: &mut Random, slots: Option<usize>) -> Program {
    let grid = match slots {
        Some(slots) => Grid::per_slot(slots, random),
        None => Grid::random(random),
    };
    let uneven = random.pick(&[Uneven::Refuse, Uneven::Pad, Uneven::Balanced]);
    let mut routes = vec![CallRoute::Call, CallRoute::CallInto];
    if uneven == Uneven::Refuse {
        routes.push(CallRoute::Resident);
    }
    let arguments = (0..random.less_than(4)).map(|_| argument(random, &grid)).collect();
    let route = random.pick(&routes);
    let mut program =
        Program { grid, uneven, route, arguments, steps: Vec::new(), results: Vec::new() };
    if let Ok(state) = ProgramState::begin(&program) {
        ProgramBuilder { random, state, items: 0, started: Vec::new(), program: &mut program }
            .build();
    }
    program
}

fn argument(random: &mut Random, grid: &Grid) -> ProgramArgument {
    let numbers = numbers(random, grid.slots());
    let spec = spec::random_for_argument(random, grid, numbers.shape.len());
    ProgramArgument { layout: random.pick(&Layout::ALL), numbers, spec }
}

/// Returns numbers of any dtype, in a shape that is often divisible by `slots`.
fn numbers(random: &mut Random, slots: usize) -> ArrayRecipe {
    let mut shape: Vec<usize> = (0..random.less_than(4)).map(|_| size(random, slots)).collect();
    let dtype = if random.one_in(20) { DType::F8E4M3 } else { random.pick(&REDUCIBLE) };
    if random.one_in(LARGE_ONE_IN) {
        let items = random.pick(&[LARGE_BYTES / dtype.size_in_bytes(), BLOCK_ITEMS]);
        shape = vec![items - 1 + random.less_than(3)];
        if random.one_in(3) {
            shape = vec![items / slots + 1, slots];
        }
    }
    let kind = random.pick(&[
        NumberKind::Ordinary,
        NumberKind::Ordinary,
        NumberKind::Extreme,
        NumberKind::Repeated,
    ]);
    ArrayRecipe { dtype, shape, kind, seed: random.word() }
}

fn size(random: &mut Random, slots: usize) -> usize {
    match random.less_than(12) {
        0 => 0,
        1..=4 => random.between(1, 5),
        5 => 2 * slots,
        6 => random.between(1, 3) * slots + random.less_than(slots),
        _ => slots,
    }
}

/// A program under construction, with its values so far.
struct ProgramBuilder<'a> {
    random: &'a mut Random,
    state: ProgramState,
    /// The number of items in the values of the steps so far.
    items: usize,
    /// The pending collectives.
    started: Vec<AsyncCall>,
    program: &'a mut Program,
}

impl ProgramBuilder<'_> {
    fn build(mut self) {
        for _ in 0..self.random.between(1, MAX_STEPS) {
            self.add_step();
        }
        self.wait();
        for _ in 0..self.random.less_than(4) {
            let value = self.random.less_than(self.state.values.len());
            if self.is_single(value) {
                let spec = self.result(value);
                self.program.results.push((value, spec));
            }
        }
    }

    /// Adds a step if it is possible and its value is not too large.
    fn add(&mut self, step: ProgramStep) -> bool {
        let Some(value) = self.state.value(&step) else { return false };
        let items: usize = value.iter().flatten().map(|array| array.items.len()).sum();
        if self.items + items > MAX_ITEMS {
            return false;
        }
        self.items += items;
        self.state.values.push(value);
        self.program.steps.push(step);
        true
    }

    /// Adds a step. An impossible collective is tried again a few times.
    fn add_step(&mut self) {
        let kind = if self.state.values.is_empty() { 0 } else { self.random.less_than(21) };
        let step = match kind {
            0..=2 => self.own(),
            3 => ProgramStep::Laid { value: self.single(), layout: self.random.pick(&Layout::ALL) },
            4 => ProgramStep::Place { axes: self.state.grid.some(self.random) },
            5 => ProgramStep::Rows,
            6 => self.sums(),
            7 => ProgramStep::Blocking(self.async_call()),
            8..=10 => return self.start(),
            11 => return self.wait(),
            _ => {
                for _ in 0..7 {
                    let step = self.collective();
                    if self.add(step) {
                        return;
                    }
                }
                return;
            }
        };
        self.add(step);
    }

    fn own(&mut self) -> ProgramStep {
        let numbers = numbers(self.random, self.state.grid.slots());
        let rank = numbers.shape.len();
        let free = (rank > 0 && self.random.one_in(4)).then(|| self.random.less_than(rank));
        ProgramStep::Own { numbers, free, layout: self.random.pick(&Layout::ALL) }
    }

    fn collective(&mut self) -> ProgramStep {
        let value = self.single();
        let axes: Axes = self.state.grid.some(self.random);
        let rank = self.state.values[value][0][0].shape.len();
        let op = Op::random(self.random, rank, self.state.grid.size(&axes));
        ProgramStep::Collective { op, value, axes }
    }

    fn sums(&mut self) -> ProgramStep {
        let value = (0..self.random.between(1, 3)).map(|_| self.single()).collect();
        ProgramStep::Sums { value }
    }

    fn async_call(&mut self) -> AsyncCall {
        let axes = self.state.grid.some(self.random);
        let ranks = self.state.grid.size(&axes);
        let runs = self.runs(ranks);
        let kind = if self.random.one_in(2) {
            AsyncCallKind::Gather(runs)
        } else {
            AsyncCallKind::Reduce(runs)
        };
        AsyncCall { kind, axes }
    }

    fn runs(&mut self, ranks: usize) -> TensorRuns {
        let slots = self.state.grid.slots();
        let mut tensors: Vec<ArrayRecipe> =
            (0..self.random.between(1, 3)).map(|_| numbers(self.random, slots)).collect();
        if self.random.one_in(LARGE_RUNS_ONE_IN) {
            let items = LARGE_BYTES / tensors[0].dtype.size_in_bytes();
            tensors[0].shape = vec![items + 1 + self.random.less_than(items / 4)];
        }
        TensorRuns::random(self.random, tensors, ranks)
    }

    fn start(&mut self) {
        let call = self.async_call();
        if self.add(ProgramStep::Start(call.clone())) {
            self.started.push(call);
        }
    }

    /// Waits for all pending collectives.
    fn wait(&mut self) {
        let calls = mem::take(&mut self.started);
        if calls.is_empty() {
            return;
        }
        let slots = 0..self.state.grid.slots();
        let orders =
            slots.map(|_| self.random.shuffled((0..calls.len()).collect::<Vec<_>>())).collect();
        let step = ProgramStep::Wait { calls, orders };
        let value = self.state.value(&step).expect("every started collective is possible");
        self.state.values.push(value);
        self.program.steps.push(step);
    }

    /// Returns the index of a value that is one array on each slot.
    fn single(&mut self) -> usize {
        let singles: Vec<usize> =
            (0..self.state.values.len()).filter(|value| self.is_single(*value)).collect();
        if singles.is_empty() {
            let own = self.own();
            assert!(self.add(own), "the first numbers are never too many");
            return self.state.values.len() - 1;
        }
        // Prefer the newest values, so that chains become long.
        let newest = singles.len().saturating_sub(3);
        if self.random.one_in(2) {
            self.random.pick(&singles[newest..])
        } else {
            self.random.pick(&singles)
        }
    }

    fn is_single(&self, value: usize) -> bool {
        self.state.values[value].iter().all(|list| list.len() == 1)
            && !matches!(
                self.find_step(value),
                Some(
                    ProgramStep::Sums { .. }
                        | ProgramStep::Blocking(_)
                        | ProgramStep::Start(_)
                        | ProgramStep::Wait { .. }
                )
            )
    }

    /// Returns the step that made a value, or `None` for an argument.
    fn find_step(&self, value: usize) -> Option<&ProgramStep> {
        let steps = value.checked_sub(self.program.arguments.len())?;
        self.program.steps.get(steps)
    }

    /// Returns a spec that fits the value, if one is found soon; sometimes any spec.
    fn result(&mut self, value: usize) -> Spec {
        let rank = self.state.values[value][0][0].shape.len();
        let mut spec = spec::random_for_result(self.random, &self.state.grid, rank);
        let tries = if self.random.one_in(4) { 0 } else { 6 };
        for _ in 0..tries {
            let mut single = self.program.clone();
            single.results = vec![(value, spec.clone())];
            if self.state.results(&single).is_ok() {
                break;
            }
            spec = spec::random_for_result(self.random, &self.state.grid, rank);
        }
        spec
    }
}
