//! The memory and traffic of a step: predicted from the plan, and measured.

use std::fmt;

use candle_distributed::{
    finetune::{
        cost::{CollectiveCalls, MemoryPrediction, ModelBytes, StepTraffic},
        spec::Session,
    },
    types::human::{HumanBytes, HumanCount},
};
use comfy_table::{CellAlignment, Table, TableComponent, presets};

/// Predictions and measurements.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) memory: MemoryPrediction,
    /// The peak of a process's resident memory, where the system reports it.
    pub(crate) peak_bytes: Option<u64>,
    /// Whether the devices are processors, which use the memory of the process.
    pub(crate) on_processors: bool,
    /// Nothing is planned of a run that is not sharded.
    pub(crate) planned: Option<StepTraffic>,
    pub(crate) counted: StepTraffic,
}

/// The heads of the two tables.
pub(crate) const MEMORY_HEADS: [&str; 3] = ["memory of a process", "predicted", "measured"];
pub(crate) const TRAFFIC_HEADS: [&str; 5] =
    ["a device in a step", "planned calls", "counted", "planned bytes", "counted"];

impl Comparison {
    /// Returns a row for each term, and one for the sum. Only the memory before training and the sum
    /// are measured.
    pub(crate) fn memory_rows(&self) -> Vec<Vec<String>> {
        let bytes = |bytes: u64| HumanBytes(bytes.into()).to_string();
        let mut rows: Vec<Vec<String>> = Vec::new();
        for &(name, term) in &self.memory.terms {
            let measured = if rows.is_empty() { bytes(term) } else { String::new() };
            rows.push(vec![name.to_owned(), bytes(term), measured]);
        }
        let peak = self.peak_bytes.map_or_else(|| String::from("unknown"), bytes);
        rows.push(vec![String::from("peak"), bytes(self.memory.total()), peak]);
        rows
    }

    /// Returns a row for each planned or called kind of collective.
    pub(crate) fn traffic_rows(&self) -> Vec<Vec<String>> {
        let number = |number: u64| HumanCount(number.into()).to_string();
        let planned = self.planned.map(StepTraffic::kinds);
        let row = |(n, (name, counted)): (usize, (&str, CollectiveCalls))| {
            let planned = planned.map(|kinds| kinds[n].1);
            if planned.is_none_or(|planned| planned.calls == 0) && counted.calls == 0 {
                return None;
            }
            let planned = |of: fn(CollectiveCalls) -> u64| {
                planned.map_or_else(String::new, |calls| number(of(calls)))
            };
            Some(vec![
                name.to_owned(),
                planned(|calls| calls.calls),
                number(counted.calls),
                planned(|calls| calls.bytes),
                number(counted.bytes),
            ])
        };
        self.counted.kinds().into_iter().enumerate().filter_map(row).collect()
    }

    /// Returns notes on the tables.
    pub(crate) fn notes(&self) -> [&'static str; 2] {
        let traffic = if self.planned.is_some() {
            "bytes count a device's own shards and gradients; counted but not planned are the loss, \
             the norm of the gradients, and agreements between devices"
        } else {
            "the plan of a run that is not sharded sends nothing"
        };
        let memory = if self.on_processors {
            "measured is the largest resident memory that the system reports of a process"
        } else {
            "predicted is a process with processors as devices; measured is the resident memory of \
             the process alone, without its devices"
        };
        [memory, traffic]
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [memory, traffic] = self.notes();
        writeln!(f, "{}\n{memory}\n", table(&MEMORY_HEADS, self.memory_rows()))?;
        write!(f, "{}\n{traffic}", table(&TRAFFIC_HEADS, self.traffic_rows()))
    }
}

fn table(heads: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_header(heads)
        .add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

/// The memory that a process took for its devices, and how much of it the model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeakMemory {
    pub(crate) peak_bytes: u64,
    /// The number of devices of the process.
    pub(crate) n_devices: u64,
    pub(crate) needs: ModelBytes,
}

impl PeakMemory {
    /// Returns the memory of a session, if it is known.
    pub(crate) fn new(session: &Session, needs: ModelBytes) -> Option<Self> {
        let peak_bytes = session.peak_bytes?;
        Some(Self { peak_bytes, n_devices: session.devices_here, needs })
    }
}

impl fmt::Display for PeakMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peak_bytes, n_devices, needs } = *self;
        let ModelBytes { whole_bytes, sharded_bytes, is_sharded } = needs;
        let (whole, sharded) = if is_sharded { ("", ", as here") } else { (", as here", "") };
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
        write!(f, "{} per device whole{whole}, ", HumanBytes(whole_bytes))?;
        write!(f, "{} per rank sharded by the plan{sharded}; ", HumanBytes(sharded_bytes))?;
        write!(f, "activations are in neither")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_whole_and_what_is_sharded() {
        let needs = ModelBytes { whole_bytes: 2048, sharded_bytes: 1024, is_sharded: false };
        let memory = PeakMemory { peak_bytes: 4096, n_devices: 2, needs };
        let words = "peak memory of the process: 4.00 KiB, 2.00 KiB for each of its 2 devices; \
                     parameters, gradients and optimizer state: 2.00 KiB per device whole, as \
                     here, 1.00 KiB per rank sharded by the plan; activations are in neither";
        assert_eq!(memory.to_string(), words);
        let sharded = PeakMemory { needs: ModelBytes { is_sharded: true, ..needs }, ..memory };
        let words = "2.00 KiB per device whole, 1.00 KiB per rank sharded by the plan, as here;";
        assert!(sharded.to_string().contains(words), "{sharded}");
    }
}
