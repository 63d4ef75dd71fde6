//! Times collectives on a mesh, and checks the result on each device.

use std::{
    fmt,
    time::{Duration, Instant},
};

use candle_core::{Result, Tensor, bail};
use candle_distributed::mesh::{DeviceMesh, MeshAxes, Replica};
use serde::Serialize;

use crate::error;

/// The measured collectives, in order.
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
    /// Every device sends to the next, and the last to the first.
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

    /// Returns the length of the input of each of `size` devices if the larger tensor has `n`
    /// elements.
    fn input_len(self, n: usize, size: usize) -> usize {
        if self == Self::AllGather { n / size } else { n }
    }

    /// Returns the values of a result if the input of each device is filled with its position. The
    /// result consists of equal parts, each filled with one of these values.
    fn expected_values(self, position: usize, size: usize) -> Vec<f32> {
        match self {
            Self::Psum | Self::PsumScatter => vec![(size * (size - 1) / 2) as f32],
            Self::AllGather | Self::AllToAll => (0..size).map(|position| position as f32).collect(),
            Self::Ppermute => vec![((position + size - 1) % size) as f32],
        }
    }

    /// Returns the length of the output of each of `size` devices if the larger tensor has `n`
    /// elements.
    fn output_len(self, n: usize, size: usize) -> usize {
        if self == Self::PsumScatter { n / size } else { n }
    }

    /// Returns the minimum number of bytes that a device sends per byte of the larger tensor, as
    /// defined by nccl-tests.
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
    /// Returns the axes of `mesh`.
    pub(super) fn all(mesh: &DeviceMesh) -> Vec<Self> {
        mesh.axes().map(|(name, size)| Self { name: name.into(), size }).collect()
    }
}

/// A repeated measurement of one collective at one size.
#[derive(Clone, Debug)]
pub(super) struct CollectiveTrial {
    pub(super) collective: Collective,
    pub(super) axes: Vec<Axis>,
    /// Requested size of the input or the output of a device, whichever is larger.
    pub(super) bytes: usize,
    pub(super) repetitions: u16,
}

impl CollectiveTrial {
    /// Returns the number of devices in a group.
    pub(super) fn group_size(&self) -> usize {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Returns the number of elements: the requested size, rounded up to equal parts for all
    /// devices.
    fn n_elems(&self) -> usize {
        self.bytes.div_ceil(size_of::<f32>()).next_multiple_of(self.group_size())
    }

    /// Returns the rounded size in bytes.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_elems() * size_of::<f32>()
    }

    /// Returns the median time of the slowest device in seconds.
    pub(super) fn run(&self, mesh: &DeviceMesh) -> error::Result<f64> {
        let trial = self.clone();
        let times = mesh.pmap(move |ctx, ()| trial.measure(ctx)).call(())?.to_vec2::<i64>()?;
        let mut slowest = Vec::new();
        for n in 0..usize::from(self.repetitions) {
            // At least a nanosecond, since bandwidths are divided by it and a coarse clock may
            // measure 0.
            slowest.push(times.iter().map(|device_times| device_times[n]).fold(1, i64::max));
        }
        slowest.sort_unstable();
        Ok(slowest[slowest.len() / 2] as f64 / 1e9)
    }

    /// Measures the times of this device in nanoseconds, [1, repetitions].
    fn measure(&self, ctx: &Replica) -> Result<Tensor> {
        let axes: MeshAxes = self.axes.iter().map(|axis| axis.name.clone()).collect();
        let position = ctx.axis_index(&axes)?;
        let input_len = self.collective.input_len(self.n_elems(), self.group_size());
        let x = Tensor::full(position as f32, input_len, ctx.device())?;
        // The first call also warms up, and is not timed.
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

    /// Checks the result of the device at this position.
    fn check(&self, result: &Tensor, position: usize) -> Result<()> {
        let size = self.group_size();
        let found = result.to_vec1::<f32>()?;
        let expected = self.collective.expected_values(position, size);
        let n_elems = self.collective.output_len(self.n_elems(), size);
        if found.len() != n_elems {
            bail!("{} returns {} numbers, expected {n_elems}", self.collective, found.len());
        }
        let part_len = n_elems / expected.len();
        for (part, expected) in found.chunks(part_len).zip(expected) {
            if let Some(wrong) = part.iter().find(|value| value.to_bits() != expected.to_bits()) {
                bail!("{} returns {wrong}, expected {expected}", self.collective);
            }
        }
        Ok(())
    }
}

#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).expect("no collective takes 292 years")
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn trial(collective: Collective, size: usize, bytes: usize) -> CollectiveTrial {
        let axes = vec![Axis { name: DeviceMesh::AXIS.into(), size }];
        CollectiveTrial { collective, axes, bytes, repetitions: 3 }
    }

    #[test]
    fn collectives_work_on_any_device_count() {
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
    fn check_finds_wrong_results() {
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
            assert!(check(&wrong).unwrap_err().contains("returns 7, expected"), "{collective}");
            assert!(check(&right[1..]).unwrap_err().contains("numbers, expected"), "{collective}");
        }
    }

    #[test]
    fn bus_factors_match_nccl_tests() {
        let parts = |size: usize| {
            COLLECTIVES
                .map(|collective| collective.bus_factor(size) * size as f64)
                .map(f64::to_bits)
        };
        assert_eq!(parts(4), [6.0_f64, 3., 3., 3., 4.].map(f64::to_bits));
        assert_eq!(parts(1), [0.0_f64, 0., 0., 0., 1.].map(f64::to_bits));
    }
}
