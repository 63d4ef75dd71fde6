//! Adjustment of the number of batches to the world size.

use std::{cmp::Reverse, collections::BinaryHeap};

use core_types::WorldSize;

use crate::{
    config::Cost,
    distributed::config::StepRemainder,
    error::{Error, Result},
    lengths::SequenceLengths,
    sampler::plan::BatchPlan,
};

/// Splits, drops or repeats batches so that the world size divides their number, unless the last step
/// may be short and there are too few sequences to split. Returns the indices of the batches, the most
/// expensive first.
pub(crate) fn batches_by_cost<L: SequenceLengths>(
    plan: &mut BatchPlan<L>,
    world_size: WorldSize,
    remainder: StepRemainder,
    may_be_short: bool,
    cost: Cost,
) -> Result<Vec<u32>> {
    let n_batches = plan.len();
    let n_ranks = world_size.as_usize();
    let surplus = n_batches % n_ranks;
    let n_missing = if surplus == 0 { 0 } else { n_ranks - surplus };
    let mut n_repeats = 0;
    match remainder {
        StepRemainder::Split if n_missing <= n_splits(plan) => split_most_padded(plan, n_missing),
        StepRemainder::Split if may_be_short => {}
        StepRemainder::Split => {
            return Err(Error::CannotFillStep { n_batches: n_batches as u64, world_size });
        }
        StepRemainder::Drop => {
            for _ in 0..surplus {
                plan.remove(plan.len() - 1);
            }
        }
        StepRemainder::Repeat => n_repeats = n_missing,
    }
    let repeats = plan.batch_indices().cycle().take(n_repeats);
    let mut batches: Vec<u32> = plan.batch_indices().chain(repeats).collect();
    let costs: Vec<u64> = (0..plan.len()).map(|index| batch_cost(plan, index, cost)).collect();
    batches.sort_unstable_by_key(|&index| (Reverse(costs[index as usize]), index));
    Ok(batches)
}

/// Returns the cost of a batch: of its rows, or of the sequences in a packed row.
pub(crate) fn batch_cost<L: SequenceLengths>(plan: &BatchPlan<L>, index: usize, cost: Cost) -> u64 {
    if plan.limits().is_packing() {
        let costs = plan.sequences(index).map(|sequence| cost.for_length(sequence.length));
        return costs.fold(0, u64::saturating_add);
    }
    let batch = plan.planned_batch(index);
    cost.for_length(batch.padded_length).saturating_mul(batch.len() as u64)
}

/// Returns the number of times that batches can be split, until each has one group of sequences.
fn n_splits<L: SequenceLengths>(plan: &BatchPlan<L>) -> usize {
    let group_len = plan.limits().group_len();
    let n_groups = |index| plan.planned_batch(index).len().div_ceil(group_len);
    (0..plan.len()).map(|index| n_groups(index).saturating_sub(1)).sum()
}

/// Splits the batch with the most padding, `n` times, at most [`n_splits`].
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn split_most_padded<L: SequenceLengths>(plan: &mut BatchPlan<L>, n: usize) {
    if n == 0 {
        return;
    }
    let group_len = plan.limits().group_len();
    // Ties go to the batch with the most tokens, then to the first.
    let priority = |plan: &BatchPlan<L>, index: usize| {
        let batch = plan.planned_batch(index);
        (plan.padded_tokens(batch) - batch.real_tokens, batch.real_tokens, Reverse(index))
    };
    let mut queue: BinaryHeap<_> = (0..plan.len()).map(|index| priority(plan, index)).collect();
    for _ in 0..n {
        let index = loop {
            let (_, _, Reverse(index)) = queue.pop().expect("a batch is left to split");
            if plan.planned_batch(index).len() > group_len {
                break index;
            }
        };
        plan.split(index, best_split(plan, index, group_len));
        queue.push(priority(plan, index));
        queue.push(priority(plan, plan.len() - 1));
    }
}

/// Returns the number of first sequences to split off for the least padding. The batch must have
/// more than one group.
#[expect(clippy::expect_used, reason = "only batches of several groups are split")]
fn best_split<L: SequenceLengths>(plan: &BatchPlan<L>, index: usize, group_len: usize) -> usize {
    let lengths = || plan.sequences(index).map(|sequence| sequence.length);
    let len = lengths().len();
    let longest_of_first = running_maxima(lengths());
    let longest_of_last = running_maxima(lengths().rev());
    let sizes = (group_len..len).step_by(group_len);
    let best = sizes.min_by_key(|&size| {
        let other = len - size;
        u128::from(longest_of_first[size - 1]) * size as u128
            + u128::from(longest_of_last[other - 1]) * other as u128
    });
    best.expect("there is a boundary between two groups")
}

/// Returns the maximum of the first number, of the first two, and so on.
fn running_maxima(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut maxima = Vec::new();
    let mut largest = 0;
    for number in numbers {
        largest = number.max(largest);
        maxima.push(largest);
    }
    maxima
}

/// Ensures that every batch has a sequence for each rank. At most one batch has fewer, because all
/// batches but the last have a multiple of the world size.
pub(crate) fn fill_small_batch<L: SequenceLengths>(
    plan: &mut BatchPlan<L>,
    world_size: WorldSize,
    remainder: StepRemainder,
) -> Result<()> {
    let n_ranks = world_size.as_usize();
    let Some(small) = (0..plan.len()).find(|&index| plan.planned_batch(index).len() < n_ranks)
    else {
        return Ok(());
    };
    match remainder {
        StepRemainder::Drop => plan.remove(small),
        StepRemainder::Repeat => plan.repeat(small, n_ranks),
        StepRemainder::Split => {
            let n_batches = plan.len() as u64;
            join_smallest(plan, small, n_ranks)
                .ok_or(Error::CannotFillStep { n_batches, world_size })?;
        }
    }
    Ok(())
}

/// Joins a batch with the smallest other batch, and splits the result in the middle if it is too
/// large for one batch. Returns `None` if there is no other batch, or if a half is still too small.
fn join_smallest<L: SequenceLengths>(
    plan: &mut BatchPlan<L>,
    small: usize,
    n_ranks: usize,
) -> Option<()> {
    let others = (0..plan.len()).filter(|&index| index != small);
    let smallest = others.min_by_key(|&index| plan.planned_batch(index).len())?;
    let both = plan.remove_pair(small, smallest);
    if plan.allows(&both) {
        plan.push(&both);
        return Some(());
    }
    let (first, second) = both.split_at(both.len() / 2);
    plan.push(first);
    plan.push(second);
    (first.len() >= n_ranks).then_some(())
}
