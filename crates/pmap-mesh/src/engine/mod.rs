//! The seam between what replicas ask for and how it gets done: threads of one process, or
//! something over a network.

pub(crate) mod call;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod processes;
pub(crate) mod threads;

use std::{fmt, panic::Location, sync::Arc};

use candle_core::{Result, Tensor};

use crate::{
    engine::call::CollectiveCall,
    error::{self, Error, MeshError},
    mesh::{
        axes::{AxisSet, MeshAxes},
        topology::Topology,
    },
    reduce::Reduction,
};

/// How the slots of a mesh talk to each other; lives as long as the mesh.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Begins a call of a parallel function: an engine for each slot of this process, in order.
    fn begin(&self) -> Vec<Arc<dyn Engine>>;

    /// The lists of all slots, given those of this process's slots; called between two calls, by
    /// every process.
    fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> error::Result<Vec<Vec<Tensor>>>;
}

/// Moves tensors between the replicas of a group, for one replica in one call.
///
/// Every collective is called by all members of `site` with a `site.call` that agrees, and returns
/// to each its own result. Tensors come without a gradient graph and may lie on any device; results
/// lie on the device of what was given. An engine checks that calls agree, adds up in rank order,
/// and never leaves a member waiting for one that has failed or gone: it returns an error whose
/// cause [`failure`](Self::failure) knows.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// `x` reduced over all members.
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor>;

    /// The sums of those lists' entries that are `wanted` here; all members pass lists of the same
    /// shapes.
    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>>;

    /// The tensors of all members, by rank.
    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>>;

    /// The n-th of the tensors that each member passed, where n is this member's rank.
    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// What the member of rank `from` passed; `None` if nobody is to send here.
    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>>;

    /// Returns when all members have called it.
    fn barrier(&self, site: &Site) -> Result<()>;

    /// Says that this replica has returned, to those who would wait for it.
    fn finish(&self);

    /// Ends the call for all replicas because this one failed.
    fn fail(&self, error: Error);

    /// Whether the call has ended because a replica waited for longer than the mesh allows, and others
    /// may run on.
    fn is_late(&self) -> bool {
        false
    }

    /// The error that ended the call, if one did; asked of one of its engines when all replicas
    /// have ended, or are waited for no longer.
    fn failure(&self) -> Option<Error>;
}

/// A collective as one member of a group takes part in it.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) call: Arc<CollectiveCall>,
    /// The number of the group among those along the same axes.
    group: usize,
    /// The slots of the group, by rank.
    members: Arc<[usize]>,
    /// This replica's rank in the group.
    pub(crate) rank: usize,
}

impl Site {
    /// The collective `op` of `slot` with those that differ from it along `axes` only, as called by
    /// the caller's caller.
    #[track_caller]
    pub(crate) fn along(
        axes: MeshAxes,
        topology: &Topology,
        slot: usize,
        op: &'static str,
        x: Option<&Tensor>,
    ) -> error::Result<Self, MeshError> {
        let set = topology.set(&axes)?;
        let groups = topology.groups(set);
        let place = groups.place(slot);
        let call = CollectiveCall {
            op,
            detail: String::new(),
            set,
            axes,
            dtype: x.map(Tensor::dtype),
            shape: x.iter().flat_map(|x| x.dims()).copied().collect(),
            free_dim: None,
            place: Location::caller(),
        };
        Ok(Self {
            call: Arc::new(call),
            group: place.group,
            members: Arc::clone(groups.members(place.group)),
            rank: place.rank,
        })
    }

    /// The same collective, agreeing in `detail` too.
    pub(crate) fn with_detail(mut self, detail: String) -> Self {
        Arc::make_mut(&mut self.call).detail = detail;
        self
    }

    /// The same collective of tensors whose sizes may differ in `dim`.
    pub(crate) fn with_free_dim(mut self, dim: usize) -> Self {
        Arc::make_mut(&mut self.call).free_dim = Some(dim);
        self
    }

    /// The collective that the gradient of this one's result takes part in.
    pub(crate) fn backward(&self, gradient: &Tensor) -> Self {
        let mut site = self.clone();
        let call = Arc::make_mut(&mut site.call);
        call.detail.push_str(" backward");
        call.shape = gradient.dims().to_vec();
        call.free_dim = None;
        site
    }

    /// How many members the group has.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The slots of the group, by rank.
    pub(crate) fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// This replica's slot.
    pub(crate) fn slot(&self) -> usize {
        self.members[self.rank]
    }

    /// What tells the group apart from all others of the mesh.
    pub(crate) fn key(&self) -> (AxisSet, usize) {
        (self.call.set, self.group)
    }
}
