//! The text form of a report: what a person reads before a run.

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

use self::text::{counted, grouped};
use crate::{
    cost::{Collectives, CostModel, RankCost, Traffic},
    error::{Error, Result},
    plan::ShardingPlan,
    report::{Budget, PlanDiff, PlanReport, Process},
    strategy::LayerBalance,
};

/// The whole report, without a line break at the end.
impl fmt::Display for PlanReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanReport { plan, cost, layer_balance, budget, process, of_rank } = self;
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
            calls(&cost.collectives)
        )?;
        let seconds = cost.step_seconds.map(|seconds| {
            format!("sending takes {:.3} ms a step if nothing hides it", seconds * 1e3)
        });
        let more = [
            kept_units(plan),
            seconds,
            within_step(&cost.ranks[0]),
            layer_balance.as_ref().map(balance),
            process.as_ref().map(sharing),
            budget.as_ref().map(|budget| fitting(budget, &cost.ranks[0])),
        ];
        more.into_iter().flatten().try_for_each(|line| write!(f, "\n{line}"))?;
        match of_rank {
            None => Ok(()),
            Some(of_rank) => write!(f, "\n\n{}", shards::table(of_rank, plan)),
        }
    }
}

/// The units that stay gathered besides the root unit.
fn kept_units(plan: &ShardingPlan) -> Option<String> {
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
        counted(units.len() as u128, "unit")
    ))
}

/// What every rank holds for a while within a step, term by term, if there is more than what is
/// gathered and reduced.
fn within_step(rank: &RankCost) -> Option<String> {
    let terms = explain::within_step(rank);
    let has_more = rank.backward_bytes > 0 || rank.activation_bytes > 0;
    let term = |&(what, bytes, _): &explain::Term<'_>| format!("{what} {}", grouped(bytes));
    let terms: Vec<_> = terms.iter().map(term).collect();
    has_more.then(|| format!("bytes for a while within a step: {}", terms.join(", ")))
}

fn sharing(process: &Process) -> String {
    let Process { slots, peak_bytes } = *process;
    let ranks = counted(slots.get() as u128, "rank");
    let peak = counted(peak_bytes, "byte");
    format!("a process of {ranks} that share what is gathered needs at most {peak}")
}

fn fitting(budget: &Budget, rank: &RankCost) -> String {
    let verdict = match budget.missing_bytes {
        0 => String::from("it fits"),
        missing => format!("{} ({}) are missing", counted(missing, "byte"), HumanBytes(missing)),
    };
    let [peak, bytes] = [budget.peak_bytes, budget.bytes.into()].map(grouped);
    let but = if rank.activation_bytes == 0 { ", activations not counted" } else { "" };
    format!("a rank needs at most {peak} of {bytes} bytes{but}: {verdict}")
}

/// A line for each difference, without a line break at the end.
impl fmt::Display for PlanDiff<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&diff::lines(self).join("\n"))
    }
}

impl ShardingPlan {
    /// The plan in one line: strategy, ranks, parameters, elements and bytes.
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
    pub fn summary(&self) -> String {
        let bytes =
            self.parameters().iter().map(|parameter| u128::from(parameter.held_bytes())).sum();
        let groups = match self.replicas() {
            1 => String::new(),
            replicas => format!(
                " in {replicas} replicas of {}",
                grouped(self.shard_group().as_u64().into())
            ),
        };
        format!(
            "{} over {}{groups}: {}, {}, {} ({})",
            Printable(self.strategy()),
            counted(self.world_size().as_u64().into(), "rank"),
            counted(self.parameters().len() as u128, "parameter"),
            counted(self.numel(), "element"),
            counted(bytes, "byte"),
            HumanBytes(bytes),
        )
    }

    /// Tells in words what becomes of the parameter `name`: how it is cut, when it travels, and who
    /// holds which part.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`].
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
    pub fn explain_parameter(&self, name: &str) -> Result<String> {
        let unknown = || Error::UnknownParameter { name: name.to_owned() };
        self.index_of(name).map(|position| explain::parameter(self, position)).ok_or_else(unknown)
    }

    /// Tells in words what `rank` holds, unit by unit and category by category.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if there is no such rank, and what [`cost`](Self::cost) returns.
    pub fn explain_rank(&self, rank: Rank, model: &CostModel) -> Result<String> {
        let place = Placement::new(rank.as_u64(), self.world_size().as_u64())?;
        let cost = self.cost(model)?;
        explain::rank(self, &cost, &cost.ranks[place.rank().as_usize()])
    }
}

fn balance(balance: &LayerBalance) -> String {
    let [largest, lower_bound, if_cut] =
        [balance.largest, balance.lower_bound, balance.if_cut].map(u128::from);
    format!(
        "whole layers: at most {} on a rank; {} is a lower bound, and {} the share if layers were cut",
        counted(largest, "byte"),
        grouped(lower_bound),
        grouped(if_cut),
    )
}

/// The collectives that are used.
fn calls(collectives: &Collectives) -> String {
    let Collectives { all_gather, reduce_scatter, all_reduce } = *collectives;
    let named = [
        ("all_gather", all_gather),
        ("reduce_scatter", reduce_scatter),
        ("all_reduce", all_reduce),
    ];
    let used = named.into_iter().filter(|(_, traffic)| traffic.count > 0);
    let calls: Vec<_> = used.map(|(name, traffic)| call(name, traffic)).collect();
    if calls.is_empty() { String::from("nothing is sent") } else { calls.join("; ") }
}

fn call(name: &str, traffic: Traffic) -> String {
    let Traffic { count, bytes, payload_bytes, .. } = traffic;
    let payload = match payload_bytes {
        all if all == bytes => String::new(),
        _ => format!(" ({} without padding)", grouped(payload_bytes.into())),
    };
    format!("{} {name}, {} in all{payload}", grouped(count.into()), counted(bytes.into(), "byte"))
}

/// Lays out `rows` under `header`; the columns at `numbers` are aligned to the right.
fn columns(header: &[&str], numbers: Range<usize>, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_header(header)
        .add_rows(rows);
    for column in table.column_iter_mut() {
        if numbers.contains(&column.index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}
