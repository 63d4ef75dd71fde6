//! Errors of the cuts in a plan.

use core_types::human::Printable;

use crate::elem::ElemType;

/// An error about the cut of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// A parameter without dims would be cut along dim 0.
    #[error(
        "parameter {name} has no dims, so there is no dim 0 to cut; gather it always, use the flat layout, or give it shape [1]",
        name = Printable(name)
    )]
    Scalar {
        /// Name of the parameter.
        name: String,
    },
    /// A cut would split a block of the dtype.
    #[error(
        "a cut would split a block of {} elements ({dtype}) of parameter {name} of shape {shape:?}; use a ragged layout, which keeps blocks whole",
        dtype.block_numel(),
        name = Printable(name)
    )]
    SplitsBlock {
        /// Name of the parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A granule is not a whole number of blocks, or its rounding threshold is out of range.
    #[error(
        "parameter {name} has invalid granules of {granule} bytes that round up from byte {round_up_from}: a granule must be whole blocks of {dtype} and round up from a byte between 1 and its size",
        name = Printable(name)
    )]
    InvalidGranule {
        /// Name of the parameter.
        name: String,
        /// Its element type.
        dtype: ElemType,
        /// Size of a granule in bytes.
        granule: u64,
        /// Bytes of a granule from which a bound rounds up.
        round_up_from: u64,
    },
    /// The plan treats a parameter in another way than the parameter demands.
    #[error("parameter {name} {reason}", name = Printable(name))]
    Contradicts {
        /// Name of the parameter.
        name: String,
        /// What the parameter demands, and what the plan does.
        reason: &'static str,
    },
    /// Two parameters of a unit cannot share a flat buffer.
    #[error(
        "parameters {first} and {second} of unit {unit:?} differ in {property}, so they cannot share a flat buffer; use the dim-0 layout, separate units, or gather one of them always",
        first = Printable(first),
        second = Printable(second)
    )]
    UnitMismatch {
        /// Name of the unit.
        unit: String,
        /// First parameter of the unit.
        first: String,
        /// Parameter that differs from the first.
        second: String,
        /// Property that differs.
        property: &'static str,
    },
    /// A parameter overlaps another, leaves a forbidden gap, or exceeds its buffer.
    #[error(
        "parameter {name} is at offset {offset} of {len} in the buffer of unit {unit:?}, expected offset {expected_offset} of {expected_len}",
        name = Printable(name)
    )]
    MisplacedParameter {
        /// Name of the unit.
        unit: String,
        /// Name of the misplaced parameter.
        name: String,
        /// Offset in the plan: elements of a flat unit, bytes of a ragged one.
        offset: u64,
        /// Length of the buffer in the plan.
        len: u64,
        /// End of the previous parameter.
        expected_offset: u64,
        /// Length of the buffer implied by its other parameters.
        expected_len: u64,
    },
}
