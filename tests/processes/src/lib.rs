//! Starts the processes of a test, checks how they exit, and compares results.
//!
//! A test program starts itself once for each rank and case. A rank computes over processes and
//! over threads, and both results must have the same bits.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "these programs have no test harness to list the cases")]

pub mod lists;
pub mod mpirun;
pub mod ranks;

use std::{env, path::PathBuf, time::Duration};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder, TensorTree};

/// Time limit of a case, after which it counts as hung. MPI processes spin while they wait, so more
/// processes than cores are slow.
const LIMIT: Duration = Duration::from_mins(4);

/// One case of a test program, and how its processes must exit.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name of the case, which its processes get as their first argument.
    pub name: &'static str,
    /// Number of processes; on GPUs, the minimum.
    pub ranks: usize,
    /// Success, or a message on standard error if all processes must fail.
    pub end: Result<(), &'static str>,
}

impl Case {
    /// Returns a case that must succeed.
    pub const fn succeeds(name: &'static str, ranks: usize) -> Self {
        Self { name, ranks, end: Ok(()) }
    }

    /// Returns a case that must fail with `message` on standard error.
    pub const fn fails(name: &'static str, ranks: usize, message: &'static str) -> Self {
        Self { name, ranks, end: Err(message) }
    }

    fn check(&self, ranks: usize, succeeded: bool, stderr: &str) {
        let name = self.name;
        match self.end {
            Ok(()) => assert!(succeeded, "{name} on {ranks} ranks: {stderr}"),
            Err(message) => {
                assert!(
                    !succeeded && stderr.contains(message),
                    "{name} on {ranks} ranks: {stderr}"
                );
            }
        }
        println!("{name} on {ranks} ranks ... ok");
    }
}

/// An engine of several processes.
pub trait Engine {
    /// Builds a mesh over the processes.
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh;

    /// Returns the device of this process, on which threads compute the same.
    fn device(&self) -> Device;
}

/// Returns the temporary folder of the case.
pub fn folder() -> PathBuf {
    env::args().nth(2).map(PathBuf::from).unwrap()
}

/// Returns a mesh over the processes, with one axis if `axes` is empty.
pub fn mesh(
    engine: &impl Engine,
    axes: &[(&str, usize)],
    deadline: Option<Duration>,
) -> DeviceMesh {
    match deadline {
        Some(deadline) => open_within(engine, builder(axes), deadline),
        None => engine.open(builder(axes)),
    }
}

/// Opens a mesh with a short deadline. The first mesh of a process waits for the others to start,
/// which can take longer on a busy machine, so that is a mesh with the usual deadline.
pub fn open_within(
    engine: &impl Engine,
    builder: DeviceMeshBuilder,
    deadline: Duration,
) -> DeviceMesh {
    let _first = engine.open(DeviceMesh::builder());
    engine.open(builder.deadline(deadline))
}

/// Returns the same mesh over threads, with one device for all slots.
pub fn threads(axes: &[(&str, usize)], device: &Device) -> DeviceMesh {
    let slots = axes.iter().map(|(_, size)| size).product();
    builder(axes).pin(false).devices(vec![device.clone(); slots]).unwrap()
}

fn builder(axes: &[(&str, usize)]) -> DeviceMeshBuilder {
    axes.iter().fold(DeviceMesh::builder(), |builder, (name, size)| builder.axis(name, *size))
}

/// Returns an argument for functions that ignore it.
pub fn nothing() -> Tensor {
    Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()
}

/// Returns the tensors of a tree.
pub fn leaves(tree: &impl TensorTree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    let visited: Result<_, ()> = tree.try_map(&mut |leaf| {
        leaves.push(leaf.clone());
        Ok(leaf.clone())
    });
    drop(visited.unwrap());
    leaves
}

/// Asserts that both lists have the same dtypes, shapes and bits.
pub fn assert_same(results: &[Tensor], expected: &[Tensor]) {
    assert_eq!(results.len(), expected.len());
    for (result, expected) in results.iter().zip(expected) {
        assert_eq!((result.dtype(), result.dims()), (expected.dtype(), expected.dims()));
        assert_eq!(bytes(result), bytes(expected));
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    // candle panics on empty views that begin past the end.
    tensor.force_contiguous().and_then(|tensor| tensor.write_bytes(&mut bytes)).unwrap();
    bytes
}
