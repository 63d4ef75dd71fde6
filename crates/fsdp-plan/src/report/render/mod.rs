//! The text form of reports.

mod diff;
mod explain;
mod layers;
mod ranks;
mod shards;
mod text;

use std::{fmt, ops::Range};

use comfy_table::{CellAlignment, Table, TableComponent, presets};
use core_types::{
    Placement, Rank,
    human::{HumanBytes, Printable},
};

use self::text::{with_noun, with_separators};
use crate::{
    cost::{CollectiveTraffic, Collectives, CostModel, RankCost},
    error::{Error, Result},
    plan::ShardingPlan,
    report::{BudgetReport, PlanDiff, PlanReport, ProcessReport},
    strategy::LayerBalance,
};

/// Writes the report without a final line break.
impl fmt::Display for PlanReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanReport { plan, cost, layer_balance, budget, process, rank_report } = self;
        write!(
            f,
            "{}\n\n{}\n\n{}\n\n",
            plan.summary(),
            layers::table(plan),
            ranks::table(&cost.ranks)
        )?;
        write!(
            f,
            "largest rank over mean: {:.3}\neach step: {}",
            cost.max_over_mean,
            collectives_line(&cost.collectives)
        )?;
        let optional_lines = [
            kept_units_line(plan),
            cost.step_seconds.map(time_line),
            within_step_line(&cost.ranks[0]),
            layer_balance.as_ref().map(balance_line),
            process.as_ref().map(process_line),
            budget.as_ref().map(|budget| budget_line(budget, &cost.ranks[0])),
        ];
        for line in optional_lines.into_iter().flatten() {
            write!(f, "\n{line}")?;
        }
        match rank_report {
            None => Ok(()),
            Some(report) => write!(f, "\n\n{}", shards::table(report, plan)),
        }
    }
}

/// Names the units that stay gathered besides the root unit.
fn kept_units_line(plan: &ShardingPlan) -> Option<String> {
    let units = plan.units();
    let kept: Vec<_> = units.iter().filter(|unit| plan.keeps_gathered(unit)).collect();
    let ([first, ..], [.., last]) = (&kept[..], &kept[..]) else { return None };
    let names = if kept.len() == 1 {
        Printable(first).to_string()
    } else {
        format!("{} … {}", Printable(first), Printable(last))
    };
    Some(format!(
        "{} of {} stay gathered: {names}",
        kept.len(),
        with_noun(units.len() as u128, "unit")
    ))
}

/// Lists the temporary memory of a rank within a step, if there is more than gathered parameters
/// and unreduced gradients.
fn within_step_line(rank: &RankCost) -> Option<String> {
    if rank.backward_bytes == 0 && rank.activation_bytes == 0 {
        return None;
    }
    let mut terms = Vec::new();
    for (category, bytes, _) in explain::within_step(rank) {
        terms.push(format!("{category} {}", with_separators(bytes)));
    }
    Some(format!("temporary bytes within a step: {}", terms.join(", ")))
}

fn time_line(seconds: f64) -> String {
    format!("sending takes {:.3} ms a step without overlap", seconds * 1e3)
}

fn process_line(process: &ProcessReport) -> String {
    let ProcessReport { slots, peak_bytes } = *process;
    let ranks = with_noun(slots.get() as u128, "rank");
    let peak = with_noun(peak_bytes, "byte");
    format!("a process of {ranks} that share gathered parameters needs at most {peak}")
}

fn budget_line(budget: &BudgetReport, rank: &RankCost) -> String {
    let verdict = match budget.missing_bytes {
        0 => String::from("it fits"),
        missing => format!("{} ({}) are missing", with_noun(missing, "byte"), HumanBytes(missing)),
    };
    let [peak, bytes] = [budget.peak_bytes, budget.bytes.into()].map(with_separators);
    let note = if rank.activation_bytes == 0 { ", activations not counted" } else { "" };
    format!("a rank needs at most {peak} of {bytes} bytes{note}: {verdict}")
}

/// Writes one line per difference, without a final line break.
impl fmt::Display for PlanDiff<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &diff::lines(self)[..] {
            [] => f.write_str("the plans are the same"),
            lines => f.write_str(&lines.join("\n")),
        }
    }
}

impl ShardingPlan {
    /// Summarizes the plan in one line: strategy, ranks, parameters, elements and bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::WorldSize;
    /// use fsdp_plan::{
    ///     ElemType, ParameterInfo,
    ///     strategy::{Full, ShardingStrategy},
    /// };
    ///
    /// let parameters = [ParameterInfo::new("wte.weight", [10, 4], ElemType::F32)?];
    /// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
    /// assert_eq!(
    ///     plan.summary(),
    ///     "full over 4 ranks: 1 parameter, 40 elements, 160 bytes (160.00 B)"
    /// );
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn summary(&self) -> String {
        let bytes =
            self.parameters().iter().map(|parameter| u128::from(parameter.unique_bytes())).sum();
        let groups = match self.replicas() {
            1 => String::new(),
            replicas => format!(
                " in {replicas} replicas of {}",
                with_separators(self.shard_group().as_u64().into())
            ),
        };
        format!(
            "{} over {}{groups}: {}, {}, {} ({})",
            Printable(self.strategy()),
            with_noun(self.world_size().as_u64().into(), "rank"),
            with_noun(self.parameters().len() as u128, "parameter"),
            with_noun(self.numel(), "element"),
            with_noun(bytes, "byte"),
            HumanBytes(bytes),
        )
    }

    /// Explains the parameter `name` in words: its cut, when it is gathered, and its owners.
    ///
    /// # Errors
    ///
    /// [`Error::Unknown`] for an unknown name.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::WorldSize;
    /// use fsdp_plan::{
    ///     ElemType, ParameterInfo,
    ///     strategy::{Full, ShardingStrategy},
    /// };
    ///
    /// let parameters = [ParameterInfo::new("wte.weight", [10, 4], ElemType::F32)?];
    /// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
    /// let explanation = plan.explain_parameter("wte.weight")?;
    /// assert!(explanation.ends_with(
    /// "along dim 0\nranks 0–2: 3 rows (12 elements) each, from element 0\nrank 3: 1 row (4 elements), from element 36"
    /// ));
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn explain_parameter(&self, name: &str) -> Result<String> {
        match self.index_of(name) {
            Some(index) => Ok(explain::explain_parameter(self, index)),
            None => Err(Error::Unknown { what: "parameter", name: name.to_owned() }),
        }
    }

    /// Explains the memory of `rank` in words, by unit and by category.
    ///
    /// # Errors
    ///
    /// [`Error::World`] for an unknown rank, and the errors of [`cost`](Self::cost).
    #[doc(hidden)]
    pub fn explain_rank(&self, rank: Rank, model: &CostModel) -> Result<String> {
        let place = Placement::new(rank.as_u64(), self.world_size().as_u64())?;
        let cost = self.cost(model)?;
        explain::explain_rank(self, &cost, &cost.ranks[place.rank().as_usize()])
    }
}

fn balance_line(balance: &LayerBalance) -> String {
    let [largest, lower_bound, if_cut] =
        [balance.largest, balance.lower_bound, balance.if_cut].map(u128::from);
    format!(
        "whole layers: at most {} on a rank; the lower bound is {}, and cut layers would take {}",
        with_noun(largest, "byte"),
        with_separators(lower_bound),
        with_separators(if_cut),
    )
}

/// Lists the collectives of a step.
fn collectives_line(collectives: &Collectives) -> String {
    let Collectives { all_gather, reduce_scatter, all_reduce } = *collectives;
    let named = [
        ("all_gather", all_gather),
        ("reduce_scatter", reduce_scatter),
        ("all_reduce", all_reduce),
    ];
    let used = named.into_iter().filter(|(_, traffic)| traffic.count > 0);
    let calls: Vec<_> = used.map(|(name, traffic)| collective_text(name, traffic)).collect();
    if calls.is_empty() { String::from("nothing is sent") } else { calls.join("; ") }
}

fn collective_text(name: &str, traffic: CollectiveTraffic) -> String {
    let CollectiveTraffic { count, bytes, payload_bytes, .. } = traffic;
    let payload = if payload_bytes == bytes {
        String::new()
    } else {
        format!(" ({} without padding)", with_separators(payload_bytes.into()))
    };
    format!(
        "{} {name}, {} in all{payload}",
        with_separators(count.into()),
        with_noun(bytes.into(), "byte")
    )
}

/// Renders a table of `rows` with a `header`; the columns in `right_aligned` hold numbers.
fn columns(header: &[&str], right_aligned: Range<usize>, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_header(header)
        .add_rows(rows);
    for column in table.column_iter_mut() {
        if right_aligned.contains(&column.index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}
