//! Tests of several processes: how they are started, how they must end, and what they compare.
//!
//! A test program starts itself once for each rank and case. What a rank computes over processes it
//! computes over threads as well, and the two must be equal to the bit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "without the test harness, nobody else says what was run")]

pub mod lists;
pub mod mpirun;
pub mod ranks;

use std::{env, path::PathBuf, time::Duration};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{DeviceMesh, DeviceMeshBuilder, TensorTree};

/// How long a case may take before it counts as a hang; processes of MPI spin, and more of them
/// than cores are slow.
const LIMIT: Duration = Duration::from_mins(4);

/// What the processes of one case do and how they end.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The name that [`ranks`](Self::ranks) processes find as their first argument.
    pub name: &'static str,
    /// How many processes run it; of GPUs, the fewest that it takes.
    pub ranks: usize,
    /// Success, or what the processes must say on standard error when all of them fail.
    pub end: Result<(), &'static str>,
}

impl Case {
    /// A case that must succeed.
    pub const fn succeeds(name: &'static str, ranks: usize) -> Self {
        Self { name, ranks, end: Ok(()) }
    }

    /// A case that must fail, with this on standard error.
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
    /// The mesh of a builder, over the processes.
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh;

    /// The device of this process; on it threads compute the same.
    fn device(&self) -> Device;
}

/// The folder in which the processes of a case may write.
pub fn folder() -> PathBuf {
    env::args().nth(2).map(PathBuf::from).unwrap()
}

/// A mesh over the processes; a row if no axes are given.
pub fn mesh(
    engine: &impl Engine,
    axes: &[(&str, usize)],
    deadline: Option<Duration>,
) -> DeviceMesh {
    engine.open(deadline.into_iter().fold(builder(axes), DeviceMeshBuilder::deadline))
}

/// The same mesh over threads, of processors or of one device several times.
pub fn threads(axes: &[(&str, usize)], device: &Device) -> DeviceMesh {
    let slots = axes.iter().map(|(_, size)| size).product();
    builder(axes).pin(false).devices(vec![device.clone(); slots]).unwrap()
}

fn builder(axes: &[(&str, usize)]) -> DeviceMeshBuilder {
    axes.iter().fold(DeviceMesh::builder(), |builder, (name, size)| builder.axis(name, *size))
}

/// An argument for functions that need none.
pub fn nothing() -> Tensor {
    Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()
}

/// The tensors of a tree.
pub fn leaves(tree: &impl TensorTree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    let visited: Result<_, ()> = tree.try_map(&mut |leaf| {
        leaves.push(leaf.clone());
        Ok(leaf.clone())
    });
    drop(visited.unwrap());
    leaves
}

/// Panics unless both are the same tensors, to the bit.
pub fn assert_same(results: &[Tensor], expected: &[Tensor]) {
    assert_eq!(results.len(), expected.len());
    for (result, expected) in results.iter().zip(expected) {
        assert_eq!((result.dtype(), result.dims()), (expected.dtype(), expected.dims()));
        assert_eq!(bytes(result), bytes(expected));
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Views of nothing may begin behind the end, where candle panics.
    tensor.force_contiguous().and_then(|tensor| tensor.write_bytes(&mut bytes)).unwrap();
    bytes
}
