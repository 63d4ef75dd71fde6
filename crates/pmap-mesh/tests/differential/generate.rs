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
    pending::{Job, Kind as JobKind, LARGE_BYTES, Runs},
    program::{Argument, Kind, Numbers, Program, Route, Step},
    random::Random,
    reference::State,
    spec::{self, Spec},
};

/// The largest number of steps of a program.
const MAX_STEPS: usize = 12;
/// The largest number of items of all values of a program on all slots: the reference computes them
/// one by one.
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
    let mut routes = vec![Route::Call, Route::CallInto];
    if uneven == Uneven::Refuse {
        routes.push(Route::Resident);
    }
    let arguments = (0..random.less_than(4)).map(|_| argument(random, &grid)).collect();
    let route = random.pick(&routes);
    let mut program =
        Program { grid, uneven, route, arguments, steps: Vec::new(), results: Vec::new() };
    if let Ok(state) = State::begin(&program) {
        Maker { random, state, items: 0, started: Vec::new(), program: &mut program }.make();
    }
    program
}

fn argument(random: &mut Random, grid: &Grid) -> Argument {
    let numbers = numbers(random, grid.slots());
    let spec = spec::random_for_argument(random, grid, numbers.shape.len());
    Argument { layout: random.pick(&Layout::ALL), numbers, spec }
}

/// Returns numbers of any dtype, in a shape that is often divisible by `slots`.
fn numbers(random: &mut Random, slots: usize) -> Numbers {
    let mut shape: Vec<usize> = (0..random.less_than(4)).map(|_| size(random, slots)).collect();
    let dtype = if random.one_in(20) { DType::F8E4M3 } else { random.pick(&REDUCIBLE) };
    if random.one_in(LARGE_ONE_IN) {
        let items = random.pick(&[LARGE_BYTES / dtype.size_in_bytes(), BLOCK_ITEMS]);
        shape = vec![items - 1 + random.less_than(3)];
        if random.one_in(3) {
            shape = vec![items / slots + 1, slots];
        }
    }
    let kind = random.pick(&[Kind::Ordinary, Kind::Ordinary, Kind::Extreme, Kind::Repeated]);
    Numbers { dtype, shape, kind, seed: random.word() }
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
struct Maker<'a> {
    random: &'a mut Random,
    state: State,
    /// The number of items that its steps have made.
    items: usize,
    /// The pending collectives.
    started: Vec<Job>,
    program: &'a mut Program,
}

impl Maker<'_> {
    fn make(mut self) {
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
    fn add(&mut self, step: Step) -> bool {
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
            3 => Step::Laid { value: self.single(), layout: self.random.pick(&Layout::ALL) },
            4 => Step::Place { axes: self.state.grid.some(self.random) },
            5 => Step::Rows,
            6 => self.sums(),
            7 => Step::Job(self.job()),
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

    fn own(&mut self) -> Step {
        let numbers = numbers(self.random, self.state.grid.slots());
        let rank = numbers.shape.len();
        let free = (rank > 0 && self.random.one_in(4)).then(|| self.random.less_than(rank));
        Step::Own { numbers, free, layout: self.random.pick(&Layout::ALL) }
    }

    fn collective(&mut self) -> Step {
        let value = self.single();
        let axes: Axes = self.state.grid.some(self.random);
        let rank = self.state.values[value][0][0].shape.len();
        let op = Op::random(self.random, rank, self.state.grid.size(&axes));
        Step::Collective { op, value, axes }
    }

    fn sums(&mut self) -> Step {
        let value: Vec<usize> = (0..self.random.between(1, 3)).map(|_| self.single()).collect();
        let slots = 0..self.state.grid.slots();
        let wanted = slots
            .map(|_| {
                (0..self.random.less_than(4)).map(|_| self.random.less_than(value.len())).collect()
            })
            .collect();
        Step::Sums { value, wanted }
    }

    fn job(&mut self) -> Job {
        let axes = self.state.grid.some(self.random);
        let ranks = self.state.grid.size(&axes);
        let kind = match self.random.less_than(3) {
            0 => JobKind::Sum { value: self.single() },
            1 => JobKind::Gather(self.runs(ranks)),
            _ => JobKind::Reduce(self.runs(ranks)),
        };
        Job { kind, axes }
    }

    fn runs(&mut self, ranks: usize) -> Runs {
        let slots = self.state.grid.slots();
        let mut tensors: Vec<Numbers> =
            (0..self.random.between(1, 3)).map(|_| numbers(self.random, slots)).collect();
        if self.random.one_in(LARGE_RUNS_ONE_IN) {
            let items = LARGE_BYTES / tensors[0].dtype.size_in_bytes();
            tensors[0].shape = vec![items + 1 + self.random.less_than(items / 4)];
        }
        Runs::random(self.random, tensors, ranks)
    }

    fn start(&mut self) {
        let job = self.job();
        if self.add(Step::Start(job.clone())) {
            self.started.push(job);
        }
    }

    /// Waits for all pending collectives.
    fn wait(&mut self) {
        let jobs = mem::take(&mut self.started);
        if jobs.is_empty() {
            return;
        }
        let slots = 0..self.state.grid.slots();
        let orders =
            slots.map(|_| self.random.shuffled((0..jobs.len()).collect::<Vec<_>>())).collect();
        let step = Step::Wait { jobs, orders };
        let value = self.state.value(&step).expect("what was started is possible");
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
                Some(Step::Sums { .. } | Step::Job(_) | Step::Start(_) | Step::Wait { .. })
            )
    }

    /// Returns the step that made a value, or `None` for an argument.
    fn find_step(&self, value: usize) -> Option<&Step> {
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
