//! What can be wrong with a list of parameters, a file that names them, or a plan.

use crate::{ElemType, FORMAT_VERSION};

/// The result of reading, planning or costing.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank or world size outside its limits.
    #[error(transparent)]
    World(#[from] core_types::Error),

    /// There is nothing to plan.
    #[error("the list of parameters is empty")]
    NoParameters,
    /// Two parameters share a name.
    #[error("parameter {name} is listed twice")]
    DuplicateName {
        /// The name they share.
        name: String,
    },
    /// A parameter's size does not fit into 64 bits.
    #[error("parameter {name} of shape {shape:?} and dtype {dtype} has more than {} bytes", u64::MAX)]
    ParameterTooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// The sizes of several parameters together do not fit into 64 bits.
    #[error("{what} add up to more than {}", u64::MAX)]
    TotalTooLarge {
        /// What was summed up.
        what: &'static str,
    },

    /// A parameter without dims was to be cut along its first dim.
    #[error(
        "parameter {name} has no dims, so there is no dim 0 to cut; gather it always, use the flat layout, or give it shape [1]"
    )]
    ScalarParameter {
        /// The parameter.
        name: String,
    },
    /// Parameters that cannot share one flat buffer were to be flattened together.
    #[error(
        "parameters {first} and {second} of unit {unit:?} differ in {property}, so they cannot share a flat buffer; use the dim-0 layout, separate units, or gather one of them always"
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
    /// The flat parameters of a unit do not lie side by side, or do not fill it.
    #[error(
        "parameter {name} lies at element {offset} of {unit_numel} in flat unit {unit:?}, where {expected_offset} of {expected_unit_numel} was due"
    )]
    BrokenUnit {
        /// The unit.
        unit: String,
        /// The parameter that is out of place.
        name: String,
        /// Where the plan puts it.
        offset: u64,
        /// How long the plan says that its unit is.
        unit_numel: u64,
        /// Where the parameter before it ends.
        expected_offset: u64,
        /// How long the unit is as far as the others tell.
        expected_unit_numel: u64,
    },
    /// A plan cuts a parameter that is to be gathered always.
    #[error("parameter {name} is to be gathered always, but the plan cuts it")]
    CutAlwaysGathered {
        /// The parameter.
        name: String,
    },

    /// A plan was written by another version of this crate.
    #[error("plan format version {found} is not supported, only {FORMAT_VERSION} is")]
    FormatVersion {
        /// The version of the plan.
        found: u32,
    },
    /// A text is not the JSON it should be.
    #[error("malformed {what}: {reason}")]
    Malformed {
        /// Which kind of document it should be.
        what: &'static str,
        /// What the parser found, and where.
        reason: String,
    },
    /// A tensor has an element type this crate does not know.
    #[error("tensor {name} has unknown dtype {dtype:?}")]
    UnknownDtype {
        /// The tensor.
        name: String,
        /// The name of its element type.
        dtype: String,
    },
    /// A safetensors header says it is longer than any header may be.
    #[error("safetensors header of {len} bytes is longer than the {max} allowed")]
    HeaderTooLong {
        /// The length it states.
        len: u64,
        /// The largest length accepted.
        max: u64,
    },
    /// A safetensors file ends before its header does.
    #[error("safetensors header ends at byte {needed}, but there are only {available}")]
    HeaderTruncated {
        /// Bytes from the start of the file to the end of the header.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// A tensor's bytes in a safetensors file are not where, or not as many as, they must be.
    #[error("tensor {name} lies at bytes {begin}..{end}, where {expected_begin}..{expected_end} was due")]
    BadOffsets {
        /// The tensor.
        name: String,
        /// Its first byte.
        begin: u64,
        /// The end of its bytes.
        end: u64,
        /// The end of the tensor before it.
        expected_begin: u64,
        /// `expected_begin` and the size that shape and dtype ask for.
        expected_end: u64,
    },
    /// An index names a file that is not a plain file name.
    #[error("index names the file {file:?}, which is not a plain file name")]
    BadFileName {
        /// The name.
        file: String,
    },
    /// A file has a tensor that the model's index does not place there.
    #[error("{file} has tensor {tensor}, which the index does not place there")]
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The file that has it.
        file: String,
    },
    /// A model's index places a tensor in a file that does not have it.
    #[error("the index places tensor {tensor} in {file}, which does not have it")]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The file where it should be.
        file: String,
    },
}
