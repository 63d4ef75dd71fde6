//! The table of layers: the size of each and its cuts.

use std::collections::BTreeSet;

use core_types::{Rank, human::Printable};

use super::{columns, text::with_separators};
use crate::{
    cut::Cut,
    param::groups::NamedGroups,
    plan::{PlannedParameter, ShardingPlan},
};

/// Limit on the owners that a line names.
const MAX_OWNERS: usize = 2;

/// Renders the table with one line per layer; neighbors that differ only in name share a line.
pub(super) fn table(plan: &ShardingPlan) -> String {
    let layers = LayerRow::all(plan);
    let mut rows: Vec<_> =
        layers.chunk_by(|left, right| left.content == right.content).map(line).collect();
    rows.push(sums(&layers, plan));
    let right_aligned = 1..5;
    columns(&["layer", "layers", "parameters", "elements", "bytes", "held as"], right_aligned, rows)
}

fn sums(layers: &[LayerRow<'_>], plan: &ShardingPlan) -> Vec<String> {
    let bytes = layers.iter().map(|layer| layer.content.bytes).sum();
    let sums = [layers.len() as u128, plan.parameters().len() as u128, plan.numel(), bytes]
        .map(with_separators);
    [vec![String::from("total")], sums.to_vec()].concat()
}

/// Returns the line for equal neighbors. It shows their sums, so that the columns add up to the
/// total.
fn line(neighbors: &[LayerRow<'_>]) -> Vec<String> {
    let first = &neighbors[0];
    let last = &neighbors[neighbors.len() - 1];
    let mut name = Printable(first.name).to_string();
    if neighbors.len() > 1 {
        name = format!("{name} … {}", Printable(last.name));
    }
    let LayerTotals { n_parameters, numel, bytes, .. } = first.content;
    let sums =
        [1, n_parameters, numel, bytes].map(|each| with_separators(each * neighbors.len() as u128));
    [vec![name], sums.to_vec(), vec![first.content.cuts_text()]].concat()
}

/// A layer and its totals.
struct LayerRow<'a> {
    name: &'a str,
    content: LayerTotals,
}

#[derive(Default, PartialEq)]
struct LayerTotals {
    n_parameters: u128,
    numel: u128,
    bytes: u128,
    /// Kinds of cuts, in order of first occurrence.
    cuts: Vec<CutKind>,
    /// Ranks that own whole parameters.
    owners: BTreeSet<Rank>,
}

impl<'a> LayerRow<'a> {
    /// Returns the layers in order of first occurrence.
    fn all(plan: &'a ShardingPlan) -> Vec<Self> {
        let names = plan.parameters().iter().map(|parameter| parameter.info().layer());
        let groups = NamedGroups::from_names(names);
        let mut layers = Vec::new();
        for name in groups.names {
            layers.push(Self { name, content: LayerTotals::default() });
        }
        for (parameter, layer) in plan.parameters().iter().zip(groups.group_of_item) {
            layers[layer].content.add(parameter);
        }
        layers
    }
}

impl LayerTotals {
    fn add(&mut self, parameter: &PlannedParameter) {
        self.n_parameters += 1;
        self.numel +=
            if parameter.cut() == Cut::Tied { 0 } else { parameter.info().numel().into() };
        self.bytes += u128::from(parameter.unique_bytes());
        self.owners.extend(parameter.cut().owner());
        let kind = CutKind::from(parameter.cut());
        if !self.cuts.contains(&kind) {
            self.cuts.push(kind);
        }
    }

    /// Lists the kinds of cuts in words.
    fn cuts_text(&self) -> String {
        let kinds: Vec<_> = self.cuts.iter().map(|kind| self.kind_text(*kind)).collect();
        kinds.join(", ")
    }

    fn kind_text(&self, kind: CutKind) -> String {
        match kind {
            CutKind::Rows => String::from("rows"),
            CutKind::Elements => String::from("elements"),
            CutKind::Granules => String::from("granules"),
            CutKind::Wrapped => String::from("whole tensors"),
            CutKind::Whole => self.owners_text(),
            CutKind::Copies => String::from("copies"),
            CutKind::Tied => String::from("tied"),
        }
    }

    /// Names the owners of whole parameters, or counts them if there are many: a cell with hundreds
    /// of ranks would widen every line of the table.
    fn owners_text(&self) -> String {
        if self.owners.len() > MAX_OWNERS {
            return format!("whole, on {} ranks", with_separators(self.owners.len() as u128));
        }
        let owners: Vec<_> = self.owners.iter().map(|owner| format!("whole on {owner}")).collect();
        owners.join(", ")
    }
}

/// The kind of a cut, without its numbers.
#[derive(Clone, Copy, PartialEq)]
enum CutKind {
    Rows,
    Elements,
    Granules,
    Wrapped,
    Whole,
    Copies,
    Tied,
}

impl From<Cut> for CutKind {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::Dim0 => Self::Rows,
            Cut::Flat { .. } | Cut::FlatAligned { .. } => Self::Elements,
            Cut::Ragged { .. } => Self::Granules,
            Cut::Wrapped { .. } => Self::Wrapped,
            Cut::Whole { .. } => Self::Whole,
            Cut::Replicated => Self::Copies,
            Cut::Tied => Self::Tied,
        }
    }
}
