//! Common parts of the engines of many processes: one collective at a time, agreement on it, waiting
//! for it, results of all, and an end.

mod agreement;
mod packing;
pub(crate) mod waiting;

use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor};

pub(crate) use self::agreement::{TEXT_BYTES, agreement, description, disagreement};
use self::packing::{packed, packed_reason, unpacked};
use crate::{
    axes::ALL,
    ending,
    engine::{Engine, Gathered, Purpose, Site},
    error::{self, CollectiveError, Error, ProcessError, call::CollectiveCall},
    grid::Topology,
    sync::lock,
};

/// Says why, and ends this process by `stop`.
pub(crate) fn end(rank: usize, why: &str, stop: impl FnOnce()) -> ! {
    ending::end(&format!("rank {rank}: {why}"), stop)
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

/// A process of a mesh, by its one slot.
pub(crate) struct ProcessPlace<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) slot: usize,
    /// On which what it sends to others must lie.
    pub(crate) device: &'a Device,
}

/// The lists of all processes, given this one's; tensors may be of any types and shapes.
///
/// A process that has none, or cannot send it, says so instead: the others would wait for it until
/// their deadline.
pub(crate) fn process_allgather(
    engine: &impl Engine,
    place: &ProcessPlace<'_>,
    purpose: Purpose,
    lists: error::Result<Vec<Vec<Tensor>>>,
) -> error::Result<Vec<Vec<Tensor>>> {
    let sent = lists.and_then(|lists| packed(&lists[0], place.device).map_err(exchange));
    let (message, failure) = match sent {
        Ok(message) => (message, None),
        Err(error) => {
            let Ok(message) = packed_reason(&error.to_string(), place.device) else {
                // Not even that: the end of this process tells them.
                engine.fail(error);
                unreachable!("an engine of several processes ends this one when it fails")
            };
            (message, Some(error))
        }
    };
    let op = match purpose {
        Purpose::User => "process_allgather",
        Purpose::Results => "the results of the function",
    };
    let site = Site::along(ALL, place.topology, place.slot, op, Some(&message))?.with_free_dim(0);
    let of_all = engine.all_gather(&site, &message).and_then(Gathered::into_parts);
    // What went wrong here comes first, also if the others could not be told.
    match failure {
        Some(error) => Err(error),
        None => unpacked_lists(&of_all.map_err(exchange)?),
    }
}

fn exchange(cause: candle_core::Error) -> Error {
    ProcessError::Exchange { cause }.into()
}

/// What all processes have sent, by slot.
fn unpacked_lists(messages: &[Tensor]) -> error::Result<Vec<Vec<Tensor>>> {
    let list = |(slot, message)| match unpacked(message).map_err(exchange)? {
        Ok(list) => Ok(list),
        Err(reason) => Err(ProcessError::Peer { slot, reason }.into()),
    };
    messages.iter().enumerate().map(list).collect()
}

/// Meets the others once more, so that one that still calls a collective along all axes learns that
/// it is alone.
pub(crate) fn leave(engine: &impl Engine, topology: &Topology, slot: usize) -> Result<()> {
    let site = Site::along(ALL, topology, slot, "the end of the function", None)
        .map_err(candle_core::Error::wrap)?;
    engine.barrier(&site)
}
