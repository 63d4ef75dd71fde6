//! The seam between what replicas ask for and how it gets done: threads of one process, or
//! something over a network.

pub(crate) mod layout;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod processes;
pub(crate) mod threads;
pub(crate) mod traffic;

use std::{fmt, panic::Location, sync::Arc};

use candle_core::{Device, Result, Tensor};

use crate::{
    axes::{AxisSet, MeshAxes},
    engine::{
        layout::{Run, RunLayout},
        traffic::Counter,
    },
    error::{self, Error, MeshError, ProcessError, call::CollectiveCall},
    grid::Topology,
    reduce::Reduction,
};

/// How the slots of a mesh talk to each other; lives as long as the mesh.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Begins a call of a parallel function: an engine for each slot of this process, in order.
    fn begin(&self) -> Vec<Arc<dyn Engine>>;

    /// Refuses a call from a thread that must not make it since another one calls other meshes.
    ///
    /// # Errors
    ///
    /// [`ProcessError::OtherThread`].
    fn check_caller(&self) -> error::Result<(), ProcessError> {
        Ok(())
    }

    /// What counts the collectives of each slot of this process, in order.
    fn counters(&self) -> &[Counter];

    /// The lists of all slots, given those of this process's slots, or why it has none: then all
    /// processes fail, this one with its error. Called between two calls by every process, for
    /// the same `purpose`.
    ///
    /// # Errors
    ///
    /// That of `lists`, and [`ProcessError::Peer`] if another process has none.
    fn process_allgather(
        &self,
        purpose: Purpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>>;
}

/// For what processes tell each other something between two calls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Their user asked for it.
    User,
    /// The results of a call are put together.
    Results,
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

    /// The tensors of all members, by rank.
    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Gathered>;

    /// The n-th of the tensors that each member passed, where n is this member's rank.
    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// What the member of rank `from` sends, if this one is sent something; all members name the
    /// same type and shape.
    fn receive(&self, site: &Site, message: &Message<'_>) -> Result<Option<Tensor>>;

    /// Carries out a collective of lists in a group of several members.
    fn run(&self, site: &Site, work: Work) -> Result<Vec<Tensor>>;

    /// Begins one, without waiting for the others; the result must be waited for.
    fn start(&self, site: &Site, work: Work) -> Result<Box<dyn PendingCollective>>;

    /// Returns when all members have called it.
    fn barrier(&self, site: &Site) -> Result<()>;

    /// What counts this slot's collectives.
    fn counter(&self) -> &Counter;

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

/// What all members of a group have gathered.
#[derive(Debug)]
pub(crate) enum Gathered {
    /// What each member passed, by rank.
    Parts(Vec<Tensor>),
    /// The same in one tensor.
    EndToEnd {
        /// The items of all members in one dimension, by rank.
        items: Tensor,
        /// The shape of what each member passed, by rank.
        shapes: Vec<Vec<usize>>,
    },
}

impl Gathered {
    /// The size in a dimension of what each member passed, by rank.
    pub(crate) fn sizes(&self, dim: usize) -> Vec<usize> {
        match self {
            Self::Parts(parts) => parts.iter().map(|part| part.dims()[dim]).collect(),
            Self::EndToEnd { shapes, .. } => shapes.iter().map(|shape| shape[dim]).collect(),
        }
    }

    /// What each member passed, by rank.
    pub(crate) fn into_parts(self) -> Result<Vec<Tensor>> {
        let (items, shapes) = match self {
            Self::Parts(parts) => return Ok(parts),
            Self::EndToEnd { items, shapes } => (items, shapes),
        };
        let mut start = 0;
        let part = |shape: &Vec<usize>| {
            let n_items = shape.iter().product();
            let part = items.narrow(0, start, n_items)?.reshape(shape.as_slice());
            start += n_items;
            part
        };
        shapes.iter().map(part).collect()
    }
}

/// What a member sends and receives in a collective in which not all do both.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    /// Of the type and shape of what is sent, on the device on which this member receives it.
    pub(crate) x: &'a Tensor,
    /// Whether `x` is sent to anybody, this member included. Of what is not, only type and shape
    /// count.
    pub(crate) is_sent: bool,
    /// Whose `x` this member receives.
    pub(crate) from: Option<usize>,
}

/// A collective of lists of tensors.
#[derive(Debug)]
pub(crate) enum Work {
    /// Returns the tensors of a layout, each a leaf of candle's graph, put together of the runs
    /// that each member owns.
    Gather {
        /// This member's runs, in the order of the layout.
        own: Vec<Tensor>,
        layout: RunLayout,
        /// Where the results are to lie.
        device: Device,
    },
    /// Returns what this member wants, reduced over the lists of all members, which are of the same
    /// types and shapes.
    Reduce { list: Vec<Tensor>, wanted: Wanted, reduction: Reduction },
}

/// What each member of a group wants of a list that is reduced.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    /// Every tensor of the list.
    Everything,
    /// Tensors by their numbers; what the others want, each says itself.
    Own(Vec<usize>),
    /// The runs that belong to each rank, in one dimension each; several may want the same.
    ByRank(Arc<[Vec<Run>]>),
}

/// A collective that has been started and not been waited for.
pub(crate) trait PendingCollective: fmt::Debug + Send {
    /// Waits for its result.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>>;
}

/// A collective that is over before it is waited for.
#[derive(Debug)]
pub(crate) struct Finished(pub(crate) Vec<Tensor>);

impl PendingCollective for Finished {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        Ok(self.0)
    }
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
