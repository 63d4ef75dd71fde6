//! One graph of all slots' values on one device, without the crate.

use candle_core::{Result, Tensor, Var};

use crate::differential::{
    array::Array,
    gradients::{Chain, ChainLink, ChainVariable, SlotGradients, first, local},
    grid::Grid,
    op::{Op, dim_index},
};

/// The value of each slot; slots that share a value share its node of the graph.
type SlotValues = Vec<Tensor>;

pub(crate) fn gradients(chain: &Chain) -> Result<SlotGradients> {
    let grid = &chain.grid;
    let variables: Vec<Vec<Var>> =
        chain.variables.iter().map(|variable| per_slot(grid, variable)).collect::<Result<_>>()?;
    let mut values: Vec<SlotValues> = variables
        .iter()
        .map(|per_slot| per_slot.iter().map(|var| var.as_tensor().clone()).collect())
        .collect();
    for link in &chain.links {
        let value = value(grid, link, &values)?;
        values.push(value);
    }
    let gradients = loss(chain, &values)?.backward()?;
    let mut by_slot = vec![Vec::new(); grid.slots()];
    for variable in &variables {
        for (found, var) in by_slot.iter_mut().zip(variable) {
            found.push(match gradients.get(var) {
                Some(gradient) => Array::from_tensor(gradient),
                None => Array::from_tensor(&var.zeros_like()?),
            });
        }
    }
    Ok(by_slot)
}

/// Returns the variable of each slot; slots that share a value share a variable.
fn per_slot(grid: &Grid, variable: &ChainVariable) -> Result<Vec<Var>> {
    let mut vars: Vec<Var> = Vec::new();
    for slot in 0..grid.slots() {
        let first = first(grid, &variable.varying, slot);
        let var = match vars.get(first) {
            Some(var) => var.clone(),
            None => Var::from_tensor(&variable.on_slot(grid, slot).tensor())?,
        };
        vars.push(var);
    }
    Ok(vars)
}

fn value(grid: &Grid, link: &ChainLink, values: &[SlotValues]) -> Result<SlotValues> {
    let slots = 0..grid.slots();
    match link {
        ChainLink::Collective { op, value, axes } => slots
            .map(|slot| {
                let members = grid.members(axes, slot);
                let passed: Vec<&Tensor> = members.iter().map(|m| &values[*value][*m]).collect();
                collective(op, &passed, grid.rank(axes, slot))
            })
            .collect(),
        ChainLink::Extreme { op, value, axes } => slots
            .map(|slot| {
                let members = grid.members(axes, slot);
                let passed: Vec<Tensor> =
                    members.iter().map(|m| values[*value][*m].detach()).collect();
                let stacked = Tensor::stack(&passed, 0)?;
                if *op == Op::Pmax { stacked.max(0) } else { stacked.min(0) }
            })
            .collect(),
        _ => slots
            .map(|slot| {
                let own: Vec<Tensor> =
                    values.iter().map(|per_slot| per_slot[slot].clone()).collect();
                local(link, &own)
            })
            .collect(),
    }
}

/// Returns the result of rank `rank` for the tensors that its group passes.
fn collective(op: &Op, passed: &[&Tensor], rank: usize) -> Result<Tensor> {
    let (mine, size) = (passed[rank], passed.len());
    let sum = || passed[1..].iter().try_fold(passed[0].clone(), |sum, next| sum + *next);
    let place = |dim: isize| dim_index(dim, mine.rank()).unwrap();
    let part = |x: &Tensor, dim: usize| {
        let rows = x.dim(dim)? / size;
        x.narrow(dim, rank * rows, rows)
    };
    match op {
        Op::Psum => sum(),
        Op::Pmean => sum()? / size as f64,
        Op::AllGather { dim } => Tensor::cat(passed, place(*dim)),
        Op::PsumScatter { dim } => part(&sum()?, place(*dim)),
        Op::Ppermute { pairs } => match pairs.iter().find(|(_, to)| *to == rank) {
            Some((from, _)) => Ok(passed[*from].clone()),
            None => mine.zeros_like(),
        },
        Op::AllToAll { split, concat } => {
            let parts: Vec<Tensor> =
                passed.iter().map(|x| part(x, place(*split))).collect::<Result<_>>()?;
            Tensor::cat(&parts, place(*concat))
        }
        Op::Broadcast { root } => Ok(passed[*root].clone()),
        Op::Pvary | Op::Barrier => Ok(mine.clone()),
        Op::Pmax | Op::Pmin => panic!("{op:?} has no gradient"),
    }
}

/// Returns the sum of all slots' losses, where a shared value is counted once.
fn loss(chain: &Chain, values: &[SlotValues]) -> Result<Tensor> {
    let grid = &chain.grid;
    let mut losses = Vec::new();
    for (value, weights) in &chain.losses {
        for slot in (0..grid.slots()).filter(|&slot| first(grid, &weights.varying, slot) == slot) {
            let weights = weights.on_slot(grid, slot).tensor();
            losses.push((&values[*value][slot] * weights)?.sum_all()?);
        }
    }
    Tensor::stack(&losses, 0)?.sum_all()
}
