//! Pending collectives: every failure ends all of them.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, Replica, ReplicaError};
use process_tests::nothing;

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
    run(&mesh, |ctx| {
        assert_eq!(ctx.start_psum(&small(), ALL)?.wait()?.dims(), [3]);
        Ok(())
    })
    .unwrap();
    error
}

#[test]
fn gradient_crosses_a_pending_sum() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    run(&mesh, |ctx| {
        let w = candle_core::Var::from_tensor(&small())?;
        let sum = ctx.start_psum(&w.sqr()?, ALL)?.wait()?;
        let grads = sum.sum_all()?.backward()?;
        assert_eq!(grads.get(&w).unwrap().to_vec1::<f32>()?, [2.0; 3]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn start_mismatch_names_both_calls() {
    let error = failure(2, |ctx| {
        let x = if ctx.slot() == 0 { small() } else { large() };
        let sum = ctx.start_psum(&x, ALL)?;
        ctx.barrier(ALL)?;
        sum.wait().map(drop)
    });
    let mismatch = matches!(error, Error::Collective(CollectiveError::Mismatch { .. }));
    assert!(mismatch && error.to_string().contains("start_psum of f32 [16384]"), "{error}");
}

#[test]
fn dropped_handle_is_an_error() {
    let error = failure(2, |ctx| {
        let sum = ctx.start_psum(&large(), ALL)?;
        if ctx.slot() == 1 {
            drop(sum);
            return Ok(());
        }
        sum.wait().map(drop)
    });
    let dropped = matches!(error, Error::Collective(CollectiveError::NeverAwaited { slot: 1, .. }));
    assert!(dropped && error.to_string().contains("start_psum"), "{error}");
}

/// Runs `end` in slot 1 while the others wait for the second of two collectives. Slot 1 has not
/// started the third.
fn ends(end: fn(&Replica) -> Result<()>) -> Error {
    failure(3, move |ctx| {
        let first = ctx.start_psum(&large(), ALL)?;
        let second = ctx.start_psum(&small(), ALL)?;
        if ctx.slot() == 1 {
            return end(ctx);
        }
        let third = ctx.start_psum(&large(), ALL)?;
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
        0 => ctx.start_psum(&small(), ALL)?.wait().map(drop),
        _ => Ok(()),
    });
    assert!(
        matches!(error, Error::Collective(CollectiveError::PeerReturned { slot: 1, .. })),
        "{error}"
    );
}

#[test]
fn deadline_ends_every_wait() {
    let mesh = DeviceMesh::builder()
        .axis("a", 3)
        .pin(false)
        .deadline(Duration::from_millis(100))
        .cpu()
        .unwrap();
    let error = run(&mesh, |ctx| {
        let first = ctx.start_psum(&small(), ALL)?;
        let second = (ctx.slot() != 1).then(|| ctx.start_psum(&small(), ALL)).transpose()?;
        match (ctx.slot(), second) {
            // Miss the second collective for longer than the others wait, then observe the failure.
            (_, None) => {
                std::thread::sleep(Duration::from_millis(400));
                ctx.barrier(ALL)
            }
            (0, Some(second)) => second.wait().map(drop),
            (_, Some(second)) => {
                second.wait()?;
                first.wait().map(drop)
            }
        }
    });
    match error.unwrap_err() {
        Error::Collective(CollectiveError::Deadline { missing, .. }) => assert_eq!(missing, [1]),
        other => panic!("{other}"),
    }
}

#[test]
fn impossible_waits_are_a_deadlock() {
    let mesh = DeviceMesh::builder().axis("a", 2).axis("b", 2).pin(false).cpu().unwrap();
    let error = run(&mesh, |ctx| {
        let axis = if matches!(ctx.slot(), 0 | 3) { "a" } else { "b" };
        ctx.start_psum(&small(), axis)?.wait().map(drop)
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Collective(CollectiveError::Deadlock { .. })), "{error}");
}

#[test]
fn list_mismatch_fails_every_replica() {
    let error = failure(2, |ctx| {
        let x = if ctx.slot() == 0 { large() } else { large().to_dtype(DType::F64)? };
        ctx.psum_list(vec![x], &[0], ALL).map(drop)
    });
    assert!(error.to_string().contains("tensor 0 is f32 [16384] on rank 0 and f64"), "{error}");
}
