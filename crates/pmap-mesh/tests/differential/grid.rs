//! The slots of a mesh and their groups.

use pmap_mesh::{ALL, DeviceMesh, DeviceMeshBuilder, MeshAxes};

use crate::differential::random::Random;

const NAMES: [&str; 3] = ["a", "b", "c"];
/// The name of an axis that the mesh does not have.
const UNKNOWN: &str = "z";

/// The largest number of slots of a random mesh, small enough for a small machine.
const MAX_SLOTS: usize = 6;

/// The sizes of the axes; the last one varies fastest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grid(pub(crate) Vec<usize>);

/// Some axes by index, in the order in which they are named.
pub(crate) type Axes = Vec<usize>;

impl Grid {
    /// Returns a grid of one to three axes.
    pub(crate) fn random(random: &mut Random) -> Self {
        let slots = random.between(1, MAX_SLOTS);
        Self::per_slot(slots, random)
    }

    /// Returns a grid of one to three axes with this number of slots.
    pub(crate) fn per_slot(slots: usize, random: &mut Random) -> Self {
        let mut sizes = vec![1; random.between(1, NAMES.len())];
        let mut rest = slots;
        while rest > 1 {
            let factor = (2..=rest).find(|factor| rest.is_multiple_of(*factor)).unwrap();
            let axis = random.less_than(sizes.len());
            sizes[axis] *= factor;
            rest /= factor;
        }
        Self(sizes)
    }

    pub(crate) fn builder(&self) -> DeviceMeshBuilder {
        let axes = self.0.iter().zip(NAMES);
        axes.fold(DeviceMesh::builder().pin(false), |mesh, (&size, name)| mesh.axis(name, size))
    }

    pub(crate) fn slots(&self) -> usize {
        self.0.iter().product()
    }

    pub(crate) fn all(&self) -> Axes {
        (0..self.0.len()).collect()
    }

    pub(crate) fn has(&self, axes: &Axes) -> bool {
        axes.iter().all(|axis| *axis < self.0.len())
    }

    /// Returns the axes that are not in `axes`.
    pub(crate) fn others(&self, axes: &Axes) -> Axes {
        self.all().into_iter().filter(|axis| !axes.contains(axis)).collect()
    }

    pub(crate) fn coordinate(&self, slot: usize, axis: usize) -> usize {
        let faster: usize = self.0[axis + 1..].iter().product();
        slot / faster % self.0[axis]
    }

    /// Returns the number of slots in a group along `axes`.
    pub(crate) fn size(&self, axes: &Axes) -> usize {
        axes.iter().map(|&axis| self.0[axis]).product()
    }

    /// Returns the slots that differ from `slot` along `axes` only, by rank.
    pub(crate) fn members(&self, axes: &Axes, slot: usize) -> Vec<usize> {
        let others = self.others(axes);
        (0..self.slots())
            .filter(|other| {
                others
                    .iter()
                    .all(|&axis| self.coordinate(slot, axis) == self.coordinate(*other, axis))
            })
            .collect()
    }

    pub(crate) fn rank(&self, axes: &Axes, slot: usize) -> usize {
        self.members(axes, slot).iter().position(|member| *member == slot).unwrap()
    }

    /// Returns some of the axes, in any order.
    pub(crate) fn some(&self, random: &mut Random) -> Axes {
        let all = self.all();
        if random.one_in(4) {
            return all;
        }
        let some = all.into_iter().filter(|_| random.one_in(2)).collect();
        random.shuffled(some)
    }

    /// Converts the axes to the crate's type.
    pub(crate) fn named(&self, axes: &Axes) -> MeshAxes {
        if *axes == self.all() {
            return ALL;
        }
        axes.iter()
            .map(
                |axis| {
                    if *axis < self.0.len() { NAMES[*axis].to_owned() } else { UNKNOWN.to_owned() }
                },
            )
            .collect()
    }
}

/// Returns the axes in the order of the mesh.
pub(crate) fn sorted(axes: &Axes) -> Axes {
    let mut sorted = axes.clone();
    sorted.sort_unstable();
    sorted
}
