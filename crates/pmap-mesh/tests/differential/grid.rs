//! The slots of a mesh and their groups.

use pmap_mesh::{ALL, DeviceMesh, DeviceMeshBuilder, MeshAxes};

use crate::differential::random::Random;

const NAMES: [&str; 3] = ["a", "b", "c"];
/// What an axis that the mesh does not have is called.
const UNKNOWN: &str = "z";

/// The most slots of a random mesh, without more processes or threads than a small machine bears.
const MAX_SLOTS: usize = 6;

/// The sizes of the axes; the last one varies fastest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Grid(pub(crate) Vec<usize>);

/// Some axes by number, in the order in which they are named.
pub(crate) type Axes = Vec<usize>;

impl Grid {
    /// One to three axes.
    pub(crate) fn random(random: &mut Random) -> Self {
        let slots = random.within(1, MAX_SLOTS);
        Self::of_slots(slots, random)
    }

    /// One to three axes, of so many slots in all.
    pub(crate) fn of_slots(slots: usize, random: &mut Random) -> Self {
        let mut sizes = vec![1; random.within(1, NAMES.len())];
        let mut rest = slots;
        while rest > 1 {
            let factor = (2..=rest).find(|factor| rest.is_multiple_of(*factor)).unwrap();
            let axis = random.below(sizes.len());
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

    /// The axes that are not among `axes`.
    pub(crate) fn others(&self, axes: &Axes) -> Axes {
        self.all().into_iter().filter(|axis| !axes.contains(axis)).collect()
    }

    pub(crate) fn coordinate(&self, slot: usize, axis: usize) -> usize {
        let faster: usize = self.0[axis + 1..].iter().product();
        slot / faster % self.0[axis]
    }

    /// How many slots a group along `axes` has.
    pub(crate) fn size(&self, axes: &Axes) -> usize {
        axes.iter().map(|&axis| self.0[axis]).product()
    }

    /// The slots that differ from `slot` along `axes` only, by rank.
    pub(crate) fn members(&self, axes: &Axes, slot: usize) -> Vec<usize> {
        let others = self.others(axes);
        let is_member = |other: &usize| {
            others.iter().all(|&axis| self.coordinate(slot, axis) == self.coordinate(*other, axis))
        };
        (0..self.slots()).filter(is_member).collect()
    }

    pub(crate) fn rank(&self, axes: &Axes, slot: usize) -> usize {
        self.members(axes, slot).iter().position(|member| *member == slot).unwrap()
    }

    /// Any of the axes, in any order.
    pub(crate) fn some(&self, random: &mut Random) -> Axes {
        let all = self.all();
        if random.one_in(4) {
            return all;
        }
        let some = all.into_iter().filter(|_| random.one_in(2)).collect();
        random.shuffled(some)
    }

    /// The axes as the crate names them.
    pub(crate) fn named(&self, axes: &Axes) -> MeshAxes {
        if *axes == self.all() {
            return ALL;
        }
        let name = |axis: &usize| {
            if *axis < self.0.len() { NAMES[*axis].to_owned() } else { UNKNOWN.to_owned() }
        };
        axes.iter().map(name).collect()
    }
}

/// The same axes in the order of the mesh.
pub(crate) fn sorted(axes: &Axes) -> Axes {
    let mut sorted = axes.clone();
    sorted.sort_unstable();
    sorted
}
