//! The table of the shards of one rank.

use core_types::human::Printable;

use super::{
    columns,
    text::{with_noun, with_separators},
};
use crate::{
    plan::ShardingPlan,
    report::{NamedShard, RankReport},
};

pub(super) fn table(report: &RankReport<'_>, plan: &ShardingPlan) -> String {
    let rows = report.shards.iter().map(line).collect();
    let table =
        columns(&["parameter", "shape", "dtype", "first element", "elements", "rows"], 3..5, rows);
    let n_parameters = with_noun(plan.parameters().len() as u128, "parameter");
    format!(
        "rank {} holds parts of {} of {n_parameters}\n\n{table}",
        report.rank,
        report.shards.len()
    )
}

fn line(NamedShard { info, shard }: &NamedShard<'_>) -> Vec<String> {
    let rows = shard
        .dim0_start
        .zip(shard.dim0_rows)
        .map(|(start, rows)| format!("{start}..{}", start + rows));
    vec![
        Printable(info.name()).to_string(),
        format!("{:?}", info.shape()),
        info.dtype().to_string(),
        with_separators(shard.start_offset.into()),
        with_separators(shard.shard_size.into()),
        rows.unwrap_or_default(),
    ]
}
