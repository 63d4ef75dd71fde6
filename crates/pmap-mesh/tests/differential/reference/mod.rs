//! What a program must give, by plain arithmetic on vectors: nothing here is the crate's.

mod collective;
mod cut;
mod join;

use candle_core::DType;

use crate::differential::{
    array::Array,
    bits::{Fold, REDUCIBLE},
    grid::Grid,
    program::{Program, Step},
    reference::{cut::Cut, join::Joined},
    spec::{self, Fault},
};

/// What comes of a program.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// It is refused before a replica starts, with the first fault of each argument.
    Refused(Vec<(usize, Fault)>),
    Ran {
        /// For each slot the values of every step.
        values: Vec<Vec<Vec<Array>>>,
        results: Result<Vec<Array>, Refusal>,
    },
}

/// Why results are not put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Specs(Vec<(usize, Fault)>),
    NotReplicated(usize),
    Gather(usize),
}

/// The values of one step on each slot: one, but for lists.
pub(crate) type Value = Vec<Vec<Array>>;

/// The values of a program while it runs.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) grid: Grid,
    cuts: Vec<Cut>,
    /// By step, then by slot.
    pub(crate) values: Vec<Value>,
}

pub(crate) fn run(program: &Program) -> Outcome {
    let mut state = match State::begin(program) {
        Ok(state) => state,
        Err(faults) => return Outcome::Refused(faults),
    };
    for step in &program.steps {
        let value = state.value(step).expect("a program has only steps that are possible");
        state.values.push(value);
    }
    let results = state.results(program);
    let slots = 0..program.grid.slots();
    let values = slots.map(|slot| state.values.iter().map(|value| value[slot].clone()).collect());
    Outcome::Ran { values: values.collect(), results }
}

impl State {
    /// The values of the arguments.
    pub(crate) fn begin(program: &Program) -> Result<Self, Vec<(usize, Fault)>> {
        let grid = &program.grid;
        let mut faults = Vec::new();
        let mut cuts = Vec::new();
        for (index, argument) in program.arguments.iter().enumerate() {
            let shape = &argument.numbers.shape;
            match Cut::new(grid, shape, &argument.spec, program.uneven) {
                Ok(cut) => cuts.push(cut),
                Err(fault) => faults.push((index, fault)),
            }
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        let values = program.arguments.iter().zip(&cuts).map(|(argument, cut)| {
            let array = argument.numbers.array();
            (0..grid.slots()).map(|slot| vec![cut.shard(&array, slot)]).collect()
        });
        let values = values.collect();
        Ok(Self { grid: grid.clone(), cuts, values })
    }

    /// What a step gives on each slot; `None` if it is not possible.
    pub(crate) fn value(&self, step: &Step) -> Option<Value> {
        let slots = 0..self.grid.slots();
        let one_each =
            |value: &dyn Fn(usize) -> Array| Some(slots.clone().map(|n| vec![value(n)]).collect());
        match step {
            Step::Own { numbers, free, .. } => one_each(&|slot| numbers.on_slot(slot, *free)),
            Step::Laid { value, .. } => Some(self.values[*value].clone()),
            Step::Place { axes } => one_each(&|slot| {
                let place = [self.grid.rank(axes, slot), self.grid.size(axes)];
                Array::from_numbers(&place.map(|n| n as f64))
            }),
            Step::Job(job) => job.results(&self.grid, &self.values),
            // What is started must be possible, as its results will be waited for.
            Step::Start(job) => {
                job.results(&self.grid, &self.values)?;
                Some(vec![Vec::new(); self.grid.slots()])
            }
            Step::Wait { jobs, .. } => {
                let mut all = vec![Vec::new(); self.grid.slots()];
                for job in jobs {
                    let results = job.results(&self.grid, &self.values)?;
                    all.iter_mut().zip(results).for_each(|(all, of_slot)| all.extend(of_slot));
                }
                Some(all)
            }
            Step::Rows => one_each(&|slot| self.rows(slot)),
            Step::Sums { value, wanted } => self.sums(value, wanted),
            Step::Collective { op, value, axes } => {
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

    /// The real rows of the first argument that is cut, and the weight.
    fn rows(&self, slot: usize) -> Array {
        let valid = self.cuts.iter().find_map(|cut| cut.valid(slot));
        match valid {
            Some((len, weight)) => Array::from_numbers(&[len as f64, weight]),
            None => Array::from_numbers(&[-1.0, 1.0]),
        }
    }

    fn sums(&self, value: &[usize], wanted: &[Vec<usize>]) -> Option<Value> {
        let mut sums = Vec::with_capacity(value.len());
        for value in value {
            let passed: Vec<&Array> = self.values[*value].iter().map(|slot| &slot[0]).collect();
            if !has_sum(passed[0].dtype) || !passed.iter().all(|array| array.agrees(passed[0])) {
                return None;
            }
            sums.push(Array::folded(&passed, Fold::Sum));
        }
        Some(wanted.iter().map(|list| list.iter().map(|&n| sums[n].clone()).collect()).collect())
    }

    /// What is put together.
    pub(crate) fn results(&self, program: &Program) -> Result<Vec<Array>, Refusal> {
        let faults: Vec<_> = (program.results.iter().enumerate())
            .filter_map(|(index, (_, spec))| {
                Some((index, spec::axes_fault(&self.grid, spec, false)?))
            })
            .collect();
        if !faults.is_empty() {
            return Err(Refusal::Specs(faults));
        }
        let cut = self.cuts.iter().find(|cut| cut.is_cut());
        let results = program.results.iter().enumerate();
        let joined = results.map(|(index, (value, spec))| {
            let per_slot = self.values[*value].iter().map(|list| list[0].clone()).collect();
            Joined { grid: &self.grid, cut, index }.result(per_slot, spec)
        });
        joined.collect()
    }
}

/// Whether there are sums of this type.
pub(crate) fn has_sum(dtype: DType) -> bool {
    REDUCIBLE.contains(&dtype)
}
