//! Orders for shards, such as files, where few shards are open at a time.
//!
//! The shards are concatenated in a random order. This line of samples is cut into lanes of equal
//! length, and the epoch takes one sample of each lane in turn. A lane reads its shards in
//! sequence, the samples of each in a random order. So about as many shards are open as there are
//! lanes, in any world, and rank r of W reads only lanes r, r + W, … if W divides their number.
//!
//! Odd lanes run backwards. The shard that two lanes share is then open in both at the same time,
//! at the start or at the end of the epoch. Without it, a node of several ranks fetches a fifth
//! more shards. Blocks of several shards that are shuffled as one, as in Mosaic's `py1e`, mix worse
//! than as many lanes.

use std::ops::Range;

use core_types::{Fingerprint, Seed};

use super::{
    exact,
    length::{part_at, push_starts},
    permutation::KeyedPermutation,
    table,
};
use crate::error::{Error, Result};

/// Limit on the number of shards: their indexes have 32 bits.
const MAX_SHARDS: u64 = (1 << 32) - 1;

/// The order of one epoch, 24 bytes per shard.
///
/// A slot is a place for a shard in the line; an offset in the line is a place for a sample.
#[derive(Clone, Debug)]
pub(crate) struct ShardedOrder {
    /// First sample of each shard, and the length.
    first_samples: Vec<u64>,
    shard_of_slot: Vec<u32>,
    slot_of_shard: Vec<u32>,
    /// First offset of each slot, and the length.
    first_offsets: Vec<u64>,
    lanes: u64,
    seed: Seed,
}

impl ShardedOrder {
    /// Creates the order of the epoch of `seed`.
    pub(super) fn new(shard_lens: &[u64], lanes: u64, seed: Seed) -> Result<Self> {
        let n_shards = shard_lens.len() as u64;
        if lanes == 0 {
            return Err(Error::NoLanes);
        }
        if n_shards > MAX_SHARDS {
            return Err(Error::TooMany { count: n_shards, what: "shards", max: MAX_SHARDS });
        }
        let mut first_samples = table::reserve(n_shards + 1)?;
        push_starts(shard_lens.iter().copied(), &mut first_samples)?;
        let mut slot_of_shard: Vec<u32> = table::reserve(n_shards)?;
        slot_of_shard.resize(shard_lens.len(), 0);
        let mut order = Self {
            first_samples,
            shard_of_slot: table::reserve(n_shards)?,
            slot_of_shard,
            first_offsets: table::reserve(n_shards + 1)?,
            lanes,
            seed,
        };
        order.deal(seed);
        Ok(order)
    }

    /// Deals the shards for the epoch of `seed`, reusing the memory.
    pub(super) fn deal(&mut self, seed: Seed) {
        let n_shards = self.slot_of_shard.len() as u64;
        exact::shuffle(&mut self.shard_of_slot, n_shards, seed.derive(0));
        self.first_offsets.clear();
        let mut offset = 0;
        for (slot, &shard) in (0..).zip(&self.shard_of_slot) {
            let shard = shard as usize;
            self.slot_of_shard[shard] = slot;
            self.first_offsets.push(offset);
            offset += self.first_samples[shard + 1] - self.first_samples[shard];
        }
        self.first_offsets.push(offset);
        self.seed = seed.derive(1);
    }

    #[expect(clippy::expect_used, reason = "the list of starts ends with the length")]
    pub(super) fn len(&self) -> u64 {
        *self.first_samples.last().expect("a length")
    }

    /// Returns a hash of the lengths of the shards and of the number of lanes.
    pub(super) fn fingerprint(&self) -> u64 {
        let words = self.first_samples.iter().copied().chain([self.lanes]);
        words.collect::<Fingerprint>().finish()
    }

    /// Returns the sample at `position`, which must be less than the length.
    pub(super) fn get(&self, position: u64) -> u64 {
        let lane = self.lane(position % self.lanes);
        let offset = lane.offset(position / self.lanes);
        let (slot, stretch) = self.stretch_at(&lane, offset);
        let shuffled = self.shuffle(&stretch).get(offset - stretch.start) + stretch.start;
        let shard = self.shard_of_slot[slot] as usize;
        self.first_samples[shard] + (shuffled - self.first_offsets[slot])
    }

    /// Returns the position of `sample`, or `None` if there is no such sample.
    pub(super) fn position(&self, sample: u64) -> Option<u64> {
        if sample >= self.len() {
            return None;
        }
        let shard = part_at(&self.first_samples, sample);
        let first_offset = self.first_offsets[self.slot_of_shard[shard] as usize];
        let offset = first_offset + (sample - self.first_samples[shard]);
        let lane = self.lane_at(offset);
        let (_, stretch) = self.stretch_at(&lane, offset);
        let offset = self.shuffle(&stretch).position(offset - stretch.start) + stretch.start;
        Some(lane.turn(offset) * self.lanes + lane.number)
    }

    /// Returns a lane; the first lanes have one sample more if the lanes do not divide the length.
    fn lane(&self, number: u64) -> Lane {
        let (size, extra) = (self.len() / self.lanes, self.len() % self.lanes);
        let start = number * size + number.min(extra);
        Lane { number, range: start..start + size + u64::from(number < extra) }
    }

    /// Returns the lane that contains `offset`.
    fn lane_at(&self, offset: u64) -> Lane {
        let (size, extra) = (self.len() / self.lanes, self.len() % self.lanes);
        let in_longer_lanes = extra * (size + 1);
        let number = if offset < in_longer_lanes {
            offset / (size + 1)
        } else {
            extra + (offset - in_longer_lanes) / size
        };
        self.lane(number)
    }

    /// Returns the slot that contains `offset`, and the lane's stretch of its shard.
    fn stretch_at(&self, lane: &Lane, offset: u64) -> (usize, Range<u64>) {
        let slot = part_at(&self.first_offsets, offset);
        let start = self.first_offsets[slot].max(lane.range.start);
        (slot, start..self.first_offsets[slot + 1].min(lane.range.end))
    }

    fn shuffle(&self, stretch: &Range<u64>) -> KeyedPermutation {
        KeyedPermutation::new(stretch.end - stretch.start, self.seed.derive(stretch.start))
    }
}

/// A stretch of the line that is read from one end to the other.
struct Lane {
    number: u64,
    range: Range<u64>,
}

impl Lane {
    fn is_backwards(&self) -> bool {
        self.number % 2 == 1
    }

    /// Returns the offset of the lane's sample number `turn`.
    fn offset(&self, turn: u64) -> u64 {
        if self.is_backwards() { self.range.end - 1 - turn } else { self.range.start + turn }
    }

    /// Returns the number of the lane's sample at `offset`.
    fn turn(&self, offset: u64) -> u64 {
        if self.is_backwards() { self.range.end - 1 - offset } else { offset - self.range.start }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn first_values_are_pinned() {
        let order = ShardedOrder::new(&[3, 0, 4, 2], 2, Seed::new(1)).unwrap();
        let samples: Vec<u64> = (0..9).map(|position| order.get(position)).collect();
        assert_eq!(samples, [0, 8, 1, 7, 2, 5, 3, 6, 4]);
    }

    #[test]
    fn invalid_shards_are_rejected() {
        let error =
            |lens: &[u64], lanes| ShardedOrder::new(lens, lanes, Seed::default()).unwrap_err();
        assert_eq!(error(&[], 1), Error::EmptyDataSet);
        assert_eq!(error(&[0, 0], 1), Error::EmptyDataSet);
        assert_eq!(error(&[3], 0), Error::NoLanes);
        let max = 1 << 63;
        let too_long = Error::DataSetTooLong { len: u64::MAX, max };
        assert_eq!(error(&[u64::MAX, 1], 1), too_long);
    }

    /// Returns the shard of each sample that a rank of `world` reads, in order.
    fn shards_read(order: &ShardedOrder, rank: usize, world: usize) -> Vec<usize> {
        let positions = (rank as u64..order.len()).step_by(world);
        positions.map(|position| part_at(&order.first_samples, order.get(position))).collect()
    }

    /// Returns the number of shards that are read both at or before `turn` and at or after it.
    fn count_open(shards: &[usize], turn: usize) -> usize {
        let begun: BTreeSet<usize> = shards[..=turn].iter().copied().collect();
        let unfinished: BTreeSet<usize> = shards[turn..].iter().copied().collect();
        begun.intersection(&unfinished).count()
    }

    #[test]
    fn ranks_open_few_shards() {
        const LANES: usize = 16;
        let lens: Vec<u64> = (0..100).map(|shard| 50 + shard * 37 % 100).collect();
        let order = ShardedOrder::new(&lens, LANES as u64, Seed::new(3)).unwrap();
        for world in [1, 2, 4, 8, 16] {
            let mut n_fetched = 0;
            for rank in 0..world {
                let shards = shards_read(&order, rank, world);
                for turn in (0..shards.len()).step_by(97) {
                    assert!(count_open(&shards, turn) <= LANES / world, "{turn}, {world}");
                }
                n_fetched += shards.iter().collect::<BTreeSet<_>>().len();
            }
            assert!(n_fetched <= lens.len() + LANES, "{n_fetched} shards for {world} ranks");
        }
    }
}
