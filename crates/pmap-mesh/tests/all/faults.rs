//! Replicas that disagree, fail or disappear: the call ends with the reason, and the mesh can be
//! used again.

use std::{
    panic::resume_unwind,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, Var, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, MeshError, Replica, ReplicaError};

/// The number of runs of each fault, since replicas arrive in a different order each time.
const ROUNDS: usize = 20;

#[test]
fn mismatch_names_both_calls_and_lines() {
    type Call = fn(&Replica, &Tensor) -> Result<Tensor>;
    // Random scenarios have the other ways in which calls differ.
    let cases: [(Call, Call, [&str; 2]); 3] = [
        (|ctx, x| ctx.psum(x, ALL), |ctx, x| ctx.psum(&x.narrow(1, 0, 1)?, ALL), ["psum"; 2]),
        (
            |ctx, x| ctx.all_gather(x, 0, ALL),
            |ctx, x| ctx.all_gather(&x.narrow(1, 0, 1)?, 0, ALL),
            ["all_gather"; 2],
        ),
        (|ctx, x| ctx.psum(x, ALL), psum_through_pvary, ["psum", "pvary"]),
    ];
    let mesh = DeviceMesh::cpu(2).unwrap();
    for (first, second, names) in cases {
        for _ in 0..ROUNDS {
            let call = move |ctx: &Replica| {
                let collective = if ctx.slot() == 0 { first } else { second };
                collective(ctx, &ones(2)?).map(drop)
            };
            let error = failure(&mesh, call);
            let text = error.to_string();
            let Error::Collective(CollectiveError::Mismatch { left, left_call, right, right_call }) =
                error
            else {
                panic!("{names:?}: {error:?}")
            };
            let mut calls = [(left, left_call), (right, right_call)];
            calls.sort();
            for (replica, (caller, call)) in calls.iter().enumerate() {
                assert_eq!(*caller, replica, "{text}");
                assert!(
                    text.contains(call) && source_of(call).starts_with(names[replica]),
                    "{names:?}: {text}"
                );
            }
        }
    }
}

fn psum_through_pvary(ctx: &Replica, x: &Tensor) -> Result<Tensor> {
    let x = Var::from_tensor(x)?;
    ctx.pvary(&x, ALL)?
        .sum_all()?
        .backward()?
        .remove(&x)
        .ok_or_else(|| candle_core::Error::msg("no gradient"))
}

/// Returns the source of this file from the line that the text of a call names.
fn source_of(call: &str) -> &'static str {
    let (_, place) = call.split_once("faults.rs:").unwrap();
    let (line, column) = place.split_once(':').unwrap();
    let line = include_str!("faults.rs").lines().nth(line.parse::<usize>().unwrap() - 1).unwrap();
    &line[column.parse::<usize>().unwrap() - 1..]
}

#[test]
fn groups_may_differ_in_call_counts() {
    let (mesh, rounds) = (grid(), 0..ROUNDS);
    with_time_limit(move || {
        for _ in rounds {
            let sums = mesh.pmap(|ctx, x: Tensor| {
                let calls = if ctx.axis_index("a")? == 0 { 1 } else { 20 };
                (0..calls).try_fold(x, |x, _| ctx.psum(&x, "b"))
            });
            let sums: Vec<f32> = sums
                .call(Tensor::ones(4, DType::F32, &Device::Cpu).unwrap())
                .unwrap()
                .to_vec1()
                .unwrap();
            assert_eq!(sums.bits(), [2.0, 2.0, 1_048_576.0, 1_048_576.0].to_vec().bits());
        }
    });
}

#[test]
fn error_is_reported_and_peers_return() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for failing in 0..3 {
        for len in [2, 20_000] {
            let echoes = Arc::new(Mutex::new(Vec::new()));
            let seen = Arc::clone(&echoes);
            let error = failure(&mesh, move |ctx| {
                if ctx.slot() == failing {
                    bail!("no data");
                }
                ctx.psum(&ones(len)?, ALL)
                    .map(drop)
                    .inspect_err(|error| seen.lock().unwrap().push(error.to_string()))
            });
            assert!(
                matches!(&error, Error::Replica(ReplicaError::Failed { slot, cause, .. }) if *slot == failing && cause.to_string().contains("no data"))
            );
            let echoes = echoes.lock().unwrap();
            assert_eq!(echoes.len(), 2);
            assert!(
                echoes.iter().all(|echo| echo.contains(&format!("ended by replica {failing}"))),
                "{echoes:?}"
            );
        }
    }
}

/// A panic payload that panics again when it is dropped.
struct Stubborn;

impl Drop for Stubborn {
    fn drop(&mut self) {
        panic!("again");
    }
}

#[test]
fn panicking_payload_is_reported() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let error = failure(&mesh, |ctx| match ctx.slot() {
        1 => std::panic::panic_any(Stubborn),
        _ => ctx.barrier(ALL),
    });
    assert!(matches!(error, Error::Replica(ReplicaError::Panicked { slot: 1, .. })), "{error}");
}

#[test]
fn panicking_argument_drop_is_reported() {
    /// An argument with shards that panic when they are dropped on a worker.
    struct Fragile(Tensor);

    impl pmap_mesh::TensorTree for Fragile {
        fn try_map<E>(
            &self,
            f: &mut impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
        ) -> std::result::Result<Self, E> {
            Ok(Self(f(&self.0)?))
        }
    }

    impl Drop for Fragile {
        fn drop(&mut self) {
            let is_worker = thread::current().name().is_some_and(|name| name.starts_with("mesh-"));
            assert!(!is_worker || thread::panicking(), "it breaks");
        }
    }

    let mesh = DeviceMesh::cpu(2).unwrap();
    let call = mesh.pmap(|_, _: Fragile| Ok(()));
    let error = with_time_limit(move || call.call(Fragile(inputs(2))).unwrap_err());
    assert!(
        matches!(&error, Error::Replica(ReplicaError::Panicked { slot: 0, message, .. }) if message == "it breaks"),
        "{error}"
    );
}

#[test]
fn lowest_failing_slot_is_reported() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for _ in 0..ROUNDS {
        let error = failure(&mesh, |ctx| match ctx.slot() {
            0 => ctx.barrier(ALL),
            1 => bail!("no data"),
            _ => panic!("out of order"),
        });
        assert!(matches!(error, Error::Replica(ReplicaError::Failed { slot: 1, .. })), "{error}");
    }
}

#[test]
fn missing_gradient_releases_peers() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let error = failure(&mesh, |ctx| {
        let x = Var::ones(2, DType::F32, ctx.device())?;
        let y = ctx.pvary(&x, ALL)?;
        let largest = ctx.pmax(&y, ALL)?;
        if ctx.slot() == 1 { largest } else { y }.sum_all()?.backward().map(drop)
    });
    assert!(
        matches!(&error, Error::Replica(ReplicaError::Failed { slot: 1, cause, .. }) if cause.to_string().contains("pmax has no gradient"))
    );
}

#[test]
fn crossed_waits_are_a_deadlock() {
    let mesh = grid();
    for _ in 0..ROUNDS {
        // Slot 0 waits for 2, 2 for 3, 3 for 1, and 1 for 0.
        let error = failure(&mesh, |ctx| {
            let (first, second) = if matches!(ctx.slot(), 0 | 3) { ("a", "b") } else { ("b", "a") };
            let sum = ctx.psum(&ones(2)?, first)?;
            ctx.psum(&sum, second).map(drop)
        });
        let Error::Collective(CollectiveError::Deadlock { waiting }) = &error else {
            panic!("{error:?}")
        };
        assert_eq!(waiting.iter().map(|(replica, _)| *replica).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(waiting.iter().all(|(_, call)| source_of(call).starts_with("psum")), "{error}");
    }
}

#[test]
fn overflowing_deadline_is_none() {
    let mesh = DeviceMesh::builder().axis("a", 2).deadline(Duration::MAX).cpu().unwrap();
    with_time_limit(move || assert_works(&mesh));
}

#[test]
fn unknown_axis_lists_known_axes() {
    type Call = fn(&Replica) -> Result<()>;
    let calls: [Call; 2] =
        [|ctx| ctx.psum(&ones(2)?, ["a", "x"]).map(drop), |ctx| ctx.axis_size("x").map(drop)];
    let mesh = grid();
    for call in calls {
        for asking in [0, 3] {
            let error =
                failure(
                    &mesh,
                    move |ctx| if ctx.slot() == asking { call(ctx) } else { ctx.barrier(ALL) },
                );
            assert!(
                matches!(&error, Error::Mesh(MeshError::UnknownAxis { name, known }) if name == "x" && *known == ["a", "b"]),
                "{error:?}"
            );
        }
    }
}

#[test]
fn ignored_failure_still_fails_the_call() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for _ in 0..ROUNDS {
        let error = failure(&mesh, |ctx| {
            let x = ones(1 + ctx.slot())?;
            (0..100).for_each(|_| drop(ctx.psum(&x, ALL)));
            Ok(())
        });
        assert!(matches!(error, Error::Collective(CollectiveError::Mismatch { .. })), "{error}");
        let error = failure(&mesh, |ctx| {
            drop(ctx.axis_size("x"));
            Ok(())
        });
        assert!(matches!(error, Error::Mesh(MeshError::UnknownAxis { .. })), "{error}");
    }
}

#[test]
fn concurrent_calls_of_one_replica_fail() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let error = failure(&mesh, move |ctx| {
        if ctx.slot() == 1 {
            return released.lock().unwrap().recv().map_err(candle_core::Error::wrap);
        }
        let sum = || ctx.psum(&ones(2)?, ALL).map(drop);
        let sums = thread::scope(|scope| {
            [scope.spawn(sum), scope.spawn(sum)].map(|thread| thread.join().unwrap())
        });
        release.send(()).map_err(candle_core::Error::wrap)?;
        sums.into_iter().collect()
    });
    assert!(
        matches!(error, Error::Collective(CollectiveError::Mismatch { left: 0, right: 0, .. })),
        "{error}"
    );
}

#[test]
fn nested_call_is_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let inner = mesh.pmap(|_, x: Tensor| Ok(x));
    let (seen, refusals) = mpsc::channel();
    let error = failure(&mesh, move |_| {
        // A worker stays a replica even while rayon runs other work on it.
        rayon::yield_now();
        let refusal = inner.call(inputs(2)).unwrap_err();
        let message = candle_core::Error::msg(&refusal);
        seen.send(refusal).map_err(candle_core::Error::wrap)?;
        Err(message)
    });
    assert!(error.to_string().contains("cannot be called inside a replica"), "{error}");
    let refusals: Vec<Error> = refusals.try_iter().collect();
    assert_eq!(refusals.len(), 2);
    for refusal in refusals {
        assert!(matches!(refusal, Error::Replica(ReplicaError::Nested)), "{refusal}");
    }
}

#[test]
fn thread_outliving_its_replica_gets_error() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let (start, started) = mpsc::channel::<()>();
    let started = Arc::new(Mutex::new(started));
    let (seen, outcome) = mpsc::channel();
    let error = failure(&mesh, move |ctx| {
        if ctx.slot() == 0 {
            let (ctx, started, seen) = (ctx.clone(), Arc::clone(&started), seen.clone());
            thread::spawn(move || {
                // Wait until the call has returned, and its failure with it.
                let _ = started.lock().unwrap().recv();
                drop(seen.send(ctx.barrier(ALL).map_err(|error| error.to_string())));
            });
        }
        bail!("no data")
    });
    assert!(matches!(error, Error::Replica(ReplicaError::Failed { slot: 0, .. })), "{error}");
    drop(start);
    let outcome = with_time_limit(move || outcome.recv().unwrap());
    assert!(outcome.unwrap_err().starts_with("the call has ended"));
}

#[test]
fn set_during_a_sum_does_not_deadlock() {
    for len in [2, 20_000] {
        with_concurrent_sets(3, len, 40, |ctx, var| ctx.psum(var, ALL));
        with_concurrent_sets(3, len, 40, |ctx, var| ctx.all_gather(var, 0, ALL));
    }
}

#[test]
fn set_on_private_var_does_not_deadlock() {
    // No replica waits for another one, so only the variable's lock limits how often it is taken.
    with_concurrent_sets(3, 2, 5_000, |ctx, var| ctx.pvary(var, ALL));
    with_concurrent_sets(3, 2, 5_000, |ctx, var| ctx.psum(var, []));
}

/// Runs replicas that use and set one variable `times` times, while another thread sets it too.
fn with_concurrent_sets(
    devices: usize,
    len: usize,
    times: usize,
    call: fn(&Replica, &Var) -> Result<Tensor>,
) {
    with_time_limit(move || {
        let var = Var::ones(len, DType::F32, &Device::Cpu).unwrap();
        let (shared, ended) = (var.clone(), AtomicBool::new(false));
        let mesh = DeviceMesh::cpu(devices).unwrap();
        let used = mesh.pmap(move |ctx, _: Tensor| {
            (0..times).try_for_each(|_| {
                call(ctx, &shared)?;
                shared.set(&Tensor::ones(len, DType::F32, ctx.device())?)
            })
        });
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Acquire) {
                    var.set(&Tensor::ones(len, DType::F32, &Device::Cpu).unwrap()).unwrap();
                }
            });
            let outcome = used.call(inputs(devices));
            ended.store(true, Ordering::Release);
            outcome.unwrap();
        });
    });
}

#[test]
fn mesh_may_be_dropped_inside_replica() {
    with_time_limit(|| {
        let mesh = DeviceMesh::cpu(2).unwrap();
        let other = DeviceMesh::cpu(2).unwrap();
        assert_works(&other);
        let dropped = Mutex::new(vec![mesh.clone(), other]);
        let call = mesh.pmap(move |ctx, x: Tensor| {
            dropped.lock().unwrap().clear();
            ctx.psum(&x, ALL)
        });
        drop(mesh);
        for _ in 0..ROUNDS {
            assert!(call.call(inputs(2)).is_ok());
        }
    });
}

#[test]
fn concurrent_calls_do_not_mix() {
    with_time_limit(|| {
        let mesh = DeviceMesh::cpu(3).unwrap();
        let sum = mesh.pmap(|ctx, (_, x): (Tensor, Tensor)| {
            let x = (x * (ctx.slot() + 1) as f64)?;
            ctx.psum(&ctx.all_gather(&x, 0, ALL)?, ALL)
        });
        thread::scope(|scope| {
            for caller in 1..5_u8 {
                let sum = &sum;
                scope.spawn(move || {
                    for round in 0..200_u16 {
                        let value = f32::from(caller) * 1000.0 + f32::from(round);
                        let x = Tensor::new(&[value], &Device::Cpu).unwrap();
                        let sums: Vec<f32> = sum
                            .call((inputs(3), x))
                            .unwrap()
                            .narrow(0, 6, 3)
                            .unwrap()
                            .to_vec1()
                            .unwrap();
                        assert_eq!(sums.bits(), vec![3.0 * value, 6.0 * value, 9.0 * value].bits());
                    }
                });
            }
        });
    });
}

/// Returns the error of a call that must fail, and checks that the mesh works afterwards.
fn failure(mesh: &DeviceMesh, f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> Error {
    let mesh = mesh.clone();
    with_time_limit(move || {
        let error = mesh.pmap(move |ctx, _: Tensor| f(ctx)).call(inputs(mesh.len())).unwrap_err();
        assert_works(&mesh);
        error
    })
}

fn assert_works(mesh: &DeviceMesh) {
    let len = mesh.len();
    let sums =
        mesh.pmap(|ctx, x: Tensor| ctx.psum(&x.ones_like()?, ALL)).call(inputs(len)).unwrap();
    assert_eq!(sums.to_vec1::<f32>().unwrap().bits(), vec![len as f32; len].bits());
}

/// Runs a function on a separate thread, so that a deadlock is a failure.
fn with_time_limit<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || drop(done.send(run())));
    match result.recv_timeout(Duration::from_mins(1)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("time limit exceeded"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => panic!("the thread returned no result"),
        },
    }
}

/// Returns one row for each device.
fn inputs(devices: usize) -> Tensor {
    Tensor::zeros(devices, DType::F32, &Device::Cpu).unwrap()
}

fn ones(len: usize) -> Result<Tensor> {
    Tensor::ones((2, 2 * len), DType::F32, &Device::Cpu)
}

fn grid() -> DeviceMesh {
    DeviceMesh::builder().axis("a", 2).axis("b", 2).cpu().unwrap()
}

trait Bits {
    fn bits(self) -> Vec<u32>;
}

impl Bits for Vec<f32> {
    fn bits(self) -> Vec<u32> {
        self.into_iter().map(f32::to_bits).collect()
    }
}
