//! Element types, named as in safetensors headers.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The type of one element of a parameter.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::ElemType;
/// assert_eq!(ElemType::from_name("BF16"), Some(ElemType::Bf16));
/// assert_eq!(ElemType::Bf16.size_bits(), 16);
/// assert_eq!(ElemType::from_name("bf16"), None);
/// ```
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
}

/// Every type with its name, its size in bits, and whether it is a float.
const TABLE: [(ElemType, &str, u64, bool); 15] = [
    (ElemType::F64, "F64", 64, true),
    (ElemType::F32, "F32", 32, true),
    (ElemType::F16, "F16", 16, true),
    (ElemType::Bf16, "BF16", 16, true),
    (ElemType::F8E4M3, "F8_E4M3", 8, true),
    (ElemType::F8E5M2, "F8_E5M2", 8, true),
    (ElemType::I64, "I64", 64, false),
    (ElemType::I32, "I32", 32, false),
    (ElemType::I16, "I16", 16, false),
    (ElemType::I8, "I8", 8, false),
    (ElemType::U64, "U64", 64, false),
    (ElemType::U32, "U32", 32, false),
    (ElemType::U16, "U16", 16, false),
    (ElemType::U8, "U8", 8, false),
    (ElemType::Bool, "BOOL", 8, false),
];

impl ElemType {
    /// The type that safetensors calls `name`, if this crate knows it.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// What safetensors calls this type.
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// The size of one element, in bits: types below one byte exist.
    pub const fn size_bits(self) -> u64 {
        TABLE[self as usize].2
    }

    /// Whether parameters of this type can be trained.
    pub const fn is_float(self) -> bool {
        TABLE[self as usize].3
    }

    /// The bytes that `n_elems` elements take. Sums over a whole cluster go beyond 64 bits, so this is wider.
    pub(crate) fn bytes(self, n_elems: u128) -> u128 {
        (n_elems * u128::from(self.size_bits())).div_ceil(8)
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
    fn the_table_is_in_the_order_of_the_enum() {
        for (position, (elem, name, bits, _)) in TABLE.into_iter().enumerate() {
            assert_eq!(elem as usize, position);
            assert_eq!(ElemType::from_name(name), Some(elem));
            assert_eq!((elem.name(), elem.size_bits()), (name, bits));
        }
    }
}
