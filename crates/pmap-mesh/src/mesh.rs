//! The devices that work together.

use std::sync::Arc;

use candle_core::Device;

use crate::{
    error::{Error, Result},
    pmap::PMap,
    replica::Replica,
    tree::TensorTree,
    worker::Workers,
};

/// A row of devices, each with a worker that waits for calls.
///
/// Cloning is cheap and shares the workers; they end when the last clone is dropped.
///
/// # Examples
///
/// ```
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::cpu(4)?; // four virtual devices on one processor
/// assert_eq!(mesh.len(), 4);
/// # Ok::<(), pmap_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceMesh(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    devices: Vec<Device>,
    workers: Workers,
}

impl DeviceMesh {
    /// The largest number of devices in one mesh; each has a thread of its own.
    pub const MAX_DEVICES: usize = 1024;

    /// Returns a mesh of these devices, in this order; they may be of different kinds, or the same one several times.
    ///
    /// # Errors
    ///
    /// [`Error::MeshSize`] for no devices or more than [`MAX_DEVICES`](Self::MAX_DEVICES), [`Error::Worker`] if the
    /// system gives no more threads.
    pub fn new(devices: Vec<Device>) -> Result<Self> {
        check_size(devices.len())?;
        let workers = Workers::start(devices.len())?;
        Ok(Self(Arc::new(Inner { devices, workers })))
    }

    /// Returns a mesh of `count` virtual devices, all of them this machine's processor.
    ///
    /// Each gets an equal share of the cores, at least one. So a program for several devices runs on a laptop.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn cpu(count: usize) -> Result<Self> {
        check_size(count)?;
        Self::new(vec![Device::Cpu; count])
    }

    /// Returns a mesh of the first `count` CUDA devices.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if one of them is not there or the crate was built without feature `cuda`, and those of
    /// [`new`](Self::new).
    pub fn cuda(count: usize) -> Result<Self> {
        Self::open(count, Device::new_cuda)
    }

    /// Returns a mesh of the first `count` Metal devices.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if one of them is not there or the crate was built without feature `metal`, and those of
    /// [`new`](Self::new).
    pub fn metal(count: usize) -> Result<Self> {
        Self::open(count, Device::new_metal)
    }

    fn open(count: usize, device: impl Fn(usize) -> candle_core::Result<Device>) -> Result<Self> {
        check_size(count)?;
        let open = |index| device(index).map_err(|source| Error::Device { index, source });
        Self::new((0..count).map(open).collect::<Result<_>>()?)
    }

    /// The devices, in the order in which shards are dealt to them.
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// The number of devices.
    #[allow(clippy::len_without_is_empty, reason = "a mesh is never empty")]
    pub fn len(&self) -> usize {
        self.0.devices.len()
    }

    /// Returns a function that runs `f` on every device at once, each on its shard of the arguments.
    ///
    /// By default the first tensor among the arguments is cut along axis 0 and all others are replicated, and results
    /// are concatenated along axis 0; see [`PMap::in_axes`] and [`PMap::out_axes`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{DeviceMesh, OutAxis};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let x = Tensor::arange(0_f32, 8., &Device::Cpu)?;
    ///
    /// let square = mesh.pmap(|_, x: Tensor| x.sqr());
    /// assert_eq!(square.call(x.clone())?.to_vec1::<f32>()?, [0., 1., 4., 9., 16., 25., 36., 49.]);
    ///
    /// let total = mesh.pmap(|_, x: Tensor| x.sum_all()).out_axes(OutAxis::Sum);
    /// assert_eq!(total.call(x)?.to_scalar::<f32>()?, 28.);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pmap<I, O, F>(&self, f: F) -> PMap<I, O, F>
    where
        I: TensorTree,
        O: TensorTree,
        F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync + 'static,
    {
        PMap::new(self.clone(), f)
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.0.workers
    }

    pub(crate) fn replica(&self, index: usize) -> Replica {
        Replica { index, count: self.len(), device: self.devices()[index].clone() }
    }
}

fn check_size(count: usize) -> Result<()> {
    match count {
        1..=DeviceMesh::MAX_DEVICES => Ok(()),
        _ => Err(Error::MeshSize { count, max: DeviceMesh::MAX_DEVICES }),
    }
}
