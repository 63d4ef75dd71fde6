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

    /// Returns the size of a number in bytes.
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
                // Shifting the sign bit to the top and back extends the sign.
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

    /// Decodes numbers of this type. The bytes of an incomplete one are left out.
    #[doc(hidden)]
    fn decode_all(bytes: &[u8]) -> Vec<Self>;
}

mod private {
    #[expect(unnameable_types, reason = "no other crate may implement it")]
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty: $kind:literal;)*) => {
        const KNOWN_DTYPES: &[NpyDtype] = &[$(<$type>::DTYPE),*];

        $(
        impl private::Sealed for $type {}

        impl NpyElement for $type {
            const DTYPE: NpyDtype =
                NpyDtype { kind: $kind, n_bytes: size_of::<$type>() };

            fn decode_all(bytes: &[u8]) -> Vec<Self> {
                let numbers = bytes.chunks_exact(size_of::<Self>()).map(|chunk| {
                    let mut number = [0; size_of::<Self>()];
                    number.copy_from_slice(chunk);
                    Self::from_le_bytes(number)
                });
                numbers.collect()
            }
        }
    )*};
}

elements! {
    i8: 'i';
    i16: 'i';
    i32: 'i';
    i64: 'i';
    u8: 'u';
    u16: 'u';
    u32: 'u';
    u64: 'u';
    f32: 'f';
    f64: 'f';
}
