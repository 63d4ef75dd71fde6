//! Why one rank holds what it does, and what becomes of one parameter.

use core_types::human::{HumanBytes, Printable};

use super::{
    columns,
    text::{self, counted, grouped},
};
use crate::{
    cost::{PlanCost, RankCost},
    error::Result,
    param::groups::NamedGroups,
    plan::{PlannedParameter, ShardingPlan, ShardsOfRank},
};

/// What becomes of the parameter at `param_idx`: its cut, and the ranks of the first replica that
/// hold parts of it.
pub(super) fn parameter(plan: &ShardingPlan, param_idx: usize) -> String {
    let parameter = &plan.parameters()[param_idx];
    let info = parameter.info();
    let mut lines = vec![
        format!(
            "{}: {:?} {}, {}, {}",
            Printable(info.name()),
            info.shape(),
            info.dtype(),
            counted(info.numel().into(), "element"),
            counted(info.bytes().into(), "byte"),
        ),
        format!("layer {}, {}", Printable(info.layer()), travels(plan, info.unit())),
        format!(
            "{}{}",
            text::cut_words(parameter.cut()),
            if info.requires_grad() { "" } else { "; not trained" }
        ),
    ];
    if let Some(target) = info.tied_to() {
        lines.push(format!("its values are those of {}", Printable(target)));
    }
    lines.extend(holders(plan, parameter));
    lines.join("\n")
}

fn travels(plan: &ShardingPlan, unit: &str) -> String {
    let unit_name = if unit.is_empty() {
        String::from("the root unit")
    } else {
        format!("unit {}", Printable(unit))
    };
    let stays = if plan.keeps_gathered(unit) {
        "stays gathered from forward to backward pass"
    } else {
        "is gathered twice a step"
    };
    format!("{unit_name}, which {stays}")
}

/// Lines that tell who holds how much, ranks with equally many elements on one line.
fn holders(plan: &ShardingPlan, parameter: &PlannedParameter) -> Vec<String> {
    let info = parameter.info();
    let parts = parameter.division().parts(plan.shares(), 0..info.numel());
    let numel = |part: &(Option<u64>, std::ops::Range<u64>)| part.1.end - part.1.start;
    let follows = |left: &(Option<u64>, _), right: &(Option<u64>, _)| {
        left.0.zip(right.0).is_some_and(|(left, right)| left + 1 == right)
    };
    let runs = parts.chunk_by(|left, right| numel(left) == numel(right) && follows(left, right));
    let lines = runs.map(|run| {
        let (first, part) = &run[0];
        let (last, _) = &run[run.len() - 1];
        let who = match (first, last) {
            (None, _) | (_, None) => String::from("every rank"),
            (Some(first), Some(last)) if first == last => format!("rank {first}"),
            (Some(first), Some(last)) => format!("ranks {first}–{last}"),
        };
        let each = if run.len() > 1 { " each" } else { "" };
        format!(
            "{who}: {}{each}, from element {}",
            amount(parameter, part.end - part.start),
            grouped(part.start.into())
        )
    });
    lines.collect()
}

/// Elements, as rows where they are whole ones.
fn amount(parameter: &PlannedParameter, numel: u64) -> String {
    let row = parameter.info().row_numel();
    let elements = counted(numel.into(), "element");
    match parameter.info().shape() {
        [_, _, ..] if numel.is_multiple_of(row) => {
            format!("{} ({elements})", counted((numel / row).into(), "row"))
        }
        _ => elements,
    }
}

/// What one rank holds, category by category and unit by unit.
pub(super) fn rank(plan: &ShardingPlan, cost: &PlanCost, rank: &RankCost) -> Result<String> {
    let units = NamedGroups::of(plan.parameters().iter().map(|parameter| parameter.info().unit()));
    let mut owned = vec![(0_u128, 0_u128); units.names.len()];
    let mut shards = ShardsOfRank::new(plan, rank.rank, 0..plan.parameters().len())?;
    while let Some((position, shard)) = shards.next_shard() {
        let (n_shards, bytes) = &mut owned[units.of_item[position]];
        *n_shards += 1;
        *bytes += plan.parameters()[position].info().dtype().bytes(shard.shard_size.into());
    }
    let rows = units.names.iter().zip(owned).map(|(&unit, (n_shards, bytes))| {
        let name =
            if unit.is_empty() { String::from("(root)") } else { Printable(unit).to_string() };
        vec![name, grouped(n_shards), grouped(bytes)]
    });
    let table = columns(&["unit", "shards", "bytes"], 1..3, rows.collect());
    let group = plan.shard_group().as_u64();
    let member = rank.rank.as_u64() % group;
    let replica = rank.rank.as_u64() / group;
    let place = match plan.replicas() {
        1 => String::new(),
        replicas => format!(", member {member} of {group} in replica {replica} of {replicas}"),
    };
    Ok(format!("rank {}{place}\n\n{table}\n\n{}", rank.rank, categories(cost, rank).join("\n")))
}

/// What there is, how many bytes it takes, and why.
pub(super) type Term<'a> = (&'a str, u128, &'a str);

/// What a rank holds for a while within a step; without what it holds nothing of for want of a
/// batch, or because the runtime has none of it.
pub(super) fn within_step(rank: &RankCost) -> Vec<Term<'static>> {
    let RankCost { gathered_bytes, unreduced_bytes, backward_bytes, activation_bytes, .. } = *rank;
    let mut terms = vec![
        (
            "gathered units",
            gathered_bytes.into(),
            "those that stay, and the largest with the ones gathered ahead",
        ),
        ("unreduced gradients", unreduced_bytes.into(), "of the largest unit"),
    ];
    let backward = "a gradient of zeros and its first contribution, beside the largest one";
    let activations = "the inputs of units, and what the largest computes";
    let optional = [
        ("gradients that are made", u128::from(backward_bytes), backward),
        ("activations", activation_bytes.into(), activations),
    ];
    terms.extend(optional.into_iter().filter(|&(_, bytes, _)| bytes > 0));
    terms
}

fn categories(cost: &PlanCost, rank: &RankCost) -> Vec<String> {
    let padding = rank.storage_bytes - rank.param_bytes.min(rank.storage_bytes);
    let stored = [
        ("owned parameters", rank.param_bytes.into(), ""),
        (
            "padding",
            padding.into(),
            "so that all ranks store as much as the one that owns the most",
        ),
        ("gradients", rank.grad_bytes.into(), ""),
        ("optimizer state", rank.optimizer_bytes.into(), ""),
        ("between steps", rank.total_bytes(), "the sum of these"),
    ];
    let but = if rank.activation_bytes == 0 { "activations not counted" } else { "" };
    let most =
        [("at most", rank.peak_bytes(), but), ("at most on any rank", cost.peak_bytes(), "")];
    let line = |(what, bytes, why): Term<'_>| {
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!("{what}: {} ({}){why}", counted(bytes, "byte"), HumanBytes(bytes))
    };
    stored.into_iter().chain(within_step(rank)).chain(most).map(line).collect()
}
