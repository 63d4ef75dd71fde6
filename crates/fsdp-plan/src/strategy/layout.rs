//! How parameters that every rank shares are laid out before they are cut.

use core_types::WorldSize;
use serde::{Deserialize, Serialize};

use crate::{
    arithmetic::lcm,
    cut::Cut,
    error::{Error, Result},
    param::{ParameterInfo, groups::NamedGroups},
};

/// The bytes to which FSDP1 aligns parameters.
const ALIGNMENT: u64 = 16;

/// The fractional part of the golden ratio in 64 bits: its multiples spread over the whole circle,
/// however many. Rounding every bound to the nearer end repeats one error in all equal blocks;
/// carrying errors over needs a table of bounds. Over 16,384 ranks the largest rank of DeepSeek-V3
/// holds 1.0005 of the mean, where rows of FSDP2 give 6.03.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// How [`Full`](super::Full) lays parameters out before it cuts them.
///
/// | layout | cuts | padding |
/// |---|---|---|
/// | `Dim0` | rows of each parameter | less than a row per rank and parameter |
/// | `Flat` | elements of each unit | less than an element per rank and unit |
/// | `FlatAligned` | elements of each unit | the same, and less than 16 bytes per parameter |
/// | `RowRagged` | each unit, between rows | less than the longest rows per rank and unit |
/// | `BlockRagged` | each unit, between blocks | less than the longest block per rank and unit |
///
/// Padding is what a rank stores beyond its own share, so that all have equally much to send. A
/// parameter that is smaller than a granule counts with its own size.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Layout {
    /// Each parameter by itself, along dim 0, like PyTorch's `fully_shard` (FSDP2).
    ///
    /// Rows stay whole. Every rank stores the rows of the largest share, so small parameters cost
    /// padding, and the first ranks own more than the last: with 16,384 ranks six times the mean.
    #[default]
    Dim0,
    /// The parameters of a unit end to end, like PyTorch's `FullyShardedDataParallel` (FSDP1) with
    /// `use_orig_params=False`.
    ///
    /// Most shards begin and end inside a row, and the optimizer sees one tensor per unit.
    Flat,
    /// The same with each parameter aligned to 16 bytes, like FSDP1 with `use_orig_params=True`.
    ///
    /// The optimizer sees the parameters, so that they can have learning rates of their own.
    FlatAligned,
    /// The parameters of a unit end to end, cut between rows.
    ///
    /// Every share is within one granule of the mean in each unit. Bounds are rounded differently
    /// from unit to unit (by multiples of the golden ratio), so that over all units the differences
    /// cancel instead of adding up.
    RowRagged {
        /// Rows that stay together, such as the 128 of a two-dimensional quantization block.
        rows: u64,
    },
    /// The parameters of a unit end to end, cut between blocks of elements.
    BlockRagged {
        /// Elements that stay together, such as those of a quantization block.
        block: u64,
    },
}

impl Layout {
    /// Rows that stay whole: the ragged layout for unquantized models.
    pub const ROWS: Self = Self::RowRagged { rows: 1 };

    /// Blocks of 128 elements that stay whole.
    pub const BLOCKS: Self = Self::BlockRagged { block: 128 };

    /// Whether parameters in either layout share the buffer of their unit, or need none.
    pub(super) fn goes_with(self, other: Self) -> bool {
        let is_ragged =
            |layout| matches!(layout, Self::RowRagged { .. } | Self::BlockRagged { .. });
        self == other || is_ragged(self) && is_ragged(other)
    }

    /// Elements of `info` that stay together; `None` for more than there can be.
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

/// The cuts of parameters in layouts that all [go with](Layout::goes_with) each other, in their
/// order.
///
/// # Errors
///
/// [`Error::Zero`] for granules of nothing, [`Error::TotalTooLarge`] if a unit does not fit into 64
/// bits.
pub(super) fn cuts(infos: &[(&ParameterInfo, Layout)], group: WorldSize) -> Result<Vec<Cut>> {
    let Some(&(_, layout)) = infos.first() else { return Ok(Vec::new()) };
    match layout {
        Layout::Dim0 => Ok(vec![Cut::Dim0; infos.len()]),
        Layout::Flat => flat(infos),
        Layout::FlatAligned => flat_aligned(infos, group),
        Layout::RowRagged { .. } | Layout::BlockRagged { .. } => ragged(infos),
    }
}

fn flat(infos: &[(&ParameterInfo, Layout)]) -> Result<Vec<Cut>> {
    let buffers = Buffers::lay_out(infos, |end, info| Some((end, end.checked_add(info.numel())?)))?;
    Ok(buffers.cuts(|_, offset, unit_numel| Cut::Flat { offset, unit_numel }))
}

fn flat_aligned(infos: &[(&ParameterInfo, Layout)], group: WorldSize) -> Result<Vec<Cut>> {
    let mut buffers = Buffers::lay_out(infos, |end, info| {
        let aligned_numel = (ALIGNMENT / info.dtype().block_bytes()).max(1);
        let offset = end.checked_next_multiple_of(aligned_numel)?;
        Some((offset, offset.checked_add(info.numel())?))
    })?;
    for len in &mut buffers.lens {
        *len = len.checked_next_multiple_of(group.as_u64()).ok_or(TOO_LARGE)?;
    }
    Ok(buffers.cuts(|_, offset, unit_numel| Cut::FlatAligned { offset, unit_numel }))
}

fn ragged(infos: &[(&ParameterInfo, Layout)]) -> Result<Vec<Cut>> {
    let buffers = Buffers::lay_out(infos, |end, info| Some((end, end.checked_add(info.bytes())?)))?;
    let granules =
        infos.iter().map(|&(info, layout)| Ok(granule_bytes(info, layout.granule_numel(info)?)));
    let granules = granules.collect::<Result<Vec<_>>>()?;
    Ok(buffers.cuts(|position, offset, unit_bytes| {
        let granule = granules[position];
        let round_up_from = round_up_from(granule, buffers.units.of_item[position]);
        Cut::Ragged { offset, unit_bytes, granule, round_up_from }
    }))
}

/// The bytes of the smallest granule that consists of whole blocks of the dtype and of `numel`
/// elements each; all of the parameter if that is smaller.
fn granule_bytes(info: &ParameterInfo, numel: Option<u64>) -> u64 {
    let dtype = info.dtype();
    let whole = info.numel().max(info.dtype().block_numel());
    let numel = numel.and_then(|numel| lcm(numel, dtype.block_numel()));
    let numel = numel.filter(|numel| (1..whole).contains(numel)).unwrap_or(whole);
    dtype.bytes_of_blocks(numel)
}

/// From which byte of a granule on a bound moves forward, in the unit at position `unit`.
///
/// In the first unit a bound moves to the nearer side. The threshold of each further unit lies as
/// far as can be from those before it, so that the bounds of equal units are moved this way and
/// that, in equal parts.
fn round_up_from(granule: u64, unit: usize) -> u64 {
    let phase = (1_u64 << 63).wrapping_add(GOLDEN.wrapping_mul(unit as u64));
    let ahead = (u128::from(granule) * u128::from(phase)) >> 64;
    #[expect(clippy::expect_used, reason = "a phase is less than the whole, 2^64")]
    let ahead = u64::try_from(ahead).expect("less than the granule");
    granule - ahead
}

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the parameters of a unit" };

/// The parameters of each unit end to end.
struct Buffers<'a> {
    units: NamedGroups<'a>,
    /// Where each parameter begins.
    offsets: Vec<u64>,
    /// Where each unit ends.
    lens: Vec<u64>,
}

impl<'a> Buffers<'a> {
    /// Puts each parameter where `place` says that it begins and ends, given the end of the one
    /// before it.
    fn lay_out(
        infos: &[(&'a ParameterInfo, Layout)],
        place: impl Fn(u64, &ParameterInfo) -> Option<(u64, u64)>,
    ) -> Result<Self> {
        let units = NamedGroups::of(infos.iter().map(|(info, _)| info.unit()));
        let mut lens = vec![0; units.names.len()];
        let mut offsets = Vec::with_capacity(infos.len());
        for (&(info, _), &unit) in infos.iter().zip(&units.of_item) {
            let (offset, end) = place(lens[unit], info).ok_or(TOO_LARGE)?;
            offsets.push(offset);
            lens[unit] = end;
        }
        Ok(Self { units, offsets, lens })
    }

    /// Makes the cuts, given the position of each parameter, its offset and the length of its unit.
    fn cuts(&self, cut: impl Fn(usize, u64, u64) -> Cut) -> Vec<Cut> {
        let lens = self.units.of_item.iter().map(|&unit| self.lens[unit]);
        self.offsets
            .iter()
            .zip(lens)
            .enumerate()
            .map(|(position, (&offset, len))| cut(position, offset, len))
            .collect()
    }
}
