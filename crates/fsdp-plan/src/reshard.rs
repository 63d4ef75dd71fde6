//! The bytes that stay and the bytes that move when one plan replaces another.

use std::{cmp::Reverse, collections::BTreeMap, ops::Range};

use core_types::{Placement, Rank};
use serde::Serialize;

use crate::{
    arithmetic::index,
    error::{Error, Result},
    plan::{PlannedParameter, ShardingPlan},
};

/// The transfers needed to change a sharded model from one plan to another, for example to resume
/// with another number of ranks or to load a sharded checkpoint into another layout.
///
/// Both plans must have the same parameters in the same order. By default rank n of the new plan
/// runs where rank n of the old plan ran, and ranks beyond the old world are new.
/// [`renumbered`](Self::renumbered) finds a better assignment.
///
/// To load a checkpoint of the old plan, rank r of the new plan reads the [`moves`](Self::moves) to it
/// and the ranges that stay. A range is in the file of rank `from`, at `start` minus the start of that
/// rank's [shard](ShardingPlan::shard).
///
/// A byte stays if its new rank already has it. If several replicas have bytes that a rank needs,
/// the source replica depends on the rank's own replica, so that all replicas share the sending.
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
/// // Rank 1 had rows 2 and 3 and needs row 1, and so on: only the first row stays.
/// let reshard = Reshard::new(&eight, &sixteen)?;
/// let first = reshard.moves().next().unwrap();
/// assert_eq!(
///     (first.param_idx, first.bytes, first.from.as_u64(), first.to.as_u64()),
///     (0, 16, 0, 1)
/// );
/// assert_eq!(reshard.volume().stay_bytes, 16);
///
/// // With each new rank where its rows are, half of the bytes stay, which is the optimum.
/// let volume = reshard.renumbered().volume();
/// assert_eq!((volume.stay_bytes, volume.move_bytes), (128, 128));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reshard<'a> {
    from: &'a ShardingPlan,
    to: &'a ShardingPlan,
    /// Place of each new rank: the number of the old rank that runs there, or a new number.
    places: Vec<u64>,
}

/// A byte range of a parameter that moves from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct ShardMove {
    /// Index of the parameter in both plans.
    pub param_idx: usize,
    /// First byte of the range within the parameter.
    pub start: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Rank of the old plan that has the bytes.
    pub from: Rank,
    /// Rank of the new plan that needs the bytes.
    pub to: Rank,
}

/// The total bytes that stay and move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct MoveVolume {
    /// Bytes that stay, copies included.
    pub stay_bytes: u128,
    /// Bytes that move, copies included.
    pub move_bytes: u128,
    /// Number of [`ShardMove`]s.
    pub moves: u64,
}

/// A range of elements with one old and one new owner; `None` means every rank.
#[derive(Clone, Debug)]
struct OwnedOverlap {
    range: Range<u64>,
    old: Option<u64>,
    new: Option<u64>,
}

impl<'a> Reshard<'a> {
    /// Compares two plans.
    ///
    /// # Errors
    ///
    /// [`Error::ParameterMismatch`] if names, shapes or dtypes differ, or their order.
    pub fn new(from: &'a ShardingPlan, to: &'a ShardingPlan) -> Result<Self> {
        let different = |parameter: &PlannedParameter, what| {
            let name = parameter.info().name().to_owned();
            Err(Error::ParameterMismatch { name, what })
        };
        for (old, new) in from.parameters().iter().zip(to.parameters()) {
            let one = old.info();
            let other = new.info();
            if one.name() != other.name() {
                return different(new, "its position");
            }
            if (one.shape(), one.dtype()) != (other.shape(), other.dtype()) {
                return different(new, "shape or dtype");
            }
        }
        let old_len = from.parameters().len();
        let new_len = to.parameters().len();
        match from.parameters().get(new_len).or(to.parameters().get(old_len)) {
            Some(parameter) => different(parameter, "only one plan has it"),
            None => Ok(Self { from, to, places: (0..to.world_size().as_u64()).collect() }),
        }
    }

    /// Assigns the ranks of the new plan to places that already have many of the bytes they need.
    ///
    /// Pairs of an old and a new rank are chosen greedily, from the most shared bytes to the
    /// fewest, so at least half as many bytes stay as in the best assignment. Unpaired new ranks
    /// take the remaining places in order. [`place_of`](Self::place_of) returns the place of each.
    ///
    /// # Complexity
    ///
    /// Linear in the number of moves, plus O(s log s) for s pairs that share bytes.
    #[must_use]
    pub fn renumbered(mut self) -> Self {
        let mut shared: BTreeMap<(u64, u64), u128> = BTreeMap::new();
        for (param_idx, overlap) in self.all_overlaps() {
            if let (Some(old), Some(new)) = (overlap.old, overlap.new) {
                *shared.entry((old, new)).or_default() +=
                    u128::from(self.bytes(param_idx, &overlap.range));
            }
        }
        let mut pairs: Vec<_> = shared.into_iter().collect();
        pairs.sort_by_key(|&((old, new), bytes)| (Reverse(bytes), old, new));
        let mut partners = vec![None; self.to.shard_group().as_usize()];
        let mut is_taken = vec![false; self.from.shard_group().as_usize()];
        for ((old, new), _) in pairs {
            if !is_taken[index(old)] && partners[index(new)].is_none() {
                is_taken[index(old)] = true;
                partners[index(new)] = Some(old);
            }
        }
        self.places = places(self.from, self.to, &partners);
        self
    }

    /// Returns the place of `rank` of the new plan: the number of the old rank that ran there, or a
    /// new number.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if the new plan has no such rank.
    #[doc(hidden)]
    pub fn place_of(&self, rank: Rank) -> Result<u64> {
        let place = Placement::new(rank.as_u64(), self.to.world_size().as_u64())?;
        Ok(self.places[place.rank().as_usize()])
    }

    /// Returns all moves, ordered by parameter and position in it.
    ///
    /// # Complexity
    ///
    /// Linear in the number of shards of both plans. Nothing is stored.
    pub fn moves(&self) -> impl Iterator<Item = ShardMove> {
        self.all_overlaps().flat_map(move |(param_idx, overlap)| {
            let ranks = self.ranks_needing(&overlap);
            ranks.filter_map(move |rank| self.to_move(param_idx, &overlap, rank))
        })
    }

    /// Returns the total bytes that move and stay.
    pub fn volume(&self) -> MoveVolume {
        let mut volume = MoveVolume::default();
        for (param_idx, overlap) in self.all_overlaps() {
            let bytes = u128::from(self.bytes(param_idx, &overlap.range));
            for rank in self.ranks_needing(&overlap) {
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

    /// Returns the overlaps of all parameters with their indices.
    fn all_overlaps(&self) -> impl Iterator<Item = (usize, OwnedOverlap)> {
        self.to.parameters().iter().enumerate().flat_map(move |(param_idx, parameter)| {
            let needed =
                parameter.prepared_cut().parts(self.to.shard_group(), 0..parameter.info().numel());
            let overlaps = needed
                .into_iter()
                .flat_map(move |(new, range)| self.overlaps(param_idx, range, new));
            overlaps.map(move |overlap| (param_idx, overlap))
        })
    }

    /// Splits a `range` that the member `new` needs into the parts of its old owners.
    fn overlaps(
        &self,
        param_idx: usize,
        range: Range<u64>,
        new: Option<u64>,
    ) -> impl Iterator<Item = OwnedOverlap> + use<> {
        let owned =
            self.from.parameters()[param_idx].prepared_cut().parts(self.from.shard_group(), range);
        owned.into_iter().map(move |(old, range)| OwnedOverlap { range, old, new })
    }

    /// Returns the new ranks that need an overlap: one per replica, or all.
    fn ranks_needing(&self, overlap: &OwnedOverlap) -> impl Iterator<Item = u64> + use<> {
        let (first, step) = match overlap.new {
            Some(member) => (member, self.to.shard_group().as_usize()),
            None => (0, 1),
        };
        (first..self.to.world_size().as_u64()).step_by(step)
    }

    /// Returns the old rank that provides an overlap to the new `rank`. It is the old rank at the
    /// same place, if that rank has the overlap.
    fn source(&self, overlap: &OwnedOverlap, rank: u64) -> u64 {
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

    /// Returns the move of an overlap to the new `rank`, or `None` if the overlap is already there.
    fn to_move(&self, param_idx: usize, overlap: &OwnedOverlap, rank: u64) -> Option<ShardMove> {
        let source = self.source(overlap, rank);
        if source == self.places[index(rank)] {
            return None;
        }
        Some(ShardMove {
            param_idx,
            start: self.bytes(param_idx, &(0..overlap.range.start)),
            bytes: self.bytes(param_idx, &overlap.range),
            from: to_rank(self.from, source),
            to: to_rank(self.to, rank),
        })
    }

    fn bytes(&self, param_idx: usize, range: &Range<u64>) -> u64 {
        self.from.parameters()[param_idx].info().dtype().bytes_of_blocks(range.end - range.start)
    }
}

#[expect(clippy::expect_used, reason = "sources and ranks are computed modulo the world")]
fn to_rank(plan: &ShardingPlan, rank: u64) -> Rank {
    Placement::new(rank, plan.world_size().as_u64()).expect("a rank of the plan's world").rank()
}

/// Returns the place of each new rank: the place of its member's partner in the replica of the same
/// number, or else the first free place.
fn places(from: &ShardingPlan, to: &ShardingPlan, partners: &[Option<u64>]) -> Vec<u64> {
    let old_world = from.world_size().as_u64();
    let new_world = to.world_size().as_u64();
    let old_group = from.shard_group().as_u64();
    let new_group = to.shard_group().as_u64();
    let mut paired: Vec<Option<u64>> = Vec::new();
    for rank in 0..new_world {
        let replica = rank / new_group;
        let partner = partners[index(rank % new_group)].filter(|_| replica < from.replicas());
        paired.push(partner.map(|old| replica * old_group + old));
    }
    let mut is_free = vec![true; index(old_world.max(new_world))];
    for &place in paired.iter().flatten() {
        is_free[index(place)] = false;
    }
    let mut free = (0..).zip(is_free).filter(|&(_, is_free)| is_free).map(|(place, _)| place);
    let mut places = Vec::with_capacity(paired.len());
    for place in paired {
        #[expect(clippy::expect_used, reason = "there are at least as many places as new ranks")]
        places.push(place.unwrap_or_else(|| free.next().expect("every pair takes one place")));
    }
    places
}
