//! The output of `mesh`.

use std::{collections::BTreeMap, env, fmt, thread};

use candle_distributed::{
    mesh::{DeviceMesh, support::THREAD_VARIABLES},
    types::human::HumanBytes,
};
use comfy_table::{CellAlignment, Table, TableComponent, presets};
use serde::Serialize;

use super::collective::{Axis, CollectiveTrial};

/// The JSON result. Text shows parts of it.
#[derive(Debug, Serialize)]
pub(super) struct MeshOutput {
    format_version: u32,
    world_size: usize,
    axes: Vec<Axis>,
    /// Devices of this process.
    devices: Vec<String>,
    cores: usize,
    /// Environment variables that set the number of threads of candle.
    threads: BTreeMap<&'static str, Option<String>>,
    repetitions: u16,
    collectives: Vec<CollectiveFigures>,
    #[serde(skip)]
    mesh: DeviceMesh,
}

/// The time and bandwidth of one collective.
#[derive(Debug, Serialize)]
pub(super) struct CollectiveFigures {
    collective: String,
    axes: Vec<String>,
    group_size: usize,
    bytes: usize,
    seconds: f64,
    algorithm_bytes_per_second: f64,
    bus_bytes_per_second: f64,
}

impl CollectiveFigures {
    /// Computes the figures of a trial from its time.
    pub(super) fn new(trial: &CollectiveTrial, seconds: f64) -> Self {
        let group_size = trial.group_size();
        let bytes = trial.n_bytes();
        let speed = bytes as f64 / seconds;
        Self {
            collective: trial.collective.to_string(),
            axes: trial.axes.iter().map(|axis| axis.name.clone()).collect(),
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

impl MeshOutput {
    pub(super) fn new(
        mesh: &DeviceMesh,
        repetitions: u16,
        collectives: Vec<CollectiveFigures>,
    ) -> Self {
        Self {
            format_version: 1,
            world_size: mesh.len(),
            axes: Axis::all(mesh),
            devices: mesh
                .devices()
                .iter()
                .map(|device| format!("{:?}", device.location()))
                .collect(),
            // 1 if the number is unknown.
            cores: thread::available_parallelism().map_or(1, usize::from),
            threads: THREAD_VARIABLES.map(|name| (name, env::var(name).ok())).into(),
            repetitions,
            collectives,
            mesh: mesh.clone(),
        }
    }
}

impl fmt::Display for MeshOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut variables = Vec::new();
        for (name, value) in &self.threads {
            variables.push(format!("{name}={}", value.as_deref().unwrap_or("")));
        }
        writeln!(f, "{}\ncores: {}, {}\n", self.mesh, self.cores, variables.join(" "))?;
        writeln!(f, "{}\n", table(&self.collectives))?;
        writeln!(
            f,
            "all results correct; median of {} repetitions, slowest device",
            self.repetitions
        )
    }
}

fn table(collectives: &[CollectiveFigures]) -> String {
    let mut table = Table::new();
    let header = ["collective", "along", "size", "time (µs)", "GB/s", "bus GB/s"];
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_header(header);
    table.add_rows(collectives.iter().map(CollectiveFigures::row));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}
