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

use candle_core::{Device, Result, Tensor};

use crate::{
    engine::call::CollectiveCall,
    error::Error,
    mesh::{axes::MeshAxes, topology::Topology},
    reduce::Reduction,
};

/// Moves tensors between the replicas of a group, for one replica.
///
/// Every method is called by all members of `site.members` with the same `site.call`, and returns
/// to each its own result. Tensors come without a gradient graph and may lie on any device; results
/// lie on the device of what was given. Whoever implements it checks that calls agree, adds up in
/// rank order, and never leaves a member waiting for one that has failed or gone: it returns an
/// error that `failed` has recorded.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// `x` reduced over all members.
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor>;

    /// The sums of those lists' entries that are `wanted` here; all members bring lists of the same
    /// shapes.
    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>>;

    /// The tensors of all members, in the order of the group.
    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>>;

    /// The n-th of the tensors that each member brought, where n is this member's position.
    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// What member `from` brought; `None` if nobody is to send here.
    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>>;

    /// Returns when all members have called it.
    fn barrier(&self, site: &Site) -> Result<()>;

    /// Notes that this replica has returned, for those who would wait for it.
    fn returned(&self);

    /// Ends the call for all replicas because this one failed.
    fn failed(&self, error: Error);
}

/// The tensor in one piece on the processor, where tensors of different devices can meet; itself,
/// if it is.
pub(crate) fn on_host(x: &Tensor) -> Result<Tensor> {
    // In one piece first: candle moves all of the storage that a view looks at.
    x.contiguous()?.to_device(&Device::Cpu)
}

/// Who takes part in a collective, and in what.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) call: Arc<CollectiveCall>,
    /// How many members the group has.
    pub(crate) size: usize,
    /// This replica's position among them.
    pub(crate) position: usize,
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
    ) -> crate::Result<Self> {
        let set = topology.set(&axes)?;
        let call = CollectiveCall {
            op,
            detail: String::new(),
            set,
            axes,
            dtype: x.map(Tensor::dtype),
            shape: x.map_or_else(Vec::new, |x| x.dims().to_vec()),
            free_dim: None,
            place: Location::caller(),
        };
        Ok(Self {
            call: Arc::new(call),
            size: topology.size(set),
            position: topology.groups(set).seat(slot).1,
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
}
