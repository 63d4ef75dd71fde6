//! The engine of many processes with a GPU each: their tensors go from device to device through
//! NCCL.
//!
//! Everything is sent from process to process, nothing through NCCL's reductions: their order of
//! summation depends on the number of ranks, the size and the network. What arrives is added up on
//! the device. There is one communicator: a group along some axes is some of its ranks, which NCCL
//! lets send to each other without the rest.
//!
//! Every collective begins with a head to the other members: a hash of what must agree, so that
//! nobody waits for what the others do not send. It ends when its result is there, and another
//! thread waits for that, so that a deadline can pass.

mod link;
mod lists;
mod store;
mod sums;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, process, slice, sync::Arc, time::Duration};

use candle_core::{Device, Result, Tensor, bail};
use core_types::Placement;

pub use self::store::NcclStore;
use self::{
    link::{Broken, Carrier, Link, Transfer, carries, new_id},
    store::Invitation,
};
use crate::{
    ALL,
    engine::{
        Engine, Site,
        processes::{self, Entered, Pending, TEXT_BYTES, agreement, description, disagreement},
    },
    error::Error,
    mesh::topology::Topology,
    reduce::Reduction,
    reduce::parts::balanced,
};

/// Up to how many bytes every member reduces everything by itself: a second transfer would take
/// longer.
const SMALL_BYTES: usize = 64 << 10;
/// How long the processes of a mesh wait for each other at its start, where connections are made
/// too.
const JOIN_TIME: Duration = Duration::from_mins(10);

/// Nobody, as the sender that a member wants to receive from.
const NOBODY: i64 = -1;

/// One slot's access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Nccl(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    device: Device,
    /// The stream takes one call at a time.
    pending: Pending,
    link: Box<dyn Carrier>,
    /// If the processes are an MPI program, which a failure ends.
    #[cfg(feature = "mpi")]
    session: Option<Arc<crate::engine::mpi::Session>>,
}

/// A collective while this slot takes part in it.
struct Call<'a> {
    engine: &'a Inner,
    site: &'a Site,
    /// The rank of each member.
    ranks: Vec<usize>,
    _entered: Entered<'a>,
}

impl Nccl {
    /// The engine of this process's slot. All processes call this.
    pub(crate) fn new(
        place: Placement,
        device: &Device,
        store: &NcclStore,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> crate::Result<Self> {
        let failed = |reason: String| Error::Nccl { reason };
        let (processes, slots) = (place.world_size().as_usize(), topology.slots());
        if processes != slots {
            return Err(failed(format!(
                "{processes} processes do not fill a mesh of {slots} slots"
            )));
        }
        let cuda = device.as_cuda_device().map_err(|error| failed(error.to_string()))?;
        let invitation = store.invitation(place, JOIN_TIME, || new_id().map_err(failed))?;
        let link = Link::join(cuda.clone(), place, invitation.id, JOIN_TIME).map_err(failed)?;
        let slot = place.rank().as_usize();
        let start = Site::along(ALL, &topology, slot, "the start of the mesh", None)?;
        let mut engine = Self(Arc::new(Inner {
            topology,
            slot,
            deadline: JOIN_TIME,
            device: device.clone(),
            pending: Pending::default(),
            link: Box::new(link),
            #[cfg(feature = "mpi")]
            session: invitation.session.clone(),
        }));
        // All have joined: the id is taken back before any of them can look for that of another
        // mesh.
        drop::<Invitation>(invitation);
        engine.barrier(&start).map_err(|error| failed(error.to_string()))?;
        if let Some(inner) = Arc::get_mut(&mut engine.0) {
            inner.deadline = deadline;
        }
        Ok(engine)
    }

    /// The lists of all processes, of any tensors: every process brings as many, in any shapes.
    pub(crate) fn exchange(&self, list: &[Tensor]) -> crate::Result<Vec<Vec<Tensor>>> {
        processes::exchange(self, &self.0.topology, self.0.slot, &self.0.device, list)
    }

    /// Enters a collective of these tensors; returns it with the `aux` of all members, or `None`
    /// for a group of one.
    ///
    /// # Errors
    ///
    /// On all members alike, if they do not agree; on this one, if a tensor cannot be sent.
    fn enter<'a>(
        &'a self,
        site: &'a Site,
        tensors: &[Tensor],
        aux: i64,
    ) -> Result<Option<(Call<'a>, Vec<i64>)>> {
        let engine = &*self.0;
        let entered = engine.pending.enter(engine.slot, &site.call)?;
        tensors.iter().try_for_each(|x| engine.check_sendable(site, x))?;
        if site.size == 1 {
            return Ok(None);
        }
        let groups = engine.topology.groups(site.call.set);
        let ranks = groups.members_with(engine.slot).to_vec();
        let call = Call { engine, site, ranks, _entered: entered };
        let told = call.meet(tensors, aux)?;
        Ok(Some((call, told)))
    }
}

impl Inner {
    fn check_sendable(&self, site: &Site, x: &Tensor) -> Result<()> {
        if !x.device().same_device(&self.device) {
            let (found, expected) = (x.device().location(), self.device.location());
            return Err(candle_core::Error::wrap(Error::OtherDevice {
                call: Arc::clone(&site.call),
                found,
                expected,
            }));
        }
        if !carries(x.dtype()) {
            bail!("tensors of type {} cannot be sent over NCCL", x.dtype().as_str());
        }
        Ok(())
    }

    /// Says why, and ends this process; what started it ends the others.
    fn end(&self, why: &str) -> ! {
        #[cfg(feature = "mpi")]
        if let Some(session) = &self.session {
            session.end(why);
        }
        processes::end(self.slot, why, || process::exit(1))
    }
}

impl Call<'_> {
    /// Sends `x(n)`, which has one dimension, to each member n; returns what they have for this
    /// one, `items(n)` items of member n, and what it has for itself, in the order of the group.
    ///
    /// Whatever goes wrong ends the program: what was started could not be taken back.
    fn swap(
        &self,
        x: impl Fn(usize) -> Result<Tensor>,
        items: impl Fn(usize) -> usize,
    ) -> Result<Vec<Tensor>> {
        let Site { size, position, .. } = *self.site;
        let own = x(position)?;
        let mut all = vec![own.narrow(0, 0, 0)?; size];
        let mut transfer =
            Transfer { dtype: own.dtype(), outgoing: Vec::new(), incoming: Vec::new() };
        let mut senders = Vec::new();
        for member in (0..size).filter(|&member| member != position) {
            let x = x(member)?;
            if x.elem_count() > 0 {
                transfer.outgoing.push((self.ranks[member], x));
            }
            if items(member) > 0 {
                transfer.incoming.push((self.ranks[member], items(member)));
                senders.push(member);
            }
        }
        for (member, arrived) in senders.into_iter().zip(self.carry_out(transfer)) {
            all[member] = arrived;
        }
        all[position] = own;
        Ok(all)
    }

    fn carry_out(&self, transfer: Transfer) -> Vec<Tensor> {
        if transfer.outgoing.is_empty() && transfer.incoming.is_empty() {
            return Vec::new();
        }
        let (engine, call) = (self.engine, &self.site.call);
        match engine.link.transfer(transfer, engine.deadline) {
            Ok(arrived) => arrived,
            Err(Broken::Failed(reason)) => engine.end(&format!("{reason} in {call}")),
            Err(Broken::Late) => {
                let (index, call, after) = (engine.slot, Arc::clone(call), engine.deadline);
                engine.end(&Error::Deadline { index, missing: Vec::new(), call, after }.to_string())
            }
        }
    }

    /// Tells all members of this one's call, and `aux`; returns what they told of theirs.
    fn meet(&self, tensors: &[Tensor], aux: i64) -> Result<Vec<i64>> {
        let head = Tensor::new(
            &[agreement(&self.site.call, tensors).cast_signed(), aux],
            &self.engine.device,
        )?;
        let heads = self.swap(|_| Ok(head.clone()), |_| 2)?;
        let heads: Vec<i64> = Tensor::cat(&heads, 0)?.to_vec1()?;
        match heads.chunks_exact(2).position(|head| head[0] != heads[0]) {
            None => Ok(heads.chunks_exact(2).map(|head| head[1]).collect()),
            Some(other) => Err(self.mismatch(other, tensors)?),
        }
    }

    /// What all members return if the first one and `other` do not agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> Result<candle_core::Error> {
        let own = Tensor::new(description(&self.site.call, tensors), &self.engine.device)?;
        let texts = self.swap(|_| Ok(own.clone()), |_| TEXT_BYTES)?;
        let texts: Vec<Vec<u8>> = texts.iter().map(Tensor::to_vec1).collect::<Result<_>>()?;
        let Self { engine, site, .. } = self;
        Ok(disagreement(&engine.topology, engine.slot, &site.call, other, |member| {
            texts[member].clone()
        }))
    }

    /// The reduction of all members' `x`, which has one dimension; of a large one each member makes
    /// a part.
    fn reduce(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Site { size, position, .. } = *self.site;
        let items = x.elem_count();
        if items * x.dtype().size_in_bytes() <= SMALL_BYTES {
            return sums::reduced(&self.swap(|_| Ok(x.clone()), |_| items)?, reduction);
        }
        let part = |member| balanced(items, member, size);
        let summands =
            self.swap(|to| x.narrow(0, part(to).start, part(to).len()), |_| part(position).len())?;
        let sum = sums::reduced(&summands, reduction)?;
        drop(summands);
        Tensor::cat(&self.swap(|_| Ok(sum.clone()), |from| part(from).len())?, 0)
    }
}

impl Engine for Nccl {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Some((call, _)) = self.enter(site, slice::from_ref(x), 0)? else {
            return x.force_contiguous();
        };
        call.reduce(&flat(x)?, reduction)?.reshape(x.shape())
    }

    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let Some((call, _)) = self.enter(site, &list, 0)? else {
            return wanted.iter().map(|&n| list[n].force_contiguous()).collect();
        };
        // Each process has one device, and all of them want all sums.
        let mut sums = BTreeMap::new();
        for bucket in lists::buckets(&list) {
            let sum = call.reduce(&lists::joined(&list, &bucket)?, reduction)?;
            sums.extend(lists::cut(&list, &bucket, &sum)?);
        }
        let sum = |n: &usize| {
            sums.get(n).cloned().ok_or_else(|| candle_core::Error::msg("a tensor was not summed"))
        };
        wanted.iter().map(sum).collect()
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let free = site.call.free_dim;
        let aux = free.map_or(0, |dim| told(x.dims()[dim]));
        let Some((call, sizes)) = self.enter(site, slice::from_ref(x), aux)? else {
            return Ok(vec![x.force_contiguous()?]);
        };
        let shape = |member: usize| {
            let mut dims = x.dims().to_vec();
            if let Some(dim) = free {
                dims[dim] = usize::try_from(sizes[member]).unwrap_or_default();
            }
            dims
        };
        let own = flat(&x.force_contiguous()?)?;
        let parts = call.swap(|_| Ok(own.clone()), |from| shape(from).iter().product())?;
        parts.into_iter().enumerate().map(|(member, part)| part.reshape(shape(member))).collect()
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Some((call, _)) = self.enter(site, &parts, 0)? else {
            return parts.iter().map(Tensor::force_contiguous).collect();
        };
        let own = &parts[site.position];
        let arrived = call.swap(|to| flat(&parts[to].force_contiguous()?), |_| own.elem_count())?;
        arrived.into_iter().map(|part| part.reshape(own.shape())).collect()
    }

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let position = site.position;
        let Some((call, senders)) =
            self.enter(site, slice::from_ref(x), from.map_or(NOBODY, told))?
        else {
            return from.map(|_| x.force_contiguous()).transpose();
        };
        let own = flat(x)?;
        let wants = |member: usize| senders[member] == told(position);
        let arrived = call.swap(
            |to| if wants(to) { Ok(own.clone()) } else { own.narrow(0, 0, 0) },
            |sender| if from == Some(sender) { own.elem_count() } else { 0 },
        )?;
        let received = |from: usize| {
            // Its own would change with the argument.
            if from == position { x.force_contiguous() } else { arrived[from].reshape(x.shape()) }
        };
        from.map(received).transpose()
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        self.enter(site, &[], 0).map(drop)
    }

    fn returned(&self) {
        if let Err(error) = processes::leave(self, &self.0.topology, self.0.slot) {
            self.0.end(&error.to_string());
        }
    }

    /// Does not return: the others wait on their devices, where nothing but an end of the program
    /// reaches them.
    fn failed(&self, error: Error) {
        self.0.end(&processes::with_causes(&error));
    }
}

/// The items of a tensor in one dimension and in one piece.
fn flat(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.flatten_all()
}

/// A size or position as it is told to others.
fn told(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
