//! Collectives that are started and awaited later, including collectives of runs of many tensors.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor, Var};
use pmap_mesh::{
    Replica,
    support::{Run, RunLayout},
};

use crate::differential::{
    array::Array,
    bits::FoldOp,
    grid::{Axes, Grid},
    program::ArrayRecipe,
    random::Random,
    reference::has_sum,
};

/// The size in bytes above which engines send data differently.
pub(crate) const LARGE_BYTES: usize = 16 << 10;

/// A collective that can be started.
#[derive(Clone, Debug)]
pub(crate) struct AsyncCall {
    pub(crate) kind: AsyncCallKind,
    pub(crate) axes: Axes,
}

#[derive(Clone, Debug)]
pub(crate) enum AsyncCallKind {
    /// A gather of tensors from the runs of each rank.
    Gather(TensorRuns),
    /// A reduction of runs over all ranks.
    Reduce(TensorRuns),
}

/// Tensors of each replica, and the runs of items that each rank of a group owns.
#[derive(Clone, Debug)]
pub(crate) struct TensorRuns {
    pub(crate) tensors: Vec<ArrayRecipe>,
    owned: Vec<Vec<OwnedRun>>,
}

/// The index of a tensor, and some of its items.
type OwnedRun = (usize, Range<usize>);

/// A function that waits for a pending collective.
pub(crate) type PendingResult = Box<dyn FnOnce() -> Result<Vec<Tensor>>>;

impl TensorRuns {
    /// Returns random runs: every item has one owner among `ranks`, and some empty runs begin where
    /// others end.
    pub(crate) fn random(random: &mut Random, tensors: Vec<ArrayRecipe>, ranks: usize) -> Self {
        let mut owned = vec![Vec::new(); ranks];
        for (number, numbers) in tensors.iter().enumerate() {
            let size: usize = numbers.shape.iter().product();
            let mut start = 0;
            while start < size {
                let end = if random.one_in(4) { start } else { random.between(start, size) };
                owned[random.less_than(ranks)].push((number, start..end));
                start = end;
            }
        }
        let owned = owned.into_iter().map(|runs| random.shuffled(runs)).collect();
        Self { tensors, owned }
    }

    fn is_reducible(&self) -> bool {
        self.tensors.iter().all(|numbers| has_sum(numbers.dtype))
    }

    /// Returns a slot's tensor.
    fn whole(&self, number: usize, slot: usize) -> Array {
        self.tensors[number].on_slot(slot, None)
    }

    fn run(&self, (number, items): &OwnedRun, slot: usize) -> Array {
        self.whole(*number, slot).flat().rows(0, items.start, items.len())
    }

    fn layout(&self) -> RunLayout {
        let tensors =
            self.tensors.iter().map(|value| (Shape::from(value.shape.clone()), value.dtype));
        let owned = self.owned.iter().map(|runs| {
            runs.iter()
                .map(|(tensor, items)| Run { tensor: *tensor, items: items.clone() })
                .collect()
        });
        RunLayout::new("runs", tensors, owned).unwrap()
    }
}

impl AsyncCall {
    /// Returns the result of each slot, or `None` if the collective is impossible.
    pub(crate) fn results(&self, grid: &Grid) -> Option<Vec<Vec<Array>>> {
        (0..grid.slots()).map(|slot| self.result(grid, slot)).collect()
    }

    fn result(&self, grid: &Grid, slot: usize) -> Option<Vec<Array>> {
        let members = grid.members(&self.axes, slot);
        match &self.kind {
            AsyncCallKind::Gather(runs) => {
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
            AsyncCallKind::Reduce(runs) => {
                let own = &runs.owned[grid.rank(&self.axes, slot)];
                runs.is_reducible().then(|| {
                    own.iter()
                        .map(|run| {
                            let passed: Vec<Array> =
                                members.iter().map(|m| runs.run(run, *m)).collect();
                            Array::folded(&passed.iter().collect::<Vec<_>>(), FoldOp::Sum)
                        })
                        .collect()
                })
            }
        }
    }

    /// Calls the collective in the crate.
    pub(crate) fn run(&self, ctx: &Replica, grid: &Grid) -> Result<Vec<Tensor>> {
        let axes = grid.named(&self.axes);
        match &self.kind {
            AsyncCallKind::Gather(runs) => {
                let own = self.own(runs, ctx, grid);
                ctx.gather_runs(own, &runs.layout(), axes).map(tensors)
            }
            AsyncCallKind::Reduce(runs) => ctx.reduce_runs(list(runs, ctx), &runs.layout(), axes),
        }
    }

    /// Starts the collective; returns a function that waits for it.
    pub(crate) fn start(&self, ctx: &Replica, grid: &Grid) -> Result<PendingResult> {
        let axes = grid.named(&self.axes);
        Ok(match &self.kind {
            AsyncCallKind::Gather(runs) => {
                let own = self.own(runs, ctx, grid);
                let pending = ctx.start_gather_runs(own, &runs.layout(), axes)?;
                Box::new(|| pending.wait().map(tensors))
            }
            AsyncCallKind::Reduce(runs) => {
                let pending = ctx.start_reduce_runs(list(runs, ctx), &runs.layout(), axes)?;
                Box::new(|| pending.wait())
            }
        })
    }

    /// Returns the runs that a replica owns.
    fn own(&self, runs: &TensorRuns, ctx: &Replica, grid: &Grid) -> Vec<Tensor> {
        let own = &runs.owned[grid.rank(&self.axes, ctx.slot())];
        own.iter().map(|run| runs.run(run, ctx.slot()).tensor()).collect()
    }
}

fn list(runs: &TensorRuns, ctx: &Replica) -> Vec<Tensor> {
    (0..runs.tensors.len()).map(|number| runs.whole(number, ctx.slot()).tensor()).collect()
}

#[allow(clippy::needless_pass_by_value, reason = "collectives return an owned list")]
fn tensors(variables: Vec<Var>) -> Vec<Tensor> {
    variables.iter().map(Var::as_detached_tensor).collect()
}
