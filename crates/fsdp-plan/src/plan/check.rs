//! What must hold of every plan.

use std::collections::BTreeMap;

use core_types::{Placement, WorldSize};

use super::parameter::PlannedParameter;
use crate::{
    cut::Cut,
    error::{CutError, Error, ParameterError, Result},
    param::{ParameterInfo, groups::NamedGroups},
};

/// Checks each parameter by itself against its cut.
pub(crate) fn cuts(parameters: &[PlannedParameter], group: WorldSize) -> Result<()> {
    for parameter in parameters {
        let info = parameter.info();
        let cut = parameter.cut();
        let name = || info.name().to_owned();
        if info.tied_to().is_some() != (cut == Cut::Tied) {
            return Err(Error::Cut(CutError::Tied {
                name: name(),
                is_tied: info.tied_to().is_some(),
            }));
        }
        if info.always_gather() && !matches!(cut, Cut::Replicated | Cut::Tied) {
            return Err(Error::Cut(CutError::AlwaysGathered { name: name() }));
        }
        match cut {
            Cut::Dim0 if info.shape().is_empty() => {
                return Err(Error::Cut(CutError::Scalar { name: name() }));
            }
            Cut::Dim0 => whole_blocks(info, info.row_numel(), group)?,
            Cut::Flat { .. } | Cut::FlatAligned { .. } => whole_blocks(info, 1, group)?,
            Cut::Ragged { granule, round_up_from, .. } => granules(info, granule, round_up_from)?,
            Cut::Whole { owner } => _ = Placement::new(owner.as_u64(), group.as_u64())?,
            Cut::Wrapped { .. } | Cut::Replicated | Cut::Tied => {}
        }
    }
    Ok(())
}

/// Checks that cuts after every `item_numel` elements leave blocks whole.
fn whole_blocks(info: &ParameterInfo, item_numel: u64, group: WorldSize) -> Result<()> {
    if group == WorldSize::ONE || item_numel.is_multiple_of(info.dtype().block_numel()) {
        return Ok(());
    }
    Err(Error::Cut(CutError::SplitsBlock {
        name: info.name().to_owned(),
        shape: info.shape().to_vec(),
        dtype: info.dtype(),
    }))
}

fn granules(info: &ParameterInfo, granule: u64, round_up_from: u64) -> Result<()> {
    let dtype = info.dtype();
    let whole_blocks = granule > 0 && granule.is_multiple_of(dtype.block_bytes());
    if whole_blocks && (1..=granule).contains(&round_up_from) {
        return Ok(());
    }
    Err(Error::Cut(CutError::BadGranule {
        name: info.name().to_owned(),
        dtype,
        granule,
        round_up_from,
    }))
}

/// Checks that every tied parameter is another name of one that is planned like it.
pub(crate) fn ties<'a>(
    parameters: &'a [PlannedParameter],
    find: impl Fn(&str) -> Option<&'a PlannedParameter>,
) -> Result<()> {
    for info in parameters.iter().map(PlannedParameter::info) {
        let Some(target) = info.tied_to() else { continue };
        let reason = match find(target).map(PlannedParameter::info) {
            None => "there is no such parameter",
            Some(other) if other.tied_to().is_some() => "that is tied itself",
            Some(other) if (other.shape(), other.dtype()) != (info.shape(), info.dtype()) => {
                "they differ in shape or dtype"
            }
            Some(other) if other.unit() != info.unit() => {
                "they are in two units, of which one would be gathered without the other; put both into one"
            }
            Some(_) => continue,
        };
        return Err(Error::Parameters(ParameterError::BadTie {
            name: info.name().to_owned(),
            target: target.to_owned(),
            reason,
        }));
    }
    Ok(())
}

/// Checks that parameters which share a buffer can do so, and lie in it in order.
pub(crate) fn buffers(parameters: &[PlannedParameter]) -> Result<()> {
    let units = NamedGroups::of(parameters.iter().map(|parameter| parameter.info().unit()));
    let mut buffers: BTreeMap<_, Buffer<'_>> = BTreeMap::new();
    for (parameter, unit) in parameters.iter().zip(units.of_item) {
        let info = parameter.info();
        let cut = parameter.cut();
        let (kind, offset, size, len) = match cut {
            Cut::Flat { offset, unit_numel } => (Kind::Flat, offset, info.numel(), unit_numel),
            Cut::FlatAligned { offset, unit_numel } => {
                (Kind::Aligned, offset, info.numel(), unit_numel)
            }
            Cut::Ragged { offset, unit_bytes, .. } => {
                (Kind::Ragged, offset, info.bytes(), unit_bytes)
            }
            Cut::Wrapped { offset, total_bytes } => {
                (Kind::Wrapped, offset, info.bytes(), total_bytes)
            }
            Cut::Dim0 | Cut::Whole { .. } | Cut::Replicated | Cut::Tied => continue,
        };
        let unit = if kind == Kind::Wrapped { 0 } else { unit };
        let new_buffer = Buffer { kind, first: info, last: info, end: 0, len };
        buffers.entry((kind, unit)).or_insert(new_buffer).append(info, offset, size, len)?;
    }
    buffers.values().try_for_each(Buffer::finish)
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Flat,
    Aligned,
    Ragged,
    Wrapped,
}

/// A buffer, as far as its parameters have been seen.
struct Buffer<'a> {
    kind: Kind,
    first: &'a ParameterInfo,
    last: &'a ParameterInfo,
    end: u64,
    len: u64,
}

impl<'a> Buffer<'a> {
    fn append(&mut self, info: &'a ParameterInfo, offset: u64, size: u64, len: u64) -> Result<()> {
        if matches!(self.kind, Kind::Flat | Kind::Aligned) {
            same_buffer(self.first, info)?;
        }
        // The first parameter stands for the padding of all, so nothing lies before it.
        let may_leave_gap = self.kind == Kind::Aligned && self.end > 0;
        let in_place = offset == self.end || may_leave_gap && offset > self.end;
        let end = offset.checked_add(size).filter(|&end| in_place && len == self.len && end <= len);
        self.end = end.ok_or_else(|| self.broken(info, (offset, len), (self.end, self.len)))?;
        self.last = info;
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        if self.end == self.len || self.kind == Kind::Aligned {
            return Ok(());
        }
        Err(self.broken(self.last, (self.end, self.len), (self.end, self.end)))
    }

    fn broken(&self, info: &ParameterInfo, found: (u64, u64), expected: (u64, u64)) -> Error {
        Error::Cut(CutError::BrokenUnit {
            unit: if self.kind == Kind::Wrapped { String::new() } else { info.unit().to_owned() },
            name: info.name().to_owned(),
            offset: found.0,
            len: found.1,
            expected_offset: expected.0,
            expected_len: expected.1,
        })
    }
}

/// Checks that `second` may lie in the flat buffer that begins with `first`.
fn same_buffer(first: &ParameterInfo, second: &ParameterInfo) -> Result<()> {
    let property = if first.dtype() != second.dtype() {
        "dtype"
    } else if first.requires_grad() != second.requires_grad() {
        "whether they are trained"
    } else {
        return Ok(());
    };
    Err(Error::Cut(CutError::MixedUnit {
        unit: first.unit().to_owned(),
        first: first.name().to_owned(),
        second: second.name().to_owned(),
        property,
    }))
}
