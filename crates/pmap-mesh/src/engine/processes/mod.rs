//! Common parts of the engines of several processes: the limit of one collective at a time, the
//! check that processes agree, waiting, the exchange of results, and termination.

mod agreement;
mod packing;
pub(crate) mod waiting;

use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor};

#[cfg(feature = "mpi")]
pub(crate) use self::agreement::TEXT_BYTES;
pub(crate) use self::agreement::{call_hash, description, disagreement};
use self::packing::{decode, encode_list, encode_reason};
use crate::{
    axes::ALL,
    engine::{AllgatherPurpose, Engine, GatheredTensors, GroupContext},
    error::{self, CollectiveError, Error, ProcessError, call::CollectiveCall},
    exit,
    grid::Topology,
    sync::lock,
};

/// Prints the reason and ends this process by calling `stop`.
pub(crate) fn exit_process(rank: usize, reason: &str, stop: impl FnOnce()) -> ! {
    exit::exit_with(&format!("rank {rank}: {reason}"), stop)
}

/// The current collective of this process; there is one at a time.
#[derive(Debug, Default)]
pub(crate) struct CurrentCall(Mutex<Option<Arc<CollectiveCall>>>);

/// A running collective. While it exists, another thread of this process that enters a collective
/// gets an error.
pub(crate) struct CallGuard<'a>(&'a CurrentCall);

impl CurrentCall {
    /// Begins a collective, which ends when the guard is dropped.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Mismatch`] while another collective runs.
    pub(crate) fn enter(&self, ctx: &GroupContext) -> Result<CallGuard<'_>> {
        let mut current = lock(&self.0);
        if let Some(call) = &*current {
            return Err(candle_core::Error::wrap(CollectiveError::Mismatch {
                left: ctx.slot(),
                left_call: call.to_string(),
                right: ctx.slot(),
                right_call: ctx.call.to_string(),
            }));
        }
        *current = Some(Arc::clone(&ctx.call));
        Ok(CallGuard(self))
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

/// The only slot of a process, and its device.
pub(crate) struct ProcessSlot<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) slot: usize,
    /// The device for tensors that are sent.
    pub(crate) device: &'a Device,
}

/// Returns the lists of all processes, by slot; `lists` has the list of this process. Tensors may
/// have any dtypes and shapes.
///
/// A process that has an error, or cannot send its list, sends the error instead. Without a
/// message, the other processes would wait until their deadline.
pub(crate) fn process_allgather(
    engine: &impl Engine,
    process: &ProcessSlot<'_>,
    purpose: AllgatherPurpose,
    lists: error::Result<Vec<Vec<Tensor>>>,
) -> error::Result<Vec<Vec<Tensor>>> {
    let encoded =
        lists.and_then(|lists| encode_list(&lists[0], process.device).map_err(exchange_error));
    let (message, failure) = match encoded {
        Ok(message) => (message, None),
        Err(error) => {
            let Ok(message) = encode_reason(&error.to_string(), process.device) else {
                // The error cannot be sent either, so end this process, which reports the error.
                engine.fail(error);
                unreachable!("an engine of several processes ends this one when it fails")
            };
            (message, Some(error))
        }
    };
    let op = match purpose {
        AllgatherPurpose::User => "process_allgather",
        AllgatherPurpose::Results => "the results of the function",
    };
    let ctx = GroupContext::new(ALL, process.topology, process.slot, op, Some(&message))?
        .with_free_dim(0);
    let messages = engine.all_gather(&ctx, &message).and_then(GatheredTensors::into_parts);
    // Return the local error, if there is one, even if the exchange failed too.
    match failure {
        Some(error) => Err(error),
        None => decode_lists(&messages.map_err(exchange_error)?),
    }
}

fn exchange_error(cause: candle_core::Error) -> Error {
    ProcessError::Exchange { cause }.into()
}

/// Decodes the messages of all processes, by slot.
fn decode_lists(messages: &[Tensor]) -> error::Result<Vec<Vec<Tensor>>> {
    let mut lists = Vec::with_capacity(messages.len());
    for (slot, message) in messages.iter().enumerate() {
        let list = decode(message).map_err(exchange_error)?;
        lists.push(list.map_err(|reason| ProcessError::Peer { slot, reason })?);
    }
    Ok(lists)
}

/// Runs a barrier of all processes at the end of a call. A process that is still in a collective
/// along all axes then fails instead of waiting.
pub(crate) fn final_barrier(engine: &impl Engine, topology: &Topology, slot: usize) -> Result<()> {
    let ctx = GroupContext::new(ALL, topology, slot, "the end of the function", None)
        .map_err(candle_core::Error::wrap)?;
    engine.barrier(&ctx)
}
