//! Specs: how tensors are cut, replicated and joined along the axes of a mesh.

pub(crate) mod cut;
pub(crate) mod join;
pub(crate) mod tree;

use std::iter;

use candle_core::Tensor;

use crate::{
    axes::{ALL, AxisSet, MeshAxes},
    error::{
        Error, Result,
        fault::{Side, SpecFault},
    },
    grid::Topology,
    spec::tree::TensorTree,
};

/// The treatment of one tensor along the axes of a mesh; JAX's `PartitionSpec`.
///
/// A spec may name each axis of the mesh once. Along an axis that is not named, a tensor is
/// replicated: every device gets the full input. A replicated output must be the same on all
/// devices, and the first device's output is returned. (The outputs are compared, unless
/// [`PMap::trust_replicated`](crate::PMap::trust_replicated) is set.) To sum an output over the
/// devices, return its [`psum`](crate::Replica::psum).
///
/// `Some(dim)` is short for `P::shard(dim, ALL)` and `None` for [`P::replicate`], so that JAX's
/// `in_axes=(0, None)` is `.in_axes([Some(0), None])`.
///
/// # Examples
///
/// ```
/// use pmap_mesh::{ALL, P};
///
/// let rows_here_columns_there = P::shard(0, "data").and(P::shard(-1, "model"));
/// assert_eq!(P::from(Some(0)), P::shard(0, ALL));
/// # let _ = rows_here_columns_there;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(alias = "PartitionSpec")]
pub struct P(Vec<(MeshAxes, Treatment)>);

/// The treatment of a tensor along some axes of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// Inputs are cut in this dimension; outputs are concatenated, without padding.
    Shard(isize),
    /// Outputs are concatenated in this dimension, including padding.
    Concat(isize),
    /// Outputs are stacked in this new dimension.
    Stack(isize),
}

impl P {
    /// Returns the spec of a tensor that every device has completely.
    pub fn replicate() -> Self {
        Self(Vec::new())
    }

    /// Returns the spec of an input that is cut in dimension `dim` over the devices along `axes`,
    /// or of an output that is concatenated in this dimension, without the padding of
    /// [`Uneven::Pad`](crate::Uneven::Pad). Negative dimensions count from the last.
    pub fn shard(dim: isize, axes: impl Into<MeshAxes>) -> Self {
        Self(vec![(axes.into(), Treatment::Shard(dim))])
    }

    /// Returns the spec of an output that is concatenated in dimension `dim` over the devices along
    /// `axes`, including all rows that the devices return.
    ///
    /// It differs from [`shard`](Self::shard) only if a batch was cut with
    /// [`Uneven::Pad`](crate::Uneven::Pad): `shard` removes the padding.
    ///
    /// # Examples
    ///
    /// Each device returns its rows and a tensor of three numbers, which has the size of a padded
    /// shard by chance.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P, Uneven};
    ///
    /// let f = DeviceMesh::cpu(2)?
    ///     .pmap(|_, x: Tensor| Ok((x.sqr()?, Tensor::zeros(3, DType::F32, &Device::Cpu)?)))
    ///     .out_axes([P::shard(0, ALL), P::concat(0, ALL)])
    ///     .uneven(Uneven::Pad);
    /// let (squares, numbers) = f.call(Tensor::arange(0_f32, 5., &Device::Cpu)?)?;
    /// assert_eq!((squares.dims(), numbers.dims()), (&[5][..], &[6][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn concat(dim: isize, axes: impl Into<MeshAxes>) -> Self {
        Self(vec![(axes.into(), Treatment::Concat(dim))])
    }

    /// Returns the spec of an output that is stacked in a new dimension `dim`, with one entry for
    /// each device along `axes`.
    pub fn stack(dim: isize, axes: impl Into<MeshAxes>) -> Self {
        Self(vec![(axes.into(), Treatment::Stack(dim))])
    }

    /// Combines two specs, for a tensor with different treatments along different axes.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Returns the treatments along the axes of a mesh, and adds the faults of the spec to
    /// `faults`.
    fn resolve(
        &self,
        side: Side,
        index: usize,
        topology: &Topology,
        faults: &mut FaultList,
    ) -> ResolvedSpec {
        let mut seen = 0;
        let mut resolved = Vec::with_capacity(self.0.len());
        let tensor = side.noun();
        for (axes, treatment) in &self.0 {
            let set = topology
                .set(axes)
                .map_err(|unknown| SpecFault(format!("{tensor} {index}: {unknown}")));
            let Some(set) = faults.note(set) else { continue };
            if seen & set != 0 {
                faults.add(SpecFault(format!(
                    "{tensor} {index}: a mesh axis of {axes} is named twice"
                )));
            }
            if side == Side::In && !matches!(treatment, Treatment::Shard(_)) {
                faults.add(SpecFault(format!(
                    "input {index}: an argument can be sharded or replicated, nothing else"
                )));
            }
            seen |= set;
            resolved.push((set, *treatment));
        }
        resolved
    }
}

impl From<Option<isize>> for P {
    fn from(dim: Option<isize>) -> Self {
        match dim {
            Some(dim) => Self::shard(dim, ALL),
            None => Self::replicate(),
        }
    }
}

/// The treatments of one tensor along disjoint sets of axes.
pub(crate) type ResolvedSpec = Vec<(AxisSet, Treatment)>;

/// The specs of all arguments or results: one [`P`] for each tensor, one for all tensors of each
/// element of a tuple, or one for all tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specs(SpecList);

#[derive(Clone, Debug, PartialEq, Eq)]
enum SpecList {
    /// One spec for the first tensor, and another for all later tensors.
    FirstAndRest(P, P),
    /// One spec for each tensor, or for each argument.
    Each(Vec<P>),
}

impl Specs {
    /// Returns specs with one [`P`] for the first tensor, and another for all later tensors.
    pub(crate) fn first_and_rest(first: P, rest: P) -> Self {
        Self(SpecList::FirstAndRest(first, rest))
    }

    /// Returns true if every tensor is replicated, so that no tensor is joined.
    pub(crate) fn are_replicated(&self) -> bool {
        match &self.0 {
            SpecList::FirstAndRest(first, rest) => first.0.is_empty() && rest.0.is_empty(),
            SpecList::Each(specs) => specs.iter().all(|p| p.0.is_empty()),
        }
    }

    /// Returns the treatments of each tensor of `tree`, and adds the faults of the specs to
    /// `faults`.
    pub(crate) fn resolve(
        &self,
        side: Side,
        tree: &impl TensorTree,
        topology: &Topology,
        faults: &mut FaultList,
    ) -> Result<Vec<ResolvedSpec>, SpecFault> {
        let parts = tree.parts();
        let tensors = parts.iter().sum();
        match &self.0 {
            SpecList::FirstAndRest(first, rest) => {
                let by_tensor = iter::once(first).chain(iter::repeat(rest)).take(tensors);
                Ok(resolve_each(by_tensor, side, topology, faults))
            }
            SpecList::Each(specs) if specs.len() == parts.len() => {
                let by_part = specs.iter().zip(&parts);
                let by_tensor = by_part.flat_map(|(p, &tensors)| iter::repeat_n(p, tensors));
                Ok(resolve_each(by_tensor, side, topology, faults))
            }
            SpecList::Each(specs) if specs.len() == tensors => {
                Ok(resolve_each(specs.iter(), side, topology, faults))
            }
            SpecList::Each(specs) => Err(SpecFault::count(side, specs.len(), parts.len(), tensors)),
        }
    }
}

fn resolve_each<'a>(
    specs: impl Iterator<Item = &'a P>,
    side: Side,
    topology: &Topology,
    faults: &mut FaultList,
) -> Vec<ResolvedSpec> {
    specs.enumerate().map(|(index, p)| p.resolve(side, index, topology, faults)).collect()
}

impl From<P> for Specs {
    fn from(p: P) -> Self {
        Self::first_and_rest(p.clone(), p)
    }
}

impl From<Option<isize>> for Specs {
    fn from(dim: Option<isize>) -> Self {
        P::from(dim).into()
    }
}

impl<T: Into<P>, const N: usize> From<[T; N]> for Specs {
    fn from(specs: [T; N]) -> Self {
        Self(SpecList::Each(specs.into_iter().map(Into::into).collect()))
    }
}

impl From<Vec<P>> for Specs {
    fn from(specs: Vec<P>) -> Self {
        Self(SpecList::Each(specs))
    }
}

/// Returns the index of `dim` among `rank` dimensions, or `None` if `dim` is out of range. Negative
/// dimensions count from the last.
pub(crate) fn normalize(dim: isize, rank: usize) -> Option<usize> {
    let position = if dim < 0 { rank.checked_sub(dim.unsigned_abs())? } else { dim.unsigned_abs() };
    (position < rank).then_some(position)
}

/// Returns the index of `dim` in the shape of a tensor; `index` is the tensor's number in the
/// error.
pub(crate) fn find_dim(
    side: Side,
    index: usize,
    dim: isize,
    tensor: &Tensor,
) -> Result<usize, SpecFault> {
    normalize(dim, tensor.rank())
        .ok_or_else(|| SpecFault::out_of_range(side, index, dim, tensor.dims()))
}

/// The faults in the specs of one call, which are reported together.
#[derive(Debug, Default)]
pub(crate) struct FaultList(Vec<String>);

impl FaultList {
    pub(crate) fn add(&mut self, fault: SpecFault) {
        self.0.push(fault.0);
    }

    /// Returns the value, or records its fault and returns `None`.
    pub(crate) fn note<T>(&mut self, outcome: Result<T, SpecFault>) -> Option<T> {
        outcome.map_err(|fault| self.add(fault)).ok()
    }

    /// Returns an error with all faults, if there are any.
    pub(crate) fn check(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::Specs(self.0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_dimensions_count_from_the_end() {
        assert_eq!(
            [-2, -1, 0, 1].map(|dim| normalize(dim, 2)),
            [Some(0), Some(1), Some(0), Some(1)]
        );
        assert_eq!([-3, 2, isize::MIN, isize::MAX].map(|dim| normalize(dim, 2)), [None; 4]);
        assert_eq!([0, -1].map(|dim| normalize(dim, 0)), [None; 2]);
    }
}
