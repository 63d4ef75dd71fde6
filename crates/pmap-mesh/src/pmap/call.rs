//! One call of a parallel function: the inputs and outputs of its replicas.

use std::{
    panic::Location,
    sync::{Arc, Mutex},
    time::Duration,
};

use candle_core::Device;
use core_types::Seed;

use crate::{
    axes::ALL,
    device::to_device::{contiguous_copy, shard_to_device},
    engine::Engine,
    error::{CollectiveError, Error, ReplicaError, Result, call::CollectiveCall},
    grid::Topology,
    mesh::workers::WorkerJob,
    replica::{Replica, ReplicaContext, collectives::Collectives},
    spec::{cut::ArgumentCuts, tree::TensorTree},
    sync::{catch, lock},
};

/// A call of a function on all slots of this process.
pub(super) struct PmapCall<I, O, F> {
    pub(super) f: Arc<F>,
    pub(super) topology: Arc<Topology>,
    pub(super) first_slot: usize,
    /// The cuts of the first argument that was cut, which define the rows of a replica.
    pub(super) first_cut: Option<Arc<ArgumentCuts>>,
    pub(super) seed: Seed,
    /// The source location of the call.
    pub(super) location: &'static Location<'static>,
    /// One entry for each slot of this process.
    pub(super) slots: Vec<SlotCall<I, O>>,
}

/// One slot's data of a call.
pub(super) struct SlotCall<I, O> {
    device: Device,
    engine: Arc<dyn Engine>,
    /// The slot's arguments, until the replica takes them.
    shard: Mutex<Option<I>>,
    /// The replica's result, if it succeeded.
    result: Mutex<Option<O>>,
}

impl<I, O> SlotCall<I, O> {
    pub(super) fn new(device: Device, engine: Arc<dyn Engine>, shard: I) -> Self {
        Self { device, engine, shard: Mutex::new(Some(shard)), result: Mutex::new(None) }
    }
}

impl<I, O, F> PmapCall<I, O, F> {
    /// Takes the results of all slots, or returns the call's failure. All replicas must have ended.
    #[expect(clippy::expect_used, reason = "a replica without a result has recorded a failure")]
    pub(super) fn take_results(&self) -> Result<Vec<O>> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let results = self.slots.iter().map(|slot| lock(&slot.result).take());
        Ok(results.map(|result| result.expect("no replica failed")).collect())
    }

    fn failure(&self) -> Option<Error> {
        self.slots[0].engine.failure()
    }

    fn replica(&self, local_index: usize) -> Replica {
        let slot = self.first_slot + local_index;
        let call = &self.slots[local_index];
        Replica::new(ReplicaContext {
            slot,
            local_index,
            device: call.device.clone(),
            topology: Arc::clone(&self.topology),
            collectives: Collectives::new(Arc::clone(&call.engine)),
            real_rows: self.first_cut.as_ref().and_then(|cut| cut.real_rows(slot)),
            seed: self.seed,
        })
    }

    /// Returns a description of the wait of a returned replica for the other replicas, for errors.
    #[expect(clippy::expect_used, reason = "the set of all axes exists on every mesh")]
    fn final_wait(&self) -> CollectiveCall {
        CollectiveCall {
            op: "the end of the function",
            detail: String::new(),
            axis_set: self.topology.set(&ALL).expect("no axis is named"),
            axes: ALL,
            dtype: None,
            shape: Vec::new(),
            free_dim: None,
            location: self.location,
        }
    }
}

impl<I, O, F> WorkerJob for PmapCall<I, O, F>
where
    I: TensorTree,
    O: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync,
{
    #[expect(clippy::expect_used, reason = "a worker runs each of its tasks once")]
    fn run(&self, local_index: usize) {
        let call = &self.slots[local_index];
        let shard = lock(&call.shard).take().expect("a replica runs once");
        let replica = self.replica(local_index);
        let outcome = run_replica(&*self.f, &replica, shard);
        replica.record_end(outcome.map(|result| *lock(&call.result) = Some(result)));
    }

    fn deadline_passed(&self) -> bool {
        self.slots[0].engine.deadline_passed()
    }

    #[expect(clippy::expect_used, reason = "one slot has ended, and a failure is recorded")]
    fn time_out(&self, stuck: &[usize], limit: Duration) -> Error {
        if let Some(failure) = self.failure() {
            return failure;
        }
        // All slots of the mesh are in this process: with several processes, each process has one
        // slot, and a single slot cannot be stuck.
        let slot = (0..self.slots.len()).find(|slot| !stuck.contains(slot)).expect("one has ended");
        let missing = stuck.to_vec();
        let late =
            CollectiveError::Deadline { slot, missing, call: self.final_wait().to_string(), limit };
        self.slots[slot].engine.fail(late.into());
        self.failure().expect("a failure was recorded above")
    }
}

/// Runs the function of one replica on its shard.
fn run_replica<I: TensorTree, O: TensorTree>(
    f: impl Fn(&Replica, I) -> candle_core::Result<O>,
    replica: &Replica,
    shard: I,
) -> Result<O> {
    let slot = replica.slot();
    let device = replica.device();
    let outcome = catch(|| {
        let placed = shard.try_map(&mut |input| shard_to_device(input, device))?;
        // Drop the shard inside `catch`, since the drop may panic.
        drop(shard);
        let output = f(replica, placed)?;
        device.synchronize()?;
        output.try_map(&mut |result| {
            let result = result.detach();
            // The result may be on another device, which the function captured or opened.
            result.device().synchronize()?;
            if result.elem_count() == 0 { contiguous_copy(&result) } else { Ok(result) }
        })
    });
    let failure = match outcome {
        Ok(Ok(output)) => return Ok(output),
        Ok(Err(cause)) => ReplicaError::Failed { slot, device: device.clone(), cause },
        Err(message) => ReplicaError::Panicked { slot, device: device.clone(), message },
    };
    Err(failure.into())
}
