//! Batches made to go round: their number, and what each costs.

use std::{cmp::Reverse, collections::BinaryHeap};

use core_types::WorldSize;

use crate::{BatchPlan, Cost, Error, Result, SequenceLengths, StepRemainder};

/// What is to be known of each batch of a plan.
#[derive(Clone, Copy, Debug)]
struct Totals {
    padding: u64,
    real_tokens: u64,
    cost: u64,
}

/// The batches of all ranks, the most expensive first: as many as there are, or a few more or fewer, so that the world
/// size divides their number.
pub(crate) fn batches_by_cost<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    world_size: WorldSize,
    remainder: StepRemainder,
    cost: Cost,
) -> Result<Vec<u32>> {
    let mut totals: Vec<Totals> = (0..plan.len()).map(|nth| of_batch(plan, nth, cost)).collect();
    let (n_batches, n_ranks) = (plan.len(), world_size.as_usize());
    let surplus = n_batches % n_ranks;
    let missing = if surplus == 0 { 0 } else { n_ranks - surplus };
    match remainder {
        StepRemainder::Split => split_most_padded(plan, &mut totals, missing, cost)
            .ok_or(Error::CannotFillStep { n_batches: n_batches as u64, world_size })?,
        StepRemainder::Drop => (0..surplus).for_each(|_| plan.remove(plan.len() - 1)),
        StepRemainder::Repeat => {}
    }
    let repeats = if remainder == StepRemainder::Repeat { missing } else { 0 };
    let all = 0..u32::try_from(plan.len()).unwrap_or(u32::MAX);
    let mut batches: Vec<u32> = all.clone().chain(all.cycle().take(repeats)).collect();
    batches.sort_unstable_by_key(|&nth| (Reverse(totals[nth as usize].cost), nth));
    Ok(batches)
}

fn of_batch<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, cost: Cost) -> Totals {
    let (mut longest, mut real_tokens, mut of_sequences) = (0, 0, 0_u64);
    let sequences = plan.sequences(nth);
    let rows = sequences.len() as u64;
    for sequence in sequences {
        longest = sequence.length.max(longest);
        real_tokens += sequence.length;
        of_sequences = of_sequences.saturating_add(cost.of(sequence.length));
    }
    if plan.limits().is_packing() {
        let padding = plan.limits().max_tokens() - real_tokens;
        return Totals { padding, real_tokens, cost: of_sequences };
    }
    let padded_length = plan.limits().padded_length(longest);
    let padding = padded_length.saturating_mul(rows).saturating_sub(real_tokens);
    Totals { padding, real_tokens, cost: cost.of(padded_length).saturating_mul(rows) }
}

/// Splits `n` batches, each time the one with the most padding; `None` if none can be split any more.
fn split_most_padded<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    totals: &mut Vec<Totals>,
    n: usize,
    cost: Cost,
) -> Option<()> {
    if n == 0 {
        return Some(());
    }
    let group_len = plan.limits().group_len();
    // At equal padding the one with the most tokens, then the first one.
    let entry = |totals: &[Totals], nth: usize| (totals[nth].padding, totals[nth].real_tokens, Reverse(nth));
    let mut padded: BinaryHeap<_> = (0..plan.len()).map(|nth| entry(totals, nth)).collect();
    for _ in 0..n {
        let nth = loop {
            let (_, _, Reverse(nth)) = padded.pop()?;
            if plan.sequences(nth).len() > group_len {
                break nth;
            }
        };
        plan.split(nth, best_split(plan, nth, group_len));
        totals[nth] = of_batch(plan, nth, cost);
        totals.push(of_batch(plan, plan.len() - 1, cost));
        padded.extend([nth, plan.len() - 1].map(|nth| entry(totals, nth)));
    }
    Some(())
}

/// How many of the first sequences make a batch of their own so that both have the least padding.
fn best_split<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, group_len: usize) -> usize {
    let lengths: Vec<u64> = plan.sequences(nth).map(|sequence| sequence.length).collect();
    let longest = |lengths: &mut dyn Iterator<Item = &u64>| -> Vec<u64> {
        lengths
            .scan(0, |longest, &length| {
                *longest = length.max(*longest);
                Some(*longest)
            })
            .collect()
    };
    let of_first = longest(&mut lengths.iter());
    let of_last = longest(&mut lengths.iter().rev());
    let tokens = |size: usize| {
        let other = lengths.len() - size;
        u128::from(of_first[size - 1]) * size as u128 + u128::from(of_last[other - 1]) * other as u128
    };
    (group_len..lengths.len()).step_by(group_len).min_by_key(|&size| tokens(size)).unwrap_or(group_len)
}

/// Makes sure that every batch has a sequence for each rank. One that has not is joined to the smallest other.
pub(crate) fn fill_small_batch<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    world_size: WorldSize,
    remainder: StepRemainder,
) -> Result<()> {
    let n_ranks = world_size.as_usize();
    let Some(small) = (0..plan.len()).find(|&nth| plan.sequences(nth).len() < n_ranks) else { return Ok(()) };
    match remainder {
        StepRemainder::Drop => plan.remove(small),
        StepRemainder::Repeat => plan.repeat(small, n_ranks),
        StepRemainder::Split => {
            let too_few = Error::CannotFillStep { n_batches: plan.len() as u64, world_size };
            let others = (0..plan.len()).filter(|&nth| nth != small);
            let Some(smallest) = others.min_by_key(|&nth| plan.sequences(nth).len()) else { return Err(too_few) };
            let joined = plan.join(small, smallest);
            let batch = plan.batch(joined);
            if batch.rows > plan.limits().max_rows(batch.padded_length) {
                plan.split(joined, batch.len() / 2);
                if batch.len() / 2 < n_ranks {
                    return Err(too_few);
                }
            }
        }
    }
    Ok(())
}
