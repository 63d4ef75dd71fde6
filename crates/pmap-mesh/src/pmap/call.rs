//! One call of a parallel function: what its replicas are given, and what they return.

use std::{
    panic::Location,
    sync::{Arc, Mutex},
    time::Duration,
};

use candle_core::Device;
use core_types::Seed;

use crate::{
    axes::ALL,
    device::to_device::{copied, place},
    engine::Engine,
    error::{CollectiveError, Error, ReplicaError, Result, call::CollectiveCall},
    grid::Topology,
    mesh::workers::Job,
    replica::{Identity, Replica, collectives::Collectives},
    spec::{cut::Cut, tree::TensorTree},
    sync::{catch, lock},
};

/// A call of a function on all slots of this process.
pub(super) struct Call<I, O, F> {
    pub(super) f: Arc<F>,
    pub(super) topology: Arc<Topology>,
    pub(super) first_slot: usize,
    pub(super) cut: Option<Arc<Cut>>,
    pub(super) seed: Seed,
    /// Where the function was called.
    pub(super) site: &'static Location<'static>,
    /// For each slot of this process.
    pub(super) parts: Vec<Part<I, O>>,
}

/// What one slot has of a call.
pub(super) struct Part<I, O> {
    device: Device,
    engine: Arc<dyn Engine>,
    /// Its arguments, until the replica takes them.
    shard: Mutex<Option<I>>,
    /// What the replica has returned, if it has not failed.
    result: Mutex<Option<O>>,
}

impl<I, O> Part<I, O> {
    pub(super) fn new(device: Device, engine: Arc<dyn Engine>, shard: I) -> Self {
        Self { device, engine, shard: Mutex::new(Some(shard)), result: Mutex::new(None) }
    }
}

impl<I, O, F> Call<I, O, F> {
    /// The results of all slots, or why there are none; when all replicas have ended.
    #[expect(clippy::expect_used, reason = "a replica that has no result has noted a failure")]
    pub(super) fn results(&self) -> Result<Vec<O>> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let result = |part: &Part<I, O>| lock(&part.result).take().expect("nothing failed");
        Ok(self.parts.iter().map(result).collect())
    }

    fn failure(&self) -> Option<Error> {
        self.parts[0].engine.failure()
    }

    fn replica(&self, local_index: usize) -> Replica {
        let slot = self.first_slot + local_index;
        let part = &self.parts[local_index];
        Replica::new(Identity {
            slot,
            local_index,
            device: part.device.clone(),
            topology: Arc::clone(&self.topology),
            collectives: Collectives::new(Arc::clone(&part.engine)),
            valid: self.cut.as_ref().and_then(|cut| cut.valid(slot)),
            seed: self.seed,
        })
    }

    /// What a replica that has returned waits in, until all have.
    #[expect(clippy::expect_used, reason = "every mesh has all axes")]
    fn end(&self) -> CollectiveCall {
        CollectiveCall {
            op: "the end of the function",
            detail: String::new(),
            set: self.topology.set(&ALL).expect("no axis is named"),
            axes: ALL,
            dtype: None,
            shape: Vec::new(),
            free_dim: None,
            place: self.site,
        }
    }
}

impl<I, O, F> Job for Call<I, O, F>
where
    I: TensorTree,
    O: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync,
{
    #[expect(clippy::expect_used, reason = "a worker runs its part of a job once")]
    fn run(&self, local_index: usize) {
        let part = &self.parts[local_index];
        let shard = lock(&part.shard).take().expect("a replica runs once");
        let replica = self.replica(local_index);
        let outcome = run_replica(&*self.f, &replica, shard);
        replica.end(outcome.map(|result| *lock(&part.result) = Some(result)));
    }

    fn is_late(&self) -> bool {
        self.parts[0].engine.is_late()
    }

    #[expect(clippy::expect_used, reason = "one slot has ended, and a failure was noted")]
    fn time_out(&self, stuck: &[usize], after: Duration) -> Error {
        if let Some(failure) = self.failure() {
            return failure;
        }
        // Its slots are those of the mesh: over several processes each has one.
        let slot = (0..self.parts.len()).find(|slot| !stuck.contains(slot)).expect("one has ended");
        let missing = stuck.to_vec();
        let late = CollectiveError::Deadline { slot, missing, call: Arc::new(self.end()), after };
        self.parts[slot].engine.fail(late.into());
        self.failure().expect("a failure was noted")
    }
}

/// What the worker of one replica does.
fn run_replica<I: TensorTree, O: TensorTree>(
    f: impl Fn(&Replica, I) -> candle_core::Result<O>,
    replica: &Replica,
    shard: I,
) -> Result<O> {
    let slot = replica.slot();
    let device = replica.device();
    let run = || {
        let placed = shard.try_map(&mut |input| place(input, device))?;
        // Here, where it may panic.
        drop(shard);
        let output = f(replica, placed)?;
        device.synchronize()?;
        output.try_map(&mut |result| {
            let result = result.detach();
            // It may lie elsewhere, on a device that the function has captured or opened.
            result.device().synchronize()?;
            if result.elem_count() == 0 { copied(&result) } else { Ok(result) }
        })
    };
    let failure = match catch(run) {
        Ok(Ok(output)) => return Ok(output),
        Ok(Err(cause)) => ReplicaError::Failed { slot, device: device.clone(), cause },
        Err(message) => ReplicaError::Panicked { slot, device: device.clone(), message },
    };
    Err(failure.into())
}
