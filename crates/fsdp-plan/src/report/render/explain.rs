//! Explanations of one rank or one parameter.

use std::ops::Range;

use core_types::human::{HumanBytes, Printable};

use super::{
    columns,
    text::{self, with_noun, with_separators},
};
use crate::{
    cost::{PlanCost, RankCost},
    error::Result,
    param::groups::NamedGroups,
    plan::{PlannedParameter, ShardingPlan, ShardsOfRank},
};

/// Explains the parameter at `param_idx`: its cut, and the ranks of the first replica that hold it.
pub(super) fn explain_parameter(plan: &ShardingPlan, param_idx: usize) -> String {
    let parameter = &plan.parameters()[param_idx];
    let info = parameter.info();
    let mut lines = vec![
        format!(
            "{}: {:?} {}, {}, {}",
            Printable(info.name()),
            info.shape(),
            info.dtype(),
            with_noun(info.numel().into(), "element"),
            with_noun(info.bytes().into(), "byte"),
        ),
        format!("layer {}, {}", Printable(info.layer()), describe_gathering(plan, info.unit())),
        format!(
            "{}{}",
            text::cut_text(parameter.cut()),
            if info.requires_grad() { "" } else { "; not trained" }
        ),
    ];
    if let Some(target) = info.tied_to() {
        lines.push(format!("tied to {}", Printable(target)));
    }
    lines.extend(holder_lines(plan, parameter));
    lines.join("\n")
}

fn describe_gathering(plan: &ShardingPlan, unit: &str) -> String {
    let unit_name = if unit.is_empty() {
        String::from("the root unit")
    } else {
        format!("unit {}", Printable(unit))
    };
    let gathering = if plan.keeps_gathered(unit) {
        "stays gathered from forward to backward pass"
    } else {
        "is gathered twice a step"
    };
    format!("{unit_name}, which {gathering}")
}

/// Returns a line per run of ranks that hold equally many elements.
fn holder_lines(plan: &ShardingPlan, parameter: &PlannedParameter) -> Vec<String> {
    let info = parameter.info();
    let parts = parameter.prepared_cut().parts(plan.shard_group(), 0..info.numel());
    let mut lines = Vec::new();
    for run in parts.chunk_by(is_same_run) {
        let (first, range) = &run[0];
        let (last, _) = &run[run.len() - 1];
        let owners = match (first, last) {
            (None, _) | (_, None) => String::from("every rank"),
            (Some(first), Some(last)) if first == last => format!("rank {first}"),
            (Some(first), Some(last)) => format!("ranks {first}–{last}"),
        };
        let each = if run.len() > 1 { " each" } else { "" };
        let amount = amount_text(parameter, range.end - range.start);
        let start = with_separators(range.start.into());
        lines.push(format!("{owners}: {amount}{each}, from element {start}"));
    }
    lines
}

/// A range of elements and its owner; `None` means every rank.
type OwnedRange = (Option<u64>, Range<u64>);

/// Returns true if neighboring ranks own equally many elements.
fn is_same_run(left: &OwnedRange, right: &OwnedRange) -> bool {
    let is_same_size = left.1.end - left.1.start == right.1.end - right.1.start;
    is_same_size && left.0.zip(right.0).is_some_and(|(left, right)| left + 1 == right)
}

/// Formats a number of elements, as rows too if they are whole.
fn amount_text(parameter: &PlannedParameter, numel: u64) -> String {
    let row = parameter.info().row_numel();
    let elements = with_noun(numel.into(), "element");
    match parameter.info().shape() {
        [_, _, ..] if numel.is_multiple_of(row) => {
            format!("{} ({elements})", with_noun((numel / row).into(), "row"))
        }
        _ => elements,
    }
}

/// Explains the memory of one rank by unit and by category.
pub(super) fn explain_rank(
    plan: &ShardingPlan,
    cost: &PlanCost,
    rank: &RankCost,
) -> Result<String> {
    let units =
        NamedGroups::from_names(plan.parameters().iter().map(|parameter| parameter.info().unit()));
    let mut owned = vec![(0_u128, 0_u128); units.names.len()];
    let mut shards = ShardsOfRank::new(plan, rank.rank, 0..plan.parameters().len())?;
    while let Some((position, shard)) = shards.next_shard() {
        let (n_shards, bytes) = &mut owned[units.group_of_item[position]];
        *n_shards += 1;
        *bytes +=
            plan.parameters()[position].info().dtype().rounded_up_bytes(shard.shard_size.into());
    }
    let rows = units.names.iter().zip(owned).map(|(&unit, (n_shards, bytes))| {
        let name =
            if unit.is_empty() { String::from("(root)") } else { Printable(unit).to_string() };
        vec![name, with_separators(n_shards), with_separators(bytes)]
    });
    let table = columns(&["unit", "shards", "bytes"], 1..3, rows.collect());
    let group = plan.shard_group().as_u64();
    let member = rank.rank.as_u64() % group;
    let replica = rank.rank.as_u64() / group;
    let place = match plan.replicas() {
        1 => String::new(),
        replicas => format!(", member {member} of {group} in replica {replica} of {replicas}"),
    };
    let categories = category_lines(cost, rank).join("\n");
    Ok(format!("rank {}{place}\n\n{table}\n\n{categories}", rank.rank))
}

/// A category of memory, its bytes, and an explanation.
pub(super) type MemoryTerm<'a> = (&'a str, u128, &'a str);

/// Lists the temporary memory of a rank within a step. Activations and backward buffers are left
/// out if they are zero.
pub(super) fn within_step(rank: &RankCost) -> Vec<MemoryTerm<'static>> {
    let RankCost { gathered_bytes, unreduced_bytes, backward_bytes, activation_bytes, .. } = *rank;
    let mut terms = vec![
        (
            "gathered units",
            gathered_bytes.into(),
            "units that stay gathered, and the largest of the others with the units prefetched after it",
        ),
        ("unreduced gradients", unreduced_bytes.into(), "of the largest unit"),
    ];
    let backward = "two temporary copies of the largest gradient";
    let activations = "inputs of units, and activations of the largest unit";
    let optional = [
        ("gradient temporaries", u128::from(backward_bytes), backward),
        ("activations", activation_bytes.into(), activations),
    ];
    terms.extend(optional.into_iter().filter(|&(_, bytes, _)| bytes > 0));
    terms
}

fn category_lines(cost: &PlanCost, rank: &RankCost) -> Vec<String> {
    let padding = rank.storage_bytes - rank.param_bytes.min(rank.storage_bytes);
    let stored = [
        ("owned parameters", rank.param_bytes.into(), ""),
        ("padding", padding.into(), "all ranks store as much as the largest owner"),
        ("gradients", rank.grad_bytes.into(), ""),
        ("optimizer state", rank.optimizer_bytes.into(), ""),
        ("between steps", rank.total_bytes(), "the sum of these"),
    ];
    let note = if rank.activation_bytes == 0 { "activations not counted" } else { "" };
    let peaks =
        [("at most", rank.peak_bytes(), note), ("at most on any rank", cost.peak_bytes(), "")];
    stored.into_iter().chain(within_step(rank)).chain(peaks).map(category_line).collect()
}

fn category_line((category, bytes, reason): MemoryTerm<'_>) -> String {
    let line = format!("{category}: {} ({})", with_noun(bytes, "byte"), HumanBytes(bytes));
    if reason.is_empty() { line } else { format!("{line}: {reason}") }
}
