//! Element types, named as in safetensors headers and in ggml.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The type of the elements of a parameter.
///
/// Names follow safetensors headers, and ggml for the block types of quantized checkpoints. A
/// **block** is the smallest number of elements that can be stored separately: one for most types,
/// the fewest elements that fill whole bytes for types below 8 bits ([`ElemType::F4`]), or the
/// elements that share a scale for ggml types ([`ElemType::Q4_0`] and the following).
///
/// # Examples
///
/// ```
/// # use fsdp_plan::ElemType;
/// assert_eq!(ElemType::from_name("BF16"), Some(ElemType::Bf16));
/// assert_eq!((ElemType::Bf16.block_numel(), ElemType::Bf16.block_bytes()), (1, 2));
/// assert_eq!((ElemType::Q4_0.block_numel(), ElemType::Q4_0.block_bytes()), (32, 18));
/// assert_eq!(ElemType::from_name("bf16"), None);
/// ```
///
/// # References
///
/// The safetensors format; `ggml-common.h` of ggml for the block types, which match candle's
/// `GgmlDType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ElemType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an [`ElemType::F32`].
    Bf16,
    /// 8-bit float with 4 bits of exponent and 3 of mantissa.
    F8E4M3,
    /// 8-bit float with 5 bits of exponent and 2 of mantissa.
    F8E5M2,
    /// 8-bit power of two: the scale of microscaling formats.
    F8E8M0,
    /// 6-bit float with 2 bits of exponent and 3 of mantissa.
    F6E2M3,
    /// 6-bit float with 3 bits of exponent and 2 of mantissa.
    F6E3M2,
    /// 4-bit float with 2 bits of exponent and 1 of mantissa.
    F4,
    /// Complex number of two [`ElemType::F32`].
    C64,
    /// Signed integer of 64 bits.
    I64,
    /// Signed integer of 32 bits.
    I32,
    /// Signed integer of 16 bits.
    I16,
    /// Signed integer of 8 bits.
    I8,
    /// Unsigned integer of 64 bits.
    U64,
    /// Unsigned integer of 32 bits.
    U32,
    /// Unsigned integer of 16 bits.
    U16,
    /// Unsigned integer of 8 bits.
    U8,
    /// A truth value, stored in one byte.
    Bool,
    /// ggml: 32 elements of 4 bits and a scale.
    Q4_0,
    /// ggml: 32 elements of 4 bits, a scale and a minimum.
    Q4_1,
    /// ggml: 32 elements of 5 bits and a scale.
    Q5_0,
    /// ggml: 32 elements of 5 bits, a scale and a minimum.
    Q5_1,
    /// ggml: 32 elements of 8 bits and a scale.
    Q8_0,
    /// ggml: 32 elements of 8 bits, a scale and a sum.
    Q8_1,
    /// ggml: 256 elements of 2 bits, with scales for each 16 elements.
    Q2K,
    /// ggml: 256 elements of 3 bits, with scales for each 16 elements.
    Q3K,
    /// ggml: 256 elements of 4 bits, with scales for each 32 elements.
    Q4K,
    /// ggml: 256 elements of 5 bits, with scales for each 32 elements.
    Q5K,
    /// ggml: 256 elements of 6 bits, with scales for each 16 elements.
    Q6K,
    /// ggml: 256 elements of 8 bits, a scale and sums.
    Q8K,
}

/// The properties of an [`ElemType`].
struct ElemProperties {
    elem: ElemType,
    name: &'static str,
    block_numel: u64,
    block_bytes: u64,
    is_trainable: bool,
}

/// The properties of each type, in the order of the variants: a variant is the index of its row.
const TABLE: [ElemProperties; 32] = [
    row(ElemType::F64, "F64", 1, 8, true),
    row(ElemType::F32, "F32", 1, 4, true),
    row(ElemType::F16, "F16", 1, 2, true),
    row(ElemType::Bf16, "BF16", 1, 2, true),
    row(ElemType::F8E4M3, "F8_E4M3", 1, 1, true),
    row(ElemType::F8E5M2, "F8_E5M2", 1, 1, true),
    row(ElemType::F8E8M0, "F8_E8M0", 1, 1, false),
    row(ElemType::F6E2M3, "F6_E2M3", 4, 3, false),
    row(ElemType::F6E3M2, "F6_E3M2", 4, 3, false),
    row(ElemType::F4, "F4", 2, 1, false),
    row(ElemType::C64, "C64", 1, 8, true),
    row(ElemType::I64, "I64", 1, 8, false),
    row(ElemType::I32, "I32", 1, 4, false),
    row(ElemType::I16, "I16", 1, 2, false),
    row(ElemType::I8, "I8", 1, 1, false),
    row(ElemType::U64, "U64", 1, 8, false),
    row(ElemType::U32, "U32", 1, 4, false),
    row(ElemType::U16, "U16", 1, 2, false),
    row(ElemType::U8, "U8", 1, 1, false),
    row(ElemType::Bool, "BOOL", 1, 1, false),
    row(ElemType::Q4_0, "Q4_0", 32, 18, false),
    row(ElemType::Q4_1, "Q4_1", 32, 20, false),
    row(ElemType::Q5_0, "Q5_0", 32, 22, false),
    row(ElemType::Q5_1, "Q5_1", 32, 24, false),
    row(ElemType::Q8_0, "Q8_0", 32, 34, false),
    row(ElemType::Q8_1, "Q8_1", 32, 36, false),
    row(ElemType::Q2K, "Q2_K", 256, 84, false),
    row(ElemType::Q3K, "Q3_K", 256, 110, false),
    row(ElemType::Q4K, "Q4_K", 256, 144, false),
    row(ElemType::Q5K, "Q5_K", 256, 176, false),
    row(ElemType::Q6K, "Q6_K", 256, 210, false),
    row(ElemType::Q8K, "Q8_K", 256, 292, false),
];

const fn row(
    elem: ElemType,
    name: &'static str,
    block_numel: u64,
    block_bytes: u64,
    is_trainable: bool,
) -> ElemProperties {
    ElemProperties { elem, name, block_numel, block_bytes, is_trainable }
}

impl ElemType {
    /// Returns the type with this name in safetensors or ggml, or `None` if it is unknown.
    #[doc(hidden)]
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.elem)
    }

    /// Returns the name of this type in files.
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].name
    }

    /// Returns the number of elements in a block: 1 for types of whole bytes.
    #[doc(hidden)]
    pub const fn block_numel(self) -> u64 {
        TABLE[self as usize].block_numel
    }

    /// Returns the number of bytes in a block.
    #[doc(hidden)]
    pub const fn block_bytes(self) -> u64 {
        TABLE[self as usize].block_bytes
    }

    /// Returns true if parameters of this type can be trained: real and complex floats of at least
    /// 8 bits, except scales.
    pub(crate) const fn is_trainable(self) -> bool {
        TABLE[self as usize].is_trainable
    }

    /// Returns the bytes of `n_elems` elements, which must form whole blocks.
    pub(crate) fn bytes_of_blocks(self, n_elems: u64) -> u64 {
        n_elems / self.block_numel() * self.block_bytes()
    }

    /// Returns the bytes of `n_elems` elements, rounded up to whole blocks. Both numbers have 128
    /// bits, because sums over a cluster may exceed 64 bits.
    pub(crate) fn rounded_up_bytes(self, n_elems: u128) -> u128 {
        let n_blocks = match self.block_numel() {
            1 => n_elems, // avoids a 128-bit division for nearly all types
            block_numel => n_elems.div_ceil(block_numel.into()),
        };
        n_blocks * u128::from(self.block_bytes())
    }
}

impl fmt::Display for ElemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name().fmt(f)
    }
}

impl Serialize for ElemType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ElemType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::from_name(&name).ok_or_else(|| de::Error::custom(format!("unknown dtype {name:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_follow_the_enum() {
        for (position, row) in TABLE.into_iter().enumerate() {
            let ElemProperties { elem, name, block_numel, block_bytes, .. } = row;
            assert_eq!(elem as usize, position);
            assert_eq!(ElemType::from_name(name), Some(elem));
            assert_eq!(
                (elem.name(), elem.block_numel(), elem.block_bytes()),
                (name, block_numel, block_bytes)
            );
        }
    }

    #[test]
    fn partial_blocks_count_as_whole() {
        for (elem, n_elems, bytes) in
            [(ElemType::F4, 3, 2), (ElemType::F6E2M3, 5, 6), (ElemType::Q4K, 257, 288)]
        {
            assert_eq!(elem.rounded_up_bytes(n_elems), bytes);
        }
    }
}
