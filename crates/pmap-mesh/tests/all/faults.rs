//! What replicas that disagree, fail or disappear do to a call: it ends, says why, and the mesh
//! lives on.

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

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, MeshError, Replica, ReplicaError};

/// How often a fault is tried: replicas arrive in another order each time.
const ROUNDS: usize = 20;

#[test]
fn calls_that_do_not_agree_are_named_with_their_places() {
    type Call = fn(&Replica, &Tensor) -> Result<Tensor>;
    let cases: [(Call, Call, [&str; 2]); 13] = [
        (|ctx, x| ctx.psum(x, ALL), |ctx, x| ctx.pmax(x, ALL), ["psum", "pmax"]),
        (|ctx, x| ctx.psum(x, ALL), |ctx, _| ctx.barrier(ALL).and(ones(2)), ["psum", "barrier"]),
        (
            |ctx, x| ctx.all_gather(x, 0, ALL),
            |ctx, x| ctx.psum_scatter(x, 0, ALL),
            ["all_gather", "psum_scatter"],
        ),
        (|ctx, x| ctx.psum(x, ALL), |ctx, x| ctx.psum(&x.narrow(1, 0, 1)?, ALL), ["psum"; 2]),
        (|ctx, x| ctx.psum(x, ALL), |ctx, _| ctx.psum(&ones(20_000)?, ALL), ["psum"; 2]),
        (|ctx, x| ctx.pmean(x, ALL), |ctx, x| ctx.pmean(&x.flatten_all()?, ALL), ["pmean"; 2]),
        (|ctx, x| ctx.psum(x, ALL), |ctx, x| ctx.psum(&x.to_dtype(DType::F64)?, ALL), ["psum"; 2]),
        (|ctx, x| ctx.broadcast(x, 0, ALL), |ctx, x| ctx.broadcast(x, 1, ALL), ["broadcast"; 2]),
        (
            |ctx, x| ctx.ppermute(x, &[(0, 1)], ALL),
            |ctx, x| ctx.ppermute(x, &[(1, 0)], ALL),
            ["ppermute"; 2],
        ),
        (|ctx, x| ctx.all_gather(x, 0, ALL), |ctx, x| ctx.all_gather(x, 1, ALL), ["all_gather"; 2]),
        (
            |ctx, x| ctx.all_gather(x, 0, ALL),
            |ctx, x| ctx.all_gather(&x.narrow(1, 0, 1)?, 0, ALL),
            ["all_gather"; 2],
        ),
        (
            |ctx, x| ctx.all_to_all(x, 0, 1, ALL),
            |ctx, x| ctx.all_to_all(x, 1, 0, ALL),
            ["all_to_all"; 2],
        ),
        (|ctx, x| ctx.psum(x, ALL), backward_of_pvary, ["psum", "pvary"]),
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

fn backward_of_pvary(ctx: &Replica, x: &Tensor) -> Result<Tensor> {
    let x = Var::from_tensor(x)?;
    ctx.pvary(&x, ALL)?
        .sum_all()?
        .backward()?
        .remove(&x)
        .ok_or_else(|| candle_core::Error::msg("no gradient"))
}

/// This file from the place on that the text of a call names.
fn source_of(call: &str) -> &'static str {
    let (_, place) = call.split_once("faults.rs:").unwrap();
    let (line, column) = place.split_once(':').unwrap();
    let line = include_str!("faults.rs").lines().nth(line.parse::<usize>().unwrap() - 1).unwrap();
    &line[column.parse::<usize>().unwrap() - 1..]
}

#[test]
fn a_replica_that_returns_early_is_named_to_those_who_wait_for_it() {
    let row = DeviceMesh::cpu(3).unwrap();
    let grid = grid();
    for _ in 0..ROUNDS {
        let error = failure(&row, |ctx| {
            if ctx.slot() == 1 { Ok(()) } else { ctx.psum(&ones(2)?, ALL).map(drop) }
        });
        assert!(
            matches!(
                error,
                Error::Collective(CollectiveError::PeerReturned { slot: 1, waiting: 0 | 2, .. })
            ),
            "{error}"
        );
        let error = failure(&grid, |ctx| {
            if ctx.slot() == 3 { Ok(()) } else { ctx.psum(&ones(2)?, "a").map(drop) }
        });
        assert!(
            matches!(
                error,
                Error::Collective(CollectiveError::PeerReturned { slot: 3, waiting: 1, .. })
            ),
            "{error}"
        );
        let error = failure(&row, |ctx| {
            let calls = if ctx.slot() == 2 { 2 } else { 3 };
            (0..calls).try_for_each(|_| ctx.psum(&ones(20_000)?, ALL).map(drop))
        });
        assert!(
            matches!(
                error,
                Error::Collective(CollectiveError::PeerReturned { slot: 2, waiting: 0 | 1, .. })
            ),
            "{error}"
        );
    }
}

#[test]
fn groups_need_not_call_equally_often() {
    let (mesh, rounds) = (grid(), 0..ROUNDS);
    watched(move || {
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
fn an_error_is_its_replica_s_and_the_others_are_released() {
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

#[test]
fn a_panic_is_its_replica_s_and_the_others_are_released() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for failing in 0..3 {
        let error = failure(&mesh, move |ctx| {
            assert_ne!(ctx.slot(), failing, "out of order");
            ctx.psum(&ones(2)?, ALL).map(drop)
        });
        assert!(
            matches!(&error, Error::Replica(ReplicaError::Panicked { slot, message, .. }) if *slot == failing && message.contains("out of order"))
        );
    }
}

/// What panics again when it is dropped.
struct Stubborn;

impl Drop for Stubborn {
    fn drop(&mut self) {
        panic!("again");
    }
}

#[test]
fn a_panic_whose_payload_panics_when_it_is_dropped_is_its_replica_s() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let error = failure(&mesh, |ctx| match ctx.slot() {
        1 => std::panic::panic_any(Stubborn),
        _ => ctx.barrier(ALL),
    });
    assert!(matches!(error, Error::Replica(ReplicaError::Panicked { slot: 1, .. })), "{error}");
}

#[test]
fn an_argument_that_panics_when_it_is_dropped_is_its_replica_s() {
    /// Panics when a shard of it is dropped on a worker.
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
    let error = watched(move || call.call(Fragile(inputs(2))).unwrap_err());
    assert!(
        matches!(&error, Error::Replica(ReplicaError::Panicked { slot: 0, message, .. }) if message == "it breaks"),
        "{error}"
    );
}

#[test]
fn of_several_failures_the_first_replica_s_is_told() {
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
fn errors_and_panics_inside_backward_release_the_others() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    for panics in [false, true] {
        let error = failure(&mesh, move |ctx| {
            let x = Var::ones(2, DType::F32, ctx.device())?;
            let y = ctx.pvary(&x, ALL)?;
            let y = if ctx.slot() == 1 { y.apply_op1(Broken { panics })? } else { y };
            y.sum_all()?.backward().map(drop)
        });
        match error {
            Error::Replica(ReplicaError::Panicked { slot: 1, message, .. }) if panics => {
                assert_eq!(message, "broken");
            }
            Error::Replica(ReplicaError::Failed { slot: 1, cause, .. }) if !panics => {
                assert!(cause.to_string().contains("broken"));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn an_operation_without_gradient_on_one_replica_releases_the_others() {
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

/// The identity, until its gradient is wanted.
struct Broken {
    panics: bool,
}

impl CustomOp1 for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        assert!(!self.panics, "broken");
        bail!("broken")
    }
}

#[test]
fn groups_that_wait_crosswise_are_told_so() {
    let mesh = grid();
    for _ in 0..ROUNDS {
        // 0 waits for 2, 2 for 3, 3 for 1, and 1 for 0.
        let error = failure(&mesh, |ctx| {
            let (first, second) = if matches!(ctx.slot(), 0 | 3) { ("a", "b") } else { ("b", "a") };
            let sum = ctx.psum(&ones(2)?, first)?;
            ctx.psum(&sum, second).map(drop)
        });
        let Error::Collective(CollectiveError::Deadlock { waiting }) = &error else {
            panic!("{error:?}")
        };
        assert_eq!(waiting.iter().map(|(replica, _)| *replica).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(
            waiting.iter().all(|(_, call)| source_of(&call.to_string()).starts_with("psum")),
            "{error}"
        );
    }
}

#[test]
fn a_group_and_the_whole_mesh_that_wait_for_each_other_are_told_so() {
    let mesh = grid();
    for _ in 0..ROUNDS {
        let error = failure(&mesh, |ctx| match ctx.slot() {
            0 => ctx.psum(&ones(2)?, "b").map(drop),
            _ => ctx.psum(&ones(2)?, ALL).map(drop),
        });
        assert!(
            matches!(&error, Error::Collective(CollectiveError::Deadlock { waiting }) if waiting.len() == 4),
            "{error}"
        );
    }
}

#[test]
fn a_deadline_ends_waiting_for_a_replica_that_is_busy_elsewhere() {
    let deadline = Duration::from_millis(20);
    let mesh = DeviceMesh::builder().axis("a", 2).deadline(deadline).cpu().unwrap();
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let error = watched(move || {
        let call = mesh.pmap(move |ctx, _: Tensor| match ctx.slot() {
            0 => {
                let sum = ctx.psum(&ones(2)?, ALL);
                release.send(()).map_err(candle_core::Error::wrap)?;
                sum.map(drop)
            }
            _ => released.lock().unwrap().recv().map_err(candle_core::Error::wrap),
        });
        let error = call.call(inputs(2)).unwrap_err();
        // What becomes of the mesh is the subject of `deadlines`.
        error
    });
    assert!(
        matches!(&error, Error::Collective(CollectiveError::Deadline { slot: 0, missing, call, after }) if *after == deadline && missing[..] == [1] && source_of(&call.to_string()).starts_with("psum")),
        "{error}"
    );
}

#[test]
fn a_deadline_beyond_all_time_is_none() {
    let mesh = DeviceMesh::builder().axis("a", 2).deadline(Duration::MAX).cpu().unwrap();
    watched(move || assert_works(&mesh));
}

#[test]
fn an_axis_that_the_mesh_lacks_is_named_with_those_it_has() {
    type Call = fn(&Replica) -> Result<()>;
    let calls: [Call; 6] = [
        |ctx| ctx.psum(&ones(2)?, "x").map(drop),
        |ctx| ctx.psum(&ones(2)?, ["a", "x"]).map(drop),
        |ctx| ctx.barrier("x"),
        |ctx| ctx.pvary(&ones(2)?, "x").map(drop),
        |ctx| ctx.axis_index("x").map(drop),
        |ctx| ctx.axis_size("x").map(drop),
    ];
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
fn a_failure_that_is_swallowed_fails_the_call_all_the_same() {
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
fn two_threads_of_a_replica_may_not_call_at_once() {
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
fn a_call_inside_a_replica_is_refused_instead_of_waiting_for_itself() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let inner = mesh.pmap(|_, x: Tensor| Ok(x));
    let (seen, refusals) = mpsc::channel();
    let error = failure(&mesh, move |_| {
        // Whatever else the worker is lent to meanwhile, it stays a replica.
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
fn a_thread_that_outlives_its_replica_is_told_that_the_call_has_ended() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let (start, started) = mpsc::channel::<()>();
    let started = Arc::new(Mutex::new(started));
    let (seen, outcome) = mpsc::channel();
    let error = failure(&mesh, move |ctx| {
        if ctx.slot() == 0 {
            let (ctx, started, seen) = (ctx.clone(), Arc::clone(&started), seen.clone());
            thread::spawn(move || {
                // Until the call has returned, and its failure with it.
                let _ = started.lock().unwrap().recv();
                drop(seen.send(ctx.barrier(ALL).map_err(|error| error.to_string())));
            });
        }
        bail!("no data")
    });
    assert!(matches!(error, Error::Replica(ReplicaError::Failed { slot: 0, .. })), "{error}");
    drop(start);
    let outcome = watched(move || outcome.recv().unwrap());
    assert!(outcome.unwrap_err().starts_with("the call has ended"));
}

#[test]
fn setting_a_variable_that_is_being_summed_ends() {
    for len in [2, 20_000] {
        with_a_variable_that_is_set_all_the_time(4, len, 200, |ctx, var| ctx.psum(var, ALL));
        with_a_variable_that_is_set_all_the_time(4, len, 200, |ctx, var| {
            ctx.all_gather(var, 0, ALL)
        });
    }
}

#[test]
fn setting_a_variable_that_each_replica_uses_alone_ends() {
    // Nobody waits for anybody here but for the lock of the variable, so that it is asked for as
    // often as can be.
    with_a_variable_that_is_set_all_the_time(4, 2, 20_000, |ctx, var| ctx.pvary(var, ALL));
    with_a_variable_that_is_set_all_the_time(4, 2, 20_000, |ctx, var| ctx.psum(var, []));
}

/// Replicas use and set one variable `times` times, while a thread outside sets it.
fn with_a_variable_that_is_set_all_the_time(
    devices: usize,
    len: usize,
    times: usize,
    call: fn(&Replica, &Var) -> Result<Tensor>,
) {
    watched(move || {
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
fn meshes_may_be_dropped_inside_a_replica() {
    watched(|| {
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
fn collectives_of_calls_from_several_threads_do_not_mix() {
    watched(|| {
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

#[test]
fn failing_and_working_calls_from_several_threads_do_not_mix() {
    watched(|| {
        let mesh = DeviceMesh::cpu(2).unwrap();
        thread::scope(|scope| {
            for caller in 0..4 {
                let mesh = &mesh;
                scope.spawn(move || {
                    for _ in 0..50 {
                        if caller % 2 == 0 {
                            assert_works(mesh);
                            continue;
                        }
                        let call = mesh.pmap(|ctx, _: Tensor| match ctx.slot() {
                            0 => ctx.psum(&ones(2)?, ALL).map(drop),
                            _ => bail!("no data"),
                        });
                        assert!(matches!(
                            call.call(inputs(2)),
                            Err(Error::Replica(ReplicaError::Failed { slot: 1, .. }))
                        ));
                    }
                });
            }
        });
    });
}

#[test]
fn many_more_replicas_than_cores_go_on() {
    for slots in [8_u32, 16] {
        watched(move || {
            let mesh = DeviceMesh::cpu(slots as usize).unwrap();
            let many = mesh.pmap(move |ctx, _: Tensor| {
                let index = Tensor::new(ctx.slot() as f64, ctx.device())?;
                for round in 0..500 {
                    let sum: f64 = ctx.psum(&(&index * f64::from(round))?, ALL)?.to_scalar()?;
                    assert_eq!(sum.to_bits(), f64::from(slots * (slots - 1) / 2 * round).to_bits());
                }
                Ok(())
            });
            many.call(inputs(slots as usize)).unwrap();
        });
    }
}

/// The error of a call that must fail, after which the mesh must work.
fn failure(mesh: &DeviceMesh, f: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static) -> Error {
    let mesh = mesh.clone();
    watched(move || {
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

/// Runs it on a thread of its own, so that a hang is a failure.
fn watched<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || drop(done.send(run())));
    match result.recv_timeout(Duration::from_mins(1)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("it does not end"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => panic!("it ended without a result"),
        },
    }
}

/// Rows for a row of devices.
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
