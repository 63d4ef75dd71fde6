//! Layouts: the items of some tensors that each rank of a group owns.

use std::{fmt, ops::Range, sync::Arc};

use candle_core::{DType, Shape};
use core_types::Fingerprint;

use crate::error::{Result, ValueError};

/// A range of one tensor's items, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the two fields define a run")]
pub struct Run {
    /// The index of the tensor.
    pub tensor: usize,
    /// The items of the tensor.
    pub items: Range<usize>,
}

/// The ranges of items of some tensors that each rank of a group owns. Every item has one owner.
///
/// [`Replica::gather_runs`](crate::Replica::gather_runs) gathers the tensors from the runs, and
/// [`Replica::reduce_runs`](crate::Replica::reduce_runs) reduces gradients into the runs. The
/// layout is checked once, in `new`; cloning is cheap.
///
/// # Examples
///
/// A weight and a bias on two ranks; the first owns two of the weight's three rows:
///
/// ```
/// use candle_core::DType;
/// use pmap_mesh::support::{Run, RunLayout};
///
/// let tensors = [(vec![3, 2], DType::F32), (vec![2], DType::F32)];
/// let first = vec![Run { tensor: 0, items: 0..4 }];
/// let second = vec![Run { tensor: 0, items: 4..6 }, Run { tensor: 1, items: 0..2 }];
/// let layout = RunLayout::new("head", tensors, [first.clone(), second])?;
/// assert_eq!((layout.name(), layout.runs(0)), ("head", &first[..]));
///
/// // The bias has no owner.
/// assert!(RunLayout::new("head", [(vec![2], DType::F32)], [vec![], vec![]]).is_err());
/// # Ok::<(), pmap_mesh::Error>(())
/// ```
#[derive(Clone)]
pub struct RunLayout(Arc<LayoutInner>);

struct LayoutInner {
    name: String,
    tensors: Vec<(Shape, DType)>,
    by_rank: Arc<[Vec<Run>]>,
    /// The non-empty runs of each tensor, in the order of their items.
    by_tensor: Vec<Vec<OwnedRun>>,
    /// Text that must be equal on all ranks of a collective: the name and the fingerprint of the
    /// layout.
    call_detail: String,
}

/// A run of a tensor, with its owner: run number `index` of rank `rank`.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRun {
    pub(crate) rank: usize,
    pub(crate) index: usize,
    pub(crate) items: Range<usize>,
}

impl RunLayout {
    /// Builds the layout of tensors with these shapes and dtypes, with a list of runs for each
    /// rank.
    ///
    /// Errors show `name`, such as the name of a layer. Runs may be empty.
    ///
    /// # Errors
    ///
    /// [`ValueError::Layout`] if a run is not within its tensor, an item does not have exactly one
    /// owner, or a tensor has more bytes than can be addressed.
    pub fn new(
        name: impl Into<String>,
        tensors: impl IntoIterator<Item = (impl Into<Shape>, DType)>,
        runs: impl IntoIterator<Item = Vec<Run>>,
    ) -> Result<Self> {
        let name = name.into();
        let tensors: Vec<(Shape, DType)> =
            tensors.into_iter().map(|(shape, dtype)| (shape.into(), dtype)).collect();
        let by_rank: Arc<[Vec<Run>]> = runs.into_iter().collect();
        let by_tensor = group_by_tensor(&tensors, &by_rank)
            .map_err(|reason| ValueError::Layout { layout: name.clone(), reason })?;
        let call_detail = format!("({name}, layout {:016x})", fingerprint(&tensors, &by_rank));
        Ok(Self(Arc::new(LayoutInner { name, tensors, by_rank, by_tensor, call_detail })))
    }

    /// Returns the name that errors show.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the number of ranks, including ranks that own nothing.
    pub(crate) fn ranks(&self) -> usize {
        self.0.by_rank.len()
    }

    /// Returns the shapes and dtypes of the tensors.
    pub(crate) fn tensors(&self) -> &[(Shape, DType)] {
        &self.0.tensors
    }

    /// Returns the runs that a rank owns, in the order of its list.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn runs(&self, rank: usize) -> &[Run] {
        &self.0.by_rank[rank]
    }

    /// Returns the runs of each rank.
    pub(crate) fn by_rank(&self) -> &Arc<[Vec<Run>]> {
        &self.0.by_rank
    }

    /// Returns the non-empty runs of each tensor, in the order of their items.
    pub(crate) fn by_tensor(&self) -> &[Vec<OwnedRun>] {
        &self.0.by_tensor
    }

    /// Returns a text that must be equal on all ranks of a collective: the name and the fingerprint
    /// of the layout.
    pub(crate) fn call_detail(&self) -> &str {
        &self.0.call_detail
    }
}

impl fmt::Debug for RunLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunLayout")
            .field("name", &self.0.name)
            .field("tensors", &self.0.tensors)
            .field("by_rank", &self.0.by_rank)
            .finish_non_exhaustive()
    }
}

/// Groups the non-empty runs by tensor, each group in the order of its items, and checks them.
fn group_by_tensor(
    tensors: &[(Shape, DType)],
    by_rank: &[Vec<Run>],
) -> Result<Vec<Vec<OwnedRun>>, String> {
    let sizes: Vec<usize> =
        tensors.iter().enumerate().map(|(n, x)| checked_size(n, x)).collect::<Result<_, _>>()?;
    let mut by_tensor: Vec<Vec<OwnedRun>> = vec![Vec::new(); tensors.len()];
    for (rank, runs) in by_rank.iter().enumerate() {
        for (index, Run { tensor, items }) in runs.iter().enumerate() {
            let tensor = *tensor;
            let Some(&size) = sizes.get(tensor) else {
                let tensors = sizes.len();
                return Err(format!(
                    "rank {rank} owns items of tensor {tensor}, but there are only {tensors} tensors"
                ));
            };
            if items.start > items.end || items.end > size {
                return Err(format!(
                    "rank {rank} owns items {items:?} of tensor {tensor}, which has {size}"
                ));
            }
            if !items.is_empty() {
                by_tensor[tensor].push(OwnedRun { rank, index, items: items.clone() });
            }
        }
    }
    for (tensor, owners) in by_tensor.iter_mut().enumerate() {
        owners.sort_unstable_by_key(|owned| owned.items.start);
        check_owners(tensor, owners, sizes[tensor])?;
    }
    Ok(by_tensor)
}

/// Returns the number of items of a tensor, if its bytes can be addressed.
fn checked_size(tensor: usize, (shape, dtype): &(Shape, DType)) -> Result<usize, String> {
    let dims = shape.dims();
    let size = dims.iter().try_fold(1_usize, |size, &dim| size.checked_mul(dim));
    size.filter(|size| {
        size.checked_mul(dtype.size_in_bytes()).is_some_and(|n| n <= isize::MAX.unsigned_abs())
    })
    .ok_or_else(|| {
        format!("tensor {tensor} of shape {dims:?} has more bytes than can be addressed")
    })
}

/// Checks that sorted runs cover all items without gaps or overlaps.
fn check_owners(tensor: usize, owners: &[OwnedRun], size: usize) -> Result<(), String> {
    let mut end = 0;
    let mut previous_rank = None;
    for owned in owners {
        let item = owned.items.start;
        if item > end {
            return Err(missing_owner(tensor, end));
        }
        if let Some(first) = previous_rank
            && item < end
        {
            let second = owned.rank;
            return Err(format!(
                "item {item} of tensor {tensor} belongs to both rank {first} and rank {second}"
            ));
        }
        end = owned.items.end;
        previous_rank = Some(owned.rank);
    }
    if end < size { Err(missing_owner(tensor, end)) } else { Ok(()) }
}

fn missing_owner(tensor: usize, item: usize) -> String {
    format!("item {item} of tensor {tensor} has no owner")
}

fn fingerprint(tensors: &[(Shape, DType)], by_rank: &[Vec<Run>]) -> u64 {
    let mut fingerprint = Fingerprint::new();
    fingerprint.write_u64(tensors.len() as u64);
    for (shape, dtype) in tensors {
        fingerprint.write_bytes(dtype.as_str().as_bytes()).write_u64(shape.rank() as u64);
        for &dim in shape.dims() {
            fingerprint.write_u64(dim as u64);
        }
    }
    for runs in by_rank {
        fingerprint.write_u64(runs.len() as u64);
        for Run { tensor, items } in runs {
            fingerprint
                .write_u64(*tensor as u64)
                .write_u64(items.start as u64)
                .write_u64(items.end as u64);
        }
    }
    fingerprint.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn run(tensor: usize, items: Range<usize>) -> Run {
        Run { tensor, items }
    }

    fn layout(runs: [Vec<Run>; 2]) -> Result<RunLayout> {
        RunLayout::new("unit", [(vec![2, 3], DType::F32), (vec![0], DType::F32)], runs)
    }

    #[test]
    fn owners_are_sorted_by_items() {
        let layout = layout([vec![run(0, 4..6), run(1, 0..0)], vec![run(0, 1..4), run(0, 0..1)]]);
        let owners: Vec<_> = layout.unwrap().by_tensor()[0]
            .iter()
            .map(|owned| (owned.rank, owned.index, owned.items.clone()))
            .collect();
        assert_eq!(owners, [(1, 1, 0..1), (1, 0, 1..4), (0, 0, 4..6)]);
    }

    #[test]
    fn every_item_needs_one_owner() {
        let check = |runs, expected: &str| {
            let fault = layout(runs).unwrap_err();
            assert!(matches!(fault, Error::Value(ValueError::Layout { .. })), "{fault:?}");
            assert_eq!(fault.to_string(), format!("invalid layout unit: {expected}"));
        };
        let missing = "item 3 of tensor 0 has no owner";
        check([vec![run(0, 0..3)], vec![run(0, 4..6)]], missing);
        check([vec![run(0, 0..3)], vec![]], missing);
        check(
            [vec![run(0, 0..4)], vec![run(0, 3..6)]],
            "item 3 of tensor 0 belongs to both rank 0 and rank 1",
        );
        let outside = "rank 1 owns items 0..7 of tensor 0, which has 6";
        check([vec![], vec![run(0, 0..7)]], outside);
        let backwards = Run { tensor: 0, items: Range { start: 3, end: 2 } };
        check([vec![], vec![backwards]], "rank 1 owns items 3..2 of tensor 0, which has 6");
        check(
            [vec![], vec![run(2, 0..0)]],
            "rank 1 owns items of tensor 2, but there are only 2 tensors",
        );
    }

    #[test]
    fn oversized_tensor_is_rejected() {
        for dims in [[usize::MAX, 2], [isize::MAX.unsigned_abs() / 4 + 1, 1]] {
            let refused = RunLayout::new("x", [(dims.to_vec(), DType::F32)], [vec![]]);
            assert!(refused.unwrap_err().to_string().ends_with("more bytes than can be addressed"));
        }
    }

    #[test]
    fn details_distinguish_layouts() {
        let halves = layout([vec![run(0, 0..3)], vec![run(0, 3..6)]]).unwrap();
        let thirds = layout([vec![run(0, 0..2)], vec![run(0, 2..6)]]).unwrap();
        assert_eq!(halves.call_detail(), halves.clone().call_detail());
        assert_ne!(halves.call_detail(), thirds.call_detail());
        assert!(halves.call_detail().starts_with("(unit, layout "));
    }
}
