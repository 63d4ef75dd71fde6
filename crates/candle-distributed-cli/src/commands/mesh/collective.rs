//! Collectives on one mesh: how long they take, and whether each device gets the right result.

use std::{
    fmt,
    time::{Duration, Instant},
};

use candle_core::{Result, Tensor, bail};
use candle_distributed::mesh::{DeviceMesh, MeshAxes, Replica};
use serde::Serialize;

use crate::error;

/// The collectives that are measured, in this order.
pub(super) const COLLECTIVES: [Collective; 5] = [
    Collective::Psum,
    Collective::AllGather,
    Collective::PsumScatter,
    Collective::AllToAll,
    Collective::Ppermute,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collective {
    Psum,
    AllGather,
    PsumScatter,
    AllToAll,
    /// Every device sends to the next one, and the last one to the first.
    Ppermute,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Psum => "psum",
            Self::AllGather => "all_gather",
            Self::PsumScatter => "psum_scatter",
            Self::AllToAll => "all_to_all",
            Self::Ppermute => "ppermute",
        })
    }
}

impl Collective {
    fn call(self, ctx: &Replica, x: &Tensor, axes: &MeshAxes) -> Result<Tensor> {
        match self {
            Self::Psum => ctx.psum(x, axes),
            Self::AllGather => ctx.all_gather(x, 0, axes),
            Self::PsumScatter => ctx.psum_scatter(x, 0, axes),
            Self::AllToAll => ctx.all_to_all(x, 0, 0, axes),
            Self::Ppermute => {
                let size = ctx.axis_size(axes)?;
                let ring: Vec<_> = (0..size).map(|from| (from, (from + 1) % size)).collect();
                ctx.ppermute(x, &ring, axes)
            }
        }
    }

    /// The length of the input of each of `size` devices, where the larger tensor has `n` elements.
    fn input_len(self, n: usize, size: usize) -> usize {
        if self == Self::AllGather { n / size } else { n }
    }

    /// The values of a result, in equal parts from the first to the last, where the input of each
    /// device is full of its position.
    fn expected(self, position: usize, size: usize) -> Vec<f32> {
        let of = |position: usize| position as f32;
        match self {
            Self::Psum | Self::PsumScatter => vec![of(size * (size - 1) / 2)],
            Self::AllGather | Self::AllToAll => (0..size).map(of).collect(),
            Self::Ppermute => vec![of((position + size - 1) % size)],
        }
    }

    /// The length of the output of each of `size` devices, where the larger tensor has `n`
    /// elements.
    fn output_len(self, n: usize, size: usize) -> usize {
        if self == Self::PsumScatter { n / size } else { n }
    }

    /// How many times its size a device must at least send, as nccl-tests count it.
    pub(super) fn bus_factor(self, size: usize) -> f64 {
        let others = (size - 1) as f64 / size as f64;
        match self {
            Self::Psum => 2.0 * others,
            Self::AllGather | Self::PsumScatter | Self::AllToAll => others,
            Self::Ppermute => 1.0,
        }
    }
}

/// An axis of a mesh.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) size: usize,
}

impl Axis {
    /// The axes of `mesh`.
    pub(super) fn all(mesh: &DeviceMesh) -> Vec<Self> {
        mesh.axes().map(|(name, size)| Self { name: name.into(), size }).collect()
    }
}

/// One collective with tensors of one size, several times.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub(super) collective: Collective,
    pub(super) along: Vec<Axis>,
    /// The requested size of the larger of two tensors, the input and the output of a device.
    pub(super) bytes: usize,
    pub(super) repetitions: u16,
}

impl Trial {
    /// The number of devices in a group.
    pub(super) fn group_size(&self) -> usize {
        self.along.iter().map(|axis| axis.size).product()
    }

    /// The number of elements: at least the requested size, rounded up to equal parts for all.
    fn n_elems(&self) -> usize {
        self.bytes.div_ceil(size_of::<f32>()).next_multiple_of(self.group_size())
    }

    /// The size in bytes.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_elems() * size_of::<f32>()
    }

    /// The median time of the slowest device, in seconds.
    pub(super) fn run(&self, mesh: &DeviceMesh) -> error::Result<f64> {
        let trial = self.clone();
        let times = mesh.pmap(move |ctx, ()| trial.replica(ctx)).call(())?.to_vec2::<i64>()?;
        // At least a nanosecond, as bandwidths are divided by it: a clock may be too coarse to see
        // any.
        let slowest = |n: usize| times.iter().map(|of_device| of_device[n]).fold(1, i64::max);
        let mut slowest: Vec<i64> = (0..self.repetitions.into()).map(slowest).collect();
        slowest.sort_unstable();
        Ok(slowest[slowest.len() / 2] as f64 / 1e9)
    }

    /// The times of this device in nanoseconds, [1, repetitions].
    fn replica(&self, ctx: &Replica) -> Result<Tensor> {
        let axes: MeshAxes = self.along.iter().map(|axis| axis.name.clone()).collect();
        let position = ctx.axis_index(&axes)?;
        let input_len = self.collective.input_len(self.n_elems(), self.group_size());
        let x = Tensor::full(position as f32, input_len, ctx.device())?;
        let mut result = self.collective.call(ctx, &x, &axes)?;
        self.check(&result, position)?;
        let mut times = Vec::new();
        for _ in 0..self.repetitions {
            ctx.barrier(&axes)?;
            let start = Instant::now();
            let next = self.collective.call(ctx, &x, &axes)?;
            ctx.device().synchronize()?;
            times.push(nanoseconds(start.elapsed()));
            result = next;
        }
        self.check(&result, position)?;
        Tensor::from_vec(times, (1, ()), ctx.device())
    }

    /// Fails if this is not the result for the device at this position.
    fn check(&self, result: &Tensor, position: usize) -> Result<()> {
        let size = self.group_size();
        let found = result.to_vec1::<f32>()?;
        let expected = self.collective.expected(position, size);
        let n_elems = self.collective.output_len(self.n_elems(), size);
        if found.len() != n_elems {
            bail!("{} returns {} numbers instead of {n_elems}", self.collective, found.len());
        }
        let part = n_elems / expected.len();
        for (part, expected) in found.chunks(part).zip(expected) {
            if let Some(wrong) = part.iter().find(|value| value.to_bits() != expected.to_bits()) {
                bail!("{} returns {wrong} where {expected} is correct", self.collective);
            }
        }
        Ok(())
    }
}

#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).expect("no collective takes 292 years")
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn trial(collective: Collective, size: usize, bytes: usize) -> Trial {
        let along = vec![Axis { name: DeviceMesh::AXIS.into(), size }];
        Trial { collective, along, bytes, repetitions: 3 }
    }

    #[test]
    fn every_collective_is_right_on_any_number_of_devices() {
        for size in 1..=4 {
            let mesh = DeviceMesh::cpu(size).unwrap();
            for collective in COLLECTIVES {
                for bytes in [1, 100] {
                    assert!(
                        trial(collective, size, bytes).run(&mesh).unwrap() > 0.0,
                        "{collective} of {size}"
                    );
                }
            }
        }
    }

    #[test]
    fn wrong_results_are_found() {
        for (collective, right) in [
            (Collective::Psum, [3_f32; 6].to_vec()),
            (Collective::AllGather, vec![0., 0., 1., 1., 2., 2.]),
            (Collective::PsumScatter, vec![3., 3.]),
            (Collective::AllToAll, vec![0., 0., 1., 1., 2., 2.]),
            (Collective::Ppermute, vec![1.; 6]),
        ] {
            let check = |values: &[f32]| {
                let values = Tensor::new(values, &Device::Cpu).unwrap();
                trial(collective, 3, 24).check(&values, 2).map_err(|error| error.to_string())
            };
            check(&right).unwrap();
            let mut wrong = right.clone();
            wrong[right.len() - 1] = 7.0;
            assert!(check(&wrong).unwrap_err().contains("returns 7 where"), "{collective}");
            assert!(check(&right[1..]).unwrap_err().contains("numbers instead of"), "{collective}");
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let parts = |size: usize| {
            COLLECTIVES
                .map(|collective| collective.bus_factor(size) * size as f64)
                .map(f64::to_bits)
        };
        assert_eq!(parts(4), [6.0_f64, 3., 3., 3., 4.].map(f64::to_bits));
        assert_eq!(parts(1), [0.0_f64, 0., 0., 0., 1.].map(f64::to_bits));
    }
}
