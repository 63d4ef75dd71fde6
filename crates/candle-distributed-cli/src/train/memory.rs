//! How much memory a run took, beside what its plan predicts.

use std::{fmt, fs};

use candle_distributed::{batch::Batch, types::human::HumanBytes};

use crate::{
    devices::Place,
    train::{model::Config, session::Session, sharding::Needs},
};

/// The peak memory of this process so far in bytes, where the system reports it: on Linux.
pub(crate) fn peak_bytes() -> Option<u64> {
    peak_in(&fs::read_to_string("/proc/self/status").ok()?)
}

/// The high-water mark in a `/proc/PID/status`.
fn peak_in(status: &str) -> Option<u64> {
    let mark = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    mark.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// How much memory this process will probably take in all for a run with these `batches`, of a
/// model that takes `whole_bytes` with its gradients and the optimizer's state.
///
/// What a device computes with is measured: two cores, 4,096 tokens per batch, MiB measured and
/// predicted.
///
/// | devices | 1 | 2 | 4 | 16 |
/// |---|---|---|---|---|
/// | sequences of 15 bytes | 275, 290 | 333, 304 | 331, 333 | 672, 507 |
/// | sequences of 128 bytes | 445, 449 | 451, 463 | 499, 492 | 833, 666 |
pub(crate) fn predicted(config: Config, whole_bytes: u128, batches: &[Batch], place: Place) -> u64 {
    /// Each parameter, gradient and moment has a second copy while it is summed over the devices
    /// and updated.
    const COPIES: u128 = 2;
    let devices = place.devices_in_process();
    let activations = |batch: &Batch| {
        let rows = (batch.len() as u64).div_ceil(place.placement.world_size().as_u64());
        let tokens = rows.saturating_mul(batch.padded_length).saturating_mul(devices);
        u128::from(tokens) * u128::from(bytes_per_token(config, batch.padded_length))
    };
    let activations = batches.iter().map(activations).fold(0, u128::max);
    let state = COPIES * whole_bytes * u128::from(devices);
    // What is there before training: the program, the text and its batches.
    let program = peak_bytes().map_or(0, u128::from);
    u64::try_from(program + state + activations).unwrap_or(u64::MAX)
}

/// The bytes that the forward and the backward pass need at once for a token of a sequence of this
/// `length`.
fn bytes_per_token(config: Config, length: u64) -> u64 {
    /// Numbers per layer for each of the hidden sizes, measured.
    const WIDTHS: usize = 56;
    /// Numbers per layer and head for each other token that it attends to, measured.
    const SCORES: u64 = 12;
    let widths = (config.layers * config.hidden * WIDTHS) as u64;
    let scores = ((config.layers * config.heads) as u64).saturating_mul(SCORES * length);
    widths.saturating_add(scores).saturating_mul(size_of::<f32>() as u64)
}

/// The memory that a process took for its devices, and how much of it the model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) peak_bytes: u64,
    /// The number of devices of the process.
    pub(crate) n_devices: u64,
    pub(crate) needs: Needs,
}

impl Memory {
    /// The memory of a session, if it is known.
    pub(crate) fn of(session: &Session, needs: Needs) -> Option<Self> {
        let peak_bytes = session.peak_bytes?;
        Some(Self { peak_bytes, n_devices: session.devices_here, needs })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peak_bytes, n_devices, needs: Needs { whole_bytes, sharded_bytes } } = *self;
        let each = u128::from(peak_bytes) / u128::from(n_devices.max(1));
        let devices = if n_devices == 1 {
            "its device".into()
        } else {
            format!("each of its {n_devices} devices")
        };
        write!(
            f,
            "peak memory of the process: {}, {} ",
            HumanBytes(peak_bytes.into()),
            HumanBytes(each)
        )?;
        write!(f, "for {devices}; parameters, gradients and optimizer state: ")?;
        write!(f, "{} per device whole, as here, ", HumanBytes(whole_bytes))?;
        write!(f, "{} per rank sharded by the plan; ", HumanBytes(sharded_bytes))?;
        write!(f, "activations are in neither")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::model::MODEL;

    #[test]
    fn the_high_water_mark_is_found() {
        assert_eq!(
            peak_in("Name:\tx\nVmPeak:\t  99 kB\nVmHWM:\t    12 kB\nVmRSS:\t 8 kB\n"),
            Some(12 * 1024)
        );
        for status in ["", "VmHWM: 12", "VmHWM: x kB"] {
            assert_eq!(peak_in(status), None);
        }
    }

    #[test]
    fn a_line_says_what_is_whole_and_what_is_sharded() {
        let needs = Needs { whole_bytes: 2048, sharded_bytes: 1024 };
        let memory = Memory { peak_bytes: 4096, n_devices: 2, needs };
        let words = "peak memory of the process: 4.00 KiB, 2.00 KiB for each of its 2 devices; \
                     parameters, gradients and optimizer state: 2.00 KiB per device whole, as \
                     here, 1.00 KiB per rank sharded by the plan; activations are in neither";
        assert_eq!(memory.to_string(), words);
    }

    #[test]
    fn a_token_of_a_longer_sequence_takes_more() {
        let bytes = [15, 128].map(|length| bytes_per_token(MODEL, length));
        assert_eq!(bytes, [63_104, 106_496]);
    }
}
