//! What is drawn: some ranks, and the blocks that their columns consist of.

use std::{cmp::Reverse, collections::BTreeMap};

use candle_distributed::plan::{
    ShardingPlan,
    cost::{PlanCost, RankCost},
};

use crate::error::Result;

/// The number of columns that can be told apart.
const MAX_COLUMNS: usize = 64;

/// The ranks that are drawn.
pub(super) struct Columns<'a> {
    /// The units in the order of the plan; the root unit has no name.
    pub(super) units: Vec<&'a str>,
    pub(super) drawn: Vec<Column>,
    /// The number of ranks, some of which may share a column.
    pub(super) n_ranks: usize,
}

/// A rank and what it holds.
pub(super) struct Column {
    pub(super) cost: RankCost,
    /// Parameters without padding, for every unit.
    unit_bytes: Vec<f64>,
}

/// What a block stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Parameters of the unit at this position.
    Unit(usize),
    Padding,
    Gradients,
    Optimizer,
    Gathered,
    Activations,
}

impl<'a> Columns<'a> {
    /// Every rank of a small world; in a larger one a column stands for several neighbors, and is
    /// the one of them with the highest peak.
    pub(super) fn new(plan: &'a ShardingPlan, cost: &PlanCost) -> Result<Self> {
        let mut units = Vec::new();
        let mut positions = BTreeMap::new();
        for parameter in plan.parameters() {
            let unit = parameter.info().unit();
            positions.entry(unit).or_insert_with(|| {
                units.push(unit);
                units.len() - 1
            });
        }
        let n_ranks = cost.ranks.len();
        let n_columns = n_ranks.min(MAX_COLUMNS);
        let neighbors =
            |column| &cost.ranks[column * n_ranks / n_columns..(column + 1) * n_ranks / n_columns];
        let chosen = (0..n_columns).map(|column| highest(neighbors(column)));
        let drawn =
            chosen.map(|cost| Column::new(plan, cost, &positions)).collect::<Result<_>>()?;
        Ok(Self { units, drawn, n_ranks })
    }

    /// Whether each rank has a column of its own.
    pub(super) fn are_all_ranks(&self) -> bool {
        self.drawn.len() == self.n_ranks
    }

    /// Whether some rank has something of it.
    pub(super) fn have(&self, part: Part) -> bool {
        self.drawn
            .iter()
            .flat_map(Column::blocks)
            .any(|(other, bytes)| other == part && bytes > 0.0)
    }
}

/// The rank with the highest peak, the first of several.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn highest(ranks: &[RankCost]) -> RankCost {
    let highest = ranks.iter().min_by_key(|rank| Reverse(rank.peak_bytes()));
    *highest.expect("there are no more columns than ranks")
}

impl Column {
    fn new(plan: &ShardingPlan, cost: RankCost, positions: &BTreeMap<&str, usize>) -> Result<Self> {
        let mut unit_bytes = vec![0.0; positions.len()];
        for (parameter, shard) in plan.shards_of_rank(cost.rank)? {
            let info = parameter.info();
            let n_blocks = shard.shard_size.div_ceil(info.dtype().block_numel());
            unit_bytes[positions[info.unit()]] +=
                n_blocks as f64 * info.dtype().block_bytes() as f64;
        }
        // Parameters may be held in another dtype than that of the file.
        let sum: f64 = unit_bytes.iter().sum();
        let scale = if sum > 0.0 { cost.param_bytes as f64 / sum } else { 1.0 };
        for bytes in &mut unit_bytes {
            *bytes *= scale;
        }
        Ok(Self { cost, unit_bytes })
    }

    /// What it stores between two steps, from the bottom up.
    pub(super) fn stored(&self) -> impl Iterator<Item = (Part, f64)> {
        let padding = self.cost.storage_bytes.saturating_sub(self.cost.param_bytes);
        let units =
            self.unit_bytes.iter().enumerate().map(|(unit, &bytes)| (Part::Unit(unit), bytes));
        units.chain([(Part::Padding, padding as f64)])
    }

    /// Everything that it holds at its peak, from the bottom up.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Part, f64)> {
        let RankCost { grad_bytes, optimizer_bytes, activation_bytes, .. } = self.cost;
        let within_step = self.cost.peak_bytes() - self.cost.total_bytes();
        let gathered = within_step - u128::from(activation_bytes);
        self.stored().chain([
            (Part::Gradients, grad_bytes as f64),
            (Part::Optimizer, optimizer_bytes as f64),
            (Part::Gathered, gathered as f64),
            (Part::Activations, activation_bytes as f64),
        ])
    }
}
