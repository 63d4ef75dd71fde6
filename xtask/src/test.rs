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

/// With `--workspace`, because its features and builds are then those of a plain `cargo test
/// --workspace`; and uncaptured, because a test that skips a missing device says so in its output.
pub(crate) fn run(args: &Args) -> Result {
    let call = Call::cargo("test --workspace --test device");
    let call = match args.device {
        Device::Cpu => call,
        Device::Cuda => call.arg("--features").arg("integration-tests/cuda"),
        Device::Metal => call.arg("--features").arg("integration-tests/metal"),
    };
    call.arg("--").arg("--nocapture").run()
}
