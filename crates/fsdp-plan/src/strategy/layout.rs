//! Layouts of parameters that are cut over all ranks.

use core_types::WorldSize;
use serde::{Deserialize, Serialize};

use crate::{
    arithmetic::lcm,
    cut::Cut,
    error::{Error, Result},
    param::{ParameterInfo, groups::NamedGroups},
};

/// Alignment of parameters in FSDP1, in bytes.
const ALIGNMENT: u64 = 16;

/// Fractional part of the golden ratio in 64 bits: its multiples are spread evenly over the unit
/// interval, however many there are.
///
/// Bounds that are rounded to the nearer end would repeat one error in all equal blocks, and errors
/// that are carried over would need a table of bounds. Over 16,384 ranks the largest rank of
/// DeepSeek-V3 has 1.0005 times the mean; rows of FSDP2 have 6.03 times.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The layout in which [`Full`](super::Full) cuts parameters.
///
/// | layout | cuts | padding |
/// |---|---|---|
/// | `Dim0` | rows of each parameter | less than a row per rank and parameter |
/// | `Flat` | elements of each unit | less than an element per rank and unit |
/// | `FlatAligned` | elements of each unit | as `Flat`, and less than 16 bytes per parameter |
/// | `RowRagged` | each unit, between rows | less than the longest rows per rank and unit |
/// | `BlockRagged` | each unit, between blocks | less than the longest block per rank and unit |
///
/// Padding is memory beyond a rank's own share, so that all ranks send equally much. A parameter
/// smaller than a granule counts with its own size.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Layout {
    /// Rows of each parameter, like PyTorch's `fully_shard` (FSDP2).
    ///
    /// Rows stay whole. Every rank stores as many rows as the largest share, so small parameters
    /// cost padding, and the first ranks own more than the last: up to six times the mean with
    /// 16,384 ranks.
    #[default]
    Dim0,
    /// The concatenated parameters of a unit, like PyTorch's `FullyShardedDataParallel` (FSDP1)
    /// with `use_orig_params=False`.
    ///
    /// Most shards begin and end within a row, and the optimizer has one tensor per unit.
    Flat,
    /// Like [`Layout::Flat`], with each parameter aligned to 16 bytes, like FSDP1 with
    /// `use_orig_params=True`.
    ///
    /// The optimizer has one tensor per parameter, so parameters can have different learning rates.
    FlatAligned,
    /// The concatenated parameters of a unit, cut between rows.
    ///
    /// Every share is within one granule of the mean in each unit. Bounds are rounded differently
    /// in each unit, by multiples of the golden ratio, so that differences cancel over the units.
    RowRagged {
        /// Rows that stay together, such as the 128 rows of a two-dimensional quantization block.
        rows: u64,
    },
    /// The concatenated parameters of a unit, cut between blocks of elements.
    BlockRagged {
        /// Elements that stay together, such as a quantization block.
        block: u64,
    },
}

impl Layout {
    /// The ragged layout for unquantized models, which keeps rows whole.
    pub const ROWS: Self = Self::RowRagged { rows: 1 };

    /// The ragged layout with blocks of 128 elements.
    pub const BLOCKS: Self = Self::BlockRagged { block: 128 };

    /// Returns true if parameters in both layouts can share the buffer of their unit.
    pub(super) fn is_compatible(self, other: Self) -> bool {
        let is_ragged =
            |layout| matches!(layout, Self::RowRagged { .. } | Self::BlockRagged { .. });
        self == other || is_ragged(self) && is_ragged(other)
    }

    /// Returns the elements of `info` that stay together, or `None` if they exceed 64 bits.
    fn granule_numel(self, info: &ParameterInfo) -> Result<Option<u64>> {
        match self {
            Self::RowRagged { rows: 0 } => {
                Err(Error::Zero { what: "the number of rows in a granule" })
            }
            Self::BlockRagged { block: 0 } => {
                Err(Error::Zero { what: "the number of elements in a block" })
            }
            Self::RowRagged { rows } => Ok(info.row_numel().checked_mul(rows)),
            Self::BlockRagged { block } => Ok(Some(block)),
            Self::Dim0 => Ok(Some(info.row_numel())),
            Self::Flat | Self::FlatAligned => Ok(Some(1)),
        }
    }
}

/// Cuts parameters in [compatible](Layout::is_compatible) layouts; returns the cuts in their order.
///
/// # Errors
///
/// [`Error::Zero`] for empty granules, [`Error::TotalTooLarge`] if a unit exceeds 64 bits.
pub(super) fn cuts(infos: &[(&ParameterInfo, Layout)], group: WorldSize) -> Result<Vec<Cut>> {
    let Some(&(_, layout)) = infos.first() else { return Ok(Vec::new()) };
    match layout {
        Layout::Dim0 => Ok(vec![Cut::Dim0; infos.len()]),
        Layout::Flat => cut_flat(infos),
        Layout::FlatAligned => cut_flat_aligned(infos, group),
        Layout::RowRagged { .. } | Layout::BlockRagged { .. } => cut_ragged(infos),
    }
}

fn cut_flat(infos: &[(&ParameterInfo, Layout)]) -> Result<Vec<Cut>> {
    let buffers =
        UnitBuffers::lay_out(infos, |end, info| Some((end, end.checked_add(info.numel())?)))?;
    Ok(buffers.cuts(|_, offset, unit_numel| Cut::Flat { offset, unit_numel }))
}

fn cut_flat_aligned(infos: &[(&ParameterInfo, Layout)], group: WorldSize) -> Result<Vec<Cut>> {
    let mut buffers = UnitBuffers::lay_out(infos, |end, info| {
        let aligned_numel = (ALIGNMENT / info.dtype().block_bytes()).max(1);
        let offset = end.checked_next_multiple_of(aligned_numel)?;
        Some((offset, offset.checked_add(info.numel())?))
    })?;
    for len in &mut buffers.lens {
        *len = len.checked_next_multiple_of(group.as_u64()).ok_or(TOO_LARGE)?;
    }
    Ok(buffers.cuts(|_, offset, unit_numel| Cut::FlatAligned { offset, unit_numel }))
}

fn cut_ragged(infos: &[(&ParameterInfo, Layout)]) -> Result<Vec<Cut>> {
    let buffers =
        UnitBuffers::lay_out(infos, |end, info| Some((end, end.checked_add(info.bytes())?)))?;
    let mut granules = Vec::with_capacity(infos.len());
    for &(info, layout) in infos {
        granules.push(granule_bytes(info, layout.granule_numel(info)?));
    }
    Ok(buffers.cuts(|position, offset, unit_bytes| {
        let granule = granules[position];
        let round_up_from = rounding_threshold(granule, buffers.units.group_of_item[position]);
        Cut::Ragged { offset, unit_bytes, granule, round_up_from }
    }))
}

/// Returns the bytes of the smallest granule that consists of whole dtype blocks and is a multiple
/// of `numel` elements; at most the whole parameter.
fn granule_bytes(info: &ParameterInfo, numel: Option<u64>) -> u64 {
    let dtype = info.dtype();
    let full_numel = info.numel().max(dtype.block_numel());
    let full_bytes = dtype.bytes_of_blocks(full_numel);
    let Some(numel) = numel.and_then(|numel| lcm(numel, dtype.block_numel())) else {
        return full_bytes;
    };
    if numel == 0 || full_numel <= numel { full_bytes } else { dtype.bytes_of_blocks(numel) }
}

/// Returns the byte of a granule from which a bound rounds up, in the unit at position `unit`.
///
/// In the first unit a bound rounds to the nearer side. The thresholds of further units are spread
/// as far apart as possible, so that the bounds of equal units round up and down equally often.
fn rounding_threshold(granule: u64, unit: usize) -> u64 {
    let phase = (1_u64 << 63).wrapping_add(GOLDEN.wrapping_mul(unit as u64));
    let wide_fraction = (u128::from(granule) * u128::from(phase)) >> 64;
    #[expect(clippy::expect_used, reason = "a phase is less than 2^64")]
    let fraction = u64::try_from(wide_fraction).expect("less than the granule");
    granule - fraction
}

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the parameters of a unit" };

/// The concatenated parameters of each unit.
struct UnitBuffers<'a> {
    units: NamedGroups<'a>,
    /// Offset of each parameter in its unit.
    offsets: Vec<u64>,
    /// Length of each unit.
    lens: Vec<u64>,
}

impl<'a> UnitBuffers<'a> {
    /// Lays out the parameters: `place` returns the start and end of each, given the end of the
    /// previous one.
    fn lay_out(
        infos: &[(&'a ParameterInfo, Layout)],
        place: impl Fn(u64, &ParameterInfo) -> Option<(u64, u64)>,
    ) -> Result<Self> {
        let units = NamedGroups::from_names(infos.iter().map(|(info, _)| info.unit()));
        let mut lens = vec![0; units.names.len()];
        let mut offsets = Vec::with_capacity(infos.len());
        for (&(info, _), &unit) in infos.iter().zip(&units.group_of_item) {
            let (offset, end) = place(lens[unit], info).ok_or(TOO_LARGE)?;
            offsets.push(offset);
            lens[unit] = end;
        }
        Ok(Self { units, offsets, lens })
    }

    /// Returns the cuts; `cut` takes the position of a parameter, its offset and the length of its
    /// unit.
    fn cuts(&self, cut: impl Fn(usize, u64, u64) -> Cut) -> Vec<Cut> {
        let mut cuts = Vec::with_capacity(self.offsets.len());
        for (position, &offset) in self.offsets.iter().enumerate() {
            let unit = self.units.group_of_item[position];
            cuts.push(cut(position, offset, self.lens[unit]));
        }
        cuts
    }
}
