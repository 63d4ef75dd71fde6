//! What the slots of a mesh have handed over to their engine, counted below whatever plans it.

use std::{
    ops::Sub,
    sync::atomic::{AtomicU64, Ordering},
};

/// The collectives that one slot has taken part in, by kind; see
/// [`DeviceMesh::traffic`](crate::DeviceMesh::traffic).
///
/// What a collective counts are its own group's members: of one that is called over a group of one
/// replica, nothing is handed over, and nothing is counted.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pmap_mesh::{ALL, DeviceMesh, P, support::{Tally, Traffic}};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let sum = mesh.pmap(|ctx, x: Tensor| ctx.psum(&x, ALL)).out_axes(P::replicate());
/// let before = mesh.traffic();
/// sum.call(Tensor::zeros(6, DType::F32, &Device::Cpu)?)?;
///
/// // Each slot has handed over its half of the numbers once.
/// for (after, before) in mesh.traffic().into_iter().zip(before) {
///     let expected = Traffic { all_reduce: Tally { calls: 1, bytes: 12 }, ..Traffic::default() };
///     assert_eq!(after - before, expected);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "tests write down what they expect")]
pub struct Traffic {
    /// `psum`, `pmean`, `pmax`, `pmin`, `psum_list`, the backward of `pvary`.
    pub all_reduce: Tally,
    /// `psum_scatter`, `reduce_runs`, the backward of `all_gather`.
    pub reduce_scatter: Tally,
    /// Sums that one rank alone receives: the backward of `broadcast`.
    pub reduce: Tally,
    /// `all_gather`, `gather_runs`, the backward of `psum_scatter`.
    pub all_gather: Tally,
    /// `all_to_all`.
    pub all_to_all: Tally,
    /// `ppermute`.
    pub ppermute: Tally,
    /// `broadcast`.
    pub broadcast: Tally,
    /// `barrier`.
    pub barrier: Tally,
}

/// How many collectives of a kind, and of how much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "tests write down what they expect")]
pub struct Tally {
    /// How often the slot has called one.
    pub calls: u64,
    /// The bytes of the tensors that it handed over: what the others get to see of its own, however
    /// the engine sends it.
    pub bytes: u64,
}

impl Sub for Tally {
    type Output = Self;

    /// What was counted since `before`, an earlier reading of the same counter.
    fn sub(self, before: Self) -> Self {
        Self { calls: self.calls - before.calls, bytes: self.bytes - before.bytes }
    }
}

impl Sub for Traffic {
    type Output = Self;

    /// What was counted since `before`, an earlier reading of the same counter.
    fn sub(self, before: Self) -> Self {
        Self {
            all_reduce: self.all_reduce - before.all_reduce,
            reduce_scatter: self.reduce_scatter - before.reduce_scatter,
            reduce: self.reduce - before.reduce,
            all_gather: self.all_gather - before.all_gather,
            all_to_all: self.all_to_all - before.all_to_all,
            ppermute: self.ppermute - before.ppermute,
            broadcast: self.broadcast - before.broadcast,
            barrier: self.barrier - before.barrier,
        }
    }
}

/// A kind of collective, as it is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    AllReduce,
    ReduceScatter,
    Reduce,
    AllGather,
    AllToAll,
    Permute,
    Broadcast,
    Barrier,
}

const N_KINDS: usize = Kind::Barrier as usize + 1;

/// Counts for one slot. On cache lines of its own: slots would wait for each other's otherwise.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counter([Cell; N_KINDS]);

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    /// Counts a collective of so many bytes.
    pub(crate) fn count(&self, kind: Kind, bytes: usize) {
        let cell = &self.0[kind as usize];
        // Read between calls, whose end orders what was counted in them before the reader.
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Traffic {
        let tally = |kind: Kind| {
            let cell = &self.0[kind as usize];
            let calls = cell.calls.load(Ordering::Relaxed);
            Tally { calls, bytes: cell.bytes.load(Ordering::Relaxed) }
        };
        Traffic {
            all_reduce: tally(Kind::AllReduce),
            reduce_scatter: tally(Kind::ReduceScatter),
            reduce: tally(Kind::Reduce),
            all_gather: tally(Kind::AllGather),
            all_to_all: tally(Kind::AllToAll),
            ppermute: tally(Kind::Permute),
            broadcast: tally(Kind::Broadcast),
            barrier: tally(Kind::Barrier),
        }
    }
}
