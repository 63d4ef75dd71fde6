//! Counts of the random cases' features: a generator that never produces a feature proves nothing
//! about it.

use std::collections::BTreeMap;

use crate::differential::{
    faults::Scenario,
    gradients::{Chain, ChainLink},
    op::Op,
    pending::{AsyncCall, AsyncCallKind, LARGE_BYTES},
    program::{ArrayRecipe, Program, ProgramStep},
    reference::ProgramOutcome,
};

/// The number of occurrences of each feature.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<String, usize>);

const OPS: [&str; 11] = [
    "Psum",
    "Pmean",
    "Pmax",
    "Pmin",
    "Pvary",
    "AllGather",
    "PsumScatter",
    "Ppermute",
    "AllToAll",
    "Broadcast",
    "Barrier",
];

impl Coverage {
    fn note(&mut self, thing: impl Into<String>) {
        *self.0.entry(thing.into()).or_default() += 1;
    }

    fn note_op(&mut self, op: &Op) {
        // Use the name of the variant, without its fields.
        self.note(format!("{op:?}").split(' ').next().unwrap());
    }

    /// Panics unless each of these features has occurred `fewest` times.
    pub(crate) fn assert_each<'a>(&self, fewest: usize, things: impl IntoIterator<Item = &'a str>) {
        let rare: Vec<&str> = things
            .into_iter()
            .filter(|thing| self.0.get(*thing).copied().unwrap_or(0) < fewest)
            .collect();
        assert!(rare.is_empty(), "{rare:?} hardly occur in {:#?}", self.0);
    }

    pub(crate) fn assert_ops(&self, fewest: usize) {
        self.assert_each(fewest, OPS);
    }

    pub(crate) fn note_program(&mut self, program: &Program, outcome: &ProgramOutcome) {
        self.note(format!("{} axes", program.grid.0.len()));
        self.note(format!("{} slots", program.grid.slots()));
        let own = program.steps.iter().filter_map(|step| match step {
            ProgramStep::Own { numbers, layout, .. } => Some((numbers, layout)),
            _ => None,
        });
        let arguments =
            program.arguments.iter().map(|argument| (&argument.numbers, &argument.layout));
        for (numbers, layout) in own.chain(arguments) {
            self.note(numbers.dtype.as_str());
            self.note(format!("{layout:?}"));
            self.note(format!("{} dimensions", numbers.shape.len()));
            let items: usize = numbers.shape.iter().product();
            match items {
                0 => self.note("empty"),
                2000.. => self.note("large"),
                _ => {}
            }
        }
        for step in &program.steps {
            match step {
                ProgramStep::Collective { op, .. } => self.note_op(op),
                ProgramStep::Sums { .. } => self.note("Sums"),
                ProgramStep::Blocking(AsyncCall { kind, .. }) => {
                    self.note("Blocking");
                    self.note_async_call("Call", kind);
                }
                ProgramStep::Start(AsyncCall { kind, .. }) => self.note_async_call("Start", kind),
                ProgramStep::Wait { calls, .. } => {
                    self.note(format!("Wait {}", calls.len().min(3)));
                }
                _ => {}
            }
        }
        self.note_outcome(program, outcome);
    }

    fn note_async_call(&mut self, how: &str, kind: &AsyncCallKind) {
        let (name, runs) = match kind {
            AsyncCallKind::Gather(runs) => ("Gather", runs),
            AsyncCallKind::Reduce(runs) => ("Reduce", runs),
        };
        self.note(format!("{how} {name}"));
        let bytes = |numbers: &ArrayRecipe| {
            numbers.shape.iter().product::<usize>() * numbers.dtype.size_in_bytes()
        };
        if runs.tensors.iter().map(bytes).sum::<usize>() > LARGE_BYTES {
            self.note(format!("large {name}"));
        }
    }

    fn note_outcome(&mut self, program: &Program, outcome: &ProgramOutcome) {
        match outcome {
            ProgramOutcome::Rejected(faults) => {
                for (_, fault) in faults {
                    self.note(format!("argument {fault:?}"));
                }
            }
            ProgramOutcome::Ran { results: Err(error), .. } => self.note(format!("{error:?}")),
            ProgramOutcome::Ran { results: Ok(_), .. } => {
                self.note(format!("{:?}", program.route));
                self.note(format!("{:?}", program.uneven));
                let results = program.results.iter().flat_map(|(_, spec)| spec);
                results.for_each(|(_, treatment)| {
                    self.note(format!("{treatment:?}").split('(').next().unwrap());
                });
            }
        }
    }

    pub(crate) fn note_chain(&mut self, chain: &Chain) {
        for link in &chain.links {
            match link {
                ChainLink::Collective { op, .. } | ChainLink::Extreme { op, .. } => {
                    self.note_op(op);
                }
                ChainLink::Product { .. } => self.note("Product"),
                _ => {}
            }
        }
    }

    pub(crate) fn note_scenario(&mut self, scenario: &Scenario) {
        scenario.ends().into_iter().for_each(|end| self.note(end));
        if scenario.starts_differ() {
            self.note("Starts differ");
        }
    }
}
