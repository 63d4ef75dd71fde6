//! Checks that every plan must pass.

use std::collections::BTreeMap;

use core_types::{Placement, WorldSize, human::Printable};

use super::parameter::PlannedParameter;
use crate::{
    cut::Cut,
    error::{Error, Result},
    param::{ParameterInfo, groups::NamedGroups},
};

/// Checks each parameter against its cut.
pub(crate) fn check_cuts(parameters: &[PlannedParameter], group: WorldSize) -> Result<()> {
    for parameter in parameters {
        let info = parameter.info();
        let cut = parameter.cut();
        if info.tied_to().is_some() != (cut == Cut::Tied) {
            let reason = match info.tied_to() {
                Some(_) => "is tied, but the plan treats it as untied",
                None => "is untied, but the plan treats it as tied",
            };
            return Err(invalid_cut(info, reason));
        }
        if info.always_gather() && !matches!(cut, Cut::Replicated | Cut::Tied) {
            let reason = "must always be gathered, but the plan cuts it";
            return Err(invalid_cut(info, reason));
        }
        match cut {
            Cut::Dim0 if info.shape().is_empty() => {
                return Err(Error::Scalar { name: info.name().to_owned() });
            }
            Cut::Dim0 => check_blocks(info, info.row_numel(), group)?,
            Cut::Flat { .. } | Cut::FlatAligned { .. } => check_blocks(info, 1, group)?,
            Cut::Ragged { granule, round_up_from, .. } => {
                check_granules(info, granule, round_up_from)?;
            }
            Cut::Whole { owner } => _ = Placement::new(owner.as_u64(), group.as_u64())?,
            Cut::Wrapped { .. } | Cut::Replicated | Cut::Tied => {}
        }
    }
    Ok(())
}

/// Checks that cuts at multiples of `item_numel` elements do not split blocks.
fn check_blocks(info: &ParameterInfo, item_numel: u64, group: WorldSize) -> Result<()> {
    if group == WorldSize::ONE || item_numel.is_multiple_of(info.dtype().block_numel()) {
        return Ok(());
    }
    let reason = format!(
        "of shape {:?} would be cut within a block of {} elements ({}); use a ragged layout, which keeps \
         blocks whole",
        info.shape(),
        info.dtype().block_numel(),
        info.dtype()
    );
    Err(invalid_cut(info, reason))
}

/// Checks that a granule consists of whole blocks and rounds up from within it.
fn check_granules(info: &ParameterInfo, granule: u64, round_up_from: u64) -> Result<()> {
    let dtype = info.dtype();
    let has_whole_blocks = granule > 0 && granule.is_multiple_of(dtype.block_bytes());
    if has_whole_blocks && (1..=granule).contains(&round_up_from) {
        return Ok(());
    }
    let reason = format!(
        "has invalid granules of {granule} bytes that round up from byte {round_up_from}: a granule must \
         be whole blocks of {dtype} and round up from a byte between 1 and its size"
    );
    Err(invalid_cut(info, reason))
}

/// Checks that every tied parameter matches its target.
pub(crate) fn check_ties<'a>(
    parameters: &'a [PlannedParameter],
    find: impl Fn(&str) -> Option<&'a PlannedParameter>,
) -> Result<()> {
    for info in parameters.iter().map(PlannedParameter::info) {
        let Some(target) = info.tied_to() else { continue };
        let reason = match find(target).map(PlannedParameter::info) {
            None => "there is no such parameter",
            Some(other) if other.tied_to().is_some() => "the target is tied to another parameter",
            Some(other) if (other.shape(), other.dtype()) != (info.shape(), info.dtype()) => {
                "they differ in shape or dtype"
            }
            Some(other) if other.unit() != info.unit() => {
                "they are in different units, which are gathered separately; put both into one unit"
            }
            Some(_) => continue,
        };
        let reason = format!("cannot be tied to {}: {reason}", Printable(target));
        return Err(Error::InvalidParameter { name: info.name().to_owned(), reason });
    }
    Ok(())
}

/// Checks that the parameters of each buffer match and lie in order.
pub(crate) fn check_buffers(parameters: &[PlannedParameter]) -> Result<()> {
    let units = NamedGroups::from_names(parameters.iter().map(|parameter| parameter.info().unit()));
    let mut buffers: BTreeMap<_, BufferState<'_>> = BTreeMap::new();
    for (parameter, unit) in parameters.iter().zip(units.group_of_item) {
        let info = parameter.info();
        let cut = parameter.cut();
        let (kind, offset, size, len) = match cut {
            Cut::Flat { offset, unit_numel } => {
                (BufferKind::Flat, offset, info.numel(), unit_numel)
            }
            Cut::FlatAligned { offset, unit_numel } => {
                (BufferKind::Aligned, offset, info.numel(), unit_numel)
            }
            Cut::Ragged { offset, unit_bytes, .. } => {
                (BufferKind::Ragged, offset, info.bytes(), unit_bytes)
            }
            Cut::Wrapped { offset, total_bytes } => {
                (BufferKind::Wrapped, offset, info.bytes(), total_bytes)
            }
            Cut::Dim0 | Cut::Whole { .. } | Cut::Replicated | Cut::Tied => continue,
        };
        let unit = if kind == BufferKind::Wrapped { 0 } else { unit };
        let new_buffer = BufferState { kind, first: info, last: info, end: 0, len };
        buffers.entry((kind, unit)).or_insert(new_buffer).append(info, offset, size, len)?;
    }
    buffers.values().try_for_each(BufferState::finish)
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum BufferKind {
    Flat,
    Aligned,
    Ragged,
    Wrapped,
}

/// The state of a buffer after some of its parameters.
struct BufferState<'a> {
    kind: BufferKind,
    first: &'a ParameterInfo,
    last: &'a ParameterInfo,
    end: u64,
    len: u64,
}

impl<'a> BufferState<'a> {
    /// Checks that `info` follows the parameters so far.
    fn append(&mut self, info: &'a ParameterInfo, offset: u64, size: u64, len: u64) -> Result<()> {
        if matches!(self.kind, BufferKind::Flat | BufferKind::Aligned) {
            check_same_kind(self.first, info)?;
        }
        // The cost model counts the padding of a buffer at its first parameter, so no gap may
        // precede that parameter.
        let may_leave_gap = self.kind == BufferKind::Aligned && self.end > 0;
        let is_in_place = offset == self.end || (may_leave_gap && offset > self.end);
        let end =
            offset.checked_add(size).filter(|&end| is_in_place && len == self.len && end <= len);
        self.end = end.ok_or_else(|| self.misplaced(info, (offset, len), (self.end, self.len)))?;
        self.last = info;
        Ok(())
    }

    /// Checks that the parameters fill the buffer.
    fn finish(&self) -> Result<()> {
        if self.end == self.len || self.kind == BufferKind::Aligned {
            return Ok(());
        }
        Err(self.misplaced(self.last, (self.end, self.len), (self.end, self.end)))
    }

    /// Returns the error for a parameter at the wrong offset, or in a buffer of the wrong length.
    fn misplaced(
        &self,
        info: &ParameterInfo,
        (offset, len): (u64, u64),
        (expected_offset, expected_len): (u64, u64),
    ) -> Error {
        let unit = if self.kind == BufferKind::Wrapped { "" } else { info.unit() };
        let reason = format!(
            "is at offset {offset} of {len} in the buffer of unit {unit:?}, expected offset \
             {expected_offset} of {expected_len}"
        );
        invalid_cut(info, reason)
    }
}

/// Checks that `second` may share a flat buffer with `first`.
fn check_same_kind(first: &ParameterInfo, second: &ParameterInfo) -> Result<()> {
    let property = if first.dtype() != second.dtype() {
        "dtype"
    } else if first.requires_grad() != second.requires_grad() {
        "whether they are trained"
    } else {
        return Ok(());
    };
    let reason = format!(
        "of unit {:?} differs from {} in {property}, so they cannot share a flat buffer; use the dim-0 \
         layout, separate units, or gather one of them always",
        first.unit(),
        Printable(first.name())
    );
    Err(invalid_cut(second, reason))
}

fn invalid_cut(info: &ParameterInfo, reason: impl Into<String>) -> Error {
    Error::InvalidCut { name: info.name().to_owned(), reason: reason.into() }
}
