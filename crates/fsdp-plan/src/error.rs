//! What can be wrong with a list of parameters, a file that names them, or a plan.

use std::io;

use crate::{elem::ElemType, format::FORMAT_VERSION};

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
    #[error(
        "parameter {name} of shape {shape:?} and dtype {dtype} has more than {} bytes",
        u64::MAX
    )]
    ParameterTooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A parameter ends within a block of its type, of which only whole ones exist.
    #[error("parameter {name} of shape {shape:?} is no whole number of blocks of {} elements, which {dtype} consists of", dtype.block_numel())]
    PartialBlock {
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
    /// A parameter would be cut within a block of its type.
    #[error(
        "parameter {name} of shape {shape:?} would be cut within a block of {} elements of {dtype}; use a ragged layout, which never does",
        dtype.block_numel()
    )]
    CutsBlock {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
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
    /// The parameters of a buffer overlap, leave a gap where none may be, or do not fit into it.
    #[error(
        "parameter {name} lies at {offset} of {len} in the buffer of unit {unit:?}, where {expected_offset} of {expected_len} was due"
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
    /// A granule is empty, ends within a block of the dtype, or is rounded by a threshold outside
    /// it.
    #[error(
        "parameter {name} cannot be cut at granules of {granule} bytes rounded from byte {round_up_from}: granules are whole blocks of {dtype}, and round from 1 to their size"
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
    /// A number that must be at least 1 is 0.
    #[error("{what} is 0, it must be at least 1")]
    Zero {
        /// What the number counts.
        what: &'static str,
    },
    /// The world is no whole number of replicas.
    #[error("a world of {world_size} ranks does not divide into {replicas} replicas")]
    Replicas {
        /// The ranks.
        world_size: u64,
        /// The replicas that were asked for.
        replicas: u64,
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
        "parameter {name} is cut so that its layout fixes the part of each rank; only ragged and wrapped cuts can be resized"
    )]
    NotResizable {
        /// The parameter.
        name: String,
    },
    /// There is no such parameter in the plan.
    #[error("parameter {index} is out of range for a plan of {len}")]
    ParameterOutOfRange {
        /// The position that was asked for.
        index: usize,
        /// The number of parameters.
        len: usize,
    },
    /// No parameter of the plan has this name.
    #[error("the plan has no parameter {name}")]
    UnknownParameter {
        /// The name that was asked for.
        name: String,
    },
    /// No parameter of the plan is in this unit.
    #[error("the plan has no unit {unit:?}")]
    UnknownUnit {
        /// The unit that was asked for.
        unit: String,
    },
    /// A parameter cannot be another name of the one it is tied to.
    #[error("parameter {name} cannot be tied to {target}: {reason}")]
    BadTie {
        /// The parameter.
        name: String,
        /// The parameter it is tied to.
        target: String,
        /// What is in the way.
        reason: &'static str,
    },
    /// A plan cuts a parameter that is tied to another, or ties one that is not.
    #[error("parameter {name} is {}tied to another, but the plan says otherwise", if *is_tied { "" } else { "not " })]
    CutTied {
        /// The parameter.
        name: String,
        /// Whether its description says that it is tied.
        is_tied: bool,
    },
    /// A pattern cannot be read.
    #[error("malformed pattern {pattern:?}: {reason}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Costs were given for some layers, but not for this one.
    #[error("no cost is given for layer {layer}")]
    NoLayerCost {
        /// The layer.
        layer: String,
    },
    /// Two plans are not of the same parameters.
    #[error("the plans differ in parameter {name}: {what}")]
    DifferentParameters {
        /// The first parameter that differs.
        name: String,
        /// In what it differs.
        what: &'static str,
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
    /// The reader of a safetensors header fails.
    #[error("cannot read the safetensors header: {reason}")]
    Unreadable {
        /// The kind of the failure.
        kind: io::ErrorKind,
        /// What the reader says.
        reason: String,
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
    #[error(
        "tensor {name} lies at bytes {begin}..{end}, where {expected_begin}..{expected_end} was due"
    )]
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
