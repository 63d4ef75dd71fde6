//! Fisher and Yates' swaps, in a table that is larger than the cache.
//!
//! Each slot in turn changes places with one from it on. Done one after the other, nearly every
//! swap waits for a line of memory and for the address of its page. But the order of two swaps
//! matters only where they share a slot. So of many slots in a row, here called a batch,
//!
//! - swaps among the slots of the batch come first, in turn. Then each slot holds what it gives
//!   away, since all swaps that bring something into it are of slots before it;
//! - then the others, sorted by the part of the table that they reach into, in turn within each
//!   part. The pages of a part are few, and stay known while it is worked on.
//!
//! The result is that of the plain loop. Of 10^8 slots it takes 1.7 s, where swaps in turn with
//! reads ahead take 2.1 s (Sapphire Rapids, 4 KiB pages).

use std::hint::black_box;

/// The slots of a batch. A multiple of the words that PyTorch's generator makes at a time; half or
/// twice as many are as fast, and a quarter or four times as many take a tenth longer.
pub(super) const BATCH: usize = 420 * 624;

/// A part is 2^18 slots, 1 MiB; between 2^17 and 2^20 it makes no difference.
const PART_BITS: u32 = 18;

/// Tables up to here are worked on as one part: what is sorted is worth no more than it costs.
const ONE_PART: usize = 1 << 23;

/// How many swaps are read ahead; see [`swap_ahead`].
const AHEAD: usize = 512;

/// Swaps each slot in turn with its partner, one of the slots from it on.
///
/// `draw(start, partners)` writes the partners of the slots from `start` on; it is asked for
/// [`BATCH`] of them at a time, and for what is left at the end.
pub(super) fn shuffle(table: &mut [u32], mut draw: impl FnMut(usize, &mut [u32])) {
    let len = table.len();
    let mut partners = vec![0; BATCH.min(len)];
    let mut parts = (ONE_PART < len).then(|| Parts::new(len));
    for start in (0..len).step_by(BATCH) {
        let partners = &mut partners[..BATCH.min(len - start)];
        draw(start, partners);
        match &mut parts {
            Some(parts) => parts.swap(table, start, partners),
            None => in_turn(table, start, partners),
        }
    }
}

fn in_turn(table: &mut [u32], start: usize, partners: &[u32]) {
    for (start, partners) in (start..).step_by(AHEAD).zip(partners.chunks(AHEAD)) {
        swap_ahead(table, (start..).zip(partners.iter().map(|&partner| partner as usize)));
    }
}

/// Makes swaps, in the order in which they are given.
///
/// All partners are read once before the first swap, which brings them into the cache. These loads
/// do not depend on each other, so the processor has many of them under way at once; the stores
/// between the loads of the swaps would hinder it. Any 300 to 1,200 swaps at a time are as fast. 16
/// take half as long again, and 10,000 a third: they no longer stay where they were brought.
pub(super) fn swap_ahead(table: &mut [u32], swaps: impl Iterator<Item = (usize, usize)> + Clone) {
    for (_, partner) in swaps.clone() {
        black_box(table[partner]);
    }
    for (slot, partner) in swaps {
        table.swap(slot, partner);
    }
}

/// The memory to sort the swaps of a batch by the part that they reach into.
struct Parts {
    /// How many swaps there are up to each part, and then where the next one of each part goes.
    ends: Vec<usize>,
    sorted: Vec<(u32, u32)>,
}

impl Parts {
    fn new(len: usize) -> Self {
        Self { ends: vec![0; part(len) + 1], sorted: vec![(0, 0); BATCH] }
    }

    fn swap(&mut self, table: &mut [u32], start: usize, partners: &[u32]) {
        let n_far = self.sort(table, start, partners);
        for swaps in self.sorted[..n_far].chunks(AHEAD) {
            let swaps = swaps.iter().map(|&(slot, partner)| (slot as usize, partner as usize));
            swap_ahead(table, swaps);
        }
    }

    /// Makes the swaps among the slots of a batch, sorts the others, and returns how many these
    /// are.
    #[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
    fn sort(&mut self, table: &mut [u32], start: usize, partners: &[u32]) -> usize {
        let end = start + partners.len();
        self.ends.fill(0);
        for (slot, &partner) in (start..).zip(partners) {
            let partner = partner as usize;
            if partner < end {
                table.swap(slot, partner);
            } else {
                self.ends[part(partner)] += 1;
            }
        }
        let mut n_far = 0;
        for end in &mut self.ends {
            n_far += std::mem::replace(end, n_far);
        }
        for (slot, &partner) in (start as u32..).zip(partners) {
            if end <= partner as usize {
                let next = &mut self.ends[part(partner as usize)];
                self.sorted[*next] = (slot, partner);
                *next += 1;
            }
        }
        n_far
    }
}

fn part(slot: usize) -> usize {
    slot >> PART_BITS
}

#[cfg(test)]
mod tests {
    use core_types::Seed;

    use super::*;

    #[test]
    fn parts_do_what_swaps_in_turn_do() {
        for len in [1, 2, 1000, (1 << PART_BITS) + 1, BATCH - 1, 3 * BATCH + 7] {
            // The less far swaps reach, the more of them share a slot with another.
            for reach in [1, 3, 1000, BATCH as u64, u64::MAX] {
                let draw = |slot: usize| {
                    let most = ((len - slot) as u64).min(reach);
                    slot + usize::try_from(Seed::new(reach).derive(slot as u64).as_u64() % most)
                        .unwrap()
                };
                let mut expected: Vec<u32> = (0..u32::try_from(len).unwrap()).collect();
                (0..len).for_each(|slot| expected.swap(slot, draw(slot)));

                let partners: Vec<u32> =
                    (0..len).map(|slot| u32::try_from(draw(slot)).unwrap()).collect();
                let mut table: Vec<u32> = (0..u32::try_from(len).unwrap()).collect();
                let mut parts = Parts::new(len);
                for (start, partners) in (0..).step_by(BATCH).zip(partners.chunks(BATCH)) {
                    parts.swap(&mut table, start, partners);
                }
                assert!(table == expected, "{len} slots, swaps that reach {reach} slots");

                let mut table: Vec<u32> = (0..u32::try_from(len).unwrap()).collect();
                shuffle(&mut table, |start, slots| {
                    slots.copy_from_slice(&partners[start..start + slots.len()]);
                });
                assert!(table == expected, "{len} slots in turn, {reach}");
            }
        }
    }
}
