//! Pending collectives: every failure ends all of them.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, Replica, ReplicaError};
use process_tests::{lists::start_sum, nothing};

/// Returns a tensor of 64 KiB, which the members reduce together.
fn large() -> Tensor {
    Tensor::ones(16_384, DType::F32, &Device::Cpu).unwrap()
}

fn small() -> Tensor {
    Tensor::ones(3, DType::F32, &Device::Cpu).unwrap()
}

fn run(
    mesh: &DeviceMesh,
    f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static,
) -> pmap_mesh::Result<()> {
    mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None).call(nothing())
}

/// Runs a function that fails, and then one that succeeds on the same mesh.
fn failure(slots: usize, f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> Error {
    let mesh = DeviceMesh::builder()
        .axis("a", slots)
        .pin(false)
        .deadline(Duration::from_secs(20))
        .cpu()
        .unwrap();
    let error = run(&mesh, f).unwrap_err();
    run(&mesh, |ctx| start_sum(ctx, &small(), ALL)?.wait().map(drop)).unwrap();
    error
}

#[test]
fn start_mismatch_names_both_calls() {
    let error = failure(2, |ctx| {
        let x = if ctx.slot() == 0 { small() } else { large() };
        let sum = start_sum(ctx, &x, ALL)?;
        ctx.barrier(ALL)?;
        sum.wait().map(drop)
    });
    let mismatch = matches!(error, Error::Collective(CollectiveError::Mismatch { .. }));
    assert!(mismatch && error.to_string().contains("start_reduce_runs(sum, layout "), "{error}");
}

#[test]
fn dropped_handle_is_an_error() {
    let error = failure(2, |ctx| {
        let sum = start_sum(ctx, &large(), ALL)?;
        if ctx.slot() == 1 {
            drop(sum);
            return Ok(());
        }
        sum.wait().map(drop)
    });
    let dropped = matches!(error, Error::Collective(CollectiveError::NeverAwaited { slot: 1, .. }));
    assert!(dropped && error.to_string().contains("start_reduce_runs"), "{error}");
}

/// Runs `end` in slot 1 while the others wait for the second of two collectives. Slot 1 has not
/// started the third.
fn ends(end: fn(&Replica) -> Result<()>) -> Error {
    failure(3, move |ctx| {
        let first = start_sum(ctx, &large(), ALL)?;
        let second = start_sum(ctx, &small(), ALL)?;
        if ctx.slot() == 1 {
            return end(ctx);
        }
        let third = start_sum(ctx, &large(), ALL)?;
        if ctx.slot() == 0 {
            third.wait()?;
        }
        second.wait()?;
        ctx.barrier(ALL)?;
        first.wait().map(drop)
    })
}

#[test]
fn failure_ends_every_wait() {
    let error = ends(|_| bail!("no more data"));
    assert!(matches!(error, Error::Replica(ReplicaError::Failed { slot: 1, .. })), "{error}");
    assert!(error.to_string().contains("no more data"), "{error}");
}

#[test]
fn early_return_ends_every_wait() {
    let error = ends(|_| Ok(()));
    assert!(
        matches!(error, Error::Collective(CollectiveError::NeverAwaited { slot: 1, .. })),
        "{error}"
    );
    let error = failure(2, |ctx| match ctx.slot() {
        0 => start_sum(ctx, &small(), ALL)?.wait().map(drop),
        _ => Ok(()),
    });
    assert!(
        matches!(error, Error::Collective(CollectiveError::PeerReturned { slot: 1, .. })),
        "{error}"
    );
}
