//! Random programs, all of whose steps are possible; how arguments are cut and results are put
//! together may be wrong.

use std::mem;

use candle_core::DType;
use pmap_mesh::Uneven;

use crate::differential::{
    bits::REDUCIBLE,
    grid::{Axes, Grid},
    layout::Layout,
    op::Op,
    program::{Argument, Kind, Numbers, Program, Route, Step},
    random::Random,
    reference::State,
    spec::{self, Spec},
    underway::{Job, Kind as JobKind, LARGE_BYTES, Runs},
};

/// The most steps of a program.
const MAX_STEPS: usize = 12;
/// The most items that all values of a program have on all slots together: the reference looks at
/// them one by one.
const MAX_ITEMS: usize = 120_000;
/// One tensor in so many is large.
const LARGE_ONE_IN: usize = 100;
/// One list of runs in so many has a large tensor.
const LARGE_RUNS_ONE_IN: usize = 8;
/// How many items are one block of a sum.
const BLOCK_ITEMS: usize = 8192;

/// A random program on a mesh of so many slots, or of any number.
pub(crate) fn program(random: &mut Random, slots: Option<usize>) -> Program {
    let grid = match slots {
        Some(slots) => Grid::of_slots(slots, random),
        None => Grid::random(random),
    };
    let uneven = random.pick(&[Uneven::Refuse, Uneven::Pad, Uneven::Balanced]);
    let mut routes = vec![Route::Call, Route::CallInto];
    if uneven == Uneven::Refuse {
        routes.push(Route::Resident);
    }
    let arguments = (0..random.below(4)).map(|_| argument(random, &grid)).collect();
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
    let spec = spec::of_argument(random, grid, numbers.shape.len());
    Argument { layout: random.pick(&Layout::ALL), numbers, spec }
}

/// Numbers of any type and of a shape that is often divided by `slots`.
fn numbers(random: &mut Random, slots: usize) -> Numbers {
    let mut shape: Vec<usize> = (0..random.below(4)).map(|_| size(random, slots)).collect();
    let dtype = if random.one_in(20) { DType::F8E4M3 } else { random.pick(&REDUCIBLE) };
    if random.one_in(LARGE_ONE_IN) {
        let items = random.pick(&[LARGE_BYTES / dtype.size_in_bytes(), BLOCK_ITEMS]);
        shape = vec![items - 1 + random.below(3)];
        if random.one_in(3) {
            shape = vec![items / slots + 1, slots];
        }
    }
    let kind = random.pick(&[Kind::Ordinary, Kind::Ordinary, Kind::Extreme, Kind::Repeated]);
    Numbers { dtype, shape, kind, seed: random.word() }
}

fn size(random: &mut Random, slots: usize) -> usize {
    match random.below(12) {
        0 => 0,
        1..=4 => random.within(1, 5),
        5 => 2 * slots,
        6 => random.within(1, 3) * slots + random.below(slots),
        _ => slots,
    }
}

/// A program under way, with the values that it has so far.
struct Maker<'a> {
    random: &'a mut Random,
    state: State,
    /// How many items its steps have made.
    items: usize,
    /// What is under way.
    started: Vec<Job>,
    program: &'a mut Program,
}

impl Maker<'_> {
    fn make(mut self) {
        for _ in 0..self.random.within(1, MAX_STEPS) {
            self.add_step();
        }
        self.wait();
        for _ in 0..self.random.below(4) {
            let of = self.random.below(self.state.values.len());
            if self.is_single(of) {
                let spec = self.result(of);
                self.program.results.push((of, spec));
            }
        }
    }

    /// Adds a step if it is possible and what it makes is not too much.
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

    /// Adds a step; a collective may not be possible and is tried again a few times.
    fn add_step(&mut self) {
        let kind = if self.state.values.is_empty() { 0 } else { self.random.below(21) };
        let step = match kind {
            0..=2 => self.own(),
            3 => Step::Laid { of: self.single(), layout: self.random.pick(&Layout::ALL) },
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
        let free = (rank > 0 && self.random.one_in(4)).then(|| self.random.below(rank));
        Step::Own { numbers, free, layout: self.random.pick(&Layout::ALL) }
    }

    fn collective(&mut self) -> Step {
        let of = self.single();
        let axes: Axes = self.state.grid.some(self.random);
        let rank = self.state.values[of][0][0].shape.len();
        let op = Op::random(self.random, rank, self.state.grid.size(&axes));
        Step::Collective { op, of, axes }
    }

    fn sums(&mut self) -> Step {
        let of: Vec<usize> = (0..self.random.within(1, 3)).map(|_| self.single()).collect();
        let slots = 0..self.state.grid.slots();
        let some = |_| (0..self.random.below(4)).map(|_| self.random.below(of.len())).collect();
        let wanted = slots.map(some).collect();
        Step::Sums { of, wanted }
    }

    fn job(&mut self) -> Job {
        let axes = self.state.grid.some(self.random);
        let ranks = self.state.grid.size(&axes);
        let kind = match self.random.below(3) {
            0 => JobKind::Sum { of: self.single() },
            1 => JobKind::Gather(self.runs(ranks)),
            _ => JobKind::Reduce(self.runs(ranks)),
        };
        Job { kind, axes }
    }

    fn runs(&mut self, ranks: usize) -> Runs {
        let slots = self.state.grid.slots();
        let mut tensors: Vec<Numbers> =
            (0..self.random.within(1, 3)).map(|_| numbers(self.random, slots)).collect();
        if self.random.one_in(LARGE_RUNS_ONE_IN) {
            let items = LARGE_BYTES / tensors[0].dtype.size_in_bytes();
            tensors[0].shape = vec![items + 1 + self.random.below(items / 4)];
        }
        Runs::random(self.random, tensors, ranks)
    }

    fn start(&mut self) {
        let job = self.job();
        if self.add(Step::Start(job.clone())) {
            self.started.push(job);
        }
    }

    /// Waits for all that is under way.
    fn wait(&mut self) {
        let jobs = mem::take(&mut self.started);
        if jobs.is_empty() {
            return;
        }
        let numbers = || (0..jobs.len()).collect::<Vec<_>>();
        let slots = 0..self.state.grid.slots();
        let orders = slots.map(|_| self.random.shuffled(numbers())).collect();
        let step = Step::Wait { jobs, orders };
        let value = self.state.value(&step).expect("what was started is possible");
        self.state.values.push(value);
        self.program.steps.push(step);
    }

    /// The number of a value that is one array on each slot.
    fn single(&mut self) -> usize {
        let singles: Vec<usize> =
            (0..self.state.values.len()).filter(|of| self.is_single(*of)).collect();
        if singles.is_empty() {
            let own = self.own();
            assert!(self.add(own), "the first numbers are never too many");
            return self.state.values.len() - 1;
        }
        // The newest more often, so that chains become long.
        let newest = singles.len().saturating_sub(3);
        if self.random.one_in(2) {
            self.random.pick(&singles[newest..])
        } else {
            self.random.pick(&singles)
        }
    }

    fn is_single(&self, of: usize) -> bool {
        self.state.values[of].iter().all(|list| list.len() == 1)
            && !matches!(
                self.step_of(of),
                Some(Step::Sums { .. } | Step::Job(_) | Step::Start(_) | Step::Wait { .. })
            )
    }

    /// The step that made a value; arguments were made by none.
    fn step_of(&self, of: usize) -> Option<&Step> {
        let steps = of.checked_sub(self.program.arguments.len())?;
        self.program.steps.get(steps)
    }

    /// A spec by which the value can be put together, if one is found soon; one that it need not be
    /// now and then.
    fn result(&mut self, of: usize) -> Spec {
        let rank = self.state.values[of][0][0].shape.len();
        let mut spec = spec::of_result(self.random, &self.state.grid, rank);
        let tries = if self.random.one_in(4) { 0 } else { 6 };
        for _ in 0..tries {
            let mut alone = self.program.clone();
            alone.results = vec![(of, spec.clone())];
            if self.state.results(&alone).is_ok() {
                break;
            }
            spec = spec::of_result(self.random, &self.state.grid, rank);
        }
        spec
    }
}
