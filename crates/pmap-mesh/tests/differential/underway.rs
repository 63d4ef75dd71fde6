//! Collectives that are started, and waited for later; among them those of runs of many tensors.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor, Var};
use pmap_mesh::{
    Replica,
    support::{Run, RunLayout},
};

use crate::differential::{
    array::Array,
    bits::Fold,
    grid::{Axes, Grid},
    program::Numbers,
    random::Random,
    reference::has_sum,
};

/// Bytes that engines hand over otherwise than fewer.
pub(crate) const LARGE_BYTES: usize = 16 << 10;

/// A collective that can be under way.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) kind: Kind,
    pub(crate) axes: Axes,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// The sum of a value.
    Sum { of: usize },
    /// Tensors, put together of the runs that each rank owns.
    Gather(Runs),
    /// The runs of a rank, each summed over all ranks.
    Reduce(Runs),
}

/// Tensors of each replica's own, and which runs of their items each rank of a group owns.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    pub(crate) tensors: Vec<Numbers>,
    owned: Vec<Vec<Owned>>,
}

/// A tensor by its number, and some of its items.
type Owned = (usize, Range<usize>);

/// Waits for a collective under way.
pub(crate) type Waiting = Box<dyn FnOnce() -> Result<Vec<Tensor>>>;

impl Runs {
    /// Every item has one owner among `ranks`. Some runs are empty: they begin where others end.
    pub(crate) fn random(random: &mut Random, tensors: Vec<Numbers>, ranks: usize) -> Self {
        let mut owned = vec![Vec::new(); ranks];
        for (number, numbers) in tensors.iter().enumerate() {
            let size: usize = numbers.shape.iter().product();
            let mut start = 0;
            while start < size {
                let end = if random.one_in(4) { start } else { random.within(start, size) };
                owned[random.below(ranks)].push((number, start..end));
                start = end;
            }
        }
        let owned = owned.into_iter().map(|runs| random.shuffled(runs)).collect();
        Self { tensors, owned }
    }

    fn is_reducible(&self) -> bool {
        self.tensors.iter().all(|numbers| has_sum(numbers.dtype))
    }

    /// What a slot has of a tensor.
    fn whole(&self, number: usize, slot: usize) -> Array {
        self.tensors[number].on_slot(slot, None)
    }

    fn run(&self, (number, items): &Owned, slot: usize) -> Array {
        self.whole(*number, slot).flat().rows(0, items.start, items.len())
    }

    fn layout(&self) -> RunLayout {
        let tensors = self.tensors.iter().map(|of| (Shape::from(of.shape.clone()), of.dtype));
        let run = |(tensor, items): &Owned| Run { tensor: *tensor, items: items.clone() };
        let owned = self.owned.iter().map(|runs| runs.iter().map(run).collect());
        RunLayout::new("runs", tensors, owned).unwrap()
    }
}

impl Job {
    /// What each slot gets of it; `None` if it is not possible.
    pub(crate) fn results(
        &self,
        grid: &Grid,
        values: &[Vec<Vec<Array>>],
    ) -> Option<Vec<Vec<Array>>> {
        (0..grid.slots()).map(|slot| self.result(grid, values, slot)).collect()
    }

    fn result(&self, grid: &Grid, values: &[Vec<Vec<Array>>], slot: usize) -> Option<Vec<Array>> {
        let members = grid.members(&self.axes, slot);
        match &self.kind {
            Kind::Sum { of } => {
                let passed: Vec<&Array> = members.iter().map(|m| &values[*of][*m][0]).collect();
                let fits = passed.iter().all(|array| array.agrees(passed[0]));
                (fits && has_sum(passed[0].dtype)).then(|| vec![Array::folded(&passed, Fold::Sum)])
            }
            Kind::Gather(runs) => {
                let mut gathered: Vec<Array> =
                    (0..runs.tensors.len()).map(|number| runs.whole(number, slot)).collect();
                for (owned, member) in runs.owned.iter().zip(members) {
                    for run @ (number, items) in owned {
                        let of_owner = runs.run(run, member).items;
                        gathered[*number].items[items.clone()].copy_from_slice(&of_owner);
                    }
                }
                Some(gathered)
            }
            Kind::Reduce(runs) => {
                let sum = |run: &Owned| {
                    let passed: Vec<Array> = members.iter().map(|m| runs.run(run, *m)).collect();
                    Array::folded(&passed.iter().collect::<Vec<_>>(), Fold::Sum)
                };
                let own = &runs.owned[grid.rank(&self.axes, slot)];
                runs.is_reducible().then(|| own.iter().map(sum).collect())
            }
        }
    }

    /// What the crate makes of it, at once.
    pub(crate) fn run(
        &self,
        ctx: &Replica,
        grid: &Grid,
        values: &[Vec<Tensor>],
    ) -> Result<Vec<Tensor>> {
        let axes = grid.named(&self.axes);
        match &self.kind {
            Kind::Sum { of } => Ok(vec![ctx.psum(&values[*of][0], axes)?]),
            Kind::Gather(runs) => {
                let own = self.own(runs, ctx, grid);
                ctx.gather_runs(own, &runs.layout(), axes).map(tensors)
            }
            Kind::Reduce(runs) => ctx.reduce_runs(list(runs, ctx), &runs.layout(), axes),
        }
    }

    /// Starts it; what is returned waits for it.
    pub(crate) fn start(
        &self,
        ctx: &Replica,
        grid: &Grid,
        values: &[Vec<Tensor>],
    ) -> Result<Waiting> {
        let axes = grid.named(&self.axes);
        Ok(match &self.kind {
            Kind::Sum { of } => {
                let pending = ctx.start_psum(&values[*of][0], axes)?;
                Box::new(|| Ok(vec![pending.wait()?]))
            }
            Kind::Gather(runs) => {
                let own = self.own(runs, ctx, grid);
                let pending = ctx.start_gather_runs(own, &runs.layout(), axes)?;
                Box::new(|| pending.wait().map(tensors))
            }
            Kind::Reduce(runs) => {
                let pending = ctx.start_reduce_runs(list(runs, ctx), &runs.layout(), axes)?;
                Box::new(|| pending.wait())
            }
        })
    }

    /// The runs that a replica owns.
    fn own(&self, runs: &Runs, ctx: &Replica, grid: &Grid) -> Vec<Tensor> {
        let own = &runs.owned[grid.rank(&self.axes, ctx.slot())];
        own.iter().map(|run| runs.run(run, ctx.slot()).tensor()).collect()
    }
}

fn list(runs: &Runs, ctx: &Replica) -> Vec<Tensor> {
    (0..runs.tensors.len()).map(|number| runs.whole(number, ctx.slot()).tensor()).collect()
}

#[allow(clippy::needless_pass_by_value, reason = "what a collective returns")]
fn tensors(variables: Vec<Var>) -> Vec<Tensor> {
    variables.iter().map(Var::as_detached_tensor).collect()
}
