//! Calls, and their mesh, after a replica has missed the deadline.

use std::{
    env,
    panic::Location,
    process::Command,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, bail};
use pmap_mesh::{ALL, CollectiveError, DeviceMesh, Error, Replica, ReplicaError};

const DEADLINE: Duration = Duration::from_millis(20);

#[test]
fn call_times_out_in_a_collective() {
    let mesh = mesh();
    let gate = Gate::default();
    let error = stuck_call(&mesh, &gate, |ctx| ctx.barrier(ALL));
    assert!(
        matches!(&error, Error::Collective(CollectiveError::Deadline { slot: 0, missing, call, limit })
            if missing[..] == [1] && call.starts_with("barrier") && *limit == DEADLINE),
        "{error}"
    );
    gate.open();
    works_again(&mesh);
}

#[test]
fn call_times_out_after_others_return() {
    let mesh = mesh();
    let gate = Gate::default();
    let error = stuck_call(&mesh, &gate, |_| Ok(()));
    let text = error.to_string();
    assert!(
        matches!(&error, Error::Collective(CollectiveError::Deadline { slot: 0, missing, .. }) if missing[..] == [1]),
        "{text}"
    );
    assert!(
        text.contains(&format!("the end of the function over all axes at {}", file!())),
        "{text}"
    );
    gate.open();
    works_again(&mesh);
}

#[test]
fn failed_call_returns_despite_stuck_replica() {
    let mesh = mesh();
    let gate = Gate::default();
    let error = stuck_call(&mesh, &gate, |_| bail!("out of data"));
    assert!(matches!(&error, Error::Replica(ReplicaError::Failed { slot: 0, .. })), "{error}");
    gate.open();
    works_again(&mesh);
}

#[test]
fn stuck_slot_rejects_calls_until_return() {
    let mesh = mesh();
    let gate = Gate::default();
    let closed = gate.clone();
    let late = mesh.pmap(move |ctx, ()| {
        if ctx.slot() == 1 {
            closed.pass();
        }
        Ok(())
    });
    let line = line!() + 1;
    late.call(()).unwrap_err();
    let ones = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
    let sharded = mesh.shard(ones.clone(), [Some(0)]).unwrap();
    let double = mesh.pmap(|_, x: Tensor| x * 2.);
    let refused = [
        late.call(()).unwrap_err(),
        late.call_at(3, ()).unwrap_err(),
        double.call(ones.clone()).unwrap_err(),
        double.call_into(ones.clone(), &ones).unwrap_err(),
        double.call_sharded(ones).unwrap_err(),
        double.run(sharded).unwrap_err(),
        mesh.pmap_scoped(|_, ()| Ok(())).call(()).unwrap_err(),
    ];
    for error in &refused {
        assert_busy(error, line);
    }
    gate.open();
    works_again(&mesh);
}

#[test]
fn queued_call_is_rejected_before_start() {
    let (mesh, gate, line) = stuck_in_background();
    let slots = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&slots);
    let queued = mesh.pmap(move |ctx, ()| {
        noted.lock().unwrap().push(ctx.slot());
        Ok(())
    });
    assert_busy(&queued.call(()).unwrap_err(), line);
    gate.open();
    works_again(&mesh);
    assert_eq!(*slots.lock().unwrap(), [0]);
}

#[test]
fn queued_scoped_call_ends_its_borrow() {
    let waits_for_the_others: [fn(&Replica) -> Result<()>; 2] =
        [|_| Ok(()), |ctx| ctx.barrier(ALL)];
    for of_slot_0 in waits_for_the_others {
        let (mesh, gate, line) = stuck_in_background();
        let slots = Mutex::new(Vec::new());
        assert_busy(
            &mesh
                .pmap_scoped(|ctx: &Replica, ()| {
                    slots.lock().unwrap().push(ctx.slot());
                    of_slot_0(ctx)
                })
                .call(())
                .unwrap_err(),
            line,
        );
        assert_eq!(slots.into_inner().unwrap(), [0]);
        gate.open();
        works_again(&mesh);
    }
}

#[test]
fn queued_call_returns_its_own_failure() {
    let (mesh, gate, _) = stuck_in_background();
    let reason = String::from("out of data");
    let error = mesh.pmap_scoped(|_, ()| -> Result<()> { bail!("{reason}") }).call(()).unwrap_err();
    assert!(matches!(&error, Error::Replica(ReplicaError::Failed { slot: 0, .. })), "{error}");
    gate.open();
    works_again(&mesh);
}

#[test]
fn call_of_a_replicas_thread_is_rejected() {
    let mesh = mesh();
    let (ended, has_ended) = mpsc::channel();
    let line = line!() + 11;
    thread::spawn(move || {
        let own_mesh = mesh.clone();
        let outer = mesh.pmap(move |_, ()| {
            let inner = own_mesh.pmap(|_, ()| Ok(()));
            let refused = thread::spawn(move || inner.call(())).join().unwrap();
            if let Err(error) = &refused {
                assert_busy_with(error, line);
            }
            refused.map_err(candle_core::Error::wrap)
        });
        let outcome = outer.call(());
        works_again(&mesh);
        ended.send(outcome.unwrap_err()).unwrap();
    });
    let error = has_ended.recv_timeout(Duration::from_mins(1)).expect("the call ends");
    assert!(matches!(&error, Error::Replica(ReplicaError::Failed { .. })), "{error}");
    assert!(error.to_string().contains("must not wait for a call on its own mesh"), "{error}");
}

/// Returns a mesh with slot 1 in a call that has not missed its deadline yet, and the line of that
/// call.
fn stuck_in_background() -> (DeviceMesh, Gate, u32) {
    let mesh = DeviceMesh::builder().axis("a", 2).deadline(Duration::from_secs(1)).cpu().unwrap();
    let gate = Gate::default();
    let (begun, has_begun) = mpsc::channel();
    let (closed, of_thread) = (gate.clone(), mesh.clone());
    let line = line!() + 9;
    thread::spawn(move || {
        let stuck = of_thread.pmap(move |ctx, ()| {
            begun.send(()).map_err(candle_core::Error::wrap)?;
            if ctx.slot() == 1 {
                closed.pass();
            }
            Ok(())
        });
        stuck.call(()).unwrap_err()
    });
    (0..2).for_each(|_| has_begun.recv().unwrap());
    (mesh, gate, line)
}

/// Asserts that the error names a slot and the call at this line.
#[track_caller]
fn assert_busy_with(error: &Error, line: u32) {
    assert!(
        matches!(error, Error::Replica(ReplicaError::Stuck { call, .. })
            if call.file() == file!() && call.line() == line),
        "{error}"
    );
}

/// Asserts that the error names slot 1 and the call at this line.
#[track_caller]
fn assert_busy(error: &Error, line: u32) {
    assert!(
        matches!(error, Error::Replica(ReplicaError::Stuck { slot: 1, call })
            if call.file() == file!() && call.line() == line),
        "{error}"
    );
}

#[test]
fn dropped_mesh_leaves_stuck_thread_running() {
    let gate = Gate::default();
    let (ended, has_ended) = mpsc::channel();
    {
        let (mesh, closed) = (mesh(), gate.clone());
        let late = mesh.pmap(move |ctx, ()| {
            if ctx.slot() == 1 {
                closed.pass();
                ended.send(()).map_err(candle_core::Error::wrap)?;
            }
            Ok(())
        });
        late.call(()).unwrap_err();
    }
    gate.open();
    has_ended.recv().unwrap();
    // The worker has dropped the function, and with it the sender.
    assert!(has_ended.recv().is_err());
}

#[test]
fn lone_slow_replicas_have_no_deadline() {
    let mesh = DeviceMesh::builder().axis("a", 1).deadline(Duration::ZERO).cpu().unwrap();
    let gate = Gate::default();
    let closed = gate.clone();
    let slow = mesh.pmap(move |_, ()| {
        closed.pass();
        Ok(())
    });
    let caller = thread::spawn(move || slow.call(()));
    gate.wait_for_arrival();
    gate.open();
    caller.join().unwrap().unwrap();
}

#[test]
fn stuck_scoped_call_ends_the_process() {
    const CHILD: &str = "PMAP_MESH_TEST_STUCK";
    if env::var_os(CHILD).is_some() {
        let gate = Gate::default();
        let stuck = mesh().pmap_scoped(|ctx, ()| {
            if ctx.slot() == 1 {
                gate.pass();
            }
            ctx.barrier(ALL)
        });
        drop(stuck.call(()));
        unreachable!("the process has ended");
    }
    let name = "deadlines::stuck_scoped_call_ends_the_process";
    let mut child = Command::new(env::current_exe().unwrap());
    let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let stderr = String::from_utf8(child.stderr).unwrap();
    assert_eq!(child.status.code(), Some(1), "{stderr}");
    let line = stderr.lines().find(|line| line.starts_with("replica 0 waited for more than 20ms"));
    let line = line.unwrap_or_else(|| panic!("{stderr}"));
    assert!(line.contains("replica 1 did not arrive; the process ends"), "{line}");
}

/// A gate that blocks until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar, AtomicUsize)>);

impl Gate {
    fn pass(&self) {
        let (is_open, opened, visitors) = &*self.0;
        visitors.fetch_add(1, Ordering::SeqCst);
        drop(opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait_for_arrival(&self) {
        while self.0.2.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
    }
}

fn mesh() -> DeviceMesh {
    DeviceMesh::builder().axis("a", 2).deadline(DEADLINE).cpu().unwrap()
}

/// Returns the error of a call with replica 1 blocked at a closed gate.
#[track_caller]
fn stuck_call(
    mesh: &DeviceMesh,
    gate: &Gate,
    other: impl Fn(&Replica) -> Result<()> + Send + Sync + 'static,
) -> Error {
    let closed = gate.clone();
    let late = mesh.pmap(move |ctx, ()| {
        if ctx.slot() == 1 {
            closed.pass();
            return Ok(());
        }
        other(ctx)
    });
    late.call(()).unwrap_err()
}

/// Waits until the mesh accepts calls again.
fn works_again(mesh: &DeviceMesh) {
    let barrier = mesh.pmap(|ctx, ()| ctx.barrier(ALL));
    loop {
        match barrier.call(()) {
            Ok(()) => return,
            Err(Error::Replica(ReplicaError::Stuck { .. })) => thread::yield_now(),
            // The machine is busy, and the deadline short.
            Err(Error::Collective(CollectiveError::Deadline { .. })) => {}
            Err(error) => panic!("{error}, at {}", Location::caller()),
        }
    }
}
