//! What a step takes and sends: predicted from the plan, beside what was measured.

use std::fmt;

use candle_distributed::types::{
    Rank, WorldSize,
    human::{HumanBytes, HumanCount},
};
use comfy_table::{CellAlignment, Table, TableComponent, presets};

use crate::{
    error::Result,
    train::{
        memory::{Prediction, Work},
        sharding,
        traffic::{Calls, StepTraffic},
    },
};

/// What the plan of a sharded run has its first rank hand over in a step.
pub(crate) fn planned(work: &Work<'_>) -> Result<Option<StepTraffic>> {
    let Some(sharding) = work.sharding else { return Ok(None) };
    let plan = sharding.plan(work.parameters, WorldSize::new(work.world_size)?)?;
    Ok(Some(
        plan.schedule(&sharding::cost_model(Some(sharding), work.precision))?
            .handed_over(Rank::ZERO)?
            .into(),
    ))
}

/// What was predicted, beside what was measured.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) memory: Prediction,
    /// The peak of a process's resident memory, where the system reports it.
    pub(crate) peak_bytes: Option<u64>,
    /// Whether the devices are processors, whose memory is that of the process.
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
    /// A row for each term, and one for all of them. What is there before training is measured
    /// alone, and so is the sum.
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

    /// A row for each kind of collective that is planned or was called.
    pub(crate) fn traffic_rows(&self) -> Vec<Vec<String>> {
        let number = |number: u64| HumanCount(number.into()).to_string();
        let planned = self.planned.map(StepTraffic::kinds);
        let row = |(n, (name, counted)): (usize, (&str, Calls))| {
            let planned = planned.map(|kinds| kinds[n].1);
            if planned.unwrap_or_default().calls + counted.calls == 0 {
                return None;
            }
            let planned =
                |of: fn(Calls) -> u64| planned.map_or_else(String::new, |calls| number(of(calls)));
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

    /// What to know of the tables.
    pub(crate) fn notes(&self) -> [&'static str; 2] {
        let traffic = if self.planned.is_some() {
            "bytes are those of a device's own parts and gradients; counted but not planned are \
             the loss, the norm of the gradients, and what devices agree on"
        } else {
            "the plan of a run that is not sharded sends nothing"
        };
        let memory = if self.on_processors {
            "measured is the largest resident memory that the system reports of a process"
        } else {
            "predicted is a process whose devices are processors; measured is the resident memory \
             of the process alone, without that of its devices"
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
