//! One graph of all slots' values on one device, without the crate.

use candle_core::{Result, Tensor, Var};

use crate::differential::{
    array::Array,
    gradients::{Chain, Gradients, Link, Variable, first, local},
    grid::Grid,
    op::{Op, place_of},
};

/// For each slot its value; those who hold one value hold one node of the graph.
type OfSlots = Vec<Tensor>;

pub(crate) fn gradients(chain: &Chain) -> Result<Gradients> {
    let grid = &chain.grid;
    let variables: Vec<Vec<Var>> =
        chain.variables.iter().map(|variable| of_slots(grid, variable)).collect::<Result<_>>()?;
    let mut values: Vec<OfSlots> = variables
        .iter()
        .map(|of_slots| of_slots.iter().map(|var| var.as_tensor().clone()).collect())
        .collect();
    for link in &chain.links {
        let value = value(grid, link, &values)?;
        values.push(value);
    }
    let gradients = loss(chain, &values)?.backward()?;
    let of = |variable: &Vec<Var>, slot: usize| match gradients.get(&variable[slot]) {
        Some(gradient) => Array::of(gradient),
        None => Array::of(&variable[slot].zeros_like().unwrap()),
    };
    let of_slot = |slot| variables.iter().map(|variable| of(variable, slot)).collect();
    Ok((0..grid.slots()).map(of_slot).collect())
}

/// A variable of each slot; one for all that hold the same value.
fn of_slots(grid: &Grid, variable: &Variable) -> Result<Vec<Var>> {
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

fn value(grid: &Grid, link: &Link, values: &[OfSlots]) -> Result<OfSlots> {
    let slots = 0..grid.slots();
    match link {
        Link::Collective { op, of, axes } => slots
            .map(|slot| {
                let members = grid.members(axes, slot);
                let passed: Vec<&Tensor> = members.iter().map(|m| &values[*of][*m]).collect();
                collective(op, &passed, grid.rank(axes, slot))
            })
            .collect(),
        Link::Extreme { op, of, axes } => slots
            .map(|slot| {
                let members = grid.members(axes, slot);
                let passed: Vec<Tensor> =
                    members.iter().map(|m| values[*of][*m].detach()).collect();
                let side_by_side = Tensor::stack(&passed, 0)?;
                if *op == Op::Pmax { side_by_side.max(0) } else { side_by_side.min(0) }
            })
            .collect(),
        _ => slots
            .map(|slot| {
                let here: Vec<Tensor> =
                    values.iter().map(|of_slots| of_slots[slot].clone()).collect();
                local(link, &here)
            })
            .collect(),
    }
}

/// What the member of rank `rank` gets.
fn collective(op: &Op, passed: &[&Tensor], rank: usize) -> Result<Tensor> {
    let (mine, size) = (passed[rank], passed.len());
    let sum = || passed[1..].iter().try_fold(passed[0].clone(), |sum, next| sum + *next);
    let place = |dim: isize| place_of(dim, mine.rank()).unwrap();
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

/// The sum of all slots' losses, in which a value that several slots hold is counted once.
fn loss(chain: &Chain, values: &[OfSlots]) -> Result<Tensor> {
    let grid = &chain.grid;
    let mut losses = Vec::new();
    for (of, weights) in &chain.losses {
        for slot in (0..grid.slots()).filter(|&slot| first(grid, &weights.varying, slot) == slot) {
            let weights = weights.on_slot(grid, slot).tensor();
            losses.push((&values[*of][slot] * weights)?.sum_all()?);
        }
    }
    Tensor::stack(&losses, 0)?.sum_all()
}
