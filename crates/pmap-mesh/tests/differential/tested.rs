//! The crate's results of a program.

use std::{collections::BTreeMap, mem, sync::Arc};

use candle_core::{Result, Tensor};
use pmap_mesh::{ALL, DeviceMesh, Error, Replica, Sharded, ValueError};

use crate::differential::{
    array::Array,
    grid::Grid,
    pending::PendingResult,
    program::{ArrayRecipe, CallRoute, Program, ProgramStep},
    reference::{ProgramOutcome, ResultError},
    spec::{self, SpecFaultKind},
};

/// An open mesh for each grid, shared by the cases.
pub(crate) struct MeshCache {
    open: fn(&Grid) -> DeviceMesh,
    opened: BTreeMap<Grid, DeviceMesh>,
}

impl MeshCache {
    pub(crate) fn new(open: fn(&Grid) -> DeviceMesh) -> Self {
        Self { open, opened: BTreeMap::new() }
    }

    pub(crate) fn open(&mut self, grid: &Grid) -> &DeviceMesh {
        self.opened.entry(grid.clone()).or_insert_with(|| (self.open)(grid))
    }
}

/// Compares a program's results with the reference.
pub(crate) fn check(
    program: &Program,
    mesh: &DeviceMesh,
    expected: &ProgramOutcome,
) -> std::result::Result<(), String> {
    match (run(program, mesh)?, expected) {
        (ProgramOutcome::Rejected(found), ProgramOutcome::Rejected(expected))
            if found == *expected =>
        {
            Ok(())
        }
        (
            ProgramOutcome::Ran { values: found, results: found_results },
            ProgramOutcome::Ran { values, results },
        ) => {
            compare_values(&found, &values[mesh.local_slots()], mesh.local_slots().start)?;
            compare_results(&found_results, results)
        }
        (found, expected) => Err(format!("{found:?}\nfor {expected:?}")),
    }
}

fn compare_values(
    found: &[Vec<Vec<Array>>],
    expected: &[Vec<Vec<Array>>],
    first_slot: usize,
) -> std::result::Result<(), String> {
    for (local, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
            if !same(found, expected) {
                let slot = first_slot + local;
                return Err(format!(
                    "value {number} on slot {slot} is {found:?}\nfor {expected:?}"
                ));
            }
        }
        assert_eq!(found.len(), expected.len(), "a value for each argument and step");
    }
    assert_eq!(found.len(), expected.len(), "values for each local slot");
    Ok(())
}

fn compare_results(
    found: &std::result::Result<Vec<Array>, ResultError>,
    expected: &std::result::Result<Vec<Array>, ResultError>,
) -> std::result::Result<(), String> {
    let is_same = match (found, expected) {
        (Ok(found), Ok(expected)) => same(found, expected),
        (Err(found), Err(expected)) => found == expected,
        _ => false,
    };
    if is_same { Ok(()) } else { Err(format!("the results are {found:?}\nfor {expected:?}")) }
}

fn same(found: &[Array], expected: &[Array]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| a.same(b))
}

/// Runs a program twice: once for the values of every step on each slot, once for its results.
fn run(program: &Program, mesh: &DeviceMesh) -> std::result::Result<ProgramOutcome, String> {
    let shared = Arc::new(program.clone());
    let values_program = Arc::clone(&shared);
    let all = mesh
        .pmap(move |ctx, arguments: Vec<Tensor>| on_replica(&values_program, ctx, arguments))
        .in_axes(in_axes(program))
        .uneven(program.uneven);
    let values = match all.call_sharded(arguments(program)) {
        Ok(values) => values,
        Err(Error::Specs(faults)) => return Ok(ProgramOutcome::Rejected(firsts(&faults)?)),
        Err(error) => return Err(format!("{error}: {error:?}")),
    };
    let values = values
        .shards()
        .iter()
        .map(|lists| {
            lists.iter().map(|list| list.iter().map(Array::from_tensor).collect()).collect()
        })
        .collect();
    Ok(ProgramOutcome::Ran { values, results: results(&shared, mesh)? })
}

fn in_axes(program: &Program) -> Vec<pmap_mesh::P> {
    program.arguments.iter().map(|argument| spec::named(&argument.spec, &program.grid)).collect()
}

fn arguments(program: &Program) -> Vec<Tensor> {
    program
        .arguments
        .iter()
        .map(|argument| argument.layout.tensor(&argument.numbers.array()))
        .collect()
}

/// Returns the first fault of each argument or result.
fn firsts(faults: &[String]) -> std::result::Result<Vec<(usize, SpecFaultKind)>, String> {
    let mut firsts = BTreeMap::new();
    for fault in faults {
        let (index, fault) = SpecFaultKind::from_message(fault).ok_or_else(|| fault.clone())?;
        firsts.entry(index).or_insert(fault);
    }
    Ok(firsts.into_iter().collect())
}

/// Returns the joined results, by the program's route.
fn results(
    program: &Arc<Program>,
    mesh: &DeviceMesh,
) -> std::result::Result<std::result::Result<Vec<Array>, ResultError>, String> {
    let shared = Arc::clone(program);
    let function = mesh
        .pmap(move |ctx, arguments: Vec<Tensor>| {
            let values = on_replica(&shared, ctx, arguments)?;
            Ok(shared
                .results
                .iter()
                .map(|(value, _)| values[*value][0].clone())
                .collect::<Vec<_>>())
        })
        .in_axes(in_axes(program))
        .uneven(program.uneven);
    let specs: Vec<_> =
        program.results.iter().map(|(_, spec)| spec::named(spec, &program.grid)).collect();
    let arguments = arguments(program);
    let outcome = match program.route {
        CallRoute::Call => function.out_axes(specs).call(arguments),
        CallRoute::CallInto => {
            let function = function.out_axes(specs);
            function.call(arguments.clone()).and_then(|results| {
                let kept = results.iter().map(|result| result.ones_like().unwrap()).collect();
                function.call_into(arguments, &kept)?;
                Ok(kept)
            })
        }
        CallRoute::Resident => mesh
            .shard(arguments, in_axes(program))
            .and_then(|arguments| function.run(arguments))
            .and_then(|results: Sharded<Vec<Tensor>>| results.gather(specs)),
    };
    Ok(match outcome {
        Ok(results) => Ok(results.iter().map(Array::from_tensor).collect()),
        Err(Error::Specs(faults)) => Err(ResultError::Specs(firsts(&faults)?)),
        Err(Error::Value(ValueError::NotReplicated { index, .. })) => {
            Err(ResultError::NotReplicated(index))
        }
        Err(Error::Value(ValueError::Gather { index, .. })) => Err(ResultError::Gather(index)),
        Err(error) => return Err(format!("{error}: {error:?}")),
    })
}

/// Returns the values of every step on one replica.
fn on_replica(
    program: &Program,
    ctx: &Replica,
    arguments: Vec<Tensor>,
) -> Result<Vec<Vec<Tensor>>> {
    let mut values: Vec<Vec<Tensor>> = arguments.into_iter().map(|x| vec![x]).collect();
    let mut pending = Vec::new();
    for step in &program.steps {
        let value = match step {
            ProgramStep::Start(call) => {
                pending.push(Some(call.start(ctx, &program.grid)?));
                Vec::new()
            }
            ProgramStep::Wait { orders, .. } => {
                wait_in_order(mem::take(&mut pending), &orders[ctx.slot()])?
            }
            _ => value(program, ctx, step, &values)?,
        };
        values.push(value);
    }
    Ok(values)
}

/// Returns the results of pending collectives, awaited in this order.
fn wait_in_order(mut pending: Vec<Option<PendingResult>>, order: &[usize]) -> Result<Vec<Tensor>> {
    let mut results = vec![Vec::new(); pending.len()];
    for &number in order {
        let waiting = pending[number].take().expect("every collective is awaited once");
        results[number] = waiting()?;
    }
    Ok(results.concat())
}

fn value(
    program: &Program,
    ctx: &Replica,
    step: &ProgramStep,
    values: &[Vec<Tensor>],
) -> Result<Vec<Tensor>> {
    let named = |axes| program.grid.named(axes);
    let one = match step {
        ProgramStep::Own { numbers, layout, free } => {
            layout.tensor(&ArrayRecipe::on_slot(numbers, ctx.slot(), *free))
        }
        ProgramStep::Laid { value, layout } => {
            layout.tensor(&Array::from_tensor(&values[*value][0]))
        }
        ProgramStep::Collective { op, value, axes } => {
            op.run(ctx, &values[*value][0], named(axes))?
        }
        ProgramStep::Sums { value } => {
            let list: Vec<Tensor> = value.iter().map(|value| values[*value][0].clone()).collect();
            return ctx.psum_list("values", &list, ALL);
        }
        ProgramStep::Blocking(call) => return call.run(ctx, &program.grid),
        ProgramStep::Start(_) | ProgramStep::Wait { .. } => {
            panic!("the caller handles pending collectives")
        }
        ProgramStep::Place { axes } => {
            let place = [ctx.axis_index(named(axes))?, ctx.axis_size(named(axes))?];
            Array::from_numbers(&place.map(|n| n as f64)).tensor()
        }
        ProgramStep::Rows => {
            let len = ctx.valid_len().map_or(-1.0, |len| len as f64);
            Array::from_numbers(&[len, ctx.weight()]).tensor()
        }
    };
    Ok(vec![one])
}
