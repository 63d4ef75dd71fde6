//! `cargo xtask test`: the device tests, on a device of choice.

use clap::ValueEnum;

use crate::cmd::{Call, Result};

/// Runs the device tests, on the CPU unless another device is asked for.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The device; any but `cpu` needs its toolkit on this machine.
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Cpu,
    Cuda,
    Metal,
}

impl Device {
    fn feature(self) -> Option<&'static str> {
        match self {
            Device::Cpu => None,
            Device::Cuda => Some("cuda"),
            Device::Metal => Some("metal"),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result {
    command(args.device).run()
}

/// With `--workspace`, because its features and builds are then those of a plain `cargo test
/// --workspace`; and uncaptured, because a test that skips a missing device says so in its output.
fn command(device: Device) -> Call {
    let mut cargo = Call::cargo("test --workspace --test device");
    if let Some(feature) = device.feature() {
        cargo = cargo.arg("--features").arg(format!("integration-tests/{feature}"));
    }
    cargo.arg("--").arg("--nocapture")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_switches_its_feature_on() {
        assert_eq!(
            command(Device::Cpu),
            Call::cargo("test --workspace --test device -- --nocapture")
        );
        let cuda = Call::cargo(
            "test --workspace --test device --features integration-tests/cuda -- --nocapture",
        );
        assert_eq!(command(Device::Cuda), cuda);
    }
}
