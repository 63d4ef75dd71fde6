//! Batches made to go round: their number, and what each costs.

use std::{cmp::Reverse, collections::BinaryHeap};

use core_types::WorldSize;

use crate::{
    config::Cost,
    distributed::config::StepRemainder,
    error::{Error, Result},
    lengths::SequenceLengths,
    sampler::plan::BatchPlan,
};

/// The batches of all ranks, the most expensive first: as many as there are, or a few more or
/// fewer, so that the world size divides their number.
pub(crate) fn batches_by_cost<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    world_size: WorldSize,
    remainder: StepRemainder,
    cost: Cost,
) -> Result<Vec<u32>> {
    let n_batches = plan.len();
    let n_ranks = world_size.as_usize();
    let surplus = n_batches % n_ranks;
    let missing = if surplus == 0 { 0 } else { n_ranks - surplus };
    let mut n_repeats = 0;
    match remainder {
        StepRemainder::Split => split_most_padded(plan, missing)
            .ok_or(Error::CannotFillStep { n_batches: n_batches as u64, world_size })?,
        StepRemainder::Drop => (0..surplus).for_each(|_| plan.remove(plan.len() - 1)),
        StepRemainder::Repeat => n_repeats = missing,
    }
    let repeats = plan.numbers().cycle().take(n_repeats);
    let mut batches: Vec<u32> = plan.numbers().chain(repeats).collect();
    let costs: Vec<u64> = (0..plan.len()).map(|nth| cost_of(plan, nth, cost)).collect();
    batches.sort_unstable_by_key(|&nth| (Reverse(costs[nth as usize]), nth));
    Ok(batches)
}

/// What a batch costs: that of its rows, or of the sequences in them if they are packed.
fn cost_of<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, cost: Cost) -> u64 {
    if plan.limits().is_packing() {
        let costs = plan.sequences(nth).map(|sequence| cost.of(sequence.length));
        return costs.fold(0, u64::saturating_add);
    }
    let batch = plan.planned(nth);
    cost.of(batch.padded_length).saturating_mul(batch.len() as u64)
}

/// Splits `n` batches, each time the one with the most padding; `None` if none can be split any
/// more.
fn split_most_padded<L: SequenceLengths>(plan: &mut BatchPlan<'_, L>, n: usize) -> Option<()> {
    if n == 0 {
        return Some(());
    }
    let group_len = plan.limits().group_len();
    // At equal padding the one with the most tokens, then the first one.
    let entry = |plan: &BatchPlan<'_, L>, nth: usize| {
        let batch = plan.planned(nth);
        (plan.padded_tokens(batch) - batch.real_tokens, batch.real_tokens, Reverse(nth))
    };
    let mut padded: BinaryHeap<_> = (0..plan.len()).map(|nth| entry(plan, nth)).collect();
    for _ in 0..n {
        let nth = loop {
            let (_, _, Reverse(nth)) = padded.pop()?;
            if plan.planned(nth).len() > group_len {
                break nth;
            }
        };
        plan.split(nth, best_split(plan, nth, group_len));
        padded.extend([nth, plan.len() - 1].map(|nth| entry(plan, nth)));
    }
    Some(())
}

/// How many of the first sequences make a batch of their own so that both have the least padding;
/// the batch holds more than one group.
#[expect(clippy::expect_used, reason = "only batches of several groups are split")]
fn best_split<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, group_len: usize) -> usize {
    let lengths = || plan.sequences(nth).map(|sequence| sequence.length);
    let len = lengths().len();
    let longest_of_first = running_maxima(lengths());
    let longest_of_last = running_maxima(lengths().rev());
    let tokens = |size: usize| {
        let other = len - size;
        u128::from(longest_of_first[size - 1]) * size as u128
            + u128::from(longest_of_last[other - 1]) * other as u128
    };
    let sizes = (group_len..len).step_by(group_len);
    sizes.min_by_key(|&size| tokens(size)).expect("there is a border between two groups")
}

/// The largest of the first number, of the first two, and so on.
fn running_maxima(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut largest = 0;
    numbers
        .map(|number| {
            largest = number.max(largest);
            largest
        })
        .collect()
}

/// Makes sure that every batch has a sequence for each rank. At most one has not, since batches
/// hold multiples of the world size except for the last one.
pub(crate) fn fill_small_batch<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    world_size: WorldSize,
    remainder: StepRemainder,
) -> Result<()> {
    let n_ranks = world_size.as_usize();
    let Some(small) = (0..plan.len()).find(|&nth| plan.planned(nth).len() < n_ranks) else {
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

/// Joins a batch to the smallest other one, and splits both in the middle if they are too many for
/// one batch; `None` if there is no other, or a half is still too small.
fn join_smallest<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    small: usize,
    n_ranks: usize,
) -> Option<()> {
    let others = (0..plan.len()).filter(|&nth| nth != small);
    let smallest = others.min_by_key(|&nth| plan.planned(nth).len())?;
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
