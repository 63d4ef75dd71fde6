//! The crate's result of a scenario.

use std::{
    collections::BTreeMap,
    panic::resume_unwind,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use candle_core::{DType, Device, Error as CandleError, Result, Tensor, bail};
use pmap_mesh::{
    ALL, CollectiveError, DeviceMesh, Error, MeshError, Replica, ReplicaError, support::Pending,
};
use process_tests::lists::start_sum;

use crate::differential::{
    faults::{CallFailure, CollectiveCall, FaultKind, NO_DATA, Scenario, ScenarioStep},
    grid::Grid,
    op::Op,
};

/// A parallel function of the same mesh, which a replica must not call.
type NestedCall = Arc<dyn Fn() -> pmap_mesh::Result<()> + Send + Sync>;

pub(crate) fn failure(
    scenario: &Scenario,
    mesh: &DeviceMesh,
) -> std::result::Result<Option<CallFailure>, String> {
    let nested = mesh.pmap(|_, ()| Ok(()));
    let inner: NestedCall = Arc::new(move || nested.call_sharded(()).map(drop));
    let call_has_ended = Arc::<Gate>::default();
    let (shared, gate) = (scenario.clone(), Arc::clone(&call_has_ended));
    let function = mesh.pmap(move |ctx, ()| {
        let pending = BTreeMap::new();
        ReplicaRun { scenario: &shared, inner: &inner, call_has_ended: &gate, ctx, pending }.run()
    });
    let outcome = function.call_sharded(());
    call_has_ended.open();
    match outcome {
        Ok(_) => Ok(None),
        Err(error) => kind(scenario, &error).map(Some).ok_or_else(|| format!("{error}: {error:?}")),
    }
}

fn kind(scenario: &Scenario, error: &Error) -> Option<CallFailure> {
    Some(match error {
        Error::Replica(ReplicaError::Failed { slot, cause, .. }) => {
            let texts =
                [NO_DATA, "out of range", "of a group of", "cannot be called inside a replica"];
            let text = texts.into_iter().find(|text| cause.to_string().contains(text))?;
            CallFailure::Failed(*slot, text)
        }
        Error::Replica(ReplicaError::Panicked { slot, message, .. }) if message == NO_DATA => {
            CallFailure::Panicked(*slot)
        }
        Error::Mesh(MeshError::UnknownAxis { .. }) => CallFailure::UnknownAxis,
        Error::Collective(CollectiveError::Mismatch { left, right, .. }) => {
            CallFailure::Mismatch(*left.min(right), *left.max(right))
        }
        Error::Collective(CollectiveError::PeerReturned { slot, waiting, .. }) => {
            CallFailure::PeerReturned { slot: *slot, waiting: *waiting }
        }
        Error::Collective(CollectiveError::NeverAwaited { slot, .. }) => {
            CallFailure::NeverAwaited(*slot)
        }
        Error::Collective(CollectiveError::Deadline { .. }) => CallFailure::Deadline,
        Error::Collective(CollectiveError::Deadlock { waiting })
            if waiting.len() <= scenario.grid.slots() =>
        {
            CallFailure::Deadlock
        }
        _ => return None,
    })
}

/// Returns an error if a sum over the mesh is wrong after the failed call.
pub(crate) fn works(mesh: &DeviceMesh) -> std::result::Result<(), String> {
    let sum = mesh.pmap(move |ctx, ()| ctx.psum(&Tensor::ones(3, DType::F64, &Device::Cpu)?, ALL));
    let sums = loop {
        match sum.call_sharded(()) {
            Ok(sums) => break sums,
            Err(
                Error::Replica(ReplicaError::Stuck { .. })
                // The machine is busy, and the deadline is short.
                | Error::Collective(CollectiveError::Deadline { .. }),
            ) => thread::yield_now(),
            Err(error) => return Err(format!("afterwards: {error}")),
        }
    };
    let slots = mesh.len() as f64;
    for shard in sums.shards() {
        let sum: Vec<f64> = shard.to_vec1().unwrap();
        if sum.iter().any(|item| item.to_bits() != slots.to_bits()) {
            return Err(format!("afterwards the sum of {slots} ones is {sum:?}"));
        }
    }
    Ok(())
}

/// A gate that blocks until it is opened.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        drop(self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// One replica's run of a scenario.
struct ReplicaRun<'a> {
    scenario: &'a Scenario,
    inner: &'a NestedCall,
    call_has_ended: &'a Gate,
    ctx: &'a Replica,
    /// The pending sums, by the index of the step.
    pending: BTreeMap<usize, Pending<Vec<Tensor>>>,
}

impl ReplicaRun<'_> {
    fn run(mut self) -> Result<()> {
        let Self { scenario, ctx, .. } = self;
        let slot = ctx.slot();
        for (index, step) in scenario.steps.iter().enumerate() {
            let outcome = match scenario.fault(slot, index) {
                None => self.run_step(index, step),
                Some(FaultKind::Error) => bail!("{NO_DATA}"),
                // Panic, but without a line on standard error for each scenario.
                Some(FaultKind::Panic) => resume_unwind(Box::new(NO_DATA)),
                Some(FaultKind::Return) => return Ok(()),
                Some(kind) => self.instead(index, step, kind),
            };
            if !scenario.stubborn.contains(&slot) {
                outcome?;
            }
        }
        Ok(())
    }

    fn run_step(&mut self, index: usize, step: &ScenarioStep) -> Result<()> {
        match step {
            ScenarioStep::Call(call) => self.call(call),
            ScenarioStep::Start(axes) => {
                let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
                let sum = start_sum(self.ctx, &ones, self.scenario.grid.named(axes))?;
                self.pending.insert(index, sum);
                Ok(())
            }
            ScenarioStep::Wait(started) => {
                self.pending.remove(started).map_or(Ok(()), |sum| sum.wait().map(drop))
            }
        }
    }

    fn instead(&mut self, index: usize, step: &ScenarioStep, kind: &FaultKind) -> Result<()> {
        match (kind, step) {
            (FaultKind::Other(other), _) => self.call(other),
            (FaultKind::Twice, _) => {
                let first = self.run_step(index, step);
                // Repeat it whether it has failed or not.
                let second = index + self.scenario.steps.len();
                self.run_step(second, step).and(first)
            }
            (FaultKind::Nested, _) => (self.inner)().map_err(CandleError::msg),
            (FaultKind::Late, _) => {
                self.call_has_ended.pass();
                Ok(())
            }
            (_, ScenarioStep::Call(call)) => self.instead_of_call(call, kind),
            _ => Ok(()),
        }
    }

    fn instead_of_call(&self, call: &CollectiveCall, kind: &FaultKind) -> Result<()> {
        let Scenario { grid, .. } = self.scenario;
        let axes = || grid.named(&call.axes);
        let ones = call.ones()?;
        match kind {
            FaultKind::NoSuchDim => self.ctx.all_gather(&ones, 7, axes()).map(drop),
            FaultKind::NoSuchAxis => self.ctx.psum(&ones, "z").map(drop),
            FaultKind::NoSuchRoot => {
                let root = grid.size(&call.axes);
                Op::Broadcast { root }.run(self.ctx, &ones, axes()).map(drop)
            }
            FaultKind::WrongThread => {
                thread::scope(|scope| scope.spawn(|| run(self.ctx, grid, call)).join().unwrap())
            }
            FaultKind::TwoThreads => thread::scope(|scope| {
                let both = [0; 2].map(|_| scope.spawn(|| run(self.ctx, grid, call)));
                both.into_iter().try_for_each(|thread| thread.join().unwrap())
            }),
            _ => Ok(()),
        }
    }

    fn call(&self, call: &CollectiveCall) -> Result<()> {
        run(self.ctx, &self.scenario.grid, call)
    }
}

fn run(ctx: &Replica, grid: &Grid, call: &CollectiveCall) -> Result<()> {
    call.op.run(ctx, &call.ones()?, grid.named(&call.axes)).map(drop)
}

impl CollectiveCall {
    fn ones(&self) -> Result<Tensor> {
        Tensor::ones(&self.shape[..], self.dtype, &Device::Cpu)
    }
}
