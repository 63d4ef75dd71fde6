//! From one plan to another: which bytes stay, and which move from where to where.

use std::{cmp::Reverse, collections::BTreeMap, iter, ops::Range};

use core_types::{Placement, Rank};
use serde::Serialize;

use crate::{
    arithmetic::index,
    error::{Error, Result},
    plan::{PlannedParameter, ShardingPlan, ShardsOfRank},
};

/// What has to move when a model that is sharded by one plan is to be sharded by another: to resume
/// with another number of ranks, or to load a sharded checkpoint into another layout.
///
/// Both plans are of the same parameters, in the same order. By default the ranks of the new plan
/// run where the ranks of the same number ran before, and ranks above them are new;
/// [`renumbered`](Self::renumbered) places them better. [`ShardingPlan::resized`] makes the new
/// plan that moves the least.
///
/// To load a checkpoint of the old plan, rank r of the new one reads what
/// [`moves_to`](Self::moves_to) lists for it, and what stays: from the file of rank `from`, at
/// `start` less where that rank's [shard](ShardingPlan::shards) begins.
///
/// A byte stays if it is needed where it already was. Of several replicas that hold what a rank
/// lacks, a rank takes it from one that depends on its own replica, so that all of them send.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     reshard::Reshard,
///     strategy::{Full, ShardingStrategy},
/// };
///
/// let parameters = [ParameterInfo::new("fc.weight", [16, 4], ElemType::F32)?];
/// let plan = |world_size| Full::default().plan(&parameters, WorldSize::new(world_size)?);
/// let (eight, sixteen) = (plan(8)?, plan(16)?);
///
/// // Rank 1 had rows 2 and 3 and is to have row 1, and so on: only the first row stays.
/// let reshard = Reshard::new(&eight, &sixteen)?;
/// let first = reshard.moves().next().unwrap();
/// assert_eq!(
///     (first.param_idx, first.bytes, first.from.as_u64(), first.to.as_u64()),
///     (0, 16, 0, 1)
/// );
/// assert_eq!(reshard.volume().stay_bytes, 16);
///
/// // With the new ranks placed where their rows are, half of all bytes stay: as much as can.
/// let volume = reshard.renumbered().volume();
/// assert_eq!((volume.stay_bytes, volume.move_bytes), (128, 128));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reshard<'a> {
    from: &'a ShardingPlan,
    to: &'a ShardingPlan,
    /// Where each rank of the new plan runs: the number that its place has, or had, among the old
    /// ranks.
    places: Vec<u64>,
}

/// Bytes of a parameter that one rank needs and another has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Move {
    /// The position of the parameter in both plans.
    pub param_idx: usize,
    /// The first byte of the parameter that moves.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// A rank of the old plan, which has them.
    pub from: Rank,
    /// A rank of the new plan, which needs them.
    pub to: Rank,
}

/// How much moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Volume {
    /// Bytes that are needed where they are, copies included.
    pub stay_bytes: u128,
    /// Bytes that are needed elsewhere, copies included.
    pub move_bytes: u128,
    /// The number of [`Move`]s.
    pub moves: u64,
}

/// A run of elements with the members that have it and that need it; `None` stands for everyone.
#[derive(Clone, Debug)]
struct Overlap {
    part: Range<u64>,
    old: Option<u64>,
    new: Option<u64>,
}

impl<'a> Reshard<'a> {
    /// Compares two plans.
    ///
    /// # Errors
    ///
    /// [`Error::DifferentParameters`] if they are not of the same names, shapes and dtypes in the
    /// same order.
    pub fn new(from: &'a ShardingPlan, to: &'a ShardingPlan) -> Result<Self> {
        let different = |parameter: &PlannedParameter, what| {
            let name = parameter.info().name().to_owned();
            Err(Error::DifferentParameters { name, what })
        };
        for (old, new) in from.parameters().iter().zip(to.parameters()) {
            let one = old.info();
            let other = new.info();
            if one.name() != other.name() {
                return different(new, "it is not at the same position in both");
            }
            if (one.shape(), one.dtype()) != (other.shape(), other.dtype()) {
                return different(new, "shape or dtype");
            }
        }
        let old_len = from.parameters().len();
        let new_len = to.parameters().len();
        match from.parameters().get(new_len).or(to.parameters().get(old_len)) {
            Some(parameter) => different(parameter, "only one has it"),
            None => Ok(Self { from, to, places: (0..to.world_size().as_u64()).collect() }),
        }
    }

    /// Places the ranks of the new plan where much of what they need already is.
    ///
    /// Pairs of an old and a new rank are taken from the one that shares the most bytes to the one
    /// that shares the fewest, so at least half as many bytes stay as with the best placement. New
    /// ranks that find no place take those that are left, in order. [`place_of`](Self::place_of)
    /// tells where each runs.
    ///
    /// # Complexity
    ///
    /// That of looking at each [`Move`], and O(s log s) for s pairs that share something.
    #[must_use]
    pub fn renumbered(mut self) -> Self {
        let mut shared: BTreeMap<(u64, u64), u128> = BTreeMap::new();
        for (param_idx, overlap) in self.all_overlaps() {
            if let (Some(old), Some(new)) = (overlap.old, overlap.new) {
                *shared.entry((old, new)).or_default() +=
                    u128::from(self.bytes(param_idx, &overlap.part));
            }
        }
        let mut pairs: Vec<_> = shared.into_iter().collect();
        pairs.sort_by_key(|&((old, new), bytes)| (Reverse(bytes), old, new));
        let mut old_of = vec![None; self.to.shard_group().as_usize()];
        let mut is_taken = vec![false; self.from.shard_group().as_usize()];
        for ((old, new), _) in pairs {
            let is_taken = &mut is_taken[index(old)];
            let old_of = &mut old_of[index(new)];
            if !*is_taken && old_of.is_none() {
                (*is_taken, *old_of) = (true, Some(old));
            }
        }
        self.places = places(self.from, self.to, &old_of);
        self
    }

    /// Where `rank` of the new plan runs: where the old rank of that number ran, or at a place of
    /// its own if there was no such rank.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if the new plan has no such rank.
    pub fn place_of(&self, rank: Rank) -> Result<u64> {
        Ok(self.places
            [Placement::new(rank.as_u64(), self.to.world_size().as_u64())?.rank().as_usize()])
    }

    /// Every move, by parameter and position in it.
    ///
    /// # Complexity
    ///
    /// Linear in the number of parts of both plans, and nothing is stored.
    pub fn moves(&self) -> impl Iterator<Item = Move> {
        self.all_overlaps().flat_map(move |(param_idx, overlap)| {
            let ranks = self.needed_by(&overlap);
            ranks.filter_map(move |rank| self.to_move(param_idx, &overlap, rank))
        })
    }

    /// What `rank` of the new plan has to get, by parameter and position in it.
    ///
    /// # Complexity
    ///
    /// Linear in the number of parameters and of moves to this rank, whatever the world sizes.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if the new plan has no such rank.
    pub fn moves_to(&self, rank: Rank) -> Result<impl Iterator<Item = Move>> {
        let mut shards = ShardsOfRank::new(self.to, rank, 0..self.to.parameters().len())?;
        let shards = iter::from_fn(move || shards.next_shard());
        Ok(shards.flat_map(move |(param_idx, shard)| {
            let part = shard.start_offset..shard.start_offset + shard.shard_size;
            let overlaps = self.overlaps(param_idx, part, None);
            overlaps.filter_map(move |overlap| self.to_move(param_idx, &overlap, rank.as_u64()))
        }))
    }

    /// How much moves, and how much stays.
    pub fn volume(&self) -> Volume {
        let mut volume = Volume::default();
        for (param_idx, overlap) in self.all_overlaps() {
            let bytes = u128::from(self.bytes(param_idx, &overlap.part));
            for rank in self.needed_by(&overlap) {
                if self.source(&overlap, rank) == self.places[index(rank)] {
                    volume.stay_bytes += bytes;
                } else {
                    volume.move_bytes += bytes;
                    volume.moves += 1;
                }
            }
        }
        volume
    }

    fn all_overlaps(&self) -> impl Iterator<Item = (usize, Overlap)> {
        self.to.parameters().iter().enumerate().flat_map(move |(param_idx, parameter)| {
            let needed = parameter.division().parts(self.to.shares(), 0..parameter.info().numel());
            let overlaps =
                needed.into_iter().flat_map(move |(new, part)| self.overlaps(param_idx, part, new));
            overlaps.map(move |overlap| (param_idx, overlap))
        })
    }

    /// The parts of `part` with their old owners; `new` needs all of them.
    fn overlaps(
        &self,
        param_idx: usize,
        part: Range<u64>,
        new: Option<u64>,
    ) -> impl Iterator<Item = Overlap> + use<> {
        let had = self.from.parameters()[param_idx].division().parts(self.from.shares(), part);
        had.into_iter().map(move |(old, part)| Overlap { part, old, new })
    }

    /// The numbers of the new ranks that need an overlap: one of each replica, or all.
    fn needed_by(&self, overlap: &Overlap) -> impl Iterator<Item = u64> + use<> {
        let (first, step) = match overlap.new {
            Some(member) => (member, self.to.shard_group().as_usize()),
            None => (0, 1),
        };
        (first..self.to.world_size().as_u64()).step_by(step)
    }

    /// The old rank from which the new rank `rank` takes an overlap: the one at its place if that
    /// has it.
    fn source(&self, overlap: &Overlap, rank: u64) -> u64 {
        let place = self.places[index(rank)];
        let old_world = self.from.world_size().as_u64();
        let old_group = self.from.shard_group().as_u64();
        let replica = rank / self.to.shard_group().as_u64() % self.from.replicas();
        match overlap.old {
            None => place % old_world,
            Some(member) if place < old_world && place % old_group == member => place,
            Some(member) => replica * old_group + member,
        }
    }

    /// The move that brings an overlap to the new rank `rank`; `None` if it is there already.
    fn to_move(&self, param_idx: usize, overlap: &Overlap, rank: u64) -> Option<Move> {
        let source = self.source(overlap, rank);
        if source == self.places[index(rank)] {
            return None;
        }
        Some(Move {
            param_idx,
            start: self.bytes(param_idx, &(0..overlap.part.start)),
            bytes: self.bytes(param_idx, &overlap.part),
            from: rank_of(self.from, source),
            to: rank_of(self.to, rank),
        })
    }

    fn bytes(&self, param_idx: usize, part: &Range<u64>) -> u64 {
        self.from.parameters()[param_idx].info().dtype().bytes_of_blocks(part.end - part.start)
    }
}

#[expect(clippy::expect_used, reason = "sources and ranks are computed modulo the world")]
fn rank_of(plan: &ShardingPlan, rank: u64) -> Rank {
    Placement::new(rank, plan.world_size().as_u64()).expect("a rank of the plan's world").rank()
}

/// The place of each new rank: that of the old member that `old_of` pairs its own member with, in
/// the replica of the same number, or else the first place that is free.
fn places(from: &ShardingPlan, to: &ShardingPlan, old_of: &[Option<u64>]) -> Vec<u64> {
    let old_world = from.world_size().as_u64();
    let new_world = to.world_size().as_u64();
    let old_group = from.shard_group().as_u64();
    let new_group = to.shard_group().as_u64();
    let paired = |rank: u64| {
        let member = rank % new_group;
        let replica = rank / new_group;
        let old = old_of[index(member)].filter(|_| replica < from.replicas())?;
        Some(replica * old_group + old)
    };
    let paired: Vec<Option<u64>> = (0..new_world).map(paired).collect();
    let mut is_free = vec![true; index(old_world.max(new_world))];
    paired.iter().flatten().for_each(|&place| is_free[index(place)] = false);
    let mut free = (0..).zip(is_free).filter(|&(_, is_free)| is_free).map(|(place, _)| place);
    #[expect(clippy::expect_used, reason = "there are at least as many places as new ranks")]
    let mut next_free = || free.next().expect("every pair takes one place");
    paired.into_iter().map(|place| place.unwrap_or_else(&mut next_free)).collect()
}
