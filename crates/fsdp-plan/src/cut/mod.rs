//! Cuts of a parameter over a shard group, and the part of each member.

mod chunks;
mod ragged;

use std::ops::Range;

use core_types::{Rank, WorldSize};
use serde::{Deserialize, Serialize};

pub(crate) use self::{
    chunks::ChunkedCut,
    ragged::{GranuleStride, RaggedCut, RaggedMiddle},
};
use crate::param::ParameterInfo;

/// The cut of one parameter over the ranks of a shard group.
///
/// A plan stores nothing else per parameter; the part of a rank is computed on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cut {
    /// Rows in equal chunks by [`split::chunk`](core_types::split::chunk), like `fully_shard`
    /// (FSDP2).
    Dim0,
    /// Elements in equal chunks: the parameters of the unit are concatenated, cut by
    /// [`split::chunk`](core_types::split::chunk), and are one tensor to the optimizer, like
    /// `FullyShardedDataParallel` (FSDP1).
    Flat {
        /// Elements of the unit before this parameter.
        offset: u64,
        /// Elements of the unit.
        unit_numel: u64,
    },
    /// Like [`Cut::Flat`], but gaps align each parameter and the end of the unit, and each
    /// parameter is a separate tensor to the optimizer, like FSDP1 with `use_orig_params=True`.
    FlatAligned {
        /// Elements of the unit before this parameter, gaps included.
        offset: u64,
        /// Elements of the unit, gaps included.
        unit_numel: u64,
    },
    /// Equal parts of the concatenated parameters of the unit, with each bound rounded to a
    /// granule: a row, some rows, or a block of elements.
    Ragged {
        /// Bytes of the unit before this parameter.
        offset: u64,
        /// Bytes of the unit.
        unit_bytes: u64,
        /// Bytes that stay together, counted from the start of the parameter; the last granule may
        /// be shorter.
        granule: u64,
        /// A bound rounds up if at least this many bytes of its granule precede it, else down; from
        /// 1 to `granule`.
        round_up_from: u64,
    },
    /// Equal parts of all parameters of the plan concatenated: tensors stay whole, except at most
    /// one between neighboring ranks.
    Wrapped {
        /// Bytes of wrapped parameters before this one.
        offset: u64,
        /// Bytes of all wrapped parameters.
        total_bytes: u64,
    },
    /// One rank owns the whole parameter.
    Whole {
        /// Owner, as a rank of the shard group.
        owner: Rank,
    },
    /// Every rank keeps a copy.
    Replicated,
    /// The parameter is tied to another and stored under that name.
    Tied,
}

impl Cut {
    /// Returns the rank that owns the whole parameter, if any.
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

/// The part of a parameter that one rank holds, in elements in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct ShardAssignment {
    /// Rank that holds the shard.
    pub owner_rank: Rank,
    /// Index of the shard among the shards of the parameter, from 0. Under [`Cut::Ragged`] a rank
    /// between two others counts even if it holds nothing.
    pub shard_index: u64,
    /// Elements of the parameter before the shard.
    pub start_offset: u64,
    /// Elements in the shard, at least 1.
    pub shard_size: u64,
    /// First row, if the shard consists of whole rows and the parameter has rows.
    pub dim0_start: Option<u64>,
    /// Number of rows, if the shard consists of whole rows.
    pub dim0_rows: Option<u64>,
}

impl ShardAssignment {
    /// Creates the shard of `info` with the elements `part`.
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

/// A cut with its parameter, prepared for computing parts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PreparedCut {
    /// Equal chunks of items; the last ones are shorter or empty.
    Chunks(ChunkedCut),
    /// Parts of a buffer with bounds at granules.
    Ragged(RaggedCut),
    /// All elements on one member.
    Whole { owner: u64, numel: u64 },
    /// All elements on every member.
    Replicated { numel: u64 },
    /// No elements.
    Nothing,
}

impl PreparedCut {
    pub(crate) fn new(info: &ParameterInfo, cut: Cut) -> Self {
        let numel = info.numel();
        match cut {
            _ if numel == 0 => Self::Nothing,
            Cut::Tied => Self::Nothing,
            Cut::Dim0 => Self::Chunks(ChunkedCut::rows(info)),
            Cut::Flat { offset, unit_numel } | Cut::FlatAligned { offset, unit_numel } => {
                Self::Chunks(ChunkedCut::elements(info, offset, unit_numel))
            }
            Cut::Ragged { offset, unit_bytes, granule, round_up_from } => {
                Self::Ragged(RaggedCut::new(info, offset, unit_bytes, granule, round_up_from))
            }
            Cut::Wrapped { offset, total_bytes } => {
                let block = info.dtype().block_bytes();
                Self::Ragged(RaggedCut::new(info, offset, total_bytes, block, block))
            }
            Cut::Whole { owner } => Self::Whole { owner: owner.as_u64(), numel },
            Cut::Replicated => Self::Replicated { numel },
        }
    }

    /// Returns the elements of `member` and the index of this part among the parts of the parameter.
    /// The range is empty if the member holds nothing.
    pub(crate) fn part(&self, group: WorldSize, member: u64) -> (u64, Range<u64>) {
        match *self {
            Self::Chunks(chunks) => {
                (member.saturating_sub(chunks.first_owner(group)), chunks.part(group, member))
            }
            Self::Ragged(ragged) => {
                (member.saturating_sub(ragged.first_owner(group)), ragged.part(group, member))
            }
            Self::Whole { owner, .. } if owner != member => (0, 0..0),
            Self::Whole { numel, .. } | Self::Replicated { numel } => (0, 0..numel),
            Self::Nothing => (0, 0..0),
        }
    }

    /// Splits the elements in `range` by owner, in order; `None` means every member.
    pub(crate) fn parts(
        &self,
        group: WorldSize,
        range: Range<u64>,
    ) -> Vec<(Option<u64>, Range<u64>)> {
        let with_owner = |(owner, part)| (Some(owner), part);
        match *self {
            Self::Chunks(chunks) => chunks.parts(group, range).map(with_owner).collect(),
            Self::Ragged(ragged) => ragged.parts(group, range).map(with_owner).collect(),
            Self::Whole { owner, .. } => vec![(Some(owner), range)],
            Self::Replicated { .. } => vec![(None, range)],
            Self::Nothing => Vec::new(),
        }
    }
}
