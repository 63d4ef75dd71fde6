//! What engines of many processes have in common: how their mesh is made, one collective at a time,
//! agreement on it, results of all, and an end.

mod agreement;
mod packing;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use candle_core::{Device, Result, Tensor};

pub(crate) use self::agreement::{TEXT_BYTES, agreement, description, disagreement};
use self::packing::{packed, unpacked};
use crate::{
    ending,
    engine::{Backend, Engine, Site, call::CollectiveCall},
    error::{self, CollectiveError, Error},
    mesh::{DeviceMesh, DeviceMeshBuilder, axes::ALL, topology::Topology},
    sync::lock,
};

/// Says why, and ends this process by `stop`.
pub(crate) fn end(rank: usize, why: &str, stop: impl FnOnce()) -> ! {
    ending::end(&format!("rank {rank}: {why}"), stop)
}

/// Makes the mesh of several processes, of which this one's slot is `slot`; its backend is made
/// when the axes have been checked.
pub(crate) fn mesh(
    builder: DeviceMeshBuilder,
    slot: usize,
    processes: usize,
    device: Device,
    backend: impl FnOnce(&Arc<Topology>, Duration, &Device) -> error::Result<Arc<dyn Backend>>,
) -> error::Result<DeviceMesh> {
    let builder = match builder.axes[..] {
        [] => builder.axis(DeviceMesh::AXIS, processes),
        _ => builder,
    };
    let topology = Arc::new(Topology::new(builder.axes, DeviceMesh::MAX_DEVICES)?);
    let deadline = builder.options.deadline.unwrap_or(DeviceMesh::PROCESS_DEADLINE);
    let backend = backend(&topology, deadline, &device)?;
    DeviceMesh::start(vec![device], slot, topology, builder.options, backend)
}

/// The collective that this process takes part in; there is one at a time.
#[derive(Debug, Default)]
pub(crate) struct Current(Mutex<Option<Arc<CollectiveCall>>>);

/// Until it is dropped, other threads of this process are refused.
pub(crate) struct Guard<'a>(&'a Current);

impl Current {
    /// Begins a collective.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Mismatch`] while another one has not ended.
    pub(crate) fn enter(&self, site: &Site) -> Result<Guard<'_>> {
        let mut current = lock(&self.0);
        if let Some(call) = &*current {
            return Err(candle_core::Error::wrap(CollectiveError::Mismatch {
                left: site.slot(),
                left_call: call.to_string(),
                right: site.slot(),
                right_call: site.call.to_string(),
            }));
        }
        *current = Some(Arc::clone(&site.call));
        Ok(Guard(self))
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

/// The lists of all processes, given this one's; tensors may be of any types and shapes. They
/// travel on `device`.
pub(crate) fn process_allgather(
    engine: &impl Engine,
    topology: &Topology,
    slot: usize,
    device: &Device,
    list: &[Tensor],
) -> error::Result<Vec<Vec<Tensor>>> {
    let packed = packed(list).and_then(|packed| packed.to_device(device));
    let packed = packed.map_err(Error::gather(0))?;
    let site = Site::along(ALL, topology, slot, "results", Some(&packed))?.with_free_dim(0);
    let of_all = engine.all_gather(&site, &packed).map_err(Error::gather(0))?;
    let lists = of_all.into_parts().and_then(|packed| packed.iter().map(unpacked).collect());
    lists.map_err(Error::gather(0))
}

/// Meets the others once more, so that one that still calls a collective along all axes learns that
/// it is alone.
pub(crate) fn leave(engine: &impl Engine, topology: &Topology, slot: usize) -> Result<()> {
    let site = Site::along(ALL, topology, slot, "the end of the function", None)
        .map_err(candle_core::Error::wrap)?;
    engine.barrier(&site)
}
