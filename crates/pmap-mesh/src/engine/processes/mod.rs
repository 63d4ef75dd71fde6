//! What engines of many processes have in common: one collective at a time, agreement on it,
//! results of all, and an end.

mod agreement;
mod ending;
mod packing;

use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor};

use self::packing::{packed, unpacked};
pub(crate) use self::{
    agreement::{TEXT_BYTES, agreement, description, disagreement},
    ending::{end, with_causes},
};
use crate::{
    ALL,
    engine::{Engine, Site, call::CollectiveCall},
    error::Error,
    mesh::topology::Topology,
    sync::lock,
};

/// The collective that this process has under way; there is one at a time.
#[derive(Debug, Default)]
pub(crate) struct Pending(Mutex<Option<Arc<CollectiveCall>>>);

/// Until it is dropped, other threads of this process are refused.
pub(crate) struct Entered<'a>(&'a Pending);

impl Pending {
    /// Begins a collective of `slot`.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] while another one is under way.
    pub(crate) fn enter(&self, slot: usize, call: &Arc<CollectiveCall>) -> Result<Entered<'_>> {
        let mut pending = lock(&self.0);
        if let Some(pending) = &*pending {
            return Err(candle_core::Error::wrap(Error::Mismatch {
                left: slot,
                left_call: Arc::clone(pending),
                right: slot,
                right_call: Arc::clone(call),
            }));
        }
        *pending = Some(Arc::clone(call));
        Ok(Entered(self))
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

/// The lists of all processes, of any tensors: every process brings as many, in any shapes. They
/// travel on `device`.
pub(crate) fn exchange(
    engine: &impl Engine,
    topology: &Topology,
    slot: usize,
    device: &Device,
    list: &[Tensor],
) -> crate::Result<Vec<Vec<Tensor>>> {
    let failed = |source| Error::Gather { index: 0, source };
    let packed = packed(list).and_then(|packed| packed.to_device(device)).map_err(failed)?;
    let site = Site::along(ALL, topology, slot, "results", Some(&packed))?.with_free_dim(0);
    let of_all = engine.all_gather(&site, &packed).map_err(failed)?;
    of_all.iter().map(unpacked).collect::<Result<_>>().map_err(failed)
}

/// Meets the others once more, so that one that still calls a collective along all axes learns that
/// it is alone.
pub(crate) fn leave(engine: &impl Engine, topology: &Topology, slot: usize) -> Result<()> {
    let site = Site::along(ALL, topology, slot, "the end of the function", None)
        .map_err(candle_core::Error::wrap)?;
    engine.barrier(&site)
}
