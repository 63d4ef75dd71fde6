//! How one parameter is divided over a shard group, and which part of it a member holds.

mod chunks;
mod ragged;
pub(crate) mod shares;

use std::ops::Range;

use core_types::Rank;
use serde::{Deserialize, Serialize};

pub(crate) use self::{
    chunks::Chunks,
    ragged::{Middle, Ragged, Stride},
};
use crate::{
    cut::shares::{OwnedRun, Shares},
    param::ParameterInfo,
};

/// How one parameter is divided over the ranks of a shard group.
///
/// This is all that a plan stores for a parameter, however many ranks there are; the part of a rank
/// is computed when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cut {
    /// Along dim 0 by [`split::chunk`](core_types::split::chunk): as `fully_shard` (FSDP2) does it.
    Dim0,
    /// As a part of its unit's parameters laid end to end, which are cut by
    /// [`split::chunk`](core_types::split::chunk) and are one tensor to the optimizer: as
    /// `FullyShardedDataParallel` (FSDP1) does it.
    Flat {
        /// Elements of the unit before this parameter.
        offset: u64,
        /// Elements of the whole unit.
        unit_numel: u64,
    },
    /// Like [`Cut::Flat`], with gaps that align each parameter and the end, and each parameter a
    /// tensor of its own to the optimizer: as FSDP1 does it with `use_orig_params=True`.
    FlatAligned {
        /// Elements of the unit before this parameter, gaps included.
        offset: u64,
        /// Elements of the whole unit, gaps included.
        unit_numel: u64,
    },
    /// As a part of its unit's parameters laid end to end, cut into equal parts whose bounds are
    /// moved to the nearest granule: a row, some rows, or a block of elements.
    Ragged {
        /// Bytes of the unit before this parameter.
        offset: u64,
        /// Bytes of the whole unit.
        unit_bytes: u64,
        /// Bytes that are never cut, counted from the start of the parameter; the last granule may
        /// be shorter.
        granule: u64,
        /// A bound moves forward if at least so many bytes of its granule lie before it, else back;
        /// from 1 to `granule`.
        round_up_from: u64,
    },
    /// As a part of all parameters of the plan laid end to end and cut into equal parts: whole, but
    /// for at most one parameter between each rank and the next.
    Wrapped {
        /// Bytes of such parameters before this one.
        offset: u64,
        /// Bytes of all such parameters.
        total_bytes: u64,
    },
    /// Not at all: one rank owns the whole.
    Whole {
        /// The rank that owns it, among its shard group.
        owner: Rank,
    },
    /// Not at all: every rank keeps a copy.
    Replicated,
    /// Not at all: it is another name of the parameter it is tied to, and nothing is held under
    /// this one.
    Tied,
}

impl Cut {
    /// The rank that owns the whole parameter, if one does.
    pub(crate) fn owner(self) -> Option<Rank> {
        match self {
            Self::Whole { owner } => Some(owner),
            Self::Dim0
            | Self::Flat { .. }
            | Self::FlatAligned { .. }
            | Self::Ragged { .. }
            | Self::Wrapped { .. }
            | Self::Replicated
            | Self::Tied => None,
        }
    }
}

/// The part of a parameter that one rank holds, counted in elements of the parameter in row-major
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct ShardAssignment {
    /// The rank that holds it.
    pub owner_rank: Rank,
    /// Which of the parameter's shards it is, from 0, in the order of the elements. Under
    /// [`Cut::Ragged`] a rank between two others may hold nothing of a parameter, and is counted
    /// nevertheless.
    pub shard_index: u64,
    /// Elements of the parameter before the shard.
    pub start_offset: u64,
    /// Elements in the shard; never 0.
    pub shard_size: u64,
    /// The first row, if the shard consists of whole rows and the parameter has any.
    pub dim0_start: Option<u64>,
    /// The number of rows, if the shard consists of whole rows.
    pub dim0_rows: Option<u64>,
}

impl ShardAssignment {
    /// The part of `info` that consists of the elements `part`.
    pub(crate) fn new(
        owner_rank: Rank,
        shard_index: u64,
        info: &ParameterInfo,
        part: Range<u64>,
    ) -> Self {
        let start_offset = part.start;
        let shard_size = part.end - part.start;
        let row = info.row_numel();
        let whole_rows = !info.shape().is_empty()
            && start_offset.is_multiple_of(row)
            && shard_size.is_multiple_of(row);
        let row = whole_rows.then_some(row);
        Self {
            owner_rank,
            shard_index,
            start_offset,
            shard_size,
            dim0_start: row.map(|row| start_offset / row),
            dim0_rows: row.map(|row| shard_size / row),
        }
    }
}

/// A parameter's cut, made ready to compute parts of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Division {
    /// Equal chunks of a number of items, the last ones shorter or empty.
    Chunks(Chunks),
    /// Parts of a buffer with bounds at granules.
    Ragged(Ragged),
    /// All of `numel` elements to one member.
    Whole { owner: u64, numel: u64 },
    /// All of `numel` elements to everyone.
    Replicated { numel: u64 },
    /// Nothing to anyone.
    Nothing,
}

impl Division {
    pub(crate) fn of(info: &ParameterInfo, cut: Cut) -> Self {
        let numel = info.numel();
        match cut {
            _ if numel == 0 => Self::Nothing,
            Cut::Tied => Self::Nothing,
            Cut::Dim0 => Self::Chunks(Chunks::rows(info)),
            Cut::Flat { offset, unit_numel } | Cut::FlatAligned { offset, unit_numel } => {
                Self::Chunks(Chunks::elements(info, offset, unit_numel))
            }
            Cut::Ragged { offset, unit_bytes, granule, round_up_from } => {
                Self::Ragged(Ragged::new(info, offset, unit_bytes, granule, round_up_from))
            }
            Cut::Wrapped { offset, total_bytes } => {
                let block = info.dtype().block_bytes();
                Self::Ragged(Ragged::new(info, offset, total_bytes, block, block))
            }
            Cut::Whole { owner } => Self::Whole { owner: owner.as_u64(), numel },
            Cut::Replicated => Self::Replicated { numel },
        }
    }

    /// How many parts a member may hold that owns `n_runs` runs.
    pub(crate) fn max_parts(&self, n_runs: usize) -> usize {
        if matches!(self, Self::Ragged(_)) { n_runs } else { n_runs.min(1) }
    }

    /// The elements that belong to the member that owns `run`, and which of the parameter's parts
    /// they are; an empty range if there are none.
    ///
    /// `run` is the one at `position` among the shares. Where bounds do not depend on the shares, a
    /// member owns one run, at the position of its number.
    pub(crate) fn part(&self, shares: &Shares, position: u64, run: OwnedRun) -> (u64, Range<u64>) {
        match *self {
            Self::Chunks(chunks) => (
                position.saturating_sub(chunks.first_owner(shares)),
                chunks.part(shares, run.owner),
            ),
            Self::Ragged(ragged) => {
                (position.saturating_sub(ragged.first_position(shares)), ragged.part(run))
            }
            Self::Whole { owner, .. } if owner != run.owner => (0, 0..0),
            Self::Whole { numel, .. } | Self::Replicated { numel } => (0, 0..numel),
            Self::Nothing => (0, 0..0),
        }
    }

    /// The owners of the elements `within`, each with those it has, in order; `None` stands for
    /// everyone.
    pub(crate) fn parts(
        &self,
        shares: &Shares,
        within: Range<u64>,
    ) -> Vec<(Option<u64>, Range<u64>)> {
        let owned = |(owner, part)| (Some(owner), part);
        match *self {
            Self::Chunks(chunks) => chunks.parts(shares, within).map(owned).collect(),
            Self::Ragged(ragged) => ragged.parts(shares, within).map(owned).collect(),
            Self::Whole { owner, .. } => vec![(Some(owner), within)],
            Self::Replicated { .. } => vec![(None, within)],
            Self::Nothing => Vec::new(),
        }
    }
}
