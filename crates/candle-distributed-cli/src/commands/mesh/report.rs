//! What is printed about a mesh and the collectives on it.

use std::{collections::BTreeMap, env, fmt, thread};

use candle_distributed::{
    mesh::{DeviceMesh, support::THREAD_VARIABLES},
    types::human::HumanBytes,
};
use comfy_table::{CellAlignment, Table, TableComponent, presets};
use serde::Serialize;

use super::collective::{Axis, Trial};

/// The JSON result; the text shows a part of it.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    format_version: u32,
    world_size: usize,
    axes: Vec<Axis>,
    /// The devices of this process.
    devices: Vec<String>,
    cores: usize,
    /// The environment variables that set the number of threads of candle.
    threads: BTreeMap<&'static str, Option<String>>,
    repetitions: u16,
    collectives: Vec<Figures>,
    #[serde(skip)]
    mesh: DeviceMesh,
}

/// How long one collective takes.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    collective: String,
    axes: Vec<String>,
    group_size: usize,
    bytes: usize,
    seconds: f64,
    algorithm_bytes_per_second: f64,
    bus_bytes_per_second: f64,
}

impl Figures {
    /// The figures of a trial that took this many seconds.
    pub(super) fn new(trial: &Trial, seconds: f64) -> Self {
        let group_size = trial.group_size();
        let bytes = trial.n_bytes();
        let speed = bytes as f64 / seconds;
        Self {
            collective: trial.collective.to_string(),
            axes: trial.along.iter().map(|axis| axis.name.clone()).collect(),
            group_size,
            bytes,
            seconds,
            algorithm_bytes_per_second: speed,
            bus_bytes_per_second: speed * trial.collective.bus_factor(group_size),
        }
    }

    fn row(&self) -> [String; 6] {
        [
            self.collective.clone(),
            self.axes.join(" x "),
            HumanBytes(self.bytes as u128).to_string(),
            format!("{:.1}", self.seconds * 1e6),
            format!("{:.2}", self.algorithm_bytes_per_second / 1e9),
            format!("{:.2}", self.bus_bytes_per_second / 1e9),
        ]
    }
}

impl Answer {
    pub(super) fn new(mesh: &DeviceMesh, repetitions: u16, collectives: Vec<Figures>) -> Self {
        Self {
            format_version: 1,
            world_size: mesh.len(),
            axes: Axis::all(mesh),
            devices: mesh
                .devices()
                .iter()
                .map(|device| format!("{:?}", device.location()))
                .collect(),
            // One, if the system does not say.
            cores: thread::available_parallelism().map_or(1, usize::from),
            threads: THREAD_VARIABLES.map(|name| (name, env::var(name).ok())).into(),
            repetitions,
            collectives,
            mesh: mesh.clone(),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variables = self
            .threads
            .iter()
            .map(|(name, value)| format!("{name}={}", value.as_deref().unwrap_or("")));
        let variables: Vec<_> = variables.collect();
        writeln!(f, "{}\ncores: {}, {}\n", self.mesh, self.cores, variables.join(" "))?;
        writeln!(f, "{}\n", table(&self.collectives))?;
        writeln!(
            f,
            "all results correct; median of {} repetitions, slowest device",
            self.repetitions
        )
    }
}

fn table(collectives: &[Figures]) -> String {
    let mut table = Table::new();
    let header = ["collective", "along", "size", "time (µs)", "GB/s", "bus GB/s"];
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_header(header);
    table.add_rows(collectives.iter().map(Figures::row));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}
