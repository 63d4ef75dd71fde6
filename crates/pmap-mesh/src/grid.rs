//! The grid of a mesh, without its devices: names and sizes of axes, coordinates, groups.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use crate::{
    axes::{AxisSet, MeshAxes},
    error::{MeshError, Result},
    sync::lock,
};

/// The largest number of devices in one mesh. Each has its own thread.
pub(crate) const MAX_DEVICES: usize = 1024;

/// The default deadline over several processes, as in PyTorch's NCCL groups.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) const PROCESS_DEADLINE: std::time::Duration = std::time::Duration::from_mins(10);

/// The named axes of a mesh, and the groups along them.
#[derive(Debug)]
pub(crate) struct Topology {
    axes: Vec<(String, usize)>,
    /// Cache of the groups along each requested set of axes. No other lock is taken under it.
    groups: Mutex<BTreeMap<AxisSet, Arc<Groups>>>,
}

impl Topology {
    /// The largest number of axes. Each set of axes must fit into an [`AxisSet`].
    pub(crate) const MAX_AXES: usize = 16;

    /// Checks the names and sizes of the axes.
    pub(crate) fn new(axes: Vec<(String, usize)>, max_slots: usize) -> Result<Self, MeshError> {
        if axes.len() > Self::MAX_AXES {
            let (count, max) = (axes.len(), Self::MAX_AXES);
            return Err(axes_error(format!("invalid number of axes {count}: at most {max}")));
        }
        for (n, (name, _)) in axes.iter().enumerate() {
            if name.is_empty() {
                return Err(axes_error(format!("axis {n} of the mesh has no name")));
            }
            if axes[..n].iter().any(|(earlier, _)| earlier == name) {
                return Err(axes_error(format!("the mesh has two axes named {name}")));
            }
        }
        let count = axes.iter().fold(1, |slots: usize, (_, size)| slots.saturating_mul(*size));
        if !(1..=max_slots).contains(&count) {
            return Err(MeshError::Size { count, max: max_slots });
        }
        Ok(Self { axes, groups: Mutex::default() })
    }

    pub(crate) fn axes(&self) -> &[(String, usize)] {
        &self.axes
    }

    pub(crate) fn slots(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// Returns the coordinate of a slot along every axis.
    pub(crate) fn coordinates(&self, slot: usize) -> Vec<usize> {
        let mut rest = slot;
        let mut coordinates = vec![0; self.axes.len()];
        for (coordinate, (_, size)) in coordinates.iter_mut().zip(&self.axes).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        coordinates
    }

    /// Returns the named axes as a set.
    pub(crate) fn set(&self, axes: &MeshAxes) -> Result<AxisSet, MeshError> {
        let Some(names) = axes.names() else { return Ok((1 << self.axes.len()) - 1) };
        names.iter().try_fold(0, |set, name| Ok(set | 1 << self.axis_index(name)?))
    }

    fn axis_index(&self, name: &str) -> Result<usize, MeshError> {
        self.axes.iter().position(|(known, _)| known == name).ok_or_else(|| {
            let known = self.axes.iter().map(|(name, _)| name.clone()).collect();
            MeshError::UnknownAxis { name: name.to_owned(), known }
        })
    }

    /// Returns the axes along which there is more than one slot.
    #[cfg(feature = "mpi")]
    pub(crate) fn axes_longer_than_one(&self) -> AxisSet {
        let long = self.axes.iter().enumerate().filter(|(_, (_, size))| *size > 1);
        long.fold(0, |set, (axis, _)| set | 1 << axis)
    }

    /// Returns the number of slots in a group along these axes.
    pub(crate) fn size(&self, set: AxisSet) -> usize {
        self.axes_in(set).map(|(_, (_, size))| size).product()
    }

    /// Returns the groups of slots that differ along `set` only.
    pub(crate) fn groups(&self, set: AxisSet) -> Arc<Groups> {
        let mut groups = lock(&self.groups);
        Arc::clone(groups.entry(set).or_insert_with(|| Arc::new(self.build_groups(set))))
    }

    fn build_groups(&self, set: AxisSet) -> Groups {
        let mut groups: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut positions = Vec::with_capacity(self.slots());
        for slot in 0..self.slots() {
            let mut outside = self.coordinates(slot);
            self.axes_in(set).for_each(|(axis, _)| outside[axis] = 0);
            let group = *groups.entry(outside).or_insert(members.len());
            if group == members.len() {
                members.push(Vec::new());
            }
            positions.push(GridPosition { group, rank: members[group].len() });
            members[group].push(slot);
        }
        Groups { members: members.into_iter().map(Arc::from).collect(), positions }
    }

    fn axes_in(&self, set: AxisSet) -> impl Iterator<Item = (usize, &(String, usize))> {
        self.axes.iter().enumerate().filter(move |(axis, _)| set & (1 << axis) != 0)
    }
}

/// The slots of a mesh, divided into groups along some of its axes.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The slots of each group, by rank.
    members: Vec<Arc<[usize]>>,
    /// The position of each slot.
    positions: Vec<GridPosition>,
}

/// The group of a slot, and its rank in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridPosition {
    pub(crate) group: usize,
    pub(crate) rank: usize,
}

impl Groups {
    /// Returns the number of groups.
    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn position(&self, slot: usize) -> GridPosition {
        self.positions[slot]
    }

    /// Returns the slots of a group, by rank.
    pub(crate) fn members(&self, group: usize) -> &Arc<[usize]> {
        &self.members[group]
    }

    /// Returns the slots in the group of a slot, including the slot.
    pub(crate) fn group_members(&self, slot: usize) -> &[usize] {
        self.members(self.position(slot).group)
    }
}

/// Returns the error of invalid axes.
pub(crate) fn axes_error(reason: String) -> MeshError {
    MeshError::Axes { reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::axes::ALL;

    fn grid(sizes: &[usize]) -> Topology {
        let axes = sizes.iter().enumerate().map(|(n, &size)| (format!("a{n}"), size)).collect();
        Topology::new(axes, 1024).unwrap()
    }

    #[test]
    fn groups_differ_along_their_axes_only() {
        let grid = grid(&[2, 3]);
        let rows = grid.groups(grid.set(&"a1".into()).unwrap());
        assert_eq!((&rows.members(0)[..], &rows.members(1)[..]), (&[0, 1, 2][..], &[3, 4, 5][..]));
        let columns = grid.groups(grid.set(&"a0".into()).unwrap());
        assert_eq!((columns.members.len(), &columns.members(1)[..]), (3, &[1, 4][..]));
        assert_eq!(columns.position(4), GridPosition { group: 1, rank: 1 });
        assert_eq!(grid.groups(grid.set(&ALL).unwrap()).members(0)[..], [0, 1, 2, 3, 4, 5]);
        assert_eq!(grid.groups(0).members.len(), 6);
    }

    #[test]
    fn unknown_and_duplicate_names_are_rejected() {
        let error = grid(&[2, 2]).set(&["a0", "b"].into()).unwrap_err();
        let MeshError::UnknownAxis { name, known } = error else { panic!("{error}") };
        assert_eq!((name.as_str(), known), ("b", vec!["a0".to_owned(), "a1".to_owned()]));
        let twice = Topology::new(vec![("x".into(), 2), ("x".into(), 2)], 1024);
        assert_eq!(twice.unwrap_err().to_string(), "the mesh has two axes named x");
        let unnamed = Topology::new(vec![("x".into(), 2), (String::new(), 2)], 1024);
        assert_eq!(unnamed.unwrap_err().to_string(), "axis 1 of the mesh has no name");
        for sizes in [vec![0, 2], vec![usize::MAX, 2], vec![1025]] {
            let axes =
                sizes.into_iter().enumerate().map(|(n, size)| (n.to_string(), size)).collect();
            assert!(matches!(Topology::new(axes, 1024), Err(MeshError::Size { .. })));
        }
    }
}
