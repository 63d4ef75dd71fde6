//! Counters of the collectives that each slot of a mesh has called, and of the bytes that the slot
//! has contributed.

use std::{
    ops::Sub,
    sync::atomic::{AtomicU64, Ordering},
};

/// The number and bytes of one slot's collectives, by kind; see
/// [`DeviceMesh::traffic`](crate::DeviceMesh::traffic).
///
/// Collectives over a group of one replica are not counted, since they send nothing.
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
/// // Each slot has contributed its half of the numbers once.
/// for (after, before) in mesh.traffic().into_iter().zip(before) {
///     let expected = Traffic { all_reduce: Tally { calls: 1, bytes: 12 }, ..Traffic::default() };
///     assert_eq!(after - before, expected);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "tests construct the expected value")]
pub struct Traffic {
    /// `psum`, `pmean`, `pmax`, `pmin`, `psum_list`, the backward of `pvary`.
    pub all_reduce: Tally,
    /// `psum_scatter`, `reduce_runs`, the backward of `all_gather`.
    pub reduce_scatter: Tally,
    /// Sums on one rank only: the backward of `broadcast`.
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

/// The number and size of a slot's collectives of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "tests construct the expected value")]
pub struct Tally {
    /// The number of calls.
    pub calls: u64,
    /// The bytes of the tensors that the slot contributed. The engine may send more or fewer bytes.
    pub bytes: u64,
}

impl Sub for Tally {
    type Output = Self;

    /// Returns the difference to `earlier`, an earlier reading of the same counter.
    fn sub(self, earlier: Self) -> Self {
        Self { calls: self.calls - earlier.calls, bytes: self.bytes - earlier.bytes }
    }
}

impl Sub for Traffic {
    type Output = Self;

    /// Returns the difference to `earlier`, an earlier reading of the same counter.
    fn sub(self, earlier: Self) -> Self {
        Self {
            all_reduce: self.all_reduce - earlier.all_reduce,
            reduce_scatter: self.reduce_scatter - earlier.reduce_scatter,
            reduce: self.reduce - earlier.reduce,
            all_gather: self.all_gather - earlier.all_gather,
            all_to_all: self.all_to_all - earlier.all_to_all,
            ppermute: self.ppermute - earlier.ppermute,
            broadcast: self.broadcast - earlier.broadcast,
            barrier: self.barrier - earlier.barrier,
        }
    }
}

/// The kind of a counted collective: one field of [`Traffic`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum CollectiveKind {
    AllReduce,
    ReduceScatter,
    Reduce,
    AllGather,
    AllToAll,
    Permute,
    Broadcast,
    Barrier,
}

const N_KINDS: usize = CollectiveKind::Barrier as usize + 1;

/// The counter of one slot. Its alignment gives each counter separate cache lines, since the slots
/// would contend for a shared line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct TrafficCounter([CountCell; N_KINDS]);

#[derive(Debug, Default)]
struct CountCell {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl TrafficCounter {
    /// Counts a collective with this many bytes.
    pub(crate) fn count(&self, kind: CollectiveKind, bytes: usize) {
        let cell = &self.0[kind as usize];
        // `Relaxed` suffices: counts are read between calls, and the end of a call synchronizes its
        // replicas with the reader.
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the current counts.
    pub(crate) fn read(&self) -> Traffic {
        let tally = |kind: CollectiveKind| {
            let cell = &self.0[kind as usize];
            // `Relaxed` suffices for the reason in `count`.
            let calls = cell.calls.load(Ordering::Relaxed);
            Tally { calls, bytes: cell.bytes.load(Ordering::Relaxed) }
        };
        Traffic {
            all_reduce: tally(CollectiveKind::AllReduce),
            reduce_scatter: tally(CollectiveKind::ReduceScatter),
            reduce: tally(CollectiveKind::Reduce),
            all_gather: tally(CollectiveKind::AllGather),
            all_to_all: tally(CollectiveKind::AllToAll),
            ppermute: tally(CollectiveKind::Permute),
            broadcast: tally(CollectiveKind::Broadcast),
            barrier: tally(CollectiveKind::Barrier),
        }
    }
}
