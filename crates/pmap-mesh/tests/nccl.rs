//! One process per GPU gives what one thread per slot gives, to the bit; and no process outlives another's failure.
//!
//! The program starts itself once for each GPU, as a launcher does: it tells each process its rank, and ends the others
//! when one has failed. With one GPU that is a world of one, in which nothing is sent.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "without the test harness, nobody else says what was run")]

mod conformance;

use std::{
    cell::Cell,
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use candle_core::{Device, Tensor, cuda_backend::cudarc::driver::CudaContext};
use core_types::Launched;
use pmap_mesh::{ALL, DeviceMesh, DeviceMeshBuilder, NcclStore};

/// How long a case may take before it counts as a hang.
const LIMIT: Duration = Duration::from_mins(4);
/// How often to look whether a process has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Name, the fewest ranks, and what must be said on the standard error: of success, or of why all ended.
const CASES: [(&str, usize, Result<(), &str>); 11] = [
    ("collectives", 1, Ok(())),
    ("training", 1, Ok(())),
    ("checkpoints", 1, Ok(())),
    ("sharded", 1, Ok(())),
    ("host tensor", 1, Err("over NCCL it must be on the device of its replica")),
    ("failure", 2, Err("failed: no more data")),
    ("panic", 2, Err("this one breaks")),
    ("deadline", 2, Err("rank 0: replica 0 waited for more than 500ms in barrier over all axes")),
    ("mismatch", 2, Err("replica 1 calls pmax of f32 [70000]")),
    ("deserted", 2, Err("replica 1 calls the end of the function")),
    ("killed", 2, Err("")),
];

/// One of the processes of a case.
struct Nccl {
    launched: Launched,
    folder: PathBuf,
    meshes: Cell<usize>,
}

impl Nccl {
    fn local_rank(&self) -> usize {
        self.launched.local_rank().unwrap().as_usize()
    }
}

impl conformance::Engine for Nccl {
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh {
        // All processes make their meshes in one order.
        let store = NcclStore::File(self.folder.join(format!("id-{}", self.meshes.replace(self.meshes.get() + 1))));
        builder.nccl(self.launched.placement(), self.local_rank(), &store).unwrap()
    }

    fn device(&self) -> Device {
        Device::new_cuda_with_stream(self.local_rank()).unwrap()
    }
}

fn main() -> ExitCode {
    if let Some(launched) = Launched::from_env().unwrap() {
        let mut arguments = env::args().skip(1);
        let (case, folder) = (arguments.next().unwrap(), arguments.next().unwrap().into());
        as_rank(&case, &Nccl { launched, folder, meshes: Cell::new(0) });
    } else if Device::new_cuda(0).is_err() {
        eprintln!("SKIPPED: there is no CUDA device; nothing was checked");
    } else {
        let devices = usize::try_from(CudaContext::device_count().unwrap()).unwrap();
        launch_all(devices);
    }
    ExitCode::SUCCESS
}

fn as_rank(case: &str, engine: &Nccl) {
    match case {
        "host tensor" => host_tensor(engine),
        _ => conformance::run(engine, case, engine.launched.placement().world_size().as_usize()),
    }
}

/// A tensor on the processor in a collective, which ends the program.
fn host_tensor(engine: &Nccl) {
    let mesh = conformance::Engine::open(engine, DeviceMesh::builder());
    let run =
        mesh.pmap(|ctx, x: Tensor| ctx.barrier(ALL).and_then(|()| ctx.all_gather(&x.to_device(&Device::Cpu)?, 0, ALL)));
    drop(run.in_axes(None).call(Tensor::new(&[1_f32], &Device::Cpu).unwrap()));
}

/// Runs each case on all devices, and those of many processes on two as well.
fn launch_all(devices: usize) {
    for (name, fewest, expected) in CASES {
        if fewest > devices {
            eprintln!("SKIPPED: {name} takes {fewest} CUDA devices, there are {devices}");
            continue;
        }
        launch(name, devices, expected);
        if devices > 2 {
            launch(name, 2, expected);
        }
    }
}

/// Runs a case on so many ranks, and checks how it ends.
fn launch(name: &str, ranks: usize, expected: Result<(), &str>) {
    let folder = tempfile::tempdir().unwrap();
    let log = |rank: usize| folder.path().join(format!("log-{rank}"));
    let mut children: Vec<Child> = (0..ranks).map(|rank| start(name, rank, ranks, folder.path(), &log(rank))).collect();
    let succeeded = wait(&mut children);
    let said: String = (0..ranks).map(|rank| fs::read_to_string(log(rank)).unwrap()).collect();
    match (expected, succeeded) {
        (_, None) => panic!("{name} on {ranks} ranks has not ended after {LIMIT:?}: {said}"),
        (Ok(()), Some(succeeded)) => assert!(succeeded, "{name} on {ranks} ranks: {said}"),
        (Err(reason), Some(succeeded)) => {
            assert!(!succeeded && said.contains(reason), "{name} on {ranks} ranks: {said}");
        }
    }
    println!("{name} on {ranks} ranks ... ok");
}

fn start(name: &str, rank: usize, ranks: usize, folder: &Path, log: &Path) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg(name).arg(folder);
    for (variable, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)]
    {
        command.env(variable, value.to_string());
    }
    command.stdout(Stdio::null()).stderr(File::create(log).unwrap()).spawn().unwrap()
}

/// Whether all have succeeded; when one has failed, the others are ended. `None` if they take too long.
fn wait(children: &mut [Child]) -> Option<bool> {
    let start = Instant::now();
    loop {
        let ends: Vec<Option<bool>> =
            children.iter_mut().map(|child| child.try_wait().unwrap().map(|status| status.success())).collect();
        if ends.iter().all(|end| *end == Some(true)) {
            return Some(true);
        }
        let failed = ends.contains(&Some(false));
        if failed || start.elapsed() > LIMIT {
            children.iter_mut().for_each(end);
            return failed.then_some(false);
        }
        thread::sleep(LOOK);
    }
}

fn end(child: &mut Child) {
    // One that has ended cannot be killed.
    drop(child.kill());
    child.wait().unwrap();
}
