//! `mesh`: shows the devices, and checks and times collectives on them.

mod collective;
mod report;

use candle_distributed::{
    mesh::{DeviceMesh, DeviceMeshBuilder},
    types::human::HumanBytes,
};
use clap::value_parser;

use self::{
    collective::{Axis, COLLECTIVES, CollectiveTrial},
    report::{CollectiveFigures, MeshOutput},
};
use crate::{
    bytes,
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs},
    error::{Error, Result},
    help::examples,
    output::{self, Format},
};

/// Show the devices, run collectives on them, check the results, and print the times.
///
/// The time of a collective is the time of the slowest device, as the median over all repetitions.
/// Bandwidths are defined as in nccl-tests: GB/s is the size over the time, bus GB/s is the minimum
/// traffic of each device over the time.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How fast are collectives on two virtual CPU devices?"
    "candle-distributed mesh"
    "# And on a grid of six devices, along each axis and along both?"
    "candle-distributed mesh --axis data=3 --axis model=2 --bytes 64KiB"
    "# JSON for a program"
    "candle-distributed mesh --bytes 64KiB,256KiB --repetitions 25 --format json"
])]
pub(crate) struct MeshArgs {
    #[command(flatten)]
    devices: DeviceArgs,
    /// Axis of the grid with its size; may be repeated, and the last axis varies fastest [default:
    /// one axis]
    #[arg(long = "axis", value_name = "NAME=SIZE", value_parser = parse_axis)]
    axes: Vec<Axis>,
    /// Sizes of the input or the output of a device, whichever is larger; a device has up to three
    /// tensors of this size in memory
    #[arg(
        long,
        value_name = "BYTES,...",
        value_delimiter = ',',
        value_parser = parse_bytes,
        default_value = "4KiB,1MiB,16MiB"
    )]
    bytes: Vec<usize>,
    /// Number of measurements per collective and size
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..), default_value_t = 9)]
    repetitions: u16,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

fn parse_axis(text: &str) -> Result<Axis, String> {
    if let Some((name, size)) = text.split_once('=')
        && let Ok(size @ 1..) = size.parse()
        && !name.is_empty()
    {
        return Ok(Axis { name: name.into(), size });
    }
    Err("expected a name, an equals sign and a size of at least 1, such as data=2".into())
}

/// The limit of a size. A mesh may have many devices, each with three tensors of this size.
const MAX_BYTES: usize = 1 << 30;

fn parse_bytes(text: &str) -> Result<usize, String> {
    match usize::try_from(bytes::parse(text)?) {
        Ok(bytes) if (1..=MAX_BYTES).contains(&bytes) => Ok(bytes),
        _ => Err(format!("expected from 1 byte to {}", HumanBytes(MAX_BYTES as u128))),
    }
}

pub(crate) fn run(args: &MeshArgs) -> Result<()> {
    let process = args.devices.place(args.grid_size().unwrap_or(DEFAULT_WORLD_SIZE))?;
    let n_devices = process.placement.world_size();
    if let Some(grid_size) = args.grid_size()
        && grid_size != n_devices.as_u64()
    {
        return Err(Error::usage(format!(
            "the axes make a grid of {grid_size} devices, but there are {n_devices} devices"
        )));
    }
    process.share_cores()?;
    let answer =
        args.devices.run_on(process, args.grid(n_devices.as_usize()), |mesh| args.measure(mesh))?;
    if !process.is_first() {
        return Ok(());
    }
    match args.format {
        Format::Text => output::to_stdout(|out| write!(out, "{answer}")),
        Format::Json => output::json(&answer),
    }
}

impl MeshArgs {
    /// Returns the number of devices in the grid, or `None` without `--axis`.
    fn grid_size(&self) -> Option<u64> {
        if self.axes.is_empty() {
            return None;
        }
        Some(self.axes.iter().fold(1, |size: u64, axis| size.saturating_mul(axis.size as u64)))
    }

    /// Returns a mesh builder with the axes in `--axis`, or with one axis over all devices.
    fn grid(&self, n_devices: usize) -> DeviceMeshBuilder {
        let builder = DeviceMesh::builder();
        if self.axes.is_empty() {
            return builder.axis(DeviceMesh::AXIS, n_devices);
        }
        self.axes.iter().fold(builder, |builder, axis| builder.axis(&axis.name, axis.size))
    }

    /// Times every collective along each axis and, if there are several, along all axes together.
    fn measure(&self, mesh: &DeviceMesh) -> Result<MeshOutput> {
        let trials = self.trials(mesh);
        let bar = output::progress(trials.len() as u64, "{bar:30} {pos}/{len}, {msg}");
        let mut figures = Vec::new();
        for trial in bar.wrap_iter(trials.iter()) {
            let size = HumanBytes(trial.n_bytes() as u128);
            bar.set_message(format!("{} of {size}", trial.collective));
            figures.push(CollectiveFigures::new(trial, trial.run(mesh)?));
        }
        bar.finish_and_clear();
        Ok(MeshOutput::new(mesh, self.repetitions, figures))
    }

    /// Returns a trial for each group of axes, collective and size.
    fn trials(&self, mesh: &DeviceMesh) -> Vec<CollectiveTrial> {
        let axes = Axis::all(mesh);
        let mut groups: Vec<Vec<Axis>> = axes.iter().map(|axis| vec![axis.clone()]).collect();
        if axes.len() > 1 {
            groups.push(axes);
        }
        let mut trials = Vec::new();
        for group in &groups {
            for collective in COLLECTIVES {
                for &bytes in &self.bytes {
                    trials.push(CollectiveTrial {
                        collective,
                        axes: group.clone(),
                        bytes,
                        repetitions: self.repetitions,
                    });
                }
            }
        }
        trials
    }
}
