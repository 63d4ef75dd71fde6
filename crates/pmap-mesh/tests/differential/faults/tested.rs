//! What the crate makes of a scenario.

use std::{panic::resume_unwind, sync::Arc, thread};

use candle_core::{DType, Device, Error as CandleError, Result, Tensor, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, MeshError, Replica, ReplicaError};

use crate::{
    faults::{Call, Failure, Fault, Kind, NO_DATA, Scenario},
    grid::Grid,
    op::Op,
};

/// A parallel function of the same mesh, which no replica may call.
type Inner = Arc<dyn Fn() -> pmap_mesh::Result<()> + Send + Sync>;

pub(crate) fn failure(
    scenario: &Scenario,
    mesh: &DeviceMesh,
) -> std::result::Result<Option<Failure>, String> {
    let nested = mesh.pmap(|_, ()| Ok(()));
    let inner: Inner = Arc::new(move || nested.call_sharded(()).map(drop));
    let shared = scenario.clone();
    match mesh.pmap(move |ctx, ()| of_replica(&shared, &inner, ctx)).call_sharded(()) {
        Ok(_) => Ok(None),
        Err(error) => kind(scenario, &error).map(Some).ok_or_else(|| format!("{error}: {error:?}")),
    }
}

fn kind(scenario: &Scenario, error: &Error) -> Option<Failure> {
    Some(match error {
        Error::Replica(ReplicaError::Failed { slot, cause, .. }) => {
            let texts =
                [NO_DATA, "out of range", "of a group of", "cannot be called inside a replica"];
            let text = texts.into_iter().find(|text| cause.to_string().contains(text))?;
            Failure::Failed(*slot, text)
        }
        Error::Replica(ReplicaError::Panicked { slot, message, .. }) if message == NO_DATA => {
            Failure::Panicked(*slot)
        }
        Error::Mesh(MeshError::UnknownAxis { .. }) => Failure::UnknownAxis,
        Error::Collective(CollectiveError::Mismatch { left, right, .. }) => {
            Failure::Mismatch(*left.min(right), *left.max(right))
        }
        Error::Collective(CollectiveError::Deserted { slot, waiting, .. }) => {
            Failure::Deserted { slot: *slot, waiting: *waiting }
        }
        Error::Collective(CollectiveError::NotWaited { slot, .. }) => Failure::NotWaited(*slot),
        Error::Collective(CollectiveError::Deadlock { waiting })
            if waiting.len() <= scenario.grid.slots() =>
        {
            Failure::Deadlock
        }
        _ => return None,
    })
}

/// Whether the mesh still does what it is for.
pub(crate) fn works(mesh: &DeviceMesh) -> std::result::Result<(), String> {
    let ones = |len: usize| Tensor::ones(len, DType::F64, &Device::Cpu);
    let sum = mesh.pmap(move |ctx, ()| ctx.psum(&ones(3)?, ALL)).call_sharded(());
    let sum = sum.map_err(|error| format!("afterwards: {error}"))?;
    let slots = mesh.len() as f64;
    for of_slot in sum.shards() {
        let sum: Vec<f64> = of_slot.to_vec1().unwrap();
        if sum.iter().any(|item| item.to_bits() != slots.to_bits()) {
            return Err(format!("afterwards the sum of {slots} ones is {sum:?}"));
        }
    }
    Ok(())
}

fn of_replica(scenario: &Scenario, inner: &Inner, ctx: &Replica) -> Result<()> {
    let slot = ctx.slot();
    let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let start = |axes| ctx.start_psum(&ones, scenario.grid.named(axes));
    let under_way = scenario.under_way.as_ref().map(start).transpose()?;
    for (at, call) in scenario.calls.iter().enumerate() {
        let fault = scenario.faults.iter().find(|fault| fault.slot == slot && fault.at == at);
        let outcome = match fault {
            None => run(ctx, &scenario.grid, call),
            Some(Fault { kind: Kind::Error, .. }) => bail!("{NO_DATA}"),
            // As a panic, but without a line on standard error for each.
            Some(Fault { kind: Kind::Panic, .. }) => resume_unwind(Box::new(NO_DATA)),
            Some(Fault { kind: Kind::Return, .. }) => return Ok(()),
            Some(fault) => instead(ctx, &scenario.grid, &fault.kind, call, inner),
        };
        if !scenario.stubborn.contains(&slot) {
            outcome?;
        }
    }
    under_way.map_or(Ok(()), |sum| sum.wait().map(drop))
}

fn instead(ctx: &Replica, grid: &Grid, kind: &Kind, call: &Call, inner: &Inner) -> Result<()> {
    let axes = || grid.named(&call.axes);
    let as_usual = || run(ctx, grid, call);
    match kind {
        Kind::Other(other) => run(ctx, grid, other),
        Kind::Twice => {
            let first = as_usual();
            // The second call is made whether the first one failed or not.
            as_usual().and(first)
        }
        Kind::NoSuchDim => ctx.all_gather(&call.ones()?, 7, axes()).map(drop),
        Kind::NoSuchAxis => ctx.psum(&call.ones()?, "z").map(drop),
        Kind::NoSuchRoot => {
            Op::Broadcast { root: grid.size(&call.axes) }.run(ctx, &call.ones()?, axes()).map(drop)
        }
        Kind::Nested => inner().map_err(CandleError::msg),
        Kind::OtherThread => thread::scope(|scope| scope.spawn(as_usual).join().unwrap()),
        Kind::TwoThreads => thread::scope(|scope| {
            let both = [scope.spawn(as_usual), scope.spawn(as_usual)];
            both.into_iter().try_for_each(|thread| thread.join().unwrap())
        }),
        Kind::Skip | Kind::Error | Kind::Panic | Kind::Return => Ok(()),
    }
}

fn run(ctx: &Replica, grid: &Grid, call: &Call) -> Result<()> {
    call.op.run(ctx, &call.ones()?, grid.named(&call.axes)).map(drop)
}

impl Call {
    fn ones(&self) -> Result<Tensor> {
        Tensor::ones(&self.shape[..], self.dtype, &Device::Cpu)
    }
}
