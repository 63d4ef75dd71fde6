//! The memory and traffic of a step: predicted from the plan, and measured.

use std::{collections::BTreeMap, fmt};

use candle_distributed::{
    finetune::{
        cost::{CollectiveCalls, MemoryPrediction, ModelBytes, StepTraffic, Workload},
        spec::Session,
    },
    types::human::{HumanBytes, HumanCount},
};
use comfy_table::{CellAlignment, Table, TableComponent, presets};
use serde::{Serialize, Serializer};

/// The predicted memory of a process, and the planned traffic of its first device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Prediction {
    #[serde(serialize_with = "serialize_memory")]
    pub(crate) memory: MemoryPrediction,
    /// The planned traffic, or `None` if the run is not sharded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic: Option<StepTraffic>,
}

/// The memory of a process as JSON.
#[derive(Serialize)]
struct MemoryJson {
    terms: BTreeMap<&'static str, u64>,
    peak_bytes: u64,
    bound_bytes: u64,
}

fn serialize_memory<S: Serializer>(
    memory: &MemoryPrediction,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    MemoryJson {
        terms: memory.terms.iter().copied().collect(),
        peak_bytes: memory.total(),
        bound_bytes: memory.upper_bound(),
    }
    .serialize(serializer)
}

impl Prediction {
    /// Predicts the work of the process.
    pub(crate) fn new(workload: &Workload<'_>) -> crate::error::Result<Self> {
        Ok(Self { memory: workload.predict()?, traffic: workload.planned_traffic()? })
    }

    /// Returns a row per term of the memory, a row for their sum, and a row for its bound, which is
    /// compared with limits.
    fn memory_rows(&self) -> Vec<Vec<String>> {
        let totals =
            [("peak", self.memory.total()), ("bound of the peak", self.memory.upper_bound())];
        let rows = self.memory.terms.iter().chain(&totals);
        rows.map(|&(name, bytes)| vec![name.to_owned(), format_bytes(bytes)]).collect()
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", table(&MEMORY_HEADS[..2], self.memory_rows()))?;
        let Some(traffic) = self.traffic else { return Ok(()) };
        let kinds = traffic.kinds().into_iter().filter(|(_, planned)| planned.calls > 0);
        let rows = kinds.map(|(name, CollectiveCalls { calls, bytes, .. })| {
            vec![name.to_owned(), format_count(calls), format_count(bytes)]
        });
        let [device, calls, _, bytes, _] = TRAFFIC_HEADS;
        write!(f, "\n\n{}", table(&[device, calls, bytes], rows.collect()))
    }
}

fn format_bytes(bytes: u64) -> String {
    HumanBytes(bytes.into()).to_string()
}

fn format_count(number: u64) -> String {
    HumanCount(number.into()).to_string()
}

/// The predicted and the measured memory of a process, and the planned and the counted traffic of a
/// device.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) predicted: Prediction,
    /// The peak resident memory of a process, if the system reports it.
    pub(crate) peak_bytes: Option<u64>,
    /// Whether the devices are CPUs, which use the memory of the process.
    pub(crate) on_processors: bool,
    pub(crate) counted: StepTraffic,
}

/// The column heads of the memory table.
pub(crate) const MEMORY_HEADS: [&str; 3] = ["memory of a process", "predicted", "measured"];
/// The column heads of the traffic table.
pub(crate) const TRAFFIC_HEADS: [&str; 5] =
    ["a device in a step", "planned calls", "counted", "planned bytes", "counted"];

impl Comparison {
    /// Returns the rows of the prediction with a column of measured values, of which only two are known:
    /// the memory before training, which is the first term, and the peak.
    pub(crate) fn memory_rows(&self) -> Vec<Vec<String>> {
        let peak = self.peak_bytes.map_or_else(|| String::from("unknown"), format_bytes);
        let mut rows = self.predicted.memory_rows();
        for (index, row) in rows.iter_mut().enumerate() {
            let measured = match (index, row[0].as_str()) {
                // The prediction takes its first term from a measurement before training.
                (0, _) => row[1].clone(),
                (_, "peak") => peak.clone(),
                _ => String::new(),
            };
            row.push(measured);
        }
        rows
    }

    /// Returns a row per kind of collective that is planned or was called.
    pub(crate) fn traffic_rows(&self) -> Vec<Vec<String>> {
        let planned_kinds = self.predicted.traffic.map(StepTraffic::kinds);
        let mut rows = Vec::new();
        for (kind, (name, counted)) in self.counted.kinds().into_iter().enumerate() {
            let planned = planned_kinds.map(|kinds| kinds[kind].1);
            if planned.is_none_or(|planned| planned.calls == 0) && counted.calls == 0 {
                continue;
            }
            let format_planned = |field: fn(CollectiveCalls) -> u64| {
                planned.map_or_else(String::new, |planned| format_count(field(planned)))
            };
            rows.push(vec![
                name.to_owned(),
                format_planned(|calls| calls.calls),
                format_count(counted.calls),
                format_planned(|calls| calls.bytes),
                format_count(counted.bytes),
            ]);
        }
        rows
    }

    /// Returns a note on the memory table and a note on the traffic table.
    pub(crate) fn notes(&self) -> [&'static str; 2] {
        let traffic = if self.predicted.traffic.is_some() {
            "bytes are of a device's own shards and gradients; the counts include the loss, the \
             gradient norm and agreements between devices, which are not in the plan"
        } else {
            "a run that is not sharded has no plan, so only its counted traffic is shown"
        };
        let memory = if self.on_processors {
            "measured is the largest resident memory that the system reports of a process; a memory \
             limit must be at least the bound of the peak, which adds the largest known error and a \
             second place for logits"
        } else {
            "the prediction is for a process with CPU devices; measured is the resident memory of \
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

/// The peak memory of a process, and the bytes of its model for comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeakMemory {
    pub(crate) peak_bytes: u64,
    /// The number of devices of the process.
    pub(crate) n_devices: u64,
    pub(crate) model_bytes: ModelBytes,
}

impl PeakMemory {
    /// Returns the peak memory of a session, or `None` if it is unknown.
    pub(crate) fn new(session: &Session, model_bytes: ModelBytes) -> Option<Self> {
        let peak_bytes = session.peak_bytes?;
        Some(Self { peak_bytes, n_devices: session.devices_here, model_bytes })
    }
}

impl fmt::Display for PeakMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peak_bytes, n_devices, model_bytes } = *self;
        let ModelBytes { whole_bytes, sharded_bytes, is_sharded } = model_bytes;
        let (whole_note, sharded_note) =
            if is_sharded { ("", " (this run)") } else { (" (this run)", "") };
        let device_bytes = u128::from(peak_bytes) / u128::from(n_devices.max(1));
        let devices = if n_devices == 1 {
            "its device".into()
        } else {
            format!("each of its {n_devices} devices")
        };
        write!(
            f,
            "peak memory of the process: {}, {} ",
            HumanBytes(peak_bytes.into()),
            HumanBytes(device_bytes)
        )?;
        write!(f, "for {devices}; parameters, gradients and optimizer state: ")?;
        write!(f, "{} per device if whole{whole_note}, ", HumanBytes(whole_bytes))?;
        write!(f, "{} per rank if sharded by the plan{sharded_note}; ", HumanBytes(sharded_bytes))?;
        write!(f, "both without activations")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_whole_and_what_is_sharded() {
        let model_bytes = ModelBytes { whole_bytes: 2048, sharded_bytes: 1024, is_sharded: false };
        let memory = PeakMemory { peak_bytes: 4096, n_devices: 2, model_bytes };
        let words = "peak memory of the process: 4.00 KiB, 2.00 KiB for each of its 2 devices; \
                     parameters, gradients and optimizer state: 2.00 KiB per device if whole \
                     (this run), 1.00 KiB per rank if sharded by the plan; both without \
                     activations";
        assert_eq!(memory.to_string(), words);
        let sharded =
            PeakMemory { model_bytes: ModelBytes { is_sharded: true, ..model_bytes }, ..memory };
        let words =
            "2.00 KiB per device if whole, 1.00 KiB per rank if sharded by the plan (this run);";
        assert!(sharded.to_string().contains(words), "{sharded}");
    }
}
