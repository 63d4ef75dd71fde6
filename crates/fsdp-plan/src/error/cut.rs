//! What can be wrong with the cuts of a plan.

use core_types::human::Printable;

use crate::elem::ElemType;

/// Why parameters cannot be cut as a plan says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// A parameter without dims was to be cut along its first dim.
    #[error(
        "parameter {name} has no dims, so there is no dim 0 to cut; gather it always, use the flat layout, or give it shape [1]",
        name = Printable(name)
    )]
    Scalar {
        /// The parameter.
        name: String,
    },
    /// A parameter would be cut within a block of its type.
    #[error(
        "parameter {name} of shape {shape:?} would be cut within a block of {} elements of {dtype}; use a ragged layout, which never does",
        dtype.block_numel(),
        name = Printable(name)
    )]
    SplitsBlock {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A granule is empty, ends within a block of the dtype, or is rounded by a threshold outside
    /// it.
    #[error(
        "parameter {name} cannot be cut at granules of {granule} bytes rounded from byte {round_up_from}: granules are whole blocks of {dtype}, and round from 1 to their size",
        name = Printable(name)
    )]
    BadGranule {
        /// The parameter.
        name: String,
        /// Its element type.
        dtype: ElemType,
        /// The size of the granule.
        granule: u64,
        /// From where on a bound moves forward.
        round_up_from: u64,
    },
    /// A plan cuts a parameter that is to be gathered always.
    #[error(
        "parameter {name} is to be gathered always, but the plan cuts it",
        name = Printable(name)
    )]
    AlwaysGathered {
        /// The parameter.
        name: String,
    },
    /// A plan cuts a parameter that is tied to another, or ties one that is not.
    #[error(
        "parameter {name} is {}tied to another, but the plan says otherwise",
        if *is_tied { "" } else { "not " },
        name = Printable(name)
    )]
    Tied {
        /// The parameter.
        name: String,
        /// Whether its description says that it is tied.
        is_tied: bool,
    },
    /// Parameters that cannot share one flat buffer were to be flattened together.
    #[error(
        "parameters {first} and {second} of unit {unit:?} differ in {property}, so they cannot share a flat buffer; use the dim-0 layout, separate units, or gather one of them always",
        first = Printable(first),
        second = Printable(second)
    )]
    MixedUnit {
        /// The unit both belong to.
        unit: String,
        /// The first parameter of the unit.
        first: String,
        /// The parameter that does not fit to it.
        second: String,
        /// What they differ in.
        property: &'static str,
    },
    /// The parameters of a buffer overlap, leave a gap where none may be, or do not fit into it.
    #[error(
        "parameter {name} lies at {offset} of {len} in the buffer of unit {unit:?}, but {expected_offset} of {expected_len} is its place",
        name = Printable(name)
    )]
    BrokenUnit {
        /// The unit.
        unit: String,
        /// The parameter that is out of place.
        name: String,
        /// Where the plan puts it: elements of a flat unit, bytes of a ragged one.
        offset: u64,
        /// How long the plan says that the buffer is.
        len: u64,
        /// Where the parameter before it ends.
        expected_offset: u64,
        /// How long the buffer is as far as the others tell.
        expected_len: u64,
    },
    /// The table of a resized plan's shares is not a division of the whole among its shard group.
    #[error("the shares do not divide {total} parts over a shard group of {group}")]
    BrokenShares {
        /// The parts of the whole.
        total: u64,
        /// The members of the group.
        group: u64,
    },
    /// A plan was to be resized whose layout fixes what each rank holds.
    #[error(
        "parameter {name} is cut so that its layout fixes the part of each rank; only ragged and wrapped cuts can be resized",
        name = Printable(name)
    )]
    NotResizable {
        /// The parameter.
        name: String,
    },
}
