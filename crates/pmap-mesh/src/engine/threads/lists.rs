//! Collectives on lists of tensors, through memory that all members of a group can read.
//!
//! A member that starts a collective only contributes tensors, which must not change until the wait
//! has returned. The members compute the results together ([`SharedWork`]): once all members have
//! arrived, members that wait copy and add the tensors chunk by chunk. The last member to arrive
//! could do this alone, but this would delay its own computation, and leave the cores of the
//! waiting members idle.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{Device, Result, Shape, Tensor, Var, bail};

use super::{
    SMALL_BYTES,
    exchange::{Contribution, GroupExchange, ListWork, RunKey, nth_of_each_member},
    rendezvous::Rendezvous,
    snapshot,
};
use crate::{
    device::to_device::{leaf_to_device, n_bytes, to_host},
    engine::{
        GroupContext, ListRequest,
        layout::{Run, RunLayout},
    },
    reduce::{
        self, Reduction,
        outputs::{Concatenation, concat_output, reduce_output},
        shared_work::SharedWork,
    },
};

/// One member's parameters of a collective on lists, without its contribution.
#[derive(Debug)]
pub(super) enum ListOp {
    Gather { layout: RunLayout, device: Device },
    Reduce(ListReduction),
}

/// A reduction of the members' lists, or of parts of them.
#[derive(Debug)]
pub(super) struct ListReduction {
    /// The runs that each rank gets; `None` if every rank gets every tensor.
    runs_by_rank: Option<Arc<[Vec<Run>]>>,
    reduction: Reduction,
    /// The device of each tensor of the list.
    devices: Vec<Device>,
    /// Whether the lists are so small that every member computes its results alone.
    is_small: bool,
}

/// A run of a tensor to reduce, and the shape of the result.
struct ReduceTarget {
    run: Run,
    shape: Shape,
}

impl ListOp {
    /// Splits a request into the operation of one member and its contribution.
    pub(super) fn new(work: ListRequest) -> Result<(Self, Contribution)> {
        match work {
            ListRequest::Gather { own, layout, device } => {
                let contribution = own.iter().map(to_host).collect::<Result<_>>()?;
                Ok((Self::Gather { layout, device }, contribution))
            }
            ListRequest::Sum { list, runs_by_rank } => {
                let (op, contribution) =
                    ListReduction::new(&list, Some(runs_by_rank), Reduction::Sum)?;
                Ok((Self::Reduce(op), contribution))
            }
        }
    }

    /// Plans the shared work; returns `None` if each member computes its results alone.
    pub(super) fn plan(&self, contributions: &[Contribution]) -> Option<Result<ListWork>> {
        match self {
            Self::Gather { layout, .. } => Some(plan_gather(layout, contributions)),
            Self::Reduce(op) => (!op.is_small).then(|| op.plan(contributions)),
        }
    }

    /// Computes this member's results, after all members have contributed.
    pub(super) fn compute_results(
        &self,
        rendezvous: &Rendezvous,
        ctx: &GroupContext,
        exchange: &Arc<GroupExchange>,
    ) -> Result<Vec<Tensor>> {
        let shared = exchange.work()?;
        if let Some(ListWork { work, .. }) = shared {
            rendezvous.finish_work(ctx, exchange, work)?;
        }
        match self {
            Self::Gather { layout, device } => gather_results(layout, device, shared),
            Self::Reduce(op) => match shared {
                Some(shared) => op.shared_results(ctx, exchange, shared),
                None => op.results_alone(ctx, exchange),
            },
        }
    }
}

impl ListReduction {
    pub(super) fn new(
        list: &[Tensor],
        runs_by_rank: Option<Arc<[Vec<Run>]>>,
        reduction: Reduction,
    ) -> Result<(Self, Contribution)> {
        // Copy small lists, so that no member has to wait until the other members have read its
        // list.
        let is_small = list.iter().map(n_bytes).sum::<usize>() <= SMALL_BYTES;
        let to_contribution = if is_small { snapshot } else { to_host };
        let contribution = list.iter().map(to_contribution).collect::<Result<_>>()?;
        let devices = list.iter().map(|x| x.device().clone()).collect();
        Ok((Self { runs_by_rank, reduction, devices, is_small }, contribution))
    }

    /// Returns this member's results of finished shared work.
    fn shared_results(
        &self,
        ctx: &GroupContext,
        exchange: &GroupExchange,
        ListWork { work, outputs }: &ListWork,
    ) -> Result<Vec<Tensor>> {
        self.targets(ctx.rank, &exchange.contributions()[0])
            .iter()
            .map(|ReduceTarget { run, .. }| {
                work.result(outputs[&output_key(run)])?.to_device(&self.devices[run.tensor])
            })
            .collect()
    }

    /// Computes this member's results without the other members.
    fn results_alone(&self, ctx: &GroupContext, exchange: &GroupExchange) -> Result<Vec<Tensor>> {
        let contributions = exchange.contributions();
        check_equal_lists(contributions)?;
        let mut results = Vec::new();
        for ReduceTarget { run: Run { tensor, items }, shape } in
            self.targets(ctx.rank, &contributions[0])
        {
            let summands = exchange.nth_of_each_member(tensor);
            let sum = reduce::reduce_item_range(&summands, items, &shape, self.reduction)?;
            results.push(sum.to_device(&self.devices[tensor])?);
        }
        Ok(results)
    }

    /// Plans the reductions of all runs. A run that several ranks get is reduced once.
    fn plan(&self, contributions: &[Contribution]) -> Result<ListWork> {
        check_equal_lists(contributions)?;
        let mut outputs = BTreeMap::new();
        let mut reductions = Vec::new();
        // All ranks get the same tensors if they get every tensor.
        let n_ranks = if self.runs_by_rank.is_some() { contributions.len() } else { 1 };
        for rank in 0..n_ranks {
            for ReduceTarget { run, shape } in self.targets(rank, &contributions[0]) {
                let n_outputs = reductions.len();
                if *outputs.entry(output_key(&run)).or_insert(n_outputs) == n_outputs {
                    let summands = nth_of_each_member(contributions, run.tensor);
                    reductions.push(reduce_output(summands, run.items, shape, self.reduction)?);
                }
            }
        }
        Ok(ListWork { work: SharedWork::new(reductions, contributions.len()), outputs })
    }

    /// Returns the runs of a list that a rank gets; all members have equal lists.
    fn targets(&self, rank: usize, list: &[Tensor]) -> Vec<ReduceTarget> {
        let whole_tensor = |(tensor, x): (usize, &Tensor)| {
            let shape = x.shape().clone();
            ReduceTarget { run: Run { tensor, items: 0..shape.elem_count() }, shape }
        };
        match &self.runs_by_rank {
            None => list.iter().enumerate().map(whole_tensor).collect(),
            Some(runs) => runs[rank]
                .iter()
                .map(|run| ReduceTarget { shape: run.items.len().into(), run: run.clone() })
                .collect(),
        }
    }
}

fn output_key(run: &Run) -> RunKey {
    (run.tensor, run.items.start, run.items.end)
}

/// Rejects lists whose dtypes or shapes differ, since the kernel would reduce only the items that
/// all lists have.
fn check_equal_lists(contributions: &[Contribution]) -> Result<()> {
    for (rank, list) in contributions.iter().enumerate() {
        for (n, (left, right)) in contributions[0].iter().zip(list).enumerate() {
            if left.dtype() != right.dtype() || left.shape() != right.shape() {
                bail!(
                    "tensor {n} is {} {:?} on rank 0 and {} {:?} on rank {rank}",
                    left.dtype().as_str(),
                    left.dims(),
                    right.dtype().as_str(),
                    right.dims()
                );
            }
        }
    }
    Ok(())
}

/// Returns the gathered tensors of a layout.
#[expect(clippy::expect_used, reason = "`ListOp::plan` plans shared work for every gather")]
fn gather_results(
    layout: &RunLayout,
    device: &Device,
    shared: Option<&ListWork>,
) -> Result<Vec<Tensor>> {
    let work = &shared.expect("the members share the work of every gather").work;
    let leaves = (0..layout.tensors().len()).map(|index| Var::from_tensor(&work.result(index)?));
    leaves.map(|leaf| leaf_to_device(leaf?, device)).collect()
}

/// Plans the concatenation of a layout's tensors.
fn plan_gather(layout: &RunLayout, contributions: &[Contribution]) -> Result<ListWork> {
    let mut outputs = Vec::new();
    for ((shape, dtype), owners) in layout.tensors().iter().zip(layout.by_tensor()) {
        let parts = owners.iter().map(|run| contributions[run.rank][run.index].clone());
        outputs.push(concat_output(Concatenation {
            dtype: *dtype,
            shape: shape.clone(),
            parts: parts.collect(),
            is_leaf: true,
        })?);
    }
    let work = SharedWork::new(outputs, contributions.len());
    Ok(ListWork { work, outputs: BTreeMap::new() })
}

/// Plans the concatenation of all parts into one flat output.
pub(super) fn concat_flat(parts: Vec<Tensor>) -> Result<ListWork> {
    let n_items: usize = parts.iter().map(Tensor::elem_count).sum();
    let dtype = parts[0].dtype();
    let members = parts.len();
    let concatenation = Concatenation { dtype, shape: n_items.into(), parts, is_leaf: false };
    let work = SharedWork::new(vec![concat_output(concatenation)?], members);
    Ok(ListWork { work, outputs: BTreeMap::new() })
}
