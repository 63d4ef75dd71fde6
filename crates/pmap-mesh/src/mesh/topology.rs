//! Names, sizes and coordinates: the grid of a mesh, without its devices.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use crate::{
    error::{Error, Result},
    mesh::axes::{AxisSet, MeshAxes},
    sync::lock,
};

/// The named axes of a mesh and what follows from them.
#[derive(Debug)]
pub(crate) struct Topology {
    axes: Vec<(String, usize)>,
    /// The groups along each set of axes that was asked for.
    groups: Mutex<BTreeMap<AxisSet, Arc<Groups>>>,
}

impl Topology {
    /// The most axes; each set of them must fit into an [`AxisSet`].
    pub(crate) const MAX_AXES: usize = 16;

    /// Checks names and sizes; returns the grid and the number of its slots.
    pub(crate) fn new(axes: Vec<(String, usize)>, max_slots: usize) -> Result<(Self, usize)> {
        if axes.len() > Self::MAX_AXES {
            return Err(Error::MeshAxes { count: axes.len(), max: Self::MAX_AXES });
        }
        if let Some((name, _)) = axes.iter().enumerate().find_map(|(n, axis)| {
            axes[..n].iter().any(|earlier| earlier.0 == axis.0).then_some(axis)
        }) {
            return Err(Error::DuplicateAxis { name: name.clone() });
        }
        let count = axes.iter().fold(1, |slots: usize, (_, size)| slots.saturating_mul(*size));
        if !(1..=max_slots).contains(&count) {
            return Err(Error::MeshSize { count, max: max_slots });
        }
        Ok((Self { axes, groups: Mutex::default() }, count))
    }

    pub(crate) fn axes(&self) -> &[(String, usize)] {
        &self.axes
    }

    pub(crate) fn slots(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// The coordinate of a slot along every axis.
    pub(crate) fn coordinates(&self, slot: usize) -> Vec<usize> {
        let mut rest = slot;
        let mut coordinates: Vec<usize> = self
            .axes
            .iter()
            .rev()
            .map(|(_, size)| {
                let coordinate = rest % size;
                rest /= size;
                coordinate
            })
            .collect();
        coordinates.reverse();
        coordinates
    }

    /// The set that `axes` names.
    pub(crate) fn set(&self, axes: &MeshAxes) -> Result<AxisSet> {
        let Some(names) = axes.names() else { return Ok((1 << self.axes.len()) - 1) };
        names.iter().try_fold(0, |set, name| {
            let position = self.axes.iter().position(|(known, _)| known == name);
            let unknown = || Error::UnknownAxis { name: name.clone(), known: self.names() };
            Ok(set | 1 << position.ok_or_else(unknown)?)
        })
    }

    /// The axes along which there is more than one slot.
    #[cfg(feature = "mpi")]
    pub(crate) fn long_axes(&self) -> AxisSet {
        let long = self.axes.iter().enumerate().filter(|(_, (_, size))| *size > 1);
        long.fold(0, |set, (axis, _)| set | 1 << axis)
    }

    fn names(&self) -> Vec<String> {
        self.axes.iter().map(|(name, _)| name.clone()).collect()
    }

    /// How many slots a group along these axes has.
    pub(crate) fn size(&self, set: AxisSet) -> usize {
        self.axes_of(set).map(|(_, (_, size))| size).product()
    }

    /// The groups of slots that differ along `set` only.
    pub(crate) fn groups(&self, set: AxisSet) -> Arc<Groups> {
        let mut groups = lock(&self.groups);
        Arc::clone(groups.entry(set).or_insert_with(|| Arc::new(self.grouped(set))))
    }

    fn grouped(&self, set: AxisSet) -> Groups {
        let mut ids = BTreeMap::new();
        let mut groups = Groups { members: Vec::new(), seats: Vec::new() };
        for slot in 0..self.slots() {
            let mut outside = self.coordinates(slot);
            self.axes_of(set).for_each(|(axis, _)| outside[axis] = 0);
            let group = *ids.entry(outside).or_insert(groups.members.len());
            if group == groups.members.len() {
                groups.members.push(Vec::new());
            }
            groups.seats.push((group, groups.members[group].len()));
            groups.members[group].push(slot);
        }
        groups
    }

    fn axes_of(&self, set: AxisSet) -> impl Iterator<Item = (usize, &(String, usize))> {
        self.axes.iter().enumerate().filter(move |(axis, _)| set & (1 << axis) != 0)
    }
}

/// The slots of a mesh, parted into groups along some of its axes.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The slots of each group, in order.
    members: Vec<Vec<usize>>,
    /// For each slot its group and its position in it.
    seats: Vec<(usize, usize)>,
}

impl Groups {
    /// The group of a slot, and the slot's position in it.
    pub(crate) fn seat(&self, slot: usize) -> (usize, usize) {
        self.seats[slot]
    }

    /// The slots of the group that a slot is in, itself included.
    pub(crate) fn members_with(&self, slot: usize) -> &[usize] {
        self.members(self.seat(slot).0)
    }

    pub(crate) fn members(&self, group: usize) -> &[usize] {
        &self.members[group]
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::axes::ALL;

    fn grid(sizes: &[usize]) -> Topology {
        let axes = sizes.iter().enumerate().map(|(n, &size)| (format!("a{n}"), size)).collect();
        Topology::new(axes, 1024).unwrap().0
    }

    #[test]
    fn groups_along_an_axis_differ_there_only() {
        let grid = grid(&[2, 3]);
        let rows = grid.groups(grid.set(&"a1".into()).unwrap());
        assert_eq!((rows.members(0), rows.members(1)), (&[0, 1, 2][..], &[3, 4, 5][..]));
        let columns = grid.groups(grid.set(&"a0".into()).unwrap());
        assert_eq!((columns.len(), columns.members(1), columns.seat(4)), (3, &[1, 4][..], (1, 1)));
        assert_eq!(grid.groups(grid.set(&ALL).unwrap()).members(0), [0, 1, 2, 3, 4, 5]);
        assert_eq!(grid.groups(0).len(), 6);
    }

    #[test]
    fn every_set_of_axes_parts_all_slots_in_order() {
        let grid = grid(&[2, 3, 2]);
        for set in 0..8 {
            let groups = grid.groups(set);
            for slot in 0..12 {
                let (group, position) = groups.seat(slot);
                assert_eq!(
                    (groups.members(group)[position], groups.members(group).len()),
                    (slot, grid.size(set))
                );
            }
        }
        assert_eq!(grid.coordinates(11), [1, 2, 1]);
    }

    #[test]
    fn names_must_be_known_and_differ() {
        let error = grid(&[2, 2]).set(&["a0", "b"].into()).unwrap_err();
        assert!(
            matches!(error, Error::UnknownAxis { name, known } if name == "b" && known == ["a0", "a1"])
        );
        let twice = Topology::new(vec![("x".into(), 2), ("x".into(), 2)], 1024);
        assert!(matches!(twice, Err(Error::DuplicateAxis { name }) if name == "x"));
        for sizes in [vec![0, 2], vec![usize::MAX, 2], vec![1025]] {
            let axes =
                sizes.into_iter().enumerate().map(|(n, size)| (n.to_string(), size)).collect();
            assert!(matches!(Topology::new(axes, 1024), Err(Error::MeshSize { .. })));
        }
    }
}
