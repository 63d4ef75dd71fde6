//! The types of numbers in arrays.

use std::fmt;

/// The type of the numbers of an array: little-endian, as on all machines of today.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "these are the number types of Rust and NumPy")]
#[expect(missing_docs, reason = "the names say all")]
pub enum NpyDtype {
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F32,
    F64,
}

const NAMES: [(&str, NpyDtype); 10] = [
    ("|i1", NpyDtype::I8),
    ("<i2", NpyDtype::I16),
    ("<i4", NpyDtype::I32),
    ("<i8", NpyDtype::I64),
    ("|u1", NpyDtype::U8),
    ("<u2", NpyDtype::U16),
    ("<u4", NpyDtype::U32),
    ("<u8", NpyDtype::U64),
    ("<f4", NpyDtype::F32),
    ("<f8", NpyDtype::F64),
];

impl NpyDtype {
    /// Parses a quoted name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix('\'')?.strip_suffix('\'')?;
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, dtype)| dtype)
    }

    /// Returns the bytes of a number.
    pub fn n_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Returns true if the numbers have a fraction.
    pub fn is_real(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }

    /// Decodes the number in the first bytes. The remaining bytes must be zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use data_loader::{NpyDtype, NpyNumber};
    ///
    /// let bytes = [0xfe, 0xff, 0, 0, 0, 0, 0, 0];
    /// assert_eq!(NpyDtype::I16.decode(bytes), NpyNumber::Signed(-2));
    /// ```
    pub fn decode(self, bytes: [u8; 8]) -> NpyNumber {
        let number = u64::from_le_bytes(bytes);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => NpyNumber::Unsigned(number),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => {
                let unused_bits = 8 * (bytes.len() - self.n_bytes());
                #[expect(clippy::cast_possible_wrap, reason = "the bits are a signed number")]
                NpyNumber::Signed((number << unused_bits) as i64 >> unused_bits)
            }
            Self::F32 => {
                let [a, b, c, d, ..] = bytes;
                NpyNumber::Real(f32::from_le_bytes([a, b, c, d]).into())
            }
            Self::F64 => NpyNumber::Real(f64::from_bits(number)),
        }
    }
}

impl fmt::Display for NpyDtype {
    /// Writes NumPy's name, such as `<f4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, dtype)| dtype == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

/// A number of any type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "all numbers of the supported types are of these kinds"
)]
pub enum NpyNumber {
    /// Signed integer.
    Signed(i64),
    /// Unsigned integer.
    Unsigned(u64),
    /// Number with a fraction.
    Real(f64),
}

impl fmt::Display for NpyNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signed(number) => number.fmt(f),
            Self::Unsigned(number) => number.fmt(f),
            Self::Real(number) => number.fmt(f),
        }
    }
}

/// A type of Rust whose numbers can be in an array.
pub trait NpyElement: Copy + Send + Sync + fmt::Debug + 'static + private::Sealed {
    /// Type in the array.
    const DTYPE: NpyDtype;

    /// Returns the number in `bytes`, of the size of this type.
    #[doc(hidden)]
    fn from_bytes(bytes: &[u8]) -> Self;

    /// Converts a number, or returns `None` if an integer would change.
    #[doc(hidden)]
    fn from_number(number: NpyNumber) -> Option<Self>;
}

mod private {
    #[expect(unnameable_types, reason = "no other crate may implement it")]
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty, $dtype:ident, $number:ident => $convert:expr;)*) => {$(
        impl private::Sealed for $type {}

        impl NpyElement for $type {
            const DTYPE: NpyDtype = NpyDtype::$dtype;

            fn from_bytes(bytes: &[u8]) -> Self {
                let mut number = [0; size_of::<$type>()];
                number.copy_from_slice(bytes);
                Self::from_le_bytes(number)
            }

            fn from_number($number: NpyNumber) -> Option<Self> {
                $convert
            }
        }
    )*};
}

elements! {
    i8, I8, number => integer(number);
    i16, I16, number => integer(number);
    i32, I32, number => integer(number);
    i64, I64, number => integer(number);
    u8, U8, number => integer(number);
    u16, U16, number => integer(number);
    u32, U32, number => integer(number);
    u64, U64, number => integer(number);
    f32, F32, number => Some(round(real(number)));
    f64, F64, number => Some(real(number));
}

fn integer<T: TryFrom<i64> + TryFrom<u64>>(number: NpyNumber) -> Option<T> {
    match number {
        NpyNumber::Signed(number) => number.try_into().ok(),
        NpyNumber::Unsigned(number) => number.try_into().ok(),
        NpyNumber::Real(_) => None,
    }
}

fn real(number: NpyNumber) -> f64 {
    match number {
        NpyNumber::Signed(number) => number as f64,
        NpyNumber::Unsigned(number) => number as f64,
        NpyNumber::Real(number) => number,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "conversions to real numbers round")]
fn round(number: f64) -> f32 {
    number as f32
}
