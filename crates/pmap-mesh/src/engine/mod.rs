//! The interface between replicas and transports: threads of one process, MPI, or NCCL.

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
        traffic::TrafficCounter,
    },
    error::{self, Error, MeshError, ProcessError, call::CollectiveCall},
    grid::Topology,
    reduce::Reduction,
};

/// The transport of a mesh, which lives as long as the mesh.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Begins a call of a parallel function. Returns an engine for each slot of this process, in
    /// order.
    fn begin(&self) -> Vec<Arc<dyn Engine>>;

    /// Rejects a call from this thread if the calls on this process's meshes must come from another
    /// thread.
    ///
    /// # Errors
    ///
    /// [`ProcessError::WrongThread`].
    fn check_caller(&self) -> error::Result<(), ProcessError> {
        Ok(())
    }

    /// Returns the traffic counters of this process's slots, in order.
    fn counters(&self) -> &[TrafficCounter];

    /// Returns the lists of all slots; `lists` has one list for each slot of this process. If one
    /// process passes an error, all processes fail. Every process makes this call, with the same
    /// `purpose`, between two calls of parallel functions.
    ///
    /// # Errors
    ///
    /// The error of `lists`, and [`ProcessError::Peer`] if another process passes an error.
    fn process_allgather(
        &self,
        purpose: AllgatherPurpose,
        lists: error::Result<Vec<Vec<Tensor>>>,
    ) -> error::Result<Vec<Vec<Tensor>>>;
}

/// The reason for an exchange between two calls of parallel functions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AllgatherPurpose {
    /// The user's call of `process_allgather`.
    User,
    /// The join of a call's results.
    Results,
}

/// Moves tensors between the replicas of a group, for one replica in one call.
///
/// All members of a group call every collective, with contexts whose calls agree, and each member
/// gets its own result. Arguments have no gradient graph; results are on the device of the argument.
/// NCCL needs arguments on the replica's device, the other engines take any. An engine checks that
/// calls agree, and sums in rank order. It never lets a member wait for a member that has failed or
/// returned: the collective returns an error, and [`failure`](Self::failure) returns the cause.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Returns each tensor of a list reduced over all members, in a group of several.
    fn all_reduce(
        &self,
        ctx: &GroupContext,
        list: &[Tensor],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>>;

    /// Returns the tensors of all members, by rank.
    fn all_gather(&self, ctx: &GroupContext, x: &Tensor) -> Result<GatheredTensors>;

    /// Returns the n-th tensor of each member, where n is this member's rank.
    fn all_to_all(&self, ctx: &GroupContext, parts: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// Sends this member's tensor to the members that receive from it, and returns the tensor of
    /// rank `message.from`, if this member receives one. All members pass the same dtype and shape.
    fn send_receive(&self, ctx: &GroupContext, message: &SendReceive<'_>)
    -> Result<Option<Tensor>>;

    /// Runs a collective on lists in a group of several members.
    fn run_list(&self, ctx: &GroupContext, work: ListRequest) -> Result<Vec<Tensor>>;

    /// Starts a collective on lists in a group of several members, and returns before the other
    /// members arrive.
    fn start_list(
        &self,
        ctx: &GroupContext,
        work: ListRequest,
    ) -> Result<Box<dyn PendingCollective>>;

    /// Waits until all members have called this method.
    fn barrier(&self, ctx: &GroupContext) -> Result<()>;

    /// Returns the traffic counter of this slot.
    fn counter(&self) -> &TrafficCounter;

    /// Ends this replica's part in the call: later collectives of others with it fail. Engines of
    /// processes wait here for all processes.
    fn finish(&self);

    /// Fails the call for all replicas, because this replica has failed.
    fn fail(&self, error: Error);

    /// Returns true if the call has failed because a replica waited until the deadline. Other
    /// replicas may still run.
    fn deadline_passed(&self) -> bool {
        false
    }

    /// Returns the error that ended the call, if any. Called on one engine of the call, after all
    /// replicas have ended or the call has stopped waiting for them.
    fn failure(&self) -> Option<Error>;
}

/// The gathered tensors of all members of a group.
#[derive(Debug)]
pub(crate) enum GatheredTensors {
    /// The tensor of each member, by rank.
    Parts(Vec<Tensor>),
    /// All items in one tensor.
    Concatenated {
        /// The items of all members in one dimension, by rank.
        items: Tensor,
        /// The shape of each member's tensor, by rank.
        shapes: Vec<Vec<usize>>,
    },
}

impl GatheredTensors {
    /// Returns the size of each member's tensor in a dimension, by rank.
    pub(crate) fn sizes(&self, dim: usize) -> Vec<usize> {
        match self {
            Self::Parts(parts) => parts.iter().map(|part| part.dims()[dim]).collect(),
            Self::Concatenated { shapes, .. } => shapes.iter().map(|shape| shape[dim]).collect(),
        }
    }

    /// Returns the tensor of each member, by rank.
    pub(crate) fn into_parts(self) -> Result<Vec<Tensor>> {
        let (items, shapes) = match self {
            Self::Parts(parts) => return Ok(parts),
            Self::Concatenated { items, shapes } => (items, shapes),
        };
        let mut start = 0;
        let mut parts = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let n_items = shape.iter().product();
            parts.push(items.narrow(0, start, n_items)?.reshape(shape)?);
            start += n_items;
        }
        Ok(parts)
    }
}

/// The role of one member in a collective where some members only send or only receive.
#[derive(Debug)]
pub(crate) struct SendReceive<'a> {
    /// The tensor to send. A member that only receives passes any tensor of the same dtype and shape
    /// on the device for the result.
    pub(crate) x: &'a Tensor,
    /// Whether `x` is sent to any member, including this one.
    pub(crate) is_sent: bool,
    /// The rank from which this member receives, if any.
    pub(crate) from: Option<usize>,
}

/// A request for a collective on lists of tensors.
#[derive(Debug)]
pub(crate) enum ListRequest {
    /// Gathers the tensors of a layout from the runs that each member owns. Each result is a leaf
    /// of candle's graph.
    Gather {
        /// This member's runs, in the order of the layout.
        own: Vec<Tensor>,
        layout: RunLayout,
        /// The device of the results.
        device: Device,
    },
    /// Sums lists of the same dtypes and shapes over all members, and returns the sums of this
    /// member's runs, as tensors of one dimension.
    Sum {
        list: Vec<Tensor>,
        /// The runs that each rank gets; several ranks may get the same run.
        runs_by_rank: Arc<[Vec<Run>]>,
    },
}

/// A collective that was started, and for which the replica has not waited yet.
pub(crate) trait PendingCollective: fmt::Debug + Send {
    /// Waits until the collective has finished, and returns its results.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>>;
}

/// A collective whose results exist already.
#[derive(Debug)]
pub(crate) struct FinishedCollective(pub(crate) Vec<Tensor>);

impl PendingCollective for FinishedCollective {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        Ok(self.0)
    }
}

/// One member's view of a collective: the call, the group, and the member's rank.
#[derive(Clone, Debug)]
pub(crate) struct GroupContext {
    pub(crate) call: Arc<CollectiveCall>,
    /// The index of the group among the groups along the same axes.
    group_index: usize,
    /// The slots of the group, by rank.
    members: Arc<[usize]>,
    /// The replica's rank in the group.
    pub(crate) rank: usize,
}

impl GroupContext {
    /// Returns the context of collective `op` for `slot`, in the group of slots that differ from it
    /// along `axes` only. The location of the call is the caller's, like that of a panic.
    #[track_caller]
    pub(crate) fn new(
        axes: MeshAxes,
        topology: &Topology,
        slot: usize,
        op: &'static str,
        x: Option<&Tensor>,
    ) -> error::Result<Self, MeshError> {
        let axis_set = topology.set(&axes)?;
        let groups = topology.groups(axis_set);
        let position = groups.position(slot);
        let call = CollectiveCall {
            op,
            detail: String::new(),
            axis_set,
            axes,
            dtype: x.map(Tensor::dtype),
            shape: x.iter().flat_map(|x| x.dims()).copied().collect(),
            free_dim: None,
            location: Location::caller(),
        };
        Ok(Self {
            call: Arc::new(call),
            group_index: position.group,
            members: Arc::clone(groups.members(position.group)),
            rank: position.rank,
        })
    }

    /// Sets a detail of the call that must agree.
    pub(crate) fn with_detail(mut self, detail: String) -> Self {
        Arc::make_mut(&mut self.call).detail = detail;
        self
    }

    /// Allows sizes to differ in `dim`.
    pub(crate) fn with_free_dim(mut self, dim: usize) -> Self {
        Arc::make_mut(&mut self.call).free_dim = Some(dim);
        self
    }

    /// Returns the context of the backward pass of this collective, for the gradient of its result.
    pub(crate) fn backward(&self, gradient: &Tensor) -> Self {
        let mut ctx = self.clone();
        let call = Arc::make_mut(&mut ctx.call);
        call.detail.push_str(" backward");
        call.shape = gradient.dims().to_vec();
        call.free_dim = None;
        ctx
    }

    /// Returns the number of members of the group.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// Returns the slots of the group, by rank.
    pub(crate) fn members(&self) -> &Arc<[usize]> {
        &self.members
    }

    /// Returns this replica's slot.
    pub(crate) fn slot(&self) -> usize {
        self.members[self.rank]
    }

    /// Returns a key that identifies the group in the mesh: its axes, and its index among the
    /// groups along these axes.
    pub(crate) fn key(&self) -> (AxisSet, usize) {
        (self.call.axis_set, self.group_index)
    }
}
