//! The table of layers: how much is in each, and how it is divided.

use std::collections::BTreeSet;

use core_types::{Rank, human::Printable};

use super::{columns, text::grouped};
use crate::{
    cut::Cut,
    param::groups::NamedGroups,
    plan::{PlannedParameter, ShardingPlan},
};

/// The most owners of a layer that are named.
const MAX_OWNERS: usize = 2;

/// A line for each layer, neighbors that differ in nothing but the name on one line.
pub(super) fn table(plan: &ShardingPlan) -> String {
    let layers = Layer::all(plan);
    let mut rows: Vec<_> =
        layers.chunk_by(|left, right| left.content == right.content).map(line).collect();
    rows.push(sums(&layers, plan));
    columns(&["layer", "layers", "parameters", "elements", "bytes", "held as"], 1..5, rows)
}

fn sums(layers: &[Layer<'_>], plan: &ShardingPlan) -> Vec<String> {
    let bytes = layers.iter().map(|layer| layer.content.bytes).sum();
    let sums =
        [layers.len() as u128, plan.parameters().len() as u128, plan.numel(), bytes].map(grouped);
    [vec![String::from("total")], sums.to_vec()].concat()
}

/// The line for neighbors that are alike: sums over all of them, so that the columns add up.
fn line(alike: &[Layer<'_>]) -> Vec<String> {
    let first = &alike[0];
    let last = &alike[alike.len() - 1];
    let mut name = Printable(first.name).to_string();
    if alike.len() > 1 {
        name = format!("{name} … {}", Printable(last.name));
    }
    let Content { n_parameters, numel, bytes, .. } = first.content;
    let sums = [1, n_parameters, numel, bytes].map(|each| grouped(each * alike.len() as u128));
    [vec![name], sums.to_vec(), vec![first.content.held_as()]].concat()
}

/// The parameters of a layer, summed up.
struct Layer<'a> {
    name: &'a str,
    content: Content,
}

#[derive(Default, PartialEq)]
struct Content {
    n_parameters: u128,
    numel: u128,
    bytes: u128,
    /// In the order in which they first occur.
    cuts: Vec<Held>,
    /// The ranks that hold parameters whole.
    owners: BTreeSet<Rank>,
}

impl<'a> Layer<'a> {
    /// Every layer, in the order in which they first occur.
    fn all(plan: &'a ShardingPlan) -> Vec<Self> {
        let groups =
            NamedGroups::of(plan.parameters().iter().map(|parameter| parameter.info().layer()));
        let layers =
            groups.names.into_iter().map(|name| Self { name, content: Content::default() });
        let mut layers: Vec<Self> = layers.collect();
        for (parameter, layer) in plan.parameters().iter().zip(groups.of_item) {
            layers[layer].content.add(parameter);
        }
        layers
    }
}

impl Content {
    fn add(&mut self, parameter: &PlannedParameter) {
        self.n_parameters += 1;
        self.numel +=
            if parameter.cut() == Cut::Tied { 0 } else { parameter.info().numel().into() };
        self.bytes += u128::from(parameter.held_bytes());
        self.owners.extend(parameter.cut().owner());
        let held = Held::from(parameter.cut());
        if !self.cuts.contains(&held) {
            self.cuts.push(held);
        }
    }

    fn held_as(&self) -> String {
        let words: Vec<_> = self.cuts.iter().map(|held| self.words(*held)).collect();
        words.join(", ")
    }

    fn words(&self, held: Held) -> String {
        match held {
            Held::Rows => String::from("rows"),
            Held::Elements => String::from("elements"),
            Held::Granules => String::from("granules"),
            Held::Wrapped => String::from("whole tensors"),
            Held::Whole => self.whole(),
            Held::Copies => String::from("copies"),
            Held::Tied => String::from("tied"),
        }
    }

    /// The owners of whole parameters. Many are counted instead of named, because one cell with
    /// hundreds of ranks makes every line of the table as long as itself.
    fn whole(&self) -> String {
        if self.owners.len() > MAX_OWNERS {
            return format!("whole, on {} ranks", grouped(self.owners.len() as u128));
        }
        let owners: Vec<_> = self.owners.iter().map(|owner| format!("whole on {owner}")).collect();
        owners.join(", ")
    }
}

/// A cut without the numbers that differ from parameter to parameter.
#[derive(Clone, Copy, PartialEq)]
enum Held {
    Rows,
    Elements,
    Granules,
    Wrapped,
    Whole,
    Copies,
    Tied,
}

impl From<Cut> for Held {
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
