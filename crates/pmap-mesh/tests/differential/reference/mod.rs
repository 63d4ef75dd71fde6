//! The expected outcome of a program, by plain arithmetic on vectors and without the crate.

mod collective;
mod cut;
mod join;

use candle_core::DType;

use crate::differential::{
    array::Array,
    bits::{FoldOp, REDUCIBLE},
    grid::Grid,
    program::{Program, ProgramStep},
    reference::{cut::ShardedArgument, join::ResultJoin},
    spec::{self, SpecFaultKind},
};

/// The outcome of a program.
#[derive(Clone, Debug)]
pub(crate) enum ProgramOutcome {
    /// The call fails before a replica starts, with the first fault of each argument.
    Rejected(Vec<(usize, SpecFaultKind)>),
    Ran {
        /// By slot, then by step.
        values: Vec<Vec<Vec<Array>>>,
        results: Result<Vec<Array>, ResultError>,
    },
}

/// The reason why results cannot be joined, with the index of the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ResultError {
    Specs(Vec<(usize, SpecFaultKind)>),
    NotReplicated(usize),
    Gather(usize),
}

/// The arrays of one step on each slot: a single array, except in steps that make lists.
pub(crate) type StepValue = Vec<Vec<Array>>;

/// The values of a program while it runs.
#[derive(Clone, Debug)]
pub(crate) struct ProgramState {
    pub(crate) grid: Grid,
    arguments: Vec<ShardedArgument>,
    /// By step, then by slot.
    pub(crate) values: Vec<StepValue>,
}

pub(crate) fn run(program: &Program) -> ProgramOutcome {
    let mut state = match ProgramState::begin(program) {
        Ok(state) => state,
        Err(faults) => return ProgramOutcome::Rejected(faults),
    };
    for step in &program.steps {
        let value = state.value(step).expect("every step of a program is possible");
        state.values.push(value);
    }
    let results = state.results(program);
    let slots = 0..program.grid.slots();
    let values = slots.map(|slot| state.values.iter().map(|value| value[slot].clone()).collect());
    ProgramOutcome::Ran { values: values.collect(), results }
}

impl ProgramState {
    /// Returns the state before the first step, with the shards of the arguments as values.
    pub(crate) fn begin(program: &Program) -> Result<Self, Vec<(usize, SpecFaultKind)>> {
        let grid = &program.grid;
        let mut faults = Vec::new();
        let mut arguments = Vec::new();
        for (index, argument) in program.arguments.iter().enumerate() {
            let shape = &argument.numbers.shape;
            match ShardedArgument::new(grid, shape, &argument.spec, program.uneven) {
                Ok(sharded) => arguments.push(sharded),
                Err(fault) => faults.push((index, fault)),
            }
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let values = program.arguments.iter().zip(&arguments).map(|(argument, sharded)| {
            let array = argument.numbers.array();
            (0..grid.slots()).map(|slot| vec![sharded.shard(&array, slot)]).collect()
        });
        let values = values.collect();
        Ok(Self { grid: grid.clone(), arguments, values })
    }

    /// Returns the value of a step on each slot, or `None` if the step is impossible.
    pub(crate) fn value(&self, step: &ProgramStep) -> Option<StepValue> {
        let slots = 0..self.grid.slots();
        let one_each =
            |value: &dyn Fn(usize) -> Array| Some(slots.clone().map(|n| vec![value(n)]).collect());
        match step {
            ProgramStep::Own { numbers, free, .. } => {
                one_each(&|slot| numbers.on_slot(slot, *free))
            }
            ProgramStep::Laid { value, .. } => Some(self.values[*value].clone()),
            ProgramStep::Place { axes } => one_each(&|slot| {
                let place = [self.grid.rank(axes, slot), self.grid.size(axes)];
                Array::from_numbers(&place.map(|n| n as f64))
            }),
            ProgramStep::Blocking(call) => call.results(&self.grid),
            // A started collective must be possible, because a later step waits for its results.
            ProgramStep::Start(call) => {
                call.results(&self.grid)?;
                Some(vec![Vec::new(); self.grid.slots()])
            }
            ProgramStep::Wait { calls, .. } => {
                let mut all = vec![Vec::new(); self.grid.slots()];
                for call in calls {
                    let results = call.results(&self.grid)?;
                    all.iter_mut().zip(results).for_each(|(all, own)| all.extend(own));
                }
                Some(all)
            }
            ProgramStep::Rows => one_each(&|slot| self.rows(slot)),
            ProgramStep::Sums { value } => self.sums(value),
            ProgramStep::Collective { op, value, axes } => {
                let mut results = Vec::new();
                for slot in slots {
                    let members = self.grid.members(axes, slot);
                    let passed: Vec<&Array> =
                        members.iter().map(|slot| &self.values[*value][*slot][0]).collect();
                    let result = collective::result(op, &passed, self.grid.rank(axes, slot))?;
                    results.push(vec![result]);
                }
                Some(results)
            }
        }
    }

    /// Returns the number of real rows in the first sharded argument, and the weight.
    fn rows(&self, slot: usize) -> Array {
        let valid = self.arguments.iter().find_map(|argument| argument.valid(slot));
        match valid {
            Some((len, weight)) => Array::from_numbers(&[len as f64, weight]),
            None => Array::from_numbers(&[-1.0, 1.0]),
        }
    }

    fn sums(&self, value: &[usize]) -> Option<StepValue> {
        let mut sums = Vec::with_capacity(value.len());
        for value in value {
            let passed: Vec<&Array> = self.values[*value].iter().map(|slot| &slot[0]).collect();
            if !has_sum(passed[0].dtype) || !passed.iter().all(|array| array.agrees(passed[0])) {
                return None;
            }
            sums.push(Array::folded(&passed, FoldOp::Sum));
        }
        Some(vec![sums; self.grid.slots()])
    }

    /// Returns the joined results.
    pub(crate) fn results(&self, program: &Program) -> Result<Vec<Array>, ResultError> {
        let faults: Vec<_> = (program.results.iter().enumerate())
            .filter_map(|(index, (_, spec))| {
                Some((index, spec::axes_fault(&self.grid, spec, false)?))
            })
            .collect();
        if !faults.is_empty() {
            return Err(ResultError::Specs(faults));
        }
        let sharded = self.arguments.iter().find(|argument| argument.is_cut());
        let results = program.results.iter().enumerate();
        let joined = results.map(|(index, (value, spec))| {
            let per_slot = self.values[*value].iter().map(|list| list[0].clone()).collect();
            ResultJoin { grid: &self.grid, sharded, index }.result(per_slot, spec)
        });
        joined.collect()
    }
}

/// Returns true if tensors of this dtype can be summed.
pub(crate) fn has_sum(dtype: DType) -> bool {
    REDUCIBLE.contains(&dtype)
}
