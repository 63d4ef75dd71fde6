//! The types of numbers in arrays.

use std::fmt;

/// The type of the numbers of an array: little-endian, with 1 to 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NpyDtype {
    /// `i` for signed, `u` for unsigned and `f` for real numbers, as in NumPy's names.
    kind: char,
    n_bytes: usize,
}

impl NpyDtype {
    /// Returns the type of the numbers of a Rust type.
    ///
    /// # Examples
    ///
    /// ```
    /// assert_eq!(data_loader::NpyDtype::for_element::<f32>().to_string(), "<f4");
    /// ```
    pub fn for_element<T: NpyElement>() -> Self {
        T::DTYPE
    }

    /// Parses a quoted name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix('\'')?.strip_suffix('\'')?;
        KNOWN_DTYPES.iter().copied().find(|dtype| dtype.to_string() == name)
    }

    /// Returns the names of all types, for a message.
    pub(crate) fn names() -> String {
        let names: Vec<String> = KNOWN_DTYPES.iter().map(Self::to_string).collect();
        names.join(", ")
    }

    /// Returns the bytes of a number.
    pub fn n_bytes(self) -> usize {
        self.n_bytes
    }

    /// Returns true if the numbers have a fraction.
    pub fn is_real(self) -> bool {
        self.kind == 'f'
    }

    /// Decodes the number in the first bytes. The remaining bytes must be zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use data_loader::{NpyDtype, NpyNumber};
    ///
    /// let bytes = [0xfe, 0xff, 0, 0, 0, 0, 0, 0];
    /// assert_eq!(NpyDtype::for_element::<i16>().decode(bytes), NpyNumber::Signed(-2));
    /// ```
    pub fn decode(self, bytes: [u8; 8]) -> NpyNumber {
        let number = u64::from_le_bytes(bytes);
        match self.kind {
            'u' => NpyNumber::Unsigned(number),
            'i' => {
                let unused_bits = 8 * (bytes.len() - self.n_bytes);
                #[expect(clippy::cast_possible_wrap, reason = "the bits are a signed number")]
                NpyNumber::Signed((number << unused_bits) as i64 >> unused_bits)
            }
            _ if self.n_bytes == 4 => {
                let [a, b, c, d, ..] = bytes;
                NpyNumber::Real(f32::from_le_bytes([a, b, c, d]).into())
            }
            _ => NpyNumber::Real(f64::from_bits(number)),
        }
    }
}

impl fmt::Display for NpyDtype {
    /// Writes NumPy's name, such as `<f4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.n_bytes == 1 { '|' } else { '<' };
        write!(f, "{order}{}{}", self.kind, self.n_bytes)
    }
}

/// A number of any type.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "all supported numbers are of these kinds")]
pub enum NpyNumber {
    /// Signed integer.
    Signed(i64),
    /// Unsigned integer.
    Unsigned(u64),
    /// Number with a fraction.
    Real(f64),
}

/// A Rust type for the numbers of an array.
pub trait NpyElement: Copy + Send + Sync + fmt::Debug + 'static + private::Sealed {
    /// Type in the array.
    const DTYPE: NpyDtype;

    /// Converts a number, or returns `None` if an integer would change.
    #[doc(hidden)]
    fn from_number(number: NpyNumber) -> Option<Self>;
}

mod private {
    #[expect(unnameable_types, reason = "no other crate may implement it")]
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty: $kind:literal, $convert:ident;)*) => {
        const KNOWN_DTYPES: &[NpyDtype] = &[$(<$type>::DTYPE),*];

        $(
        impl private::Sealed for $type {}

        impl NpyElement for $type {
            const DTYPE: NpyDtype =
                NpyDtype { kind: $kind, n_bytes: size_of::<$type>() };

            fn from_number(number: NpyNumber) -> Option<Self> {
                $convert(number)
            }
        }
    )*};
}

elements! {
    i8: 'i', integer;
    i16: 'i', integer;
    i32: 'i', integer;
    i64: 'i', integer;
    u8: 'u', integer;
    u16: 'u', integer;
    u32: 'u', integer;
    u64: 'u', integer;
    f32: 'f', single;
    f64: 'f', double;
}

fn integer<T: TryFrom<i64> + TryFrom<u64>>(number: NpyNumber) -> Option<T> {
    match number {
        NpyNumber::Signed(number) => number.try_into().ok(),
        NpyNumber::Unsigned(number) => number.try_into().ok(),
        NpyNumber::Real(_) => None,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "conversions to real numbers round")]
fn single(number: NpyNumber) -> Option<f32> {
    double(number).map(|number| number as f32)
}

#[expect(clippy::unnecessary_wraps, reason = "the signature of conversions to integers")]
fn double(number: NpyNumber) -> Option<f64> {
    Some(match number {
        NpyNumber::Signed(number) => number as f64,
        NpyNumber::Unsigned(number) => number as f64,
        NpyNumber::Real(number) => number,
    })
}
