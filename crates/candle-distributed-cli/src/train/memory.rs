//! How much memory a run took, beside what its plan predicts.

use std::{fmt, fs};

use candle_distributed::types::human::HumanBytes;

use crate::train::{session::Session, sharding::Needs};

/// The peak memory of this process so far in bytes, where the system reports it: on Linux.
pub(crate) fn peak_bytes() -> Option<u64> {
    peak_in(&fs::read_to_string("/proc/self/status").ok()?)
}

/// The high-water mark in a `/proc/PID/status`.
fn peak_in(status: &str) -> Option<u64> {
    let mark = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    mark.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
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
}
