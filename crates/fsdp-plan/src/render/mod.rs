//! The text form of a report: what a person reads before a run.

mod layers;
mod ranks;
mod shards;
mod text;

use std::{fmt, ops::Range};

use comfy_table::{CellAlignment, Table, TableComponent, presets};

use self::text::{Printable, binary, counted, grouped};
use crate::{Collectives, PlanReport, ShardingPlan, Traffic};

/// Writes the whole report, without a line break at the end.
pub(crate) fn report(report: &PlanReport<'_>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let PlanReport { plan, cost, of_rank } = report;
    write!(f, "{}\n\n{}\n\n{}\n\n", title(plan), layers::table(plan), ranks::table(&cost.ranks))?;
    write!(f, "largest rank over mean: {:.3}\neach step: {}", cost.max_over_mean, calls(&cost.collectives))?;
    of_rank.as_ref().map_or(Ok(()), |of_rank| write!(f, "\n\n{}", shards::table(of_rank, plan)))
}

fn title(plan: &ShardingPlan) -> String {
    let bytes = plan.parameters().iter().map(|parameter| u128::from(parameter.info().bytes())).sum();
    format!(
        "{} over {}: {}, {}, {} ({})",
        Printable(plan.strategy()),
        counted(plan.world_size().as_u64().into(), "rank"),
        counted(plan.parameters().len() as u128, "parameter"),
        counted(plan.numel(), "element"),
        counted(bytes, "byte"),
        binary(bytes),
    )
}

/// The collectives that are used.
fn calls(collectives: &Collectives) -> String {
    let Collectives { all_gather, reduce_scatter, all_reduce, broadcast, reduce } = *collectives;
    let named = [
        ("all_gather", all_gather),
        ("reduce_scatter", reduce_scatter),
        ("all_reduce", all_reduce),
        ("broadcast", broadcast),
        ("reduce", reduce),
    ];
    let used = named.into_iter().filter(|(_, traffic)| traffic.count > 0);
    let calls: Vec<_> = used.map(|(name, traffic)| call(name, traffic)).collect();
    if calls.is_empty() { String::from("nothing is sent") } else { calls.join("; ") }
}

fn call(name: &str, traffic: Traffic) -> String {
    format!("{} {name}, {} in all", grouped(traffic.count.into()), counted(traffic.bytes.into(), "byte"))
}

/// Lays out `rows` under `header`; the columns at `numbers` are aligned to the right.
fn columns(header: &[&str], numbers: Range<usize>, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_style(TableComponent::HeaderLines, '─').set_header(header).add_rows(rows);
    for column in table.column_iter_mut() {
        if numbers.contains(&column.index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}
