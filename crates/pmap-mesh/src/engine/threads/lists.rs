//! Collectives of lists of tensors, over memory that all members of a group can read.
//!
//! Nothing is done where a collective is started: its tensors are handed in, and are not to be
//! written to before it has been waited for. What is copied or added up, those who wait make
//! together, piece by piece, once all have come ([`SharedWork`]). The member that came last could do
//! it alone, but its own computation would stand still meanwhile, and the cores of those who wait.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{Device, Result, Shape, Tensor, Var, bail};

use super::{
    SMALL_BYTES,
    exchange::{Contribution, Exchange, ListWork, tensors_at},
    rendezvous::Rendezvous,
    snapshot,
};
use crate::{
    device::to_device::{n_bytes, on_host, placed},
    engine::{
        Site, Wanted, Work,
        layout::{Owned, Run, RunLayout},
    },
    reduce::{
        self, Reduction,
        joint::SharedWork,
        outputs::{Assembly, assembled, reduced},
    },
};

/// What one member has to know of a collective of lists besides what it contributes.
#[derive(Debug)]
pub(super) enum Job {
    Gather { layout: RunLayout, device: Device },
    Reduce(ListReduction),
}

/// A reduction of what several members want of their lists.
#[derive(Debug)]
pub(super) struct ListReduction {
    wanted: Wanted,
    reduction: Reduction,
    /// The device of each tensor of the list.
    devices: Vec<Device>,
    /// Whether every member reduces by itself what it wants.
    is_small: bool,
}

/// A run of a tensor that is reduced, and the shape of the result.
struct ReduceTarget {
    run: Run,
    shape: Shape,
}

impl Job {
    /// The job of one member, and what it contributes.
    pub(super) fn new(work: Work) -> Result<(Self, Contribution)> {
        match work {
            Work::Gather { own, layout, device } => {
                let tensors = own.iter().map(on_host).collect::<Result<_>>()?;
                let contribution = Contribution { tensors, wanted: Vec::new() };
                Ok((Self::Gather { layout, device }, contribution))
            }
            Work::Reduce { list, wanted, reduction } => {
                let (job, contribution) = ListReduction::new(&list, wanted, reduction)?;
                Ok((Self::Reduce(job), contribution))
            }
        }
    }

    /// What the members make together.
    pub(super) fn lay_out(&self, contributions: &[Contribution]) -> Option<Result<ListWork>> {
        match self {
            Self::Gather { layout, .. } => Some(gathering(layout, contributions)),
            Self::Reduce(job) => (!job.is_small).then(|| job.lay_out(contributions)),
        }
    }

    /// The results, given that all have contributed.
    pub(super) fn results(
        &self,
        rendezvous: &Rendezvous,
        site: &Site,
        exchange: &Arc<Exchange>,
    ) -> Result<Vec<Tensor>> {
        let joint = exchange.work()?;
        if let Some(ListWork { work, .. }) = joint {
            rendezvous.work(site, exchange, work)?;
        }
        match self {
            Self::Gather { layout, device } => gathered(layout, device, joint),
            Self::Reduce(job) => match joint {
                Some(joint) => job.joint_results(site, exchange, joint),
                None => job.own_results(site, exchange),
            },
        }
    }
}

impl ListReduction {
    fn new(list: &[Tensor], wanted: Wanted, reduction: Reduction) -> Result<(Self, Contribution)> {
        // Small lists are copied, so that nobody has to wait until all have read them.
        let is_small = list.iter().map(n_bytes).sum::<usize>() <= SMALL_BYTES;
        let contributed = if is_small { snapshot } else { on_host };
        let tensors = list.iter().map(contributed).collect::<Result<_>>()?;
        let own = match &wanted {
            Wanted::Own(own) => own.clone(),
            Wanted::Everything | Wanted::ByRank(_) => Vec::new(),
        };
        if let Some(n) = own.iter().find(|&&n| n >= list.len()) {
            bail!("there is no tensor {n} to sum");
        }
        let devices = list.iter().map(|x| x.device().clone()).collect();
        Ok((Self { wanted, reduction, devices, is_small }, Contribution { tensors, wanted: own }))
    }

    /// The results that all have made together.
    fn joint_results(
        &self,
        site: &Site,
        exchange: &Exchange,
        ListWork { work, outputs }: &ListWork,
    ) -> Result<Vec<Tensor>> {
        let result = |ReduceTarget { run, .. }: &ReduceTarget| {
            work.result(outputs[&key(run)])?.to_device(&self.devices[run.tensor])
        };
        self.wants(site.rank, exchange.contributions()).iter().map(result).collect()
    }

    /// The results, made by this member alone.
    fn own_results(&self, site: &Site, exchange: &Exchange) -> Result<Vec<Tensor>> {
        let contributions = exchange.contributions();
        check_alike(contributions)?;
        let sum = |ReduceTarget { run: Run { tensor, items }, shape }: &ReduceTarget| {
            let summands = exchange.tensors_at(*tensor);
            let sum = reduce::run(&summands, items.clone(), shape, self.reduction)?;
            sum.to_device(&self.devices[*tensor])
        };
        self.wants(site.rank, contributions).iter().map(sum).collect()
    }

    /// Everything that any member wants, each run once.
    fn lay_out(&self, contributions: &[Contribution]) -> Result<ListWork> {
        check_alike(contributions)?;
        let mut outputs = BTreeMap::new();
        let mut reductions = Vec::new();
        for rank in 0..contributions.len() {
            for ReduceTarget { run, shape } in self.wants(rank, contributions) {
                let n_outputs = reductions.len();
                if *outputs.entry(key(&run)).or_insert(n_outputs) == n_outputs {
                    let summands = tensors_at(contributions, run.tensor);
                    reductions.push(reduced(summands, run.items, shape, self.reduction)?);
                }
            }
        }
        Ok(ListWork { work: SharedWork::new(reductions, contributions.len()), outputs })
    }

    fn wants(&self, rank: usize, contributions: &[Contribution]) -> Vec<ReduceTarget> {
        let Contribution { tensors, wanted } = &contributions[rank];
        let whole = |tensor: usize| {
            let shape = tensors[tensor].shape().clone();
            ReduceTarget { run: Run { tensor, items: 0..shape.elem_count() }, shape }
        };
        match &self.wanted {
            Wanted::Everything => (0..tensors.len()).map(whole).collect(),
            Wanted::Own(_) => wanted.iter().copied().map(whole).collect(),
            Wanted::ByRank(runs) => {
                let want =
                    |run: &Run| ReduceTarget { shape: run.items.len().into(), run: run.clone() };
                runs[rank].iter().map(want).collect()
            }
        }
    }
}

fn key(run: &Run) -> (usize, usize, usize) {
    (run.tensor, run.items.start, run.items.end)
}

/// Rejects lists whose dtypes or shapes differ: the kernel would reduce the items that all have.
fn check_alike(contributions: &[Contribution]) -> Result<()> {
    let first = &contributions[0].tensors;
    for (rank, Contribution { tensors, .. }) in contributions.iter().enumerate() {
        for (n, (left, right)) in first.iter().zip(tensors).enumerate() {
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

/// The tensors of a layout, as all have made them together.
#[expect(clippy::expect_used, reason = "`Job::lay_out` lays out every gathering")]
fn gathered(layout: &RunLayout, device: &Device, joint: Option<&ListWork>) -> Result<Vec<Tensor>> {
    let work = &joint.expect("what is gathered is made together").work;
    let leaf = |n| placed(Var::from_tensor(&work.result(n)?)?, device);
    (0..layout.tensors().len()).map(leaf).collect()
}

/// The making of a layout's tensors, in its order.
fn gathering(layout: &RunLayout, contributions: &[Contribution]) -> Result<ListWork> {
    let tensors = layout.tensors().iter().zip(layout.owners());
    let assemblies = tensors.map(|((shape, dtype), owners)| {
        let part = |owned: &Owned| contributions[owned.rank].tensors[owned.n_th].clone();
        assembled(Assembly {
            dtype: *dtype,
            shape: shape.clone(),
            parts: owners.iter().map(part).collect(),
            is_leaf: true,
        })
    });
    let work = SharedWork::new(assemblies.collect::<Result<_>>()?, contributions.len());
    Ok(ListWork { work, outputs: BTreeMap::new() })
}

/// The items of all parts, one after the other, as one output.
pub(super) fn concat_flat(parts: Vec<Tensor>) -> Result<ListWork> {
    let n_items: usize = parts.iter().map(Tensor::elem_count).sum();
    let dtype = parts[0].dtype();
    let members = parts.len();
    let assembly = Assembly { dtype, shape: n_items.into(), parts, is_leaf: false };
    let work = SharedWork::new(vec![assembled(assembly)?], members);
    Ok(ListWork { work, outputs: BTreeMap::new() })
}
