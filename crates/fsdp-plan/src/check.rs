//! What must hold of every plan.

use std::collections::BTreeMap;

use core_types::{Placement, WorldSize};

use crate::{
    Cut, ParameterInfo, PlannedParameter,
    error::{Error, Result},
};

/// Returns the positions of `parameters` in the order of their names, once it is sure that each has its own.
pub(crate) fn sorted_by_name(parameters: &[PlannedParameter]) -> Result<Vec<usize>> {
    if parameters.is_empty() {
        return Err(Error::NoParameters);
    }
    let name = |position: usize| parameters[position].info().name();
    let mut positions: Vec<usize> = (0..parameters.len()).collect();
    positions.sort_unstable_by_key(|&position| name(position));
    match positions.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        Some(pair) => Err(Error::DuplicateName { name: name(pair[0]).to_owned() }),
        None => Ok(positions),
    }
}

/// Checks each parameter by itself against its cut.
pub(crate) fn cuts(parameters: &[PlannedParameter], world_size: WorldSize) -> Result<()> {
    for parameter in parameters {
        let (info, cut) = (parameter.info(), parameter.cut());
        let name = || info.name().to_owned();
        if info.always_gather() && cut != Cut::Replicated {
            return Err(Error::CutAlwaysGathered { name: name() });
        }
        if info.shape().is_empty() && cut == Cut::Dim0 {
            return Err(Error::ScalarParameter { name: name() });
        }
        if let Cut::Whole { owner } = cut {
            Placement::new(owner.as_u64(), world_size.as_u64())?;
        }
    }
    Ok(())
}

/// Checks that the flat parameters of each unit can be flattened together, and lie side by side.
pub(crate) fn flat_units(parameters: &[PlannedParameter]) -> Result<()> {
    let mut units: BTreeMap<&str, FlatUnit<'_>> = BTreeMap::new();
    for parameter in parameters {
        if let Cut::Flat { offset, unit_numel } = parameter.cut() {
            let info = parameter.info();
            let new_unit = FlatUnit { first: info, last: info, end: 0, numel: unit_numel };
            units.entry(info.unit()).or_insert(new_unit).append(info, offset, unit_numel)?;
        }
    }
    units.values().try_for_each(FlatUnit::finish)
}

/// A unit, as far as its parameters have been seen.
struct FlatUnit<'a> {
    first: &'a ParameterInfo,
    last: &'a ParameterInfo,
    end: u64,
    numel: u64,
}

impl<'a> FlatUnit<'a> {
    fn append(&mut self, info: &'a ParameterInfo, offset: u64, unit_numel: u64) -> Result<()> {
        same_buffer(self.first, info)?;
        let in_place = (offset, unit_numel) == (self.end, self.numel);
        let end = self.end.checked_add(info.numel()).filter(|&end| in_place && end <= self.numel);
        self.end = end.ok_or_else(|| broken(info, (offset, unit_numel), (self.end, self.numel)))?;
        self.last = info;
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        let offset = self.end - self.last.numel();
        let is_full = self.end == self.numel;
        if is_full { Ok(()) } else { Err(broken(self.last, (offset, self.numel), (offset, self.end))) }
    }
}

fn broken(info: &ParameterInfo, found: (u64, u64), expected: (u64, u64)) -> Error {
    Error::BrokenUnit {
        unit: info.unit().to_owned(),
        name: info.name().to_owned(),
        offset: found.0,
        unit_numel: found.1,
        expected_offset: expected.0,
        expected_unit_numel: expected.1,
    }
}

/// Checks that `second` may lie in the flat buffer that begins with `first`.
pub(crate) fn same_buffer(first: &ParameterInfo, second: &ParameterInfo) -> Result<()> {
    let property = if first.dtype() != second.dtype() {
        "dtype"
    } else if first.requires_grad() != second.requires_grad() {
        "whether they are trained"
    } else {
        return Ok(());
    };
    Err(Error::MixedUnit {
        unit: first.unit().to_owned(),
        first: first.name().to_owned(),
        second: second.name().to_owned(),
        property,
    })
}
