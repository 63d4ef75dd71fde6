//! Tensors in safetensors files: one writer, and one reader of ranges.

pub(crate) mod checksum;
pub(crate) mod finite;
pub(crate) mod scan;
pub(crate) mod stored;
pub(crate) mod tensor_file;
